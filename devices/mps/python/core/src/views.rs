// SPDX-License-Identifier: MIT OR Apache-2.0
//! Views: another tensor on the same storage. Nothing crosses the wire.
//!
//! What cannot be a view is given to torch's own function, which says why in its own words.

use crate::call::Call;
use crate::core::{Core, core};
use crate::python::{Gil, Kept, Object, Owned, Raised};
use crate::shims::Tensor;
use crate::tensors::{element_bytes, of_object, span};

/// torch's functions for the same, and the dispatch key that they are asked with.
#[derive(Debug)]
pub(crate) struct TorchViews {
    keys: Kept,
    as_strided: Kept,
    view: Kept,
}

impl TorchViews {
    pub(crate) fn new(gil: Gil<'_>) -> Result<Self, Raised> {
        let torch = gil.import(c"torch")?;
        let private = gil.import(c"torch._C")?;
        let key = private.object().attribute_named(c"DispatchKey")?;
        let key = key.object().attribute_named(c"CPU")?;
        let set = private.object().attribute_named(c"DispatchKeySet")?;
        let ops = torch.object().attribute_named(c"ops")?;
        let aten = ops.object().attribute_named(c"aten")?;
        let redispatch = |name| {
            let packet = aten.object().attribute_named(name)?;
            let overload = packet.object().attribute_named(c"default")?;
            Ok::<_, Raised>(overload.object().attribute_named(c"redispatch")?.object().keep())
        };
        Ok(Self {
            keys: set.object().call(&[key.object()])?.object().keep(),
            as_strided: redispatch(c"as_strided")?,
            view: redispatch(c"view")?,
        })
    }
}

/// `as_strided(tensor, size, stride, storage_offset=None)`.
pub(crate) fn as_strided<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let core = core(gil)?;
    let (object, size, stride) =
        (call.required(0, "self")?, call.required(1, "size")?, call.required(2, "stride")?);
    let given = call.optional(3, "storage_offset").filter(|offset| !offset.is_none());
    let (sizes, strides) = (size.integers()?, stride.integers()?);
    let offset = given.map(Object::as_integer).transpose()?;
    if let Some(tensor) = of_object(&core.known, object)
        && let Some(shift) = shift_within(core, &tensor, &sizes, &strides, offset)
        && let Some(view) = core.shims.reinterpret(&tensor, &sizes, &strides, shift)
    {
        return core.maker.adopt(gil, view);
    }
    let keys = core.torch_views.keys.object(gil);
    let none = gil.none();
    core.torch_views.as_strided.object(gil).call(&[
        keys,
        object,
        size,
        stride,
        given.unwrap_or(none.object()),
    ])
}

/// By how many elements a view's offset lies after the tensor's own; None where the view is not within the storage.
fn shift_within(
    core: &Core,
    tensor: &Tensor<'_>,
    sizes: &[i64],
    strides: &[i64],
    offset: Option<i64>,
) -> Option<i64> {
    let own = core.shims.storage_offset(tensor)?;
    let offset = offset.unwrap_or(own);
    if sizes.len() != strides.len() || sizes.iter().chain(strides).any(|value| *value < 0) {
        return None;
    }
    let bytes = u64::try_from(core.shims.storage_bytes(tensor)?).ok()?;
    let width = element_bytes(core.shims.dtype(tensor)?)?;
    let reach = match span(sizes, strides)? {
        0 => 0,
        elements => elements.checked_add(u64::try_from(offset).ok()?)?,
    };
    (offset >= 0 && reach.checked_mul(width)? <= bytes).then(|| offset.checked_sub(own)).flatten()
}

/// `view(tensor, size)`.
pub(crate) fn view<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let core = core(gil)?;
    let (object, size) = (call.required(0, "self")?, call.required(1, "size")?);
    let asked = size.integers()?;
    if let Some(tensor) = of_object(&core.known, object)
        && let Some(metadata) = core.shims.metadata(&tensor)
        && let Some(sizes) = inferred(metadata.sizes, &asked)
        && let Some(strides) = view_strides(metadata.sizes, metadata.strides, &sizes)
        && let Some(view) = core.shims.reinterpret(&tensor, &sizes, &strides, 0)
    {
        return core.maker.adopt(gil, view);
    }
    let keys = core.torch_views.keys.object(gil);
    core.torch_views.view.object(gil).call(&[keys, object, size])
}

fn count(sizes: &[i64]) -> Option<i64> {
    sizes.iter().try_fold(1i64, |product, size| product.checked_mul(*size))
}

/// The asked sizes with a -1 replaced by what is left; None where they do not fit.
fn inferred(sizes: &[i64], asked: &[i64]) -> Option<Vec<i64>> {
    let elements = count(sizes)?;
    let mut given = 1i64;
    let mut open = None;
    for (index, size) in asked.iter().enumerate() {
        match size {
            -1 if open.is_none() => open = Some(index),
            0.. => given = given.checked_mul(*size)?,
            _ => return None,
        }
    }
    let mut sizes = asked.to_vec();
    match open {
        Some(index) => {
            // With nothing given, any size would do, which torch refuses.
            if given == 0 || elements.checked_rem(given)? != 0 {
                return None;
            }
            *sizes.get_mut(index)? = elements.checked_div(given)?;
        }
        None if given != elements => return None,
        None => {}
    }
    Some(sizes)
}

