// SPDX-License-Identifier: MIT OR Apache-2.0
//! From the arguments of a call to its *key*, by which a plan is found, and its *slots*, which go on the wire.
//!
//! What decides about the result's metadata is in the key: shapes, strides, types, whole numbers, texts. What changes from
//! call to call is a slot of eight bytes: addresses, and numbers where the kernel says that the position is dynamic; of
//! those only the type is in the key, because 1, 1.0 and True promote differently. A CPU tensor of one element and without
//! dimensions is a number in torch's eyes and travels by value.
//!
//! An argument of any other type, a subclass of Tensor among them, has no key: Python decides about such a call.

use std::ffi::CStr;

use pyo3_ffi as ffi;

use crate::python::{Gil, Kept, Object, Raised};
use crate::shims::{DEVICE_CPU, DEVICE_MPS, Metadata, Shims};
use crate::tensors;

/// torch's numbers of the types that a wrapped number has.
const INT64: i32 = 4;
const FLOAT64: i32 = 7;
const BOOL: i32 = 11;
/// Types that hold complex numbers: 8 to 10.
const COMPLEX: std::ops::RangeInclusive<i32> = 8..=10;
/// How deep lists may lie in lists; no operator's argument is deeper than one.
const MAX_DEPTH: u32 = 2;

/// Bytes of one call, reused from call to call.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) key: Vec<u8>,
    pub(crate) slots: Vec<u8>,
}

/// What Python objects are known by.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) tensor: Kept,
    pub(crate) parameter: Kept,
    pub(crate) device: Kept,
    /// torch.dtype, torch.memory_format and torch.layout: their objects live for ever, so an address names one.
    pub(crate) singletons: [Kept; 3],
    pub(crate) strided: Kept,
    /// Memory formats that ask for nothing: contiguous and preserve.
    pub(crate) plain_formats: [Kept; 2],
    /// torch.get_default_dtype.
    pub(crate) default_dtype: Kept,
    /// The types that the device has, and torch's number of each.
    dtypes: Vec<(Kept, i32)>,
    /// Names of attributes.
    pub(crate) cdata: Kept,
    pub(crate) type_: Kept,
    pub(crate) index: Kept,
    pub(crate) is_neg: Kept,
    pub(crate) is_conj: Kept,
}

impl Known {
    pub(crate) fn new(gil: Gil<'_>, tensor: Kept, parameter: Kept) -> Result<Self, Raised> {
        let torch = gil.import(c"torch")?;
        let kept = |name: &CStr| Ok::<_, Raised>(torch.object().attribute_named(name)?.object().keep());
        Ok(Self {
            tensor,
            parameter,
            device: kept(c"device")?,
            strided: kept(c"strided")?,
            plain_formats: [kept(c"contiguous_format")?, kept(c"preserve_format")?],
            default_dtype: kept(c"get_default_dtype")?,
            dtypes: known_dtypes(gil, torch.object()),
            singletons: [kept(c"dtype")?, kept(c"memory_format")?, kept(c"layout")?],
            cdata: gil.interned(c"_cdata")?,
            type_: gil.interned(c"type")?,
            index: gil.interned(c"index")?,
            is_neg: gil.interned(c"is_neg")?,
            is_conj: gil.interned(c"is_conj")?,
        })
    }

    /// torch's number of a type that the device has.
    pub(crate) fn dtype_code(&self, dtype: Object<'_>) -> Option<i32> {
        self.dtypes.iter().find(|(known, _)| known.address() == dtype.pointer()).map(|(_, code)| *code)
    }

    /// Whether it is exactly a tensor or a parameter: a subclass may mean anything.
    pub(crate) fn is_tensor(&self, object: Object<'_>) -> bool {
        let kind = object.kind().cast();
        kind == self.tensor.address() || kind == self.parameter.address()
    }
}

/// The types that new tensors often have; for float64 and complex128 there is an error to raise, which Python does.
fn known_dtypes(gil: Gil<'_>, torch: Object<'_>) -> Vec<(Kept, i32)> {
    let names: [(&CStr, i32); 11] = [
        (c"float32", 6),
        (c"float16", 5),
        (c"bfloat16", 15),
        (c"int64", INT64),
        (c"int32", 3),
        (c"bool", BOOL),
        (c"uint8", 0),
        (c"int16", 2),
        (c"int8", 1),
        (c"complex64", 9),
        (c"complex32", 8),
    ];
    let found = names
        .iter()
        .filter_map(|(name, code)| Some((torch.attribute_named(name).ok()?.object().keep(), *code)));
    let found = found.collect();
    gil.forget_error();
    found
}

