// SPDX-License-Identifier: MIT OR Apache-2.0
//! Views: another tensor on the same storage. Nothing crosses the wire.

use crate::call::Call;
use crate::core::core;
use crate::python::{Gil, Kind, Owned, Raised};
use crate::tensors::{element_bytes, of_object, span};

/// `as_strided(tensor, size, stride, storage_offset=None)`.
pub(crate) fn as_strided<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let core = core(gil)?;
    let object = call.required(0, "self")?;
    let sizes = call.required(1, "size")?.integers()?;
    let strides = call.required(2, "stride")?.integers()?;
    let refuse = |what: &str| {
        gil.raise(Kind::Runtime, &format!("as_strided: sizes {sizes:?}, strides {strides:?}: {what}"))
    };
    let tensor = of_object(&core.known, object).ok_or_else(|| refuse("self is no tensor"))?;
    let own = core.shims.storage_offset(&tensor).ok_or_else(|| refuse("self has no storage"))?;
    let offset = match call.optional(3, "storage_offset").filter(|offset| !offset.is_none()) {
        Some(offset) => offset.as_integer()?,
        None => own,
    };
    if sizes.len() != strides.len() {
        return Err(refuse("there must be as many strides as sizes"));
    }
    if sizes.iter().chain(&strides).any(|value| *value < 0) || offset < 0 {
        return Err(refuse("negative sizes, strides and offsets are not supported"));
    }
    let bytes = core.shims.storage_bytes(&tensor).and_then(|bytes| u64::try_from(bytes).ok());
    let width = core.shims.dtype(&tensor).and_then(element_bytes);
    let (Some(bytes), Some(width)) = (bytes, width) else { return Err(refuse("self has no storage")) };
    let reach = span(&sizes, &strides)
        .and_then(|span| if span == 0 { Some(0) } else { span.checked_add(u64::try_from(offset).ok()?) })
        .and_then(|elements| elements.checked_mul(width));
    if reach.is_none_or(|reach| reach > bytes) {
        return Err(refuse(&format!(
            "with storage offset {offset} out of bounds for a storage of {bytes} bytes"
        )));
    }
    let shift = offset.wrapping_sub(own);
    let view = core.shims.reinterpret(&tensor, &sizes, &strides, shift);
    core.maker.adopt(gil, view.ok_or_else(|| refuse("torch made no view"))?)
}
