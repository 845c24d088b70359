// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter setup ane` from the real index: what it fetches serves the device, and goes again.

use std::path::Path;
use std::process::Command;

use crate::support::{stdout_of, text_of};

#[test]
#[ignore = "long: part of `make gates`"]
fn what_setup_fetches_serves_the_device_until_it_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let (engines, config) = (root.path().join("engines"), root.path().join("config.toml"));
    let hook = std::env::var("LIGHTER_GATE_HOOK").expect("run this by tools/test");
    let parts = Path::new(&hook).parent().expect("the hook lies in a folder");
    let text = format!(
        "[daemon]\nplugin_dir = {parts:?}\n[ane]\nengine_root = {engines:?}\ncache_dir = {:?}\nstate_dir = {:?}\n",
        root.path().join("cache/ane"),
        root.path().join("state")
    );
    std::fs::write(&config, text).unwrap();
    let lighter = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lighter"));
        command.arg("--config").arg(&config).args(arguments);
        command
    };
    stdout_of(&mut lighter(&["setup", "ane"]));
    let again = stdout_of(&mut lighter(&["setup", "ane"]));
    assert!(again.contains("is there"), "{again}");
    // Doctor's exit code is about the whole host.
    let found = text_of(&lighter(&["doctor"]).output().unwrap());
    let ours = found.lines().find(|line| line.starts_with("lighter.sh/ane"));
    assert!(ours.is_some_and(|line| line.contains("on:") && line.contains("version 1.32.0")), "{found}");
    stdout_of(&mut lighter(&["setup", "ane", "--remove"]));
    assert!(!engines.exists());
}
