// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan: what is known of a call whose signature the host has already, so that it needs no answer.
//!
//! Python's `miss` learns it and gives it as `(signature, shape, outputs)`. Shape is "s" (one result), "t" (a tuple), "l" (a
//! list) or "v" (nothing). An output is the position of the argument that is returned, the keyword of it, None, or
//! `(sizes, strides, dtype code)` of a new tensor. A plan that does not fit its call is refused with a TypeError.

use crate::python::{Kind, Object, Raised};
use crate::tensors::{element_bytes, span};

/// How results are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Single,
    Tuple,
    List,
    Void,
}

/// One result.
#[derive(Debug)]
pub(crate) enum Output {
    /// The argument with this index, keywords counted after positions.
    Argument(usize),
    None,
    New(Layout),
}

/// What a new tensor looks like.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) sizes: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) dtype: i32,
}

impl Layout {
    /// What a tensor of it takes; None where that cannot be counted.
    pub(crate) fn checked_bytes(&self) -> Option<u64> {
        span(&self.sizes, &self.strides)?.checked_mul(element_bytes(self.dtype)?)
    }

    /// As [`Layout::checked_bytes`], or nothing where torch is going to refuse to make such a tensor.
    pub(crate) fn bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(0)
    }
}

/// What a call does.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) signature: u32,
    pub(crate) shape: Shape,
    pub(crate) outputs: Vec<Output>,
    pub(crate) new_tensors: usize,
    /// What the new tensors take on the device.
    pub(crate) new_bytes: u64,
}

impl Plan {
    /// Reads what `miss` gave for a call with `positions` arguments and then `keywords`.
    pub(crate) fn read(given: Object<'_>, positions: usize, keywords: &[&[u8]]) -> Result<Self, Raised> {
        let refuse = |what: &str| given.gil().raise(Kind::Type, &format!("lighter_mps: a plan's {what}"));
        let part = |index| given.item(index).ok_or_else(|| refuse("parts are signature, shape and outputs"));
        let signature = part(0)?.object().as_integer().ok().and_then(|number| u32::try_from(number).ok());
        let signature = signature.ok_or_else(|| refuse("signature is a u32"))?;
        let shape = match part(1)?.object().as_text()? {
            b"s" => Shape::Single,
            b"t" => Shape::Tuple,
            b"l" => Shape::List,
            b"v" => Shape::Void,
            _ => return Err(refuse("shape is one of s, t, l and v")),
        };
        let list = part(2)?;
        let length = list.object().sequence_length().ok_or_else(|| refuse("outputs are a list"))?;
        let mut outputs = Vec::with_capacity(length);
        for index in 0..length {
            let item = list.object().item(index).ok_or_else(|| refuse("outputs are a list"))?;
            outputs.push(read_output(item.object(), positions, keywords)?);
        }
        let fits = match shape {
            Shape::Single => outputs.len() == 1,
            Shape::Void => outputs.is_empty(),
            Shape::Tuple | Shape::List => true,
        };
        if !fits {
            return Err(refuse("shape does not fit its outputs"));
        }
        let layouts = outputs.iter().filter_map(|output| match output {
            Output::New(layout) => Some(layout.bytes()),
            _ => None,
        });
        let (new_tensors, new_bytes) = (layouts.clone().count(), layouts.fold(0, u64::saturating_add));
        Ok(Self { signature, shape, outputs, new_tensors, new_bytes })
    }
}

fn read_output(given: Object<'_>, positions: usize, keywords: &[&[u8]]) -> Result<Output, Raised> {
    let refuse = |what: &str| given.gil().raise(Kind::Type, &format!("lighter_mps: a plan's output {what}"));
    if given.is_none() {
        return Ok(Output::None);
    }
    if given.sequence_length() == Some(3) {
        let part = |index| given.item(index).ok_or_else(|| refuse("changed while it was read"));
        let layout = Layout {
            sizes: part(0)?.object().integers()?,
            strides: part(1)?.object().integers()?,
            dtype: i32::try_from(part(2)?.object().as_integer()?)
                .map_err(|_| refuse("has an unknown dtype"))?,
        };
        if layout.sizes.len() != layout.strides.len() {
            return Err(refuse("has not as many strides as sizes"));
        }
        return Ok(Output::New(layout));
    }
    if given.is_text() {
        let name = given.as_text()?;
        let found = keywords.iter().position(|keyword| *keyword == name);
        let index = found.ok_or_else(|| refuse("names a keyword that the call has not"))?;
        return Ok(Output::Argument(positions.saturating_add(index)));
    }
    match given.as_integer().ok().and_then(|index| usize::try_from(index).ok()) {
        Some(index) if index < positions => Ok(Output::Argument(index)),
        _ => Err(refuse("names an argument that the call has not")),
    }
}
