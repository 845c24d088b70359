// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host's side of the work as this library sees it: a connection that has a model loaded and runs it.

mod connection;
mod ring;
mod shared;
mod streamed;
mod trouble;

pub(crate) use connection::{Connection, Host};
pub(crate) use trouble::{Remedy, Trouble};

use lighter_frames::Tensor;

use crate::ort::Status;

/// An input of a run.
pub(crate) struct Input<'a> {
    pub(crate) tensor: Tensor,
    pub(crate) data: &'a [u8],
}

/// Where the outputs of a run go.
pub(crate) trait Outputs {
    /// The place for an output, as long as the tensor; `None` when nobody wants it.
    fn place(&mut self, index: usize, tensor: &Tensor) -> Result<Option<&mut [u8]>, Placing>;
}

/// Why there is no place.
pub(crate) enum Placing {
    /// The model has no such output.
    Unexpected,
    /// The runtime has no room.
    Ort(Status),
}