/// How arguments are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'c> {
    pub(crate) known: &'c Known,
    pub(crate) shims: &'c Shims,
    /// The operator's kernel sees tensors whose conjugation or negation is still to be done: such a tensor has no key.
    pub(crate) lazy: bool,
}

impl Reader<'_> {
    /// Appends a keyword's name; its value follows by [`Reader::read`].
    pub(crate) fn keyword(&self, scratch: &mut Scratch, name: &[u8]) {
        scratch.text(b'K', name);
    }

    /// Appends one argument; false when it has no key.
    pub(crate) fn read(&self, scratch: &mut Scratch, object: Object<'_>, dynamic: bool) -> bool {
        self.read_at(scratch, object, dynamic, 0)
    }

    fn read_at(&self, scratch: &mut Scratch, object: Object<'_>, dynamic: bool, depth: u32) -> bool {
        let kind = object.kind();
        if self.known.is_tensor(object) {
            return self.tensor(scratch, object);
        }
        if kind == &raw mut ffi::PyFloat_Type {
            scratch.number(dynamic, b'f', object.as_float().to_le_bytes());
        } else if kind == &raw mut ffi::PyBool_Type {
            scratch.number(dynamic, b'b', u64::from(object.is_true()).to_le_bytes());
        } else if kind == &raw mut ffi::PyLong_Type {
            let Ok(value) = object.as_integer() else {
                object.gil().forget_error();
                return false;
            };
            scratch.number(dynamic, b'i', value.to_le_bytes());
        } else if object.is_none() {
            scratch.key.push(b'N');
        } else if kind == &raw mut ffi::PyUnicode_Type {
            let Ok(text) = object.as_text() else {
                object.gil().forget_error();
                return false;
            };
            scratch.text(b'S', text);
        } else if object.is_list() {
            return self.sequence(scratch, object, dynamic, depth);
        } else if self.known.singletons.iter().any(|known| known.address() == kind.cast()) {
            scratch.key.push(b'P');
            scratch.key.extend_from_slice(&(object.pointer() as usize).to_le_bytes());
        } else if kind.cast() == self.known.device.address() {
            return self.device(scratch, object);
        } else {
            return false;
        }
        true
    }

    fn tensor(&self, scratch: &mut Scratch, object: Object<'_>) -> bool {
        let Some(tensor) = tensors::of_object(self.known, object) else { return false };
        let Some(metadata) = self.shims.metadata(&tensor) else { return false };
        if metadata.device == DEVICE_MPS {
            scratch.tensor(&metadata);
            return !self.lazy || self.is_resolved(object, metadata.dtype);
        }
        if metadata.device != DEVICE_CPU || !metadata.sizes.is_empty() {
            return false;
        }
        let (tag, word) = match metadata.dtype {
            FLOAT64 => (b'f', metadata.element::<8>()),
            INT64 => (b'i', metadata.element::<8>()),
            BOOL => (b'b', metadata.element::<1>().map(|[byte]| u64::from(byte).to_le_bytes())),
            _ => return false,
        };
        let Some(word) = word else { return false };
        scratch.number(true, tag, word);
        true
    }

    /// Whether it is a tensor or parameter on the device whose elements are in memory as they read.
    pub(crate) fn is_plain_on_device(&self, object: Object<'_>) -> bool {
        self.known.is_tensor(object)
            && tensors::of_object(self.known, object)
                .and_then(|tensor| self.shims.device_and_dtype(&tensor))
                .is_some_and(|(device, dtype)| device == DEVICE_MPS && self.is_resolved(object, dtype))
    }

    /// Whether the tensor's numbers are in memory as they read.
    fn is_resolved(&self, object: Object<'_>, dtype: i32) -> bool {
        let says_no = |name: Kept| match object
            .attribute(name)
            .and_then(|asked| asked.object().call(&[]).map(|answer| !answer.object().is_true()))
        {
            Ok(no) => no,
            Err(Raised) => {
                object.gil().forget_error();
                false
            }
        };
        says_no(self.known.is_neg) && (!COMPLEX.contains(&dtype) || says_no(self.known.is_conj))
    }

    fn sequence(&self, scratch: &mut Scratch, list: Object<'_>, dynamic: bool, depth: u32) -> bool {
        let Some(length) = list.sequence_length().filter(|_| depth < MAX_DEPTH) else { return false };
        scratch.key.push(b'L');
        scratch.key.extend_from_slice(&(length as u64).to_le_bytes());
        (0..length).all(|index| match list.item(index) {
            Some(item) => self.read_at(scratch, item.object(), dynamic, depth + 1),
            None => false,
        })
    }

    /// A device has no lasting address, so its name and index are the key.
    fn device(&self, scratch: &mut Scratch, device: Object<'_>) -> bool {
        let (Ok(name), Ok(index)) = (device.attribute(self.known.type_), device.attribute(self.known.index))
        else {
            device.gil().forget_error();
            return false;
        };
        let Ok(text) = name.object().as_text() else {
            device.gil().forget_error();
            return false;
        };
        scratch.text(b'D', text);
        self.read_at(scratch, index.object(), false, MAX_DEPTH)
    }
}

