// SPDX-License-Identifier: MIT OR Apache-2.0
//! ggml's public C API, loaded at run time, behind types that own their pointers.
//!
//! Only the worker uses it. Pointers never leave this folder; what a container says reaches it as numbers that
//! the worker has checked. A library whose tensors are laid out in another way than [`raw`] says is refused.

mod backend;
mod graph;
mod library;
mod mapping;
mod memory;
mod raw;

pub use backend::{Backend, Device, EngineError};
pub use graph::{Builder, Graph, GraphError, NodeSpec, Place};
pub use library::{Ggml, Kind, LoadError};
pub use mapping::{Mapping, MappingError};
pub use memory::{Memory, MemoryError};
