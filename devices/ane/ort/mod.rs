// SPDX-License-Identifier: MIT OR Apache-2.0
//! ONNX Runtime, opened by path: one environment, sessions of models in memory, runs on borrowed memory.
//!
//! A worker is the only user. Nothing here links to ONNX Runtime or looks for it, and nothing takes a path, a
//! library or an option from a model. Texts, sequences and packed types are refused by name.

mod error;
mod library;
mod provider;
mod run;
mod session;

pub use error::OrtError;
pub use library::{OLDEST_MINOR, Ort};
pub use provider::ProviderSetup;
pub use run::{Input, Output, Stop};
pub use session::{ModelBytes, Session, SessionSetup};
