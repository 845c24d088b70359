// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter setup metal` and `lighter setup gpu` from the system's own mirror: what they make serves the device, and goes again.

use std::path::Path;
use std::process::Command;

use crate::support::{run, stdout_of, text_of};

/// `wanted` is what the doctor says of a device that is served.
fn serves(device: &str, key: &str, wanted: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (root, config) = (dir.path().join("root"), dir.path().join("config.toml"));
    let hook = std::env::var("LIGHTER_GATE_HOOK").expect("run this by tools/test");
    let parts = Path::new(&hook).parent().expect("the hook lies in a folder");
    let cache = dir.path().join("cache/ggml");
    let section = if device == "metal" {
        format!("[metal]\ncache_dir = {cache:?}\n{key} = {root:?}\n")
    } else {
        format!("[metal]\ncache_dir = {cache:?}\n[{device}]\n{key} = {root:?}\n")
    };
    std::fs::write(&config, format!("[daemon]\nplugin_dir = {parts:?}\n{section}")).unwrap();
    let lighter = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lighter"));
        command.arg("--config").arg(&config).args(arguments);
        command
    };
    let says = |what: &str| {
        // Doctor's exit code is about the whole host.
        let found = text_of(&lighter(&["doctor"]).output().unwrap());
        let name = format!("lighter.sh/{device} ");
        let ours = found.lines().find(|line| line.starts_with(&name)).unwrap_or_default().to_owned();
        assert!(ours.contains(what), "{found}");
    };
    says("MISSING its host part");
    stdout_of(&mut lighter(&["setup", device]));
    says(wanted);
    let again = text_of(&run(&mut lighter(&["setup", device])));
    assert!(again.contains("is there"), "{again}");
    stdout_of(&mut lighter(&["setup", device, "--remove"]));
    assert!(!root.exists());
    says("MISSING its host part");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_renderer_from_the_mirror_serves_the_gpu_device() {
    serves("gpu", "renderer_root", "the renderer that lighter setup gpu made");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_ggml_from_the_mirror_serves_the_metal_device() {
    serves("metal", "engine_root", "on: ");
}
