// SPDX-License-Identifier: MIT OR Apache-2.0
//! The plug-in in a program of musl's C library. PyPI has no ONNX Runtime for musl, so a small program plays one
//! (`musl_loader.c`); what it is asked for is what is left to fail between the plug-in and another C library.
//!
//! Needs `musl-gcc` (Debian's musl-tools) and `LIGHTER_TEST_ANE_EP`; says loudly that it did not run without.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::mem::offset_of;
use std::process::Command;

use ort_sys::OrtApi;

#[test]
fn a_program_of_another_c_library_loads_it() {
    let Some(library) = std::env::var_os("LIGHTER_TEST_ANE_EP") else {
        eprintln!("SKIPPED: LIGHTER_TEST_ANE_EP names no liblighter_ane_ep.so (tools/build makes one)");
        return;
    };
    if Command::new("musl-gcc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no musl-gcc (package musl-tools)");
        return;
    }
    let folder = std::env::temp_dir().join(format!("lighter-musl-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("loader");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/musl_loader.c");
    let built =
        Command::new("musl-gcc").args(["-Wall", "-Werror", "-O1", "-o"]).arg(&program).arg(source).status();
    assert!(built.unwrap().success(), "musl-gcc");
    let offsets = [
        offset_of!(OrtApi, GetEpApi),
        offset_of!(OrtApi, CreateStatus),
        offset_of!(OrtApi, HasSessionConfigEntry),
    ];
    let output = Command::new(&program)
        .arg(library)
        .args(offsets.map(|offset| offset.to_string()))
        .env("LIGHTER_ANE", "/nonexistent/socket")
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for line in ["hardware of type 2 by Lighter", "LighterANE by Lighter", "done"] {
        assert!(said.contains(line), "{said}");
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("/nonexistent/socket does not answer"), "its variables are read: {errors}");
}
