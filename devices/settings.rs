// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules that hold for settings of every device. Pure: each gives the offending value and the reason, and the device names
//! the key.

use std::path::Path;

/// A value, as it is shown, and why it cannot be used.
pub(crate) type Objection = (String, &'static str);

/// A folder or file that the service opens, whatever directory it was started in.
pub(crate) fn absolute(path: &Path) -> Result<(), Objection> {
    if path.is_absolute() {
        return Ok(());
    }
    Err((format!("{:?}", path.display().to_string()), "the path must be absolute"))
}

/// Names of variables for an engine and its drivers.
pub(crate) fn variables<'a>(names: impl IntoIterator<Item = &'a String>) -> Result<(), Objection> {
    for name in names {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err((format!("{name:?}"), "this is no name of an environment variable"));
        }
        // These decide what code is loaded; a service sets them itself where an engine needs it.
        if name.starts_with("LD_") {
            return Err((format!("{name:?}"), "the loader's variables cannot be set here"));
        }
    }
    Ok(())
}