impl Scratch {
    pub(crate) fn clear(&mut self) {
        self.key.clear();
        self.slots.clear();
    }

    fn tensor(&mut self, metadata: &Metadata<'_>) {
        // Of constant sizes first: this runs for each tensor of each call.
        let [kind, ..] = metadata.dtype.to_le_bytes();
        let [dim, ..] = metadata.sizes.len().to_le_bytes();
        self.key.extend_from_slice(&[b'T', kind, dim]);
        for value in metadata.sizes.iter().chain(metadata.strides) {
            self.key.extend_from_slice(&value.to_le_bytes());
        }
        self.slots.extend_from_slice(&metadata.data.to_le_bytes());
    }

    /// A number: a slot with its type in the key, or all of it in the key.
    fn number(&mut self, dynamic: bool, tag: u8, word: [u8; 8]) {
        if dynamic {
            self.key.push(tag);
            self.slots.extend_from_slice(&word);
        } else {
            self.key.push(tag.to_ascii_uppercase());
            self.key.extend_from_slice(&word);
        }
    }

    fn text(&mut self, tag: u8, text: &[u8]) {
        self.key.push(tag);
        self.key.extend_from_slice(&(text.len() as u64).to_le_bytes());
        self.key.extend_from_slice(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the pure part of a key is made of.
    #[derive(Clone, Debug, PartialEq)]
    enum Part {
        Tensor(i32, Vec<(i64, i64)>, u64),
        Number(bool, u8, [u8; 8]),
        Text(Vec<u8>),
    }

    fn part() -> impl Strategy<Value = Part> {
        prop_oneof![
            (0..30i32, proptest::collection::vec((0..5i64, 0..5i64), 0..4), any::<u64>())
                .prop_map(|(dtype, shape, data)| Part::Tensor(dtype, shape, data)),
            (any::<bool>(), prop_oneof![Just(b'i'), Just(b'f'), Just(b'b')], any::<[u8; 8]>())
                .prop_map(|(dynamic, tag, word)| Part::Number(dynamic, tag, word)),
            proptest::collection::vec(any::<u8>(), 0..6).prop_map(Part::Text),
        ]
    }

    fn written(parts: &[Part]) -> Scratch {
        let mut scratch = Scratch::default();
        for part in parts {
            match part {
                Part::Tensor(dtype, shape, data) => {
                    let (sizes, strides): (Vec<i64>, Vec<i64>) = shape.iter().copied().unzip();
                    let (device, dtype, data) = (DEVICE_MPS, *dtype, *data);
                    scratch.tensor(&Metadata { device, dtype, sizes: &sizes, strides: &strides, data });
                }
                Part::Number(dynamic, tag, word) => scratch.number(*dynamic, *tag, *word),
                Part::Text(text) => scratch.text(b'S', text),
            }
        }
        scratch
    }

    /// What a key must tell apart: everything but the values of slots.
    fn without_values(parts: &[Part]) -> Vec<Part> {
        let mut parts = parts.to_vec();
        for part in &mut parts {
            match part {
                Part::Tensor(_, _, data) => *data = 0,
                Part::Number(true, _, word) => *word = [0; 8],
                _ => {}
            }
        }
        parts
    }

    proptest! {
        #[test]
        fn keys_are_equal_exactly_when_what_they_stand_for_is(
            one in proptest::collection::vec(part(), 0..4),
            other in proptest::collection::vec(part(), 0..4),
        ) {
            let same = without_values(&one) == without_values(&other);
            prop_assert_eq!(written(&one).key == written(&other).key, same);
        }

        #[test]
        fn each_tensor_and_each_dynamic_number_has_one_slot(parts in proptest::collection::vec(part(), 0..8)) {
            let slots = parts.iter().filter(|part| matches!(part, Part::Tensor(..) | Part::Number(true, ..))).count();
            prop_assert_eq!(written(&parts).slots.len(), 8 * slots);
        }
    }
}
