// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can go wrong with ONNX Runtime.

use std::path::PathBuf;

use lighter_frames::FrameError;

use super::library::OLDEST_MINOR;

/// Names the library, the provider or the tensor, and repeats what ONNX Runtime said.
#[derive(Debug, thiserror::Error)]
pub enum OrtError {
    /// The loader refused the file.
    #[error("cannot load ONNX Runtime from {}", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// What the loader said.
        #[source]
        source: libloading::Error,
    },
    /// The file is another library.
    #[error("{} is not ONNX Runtime: it has no OrtGetApiBase", path.display())]
    NotOrt {
        /// The library.
        path: PathBuf,
    },
    /// A version that is too old, or that does not read as one.
    #[error("{} is ONNX Runtime {found}; lighter needs 1.{OLDEST_MINOR} or newer", path.display())]
    Version {
        /// The library.
        path: PathBuf,
        /// What it says it is.
        found: String,
    },
    /// The library does not have the provider.
    #[error("{} has no {provider}; it has {}", path.display(), available.join(", "))]
    NoProvider {
        /// The library.
        path: PathBuf,
        /// The provider by ONNX Runtime's name.
        provider: &'static str,
        /// Those that it has.
        available: Vec<String>,
    },
    /// ONNX Runtime refused or failed.
    #[error("{what}: {text}")]
    Refused {
        /// What was asked of it.
        what: &'static str,
        /// What it said.
        text: String,
    },
    /// A name, key or value with a zero byte in it.
    #[error("{what} {text:?} holds a zero byte")]
    Text {
        /// Of what.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// A value that is no tensor of a type that travels.
    #[error("output {name} is {what}, which lighter does not carry")]
    Element {
        /// The output.
        name: String,
        /// Its type, in words.
        what: String,
    },
    /// A shape over the caps.
    #[error("output {name} is too large to carry")]
    Shape {
        /// The output.
        name: String,
        /// Which cap.
        #[source]
        source: FrameError,
    },
    /// The caller gave another number of inputs than the model has.
    #[error("{given} inputs given, the model has {wanted}")]
    Count {
        /// How many were given.
        given: usize,
        /// How many there must be.
        wanted: usize,
    },
}
