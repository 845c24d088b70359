// SPDX-License-Identifier: MIT OR Apache-2.0
//! CDI (Container Device Interface) specs: what one is, which ones a host has, and what they do to a
//! container. Knows no particular device.
//!
//! - A **producer** builds a [`Spec`], calls [`Spec::with_lowest_version`] and [`write_spec`].
//! - A **reader** calls [`parse_bytes`], or [`Registry::scan`] for whole directories.
//! - An **injector** calls [`Registry::inject`].
//!
//! The measure of all behaviour is the reference implementation; `tests/golden.rs` compares with what it did.

mod decode;
mod encode;
mod host;
mod inject;
mod names;
mod oci;
mod parse;
mod registry;
mod scalar;
mod spec;
mod tree;
mod validate;
mod version;
mod write;

pub use host::{HostNode, HostNodes, RealNodes};
pub use inject::InjectError;
pub use names::{Class, DeviceName, Kind, NameError, QualifiedName, Vendor};
pub use oci::ShapeError;
pub use parse::{MAX_SPEC_BYTES, ParseError, parse_bytes};
pub use registry::{DEFAULT_DIRECTORIES, FileError, Offer, Registry, Shadowed};
pub use spec::{
    ContainerEdits, Device, DeviceNode, Hook, HookName, IntelRdt, Mount, NetDevice, NodeType, Spec,
};
pub use validate::ValidateError;
pub use version::{Version, VersionError};
pub use write::{WriteError, Written, remove_spec, write_spec};
