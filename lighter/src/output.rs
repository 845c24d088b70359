// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one place that writes to standard output: a reader that went away is no error.

use std::io::{ErrorKind, Write};

use anyhow::Context as _;

/// Prints a line.
///
/// # Errors
/// When standard output cannot be written, other than because its reader has gone.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// Prints a value as indented JSON.
///
/// # Errors
/// As [`line`].
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string_pretty(value).context("cannot write the answer as JSON")?)
}
