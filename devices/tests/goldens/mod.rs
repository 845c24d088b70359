// SPDX-License-Identifier: MIT OR Apache-2.0
//! Holds what a device puts into a container against a file of `tests/golden`. `UPDATE_GOLDEN=1` writes it anew.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use lighter_cdi::Spec;

/// The spec is valid, of a version that every runtime in use reads, and as in the file.
pub(crate) fn check(golden: &str, spec: &Spec) {
    spec.validate().unwrap();
    assert!(spec.cdi_version.to_string().as_str() <= "0.5.0", "{}", spec.cdi_version);
    let text = format!("{}\n", serde_json::to_string_pretty(spec).unwrap());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap_or_default(), "{}", path.display());
}
