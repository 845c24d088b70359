// SPDX-License-Identifier: MIT OR Apache-2.0
//! From bytes to a valid [`Spec`]: the one way in for everything that lighter did not build itself.
//!
//! JSON and YAML are one format here, as to every other reader: JSON is YAML, and the file's ending only
//! says that it is a spec. Refuses what is no valid spec of a known version, and files above a size that
//! no spec has. Never panics, whatever the bytes.

use crate::decode::decode;
use crate::spec::Spec;
use crate::tree::first_document;
use crate::validate::ValidateError;

/// Specs of whole machines have a few hundred kilobytes.
pub const MAX_SPEC_BYTES: usize = 16 << 20;

/// Why bytes are no spec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Larger than [`MAX_SPEC_BYTES`].
    #[error("the file is larger than {MAX_SPEC_BYTES} bytes")]
    TooLarge,
    /// Not UTF-8.
    #[error("the file is not UTF-8: wrong from byte {offset} on")]
    NotUtf8 {
        /// The first byte that is wrong.
        offset: usize,
    },
    /// No content: empty, only comments, or null.
    #[error("the file holds no spec")]
    Empty,
    /// Neither JSON nor YAML, or with duplicate keys.
    #[error("line {line}: {reason}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// Well-formed, but not of a spec's shape: unknown or missing keys, wrong types, invalid names.
    #[error("{0}")]
    Shape(String),
    /// Of a spec's shape, but against its rules.
    #[error(transparent)]
    Invalid(#[from] ValidateError),
}

/// Reads a spec, JSON or YAML; of several YAML documents the first.
///
/// # Errors
/// Whatever keeps the bytes from being a valid spec.
pub fn parse_bytes(bytes: &[u8]) -> Result<Spec, ParseError> {
    if bytes.len() > MAX_SPEC_BYTES {
        return Err(ParseError::TooLarge);
    }
    let text =
        std::str::from_utf8(bytes).map_err(|error| ParseError::NotUtf8 { offset: error.valid_up_to() })?;
    let tree = first_document(text)
        .map_err(|error| ParseError::Syntax { line: error.line, reason: error.message })?
        .filter(|tree| !tree.is_null())
        .ok_or(ParseError::Empty)?;
    let spec: Spec = decode(tree).map_err(|error| ParseError::Shape(error.to_string()))?;
    spec.validate()?;
    Ok(spec)
}