/// Strides with which `new` shows the same elements in the same order; None where a dimension would need two strides.
///
/// From the last dimension on, old dimensions that follow one another in memory make one run, and new dimensions must
/// divide the runs without a rest.
fn view_strides(old: &[i64], strides: &[i64], new: &[i64]) -> Option<Vec<i64>> {
    if count(old)? == 0 {
        return if old == new { Some(strides.to_vec()) } else { Some(contiguous_strides(new)) };
    }
    let mut result = Vec::with_capacity(new.len());
    let mut wanted = new.iter().rev().peekable();
    let mut step = strides.last().copied().unwrap_or(1);
    let mut run = 1i64;
    let mut shown = 1i64;
    for (index, size) in old.iter().enumerate().rev() {
        run = run.checked_mul(*size)?;
        let before = index.checked_sub(1).and_then(|before| Some((*old.get(before)?, *strides.get(before)?)));
        // The run goes on where the dimension before begins right after it.
        if let Some((size_before, stride_before)) = before
            && (size_before == 1 || stride_before == run.checked_mul(step)?)
        {
            continue;
        }
        while let Some(size) = wanted.peek().filter(|size| shown < run || ***size == 1) {
            result.push(shown.checked_mul(step)?);
            shown = shown.checked_mul(**size)?;
            wanted.next();
        }
        if shown != run {
            return None;
        }
        if let Some((_, stride_before)) = before {
            (step, run, shown) = (stride_before, 1, 1);
        }
    }
    // Of a tensor without dimensions only ones can be shown.
    for size in wanted {
        if *size != 1 {
            return None;
        }
        result.push(shown.checked_mul(step)?);
    }
    result.reverse();
    Some(result)
}

/// Row-major strides as torch gives them: a size of 0 counts as 1. None where they cannot be counted.
pub(crate) fn checked_contiguous_strides(sizes: &[i64]) -> Option<Vec<i64>> {
    let mut step = 1i64;
    let mut strides = Vec::with_capacity(sizes.len());
    for size in sizes.iter().rev() {
        strides.push(step);
        step = step.checked_mul((*size).max(1))?;
    }
    strides.reverse();
    Some(strides)
}

fn contiguous_strides(sizes: &[i64]) -> Vec<i64> {
    checked_contiguous_strides(sizes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Where each element lies, in order.
    fn places(sizes: &[i64], strides: &[i64]) -> Vec<i64> {
        let mut places = vec![0];
        for (size, stride) in sizes.iter().zip(strides) {
            places =
                places.iter().flat_map(|place| (0..*size).map(move |index| place + index * stride)).collect();
        }
        places
    }

    fn shape() -> impl Strategy<Value = Vec<i64>> {
        proptest::collection::vec(1..4i64, 0..5)
    }

    proptest! {
        #[test]
        fn a_view_shows_the_same_elements_in_the_same_order(
            sizes in shape(), new in shape(), gaps in proptest::collection::vec(1..3i64, 5), turn in any::<bool>(),
        ) {
            let mut strides = checked_contiguous_strides(&sizes).unwrap();
            for (stride, gap) in strides.iter_mut().zip(&gaps) {
                *stride *= gap;
            }
            let mut sizes = sizes;
            if turn {
                sizes.reverse();
                strides.reverse();
            }
            if let Some(found) = inferred(&sizes, &new).and_then(|new| view_strides(&sizes, &strides, &new)) {
                prop_assert_eq!(places(&sizes, &strides), places(&new, &found));
            }
        }

        #[test]
        fn every_shape_of_a_dense_tensor_is_a_view(sizes in shape(), new in shape()) {
            let strides = checked_contiguous_strides(&sizes).unwrap();
            let fits = sizes.iter().product::<i64>() == new.iter().product::<i64>();
            let found = inferred(&sizes, &new).and_then(|new| view_strides(&sizes, &strides, &new));
            prop_assert_eq!(found, fits.then(|| checked_contiguous_strides(&new).unwrap()));
        }
    }

    #[test]
    fn one_size_can_be_left_open() {
        assert_eq!(inferred(&[2, 6], &[3, -1]), Some(vec![3, 4]));
        assert_eq!(inferred(&[2, 6], &[5, -1]), None);
        assert_eq!(inferred(&[2, 6], &[-1, -1]), None);
        assert_eq!(inferred(&[0], &[0, -1]), None);
        assert_eq!(inferred(&[0], &[-1, 3]), Some(vec![0, 3]));
        assert_eq!(inferred(&[2], &[-2]), None);
        assert_eq!(inferred(&[], &[]), Some(vec![]));
    }
}
