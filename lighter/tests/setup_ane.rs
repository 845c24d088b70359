// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter setup ane` where something is missing or wrong, with the real pip; that it works is a gate.

#![allow(clippy::unwrap_used, reason = "a test states what must hold")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A configuration of its own, and an empty folder in which pip looks for packages.
struct Host {
    root: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { root: tempfile::tempdir().unwrap() };
        fs::create_dir(host.index()).unwrap();
        let config = format!("[ane]\nengine_root = {:?}\ncache_dir = {:?}\n", host.engines(), host.cache());
        fs::write(host.root.path().join("config.toml"), config).unwrap();
        host
    }

    fn engines(&self) -> PathBuf {
        self.root.path().join("engines")
    }

    fn cache(&self) -> PathBuf {
        self.root.path().join("cache/ane")
    }

    fn index(&self) -> PathBuf {
        self.root.path().join("index")
    }

    fn setup(&self, arguments: &[&str], path: &OsStr) -> Output {
        Command::new(env!("CARGO_BIN_EXE_lighter"))
            .arg("--config")
            .arg(self.root.path().join("config.toml"))
            .args(["setup", "ane"])
            .args(arguments)
            .env("PATH", path)
            .env("PIP_NO_INDEX", "1")
            .env("PIP_FIND_LINKS", self.index())
            .output()
            .unwrap()
    }
}

fn own_path() -> std::ffi::OsString {
    std::env::var_os("PATH").unwrap()
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// What a failed run may leave: nothing that looks like an engine.
fn has_no_engine(folder: &Path) -> bool {
    fs::read_dir(folder).map_or(true, |entries| entries.flatten().count() == 0)
}

#[test]
fn without_pip_it_says_how_to_get_it_and_how_to_do_without() {
    let host = Host::new();
    let empty = tempfile::tempdir().unwrap();
    let output = host.setup(&[], empty.path().as_os_str());
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("python3-pip") && text.contains("ane.library"), "{text}");
    assert!(has_no_engine(&host.engines()));
}

#[test]
fn a_python_without_pip_counts_as_none() {
    let host = Host::new();
    let folder = tempfile::tempdir().unwrap();
    symlink("/bin/false", folder.path().join("python3")).unwrap();
    let output = host.setup(&[], folder.path().as_os_str());
    assert!(!output.status.success() && text_of(&output).contains("python3-pip"), "{}", text_of(&output));
}

#[test]
fn a_package_that_cannot_be_had_is_named_with_what_to_do() {
    let host = Host::new();
    let output = host.setup(&[], &own_path());
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("onnxruntime") && text.contains("run the command again"), "{text}");
    assert!(has_no_engine(&host.engines()));
}

#[test]
fn a_package_with_another_checksum_is_refused() {
    let host = Host::new();
    let arch = std::env::consts::ARCH;
    let wheel = format!("onnxruntime-1.32.0-cp311-cp311-manylinux_2_28_{arch}.whl");
    fs::write(host.index().join(wheel), b"not what was published").unwrap();
    let output = host.setup(&[], &own_path());
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.to_lowercase().contains("hash"), "{text}");
    assert!(has_no_engine(&host.engines()));
}

#[test]
fn what_is_not_there_is_removed_without_an_error() {
    let host = Host::new();
    let output = host.setup(&["--remove"], &own_path());
    assert!(
        output.status.success() && text_of(&output).contains("nothing to remove"),
        "{}",
        text_of(&output)
    );
}

#[test]
fn what_is_removed_is_gone_with_all_that_lies_in_it() {
    let host = Host::new();
    fs::create_dir_all(host.engines().join("onnxruntime")).unwrap();
    fs::write(host.engines().join("onnxruntime/libonnxruntime.so"), "").unwrap();
    let output = host.setup(&["--remove"], &own_path());
    assert!(output.status.success(), "{}", text_of(&output));
    assert!(!host.engines().exists());
}
