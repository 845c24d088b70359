// SPDX-License-Identifier: MIT OR Apache-2.0
//! Directories as they are found on hosts: broken files beside good ones, links, pipes, shadowed devices.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test states what must hold")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use lighter_cdi::{FileError, MAX_SPEC_BYTES, ParseError, Registry, parse_bytes};

fn spec(value: &str) -> String {
    format!(
        "cdiVersion: 0.3.0\nkind: acme.com/dev\ndevices:\n- name: a\n  containerEdits: {{env: [V={value}]}}\n"
    )
}

/// Two directories, the second of higher priority.
fn directories(root: &Path) -> [PathBuf; 2] {
    let directories = ["etc", "run"].map(|name| root.join(name));
    for directory in &directories {
        fs::create_dir(directory).unwrap();
    }
    directories
}

fn errors(registry: &Registry) -> Vec<String> {
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    registry.errors().map(|(path, error)| format!("{}: {error}", name(path))).collect()
}

#[test]
fn broken_files_hide_no_good_one() {
    let root = tempfile::tempdir().unwrap();
    let [etc, run] = directories(root.path());
    fs::write(etc.join("good.yaml"), spec("1")).unwrap();
    fs::write(etc.join("bytes.json"), b"{\"kind\": \"\xff\"}").unwrap();
    fs::write(etc.join("deep.json"), "[".repeat(1_000_000)).unwrap();
    fs::write(etc.join("empty.json"), "").unwrap();
    fs::write(etc.join(OsStr::from_bytes(b"\xff.json")), "{}").unwrap();
    fs::write(run.join("huge.json"), vec![b' '; MAX_SPEC_BYTES + 1]).unwrap();
    fs::write(run.join("key.yaml"), spec("1").replace("env", "environment")).unwrap();
    symlink("nowhere", run.join("dangling.json")).unwrap();
    symlink(".", run.join("directory.json")).unwrap();
    symlink("loop.json", run.join("loop.json")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        run.join("pipe.json"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();

    let registry = Registry::scan(&[etc, run]);
    assert_eq!(registry.devices().map(|offer| offer.name).collect::<Vec<_>>(), ["acme.com/dev=a"]);
    let errors = errors(&registry);
    let expected = [
        "bytes.json: the file is not UTF-8: wrong from byte 10 on",
        "deep.json: line 1: recursion limit exceeded",
        "empty.json: the file holds no spec",
        "\u{fffd}.json: missing field `cdiVersion`",
        "dangling.json: cannot read it: No such file or directory (os error 2)",
        "directory.json: it is not a regular file",
        "huge.json: the file is larger than 16777216 bytes",
        "key.yaml: devices[0].containerEdits: unknown field `environment`, expected one of `env`, `deviceNodes`, \
         `netDevices`, `hooks`, `mounts`, `intelRdt`, `additionalGids`",
        "loop.json: cannot read it: Too many levels of symbolic links (os error 40)",
        "pipe.json: it is not a regular file",
    ];
    assert_eq!(errors, expected);
}

#[test]
fn only_names_that_end_as_specs_do_count() {
    let root = tempfile::tempdir().unwrap();
    let [etc, _] = directories(root.path());
    for name in ["a.yml", "a.JSON", "a.json.tmp", ".a.json.1-0.tmp", "a"] {
        fs::write(etc.join(name), "{").unwrap();
    }
    fs::create_dir(etc.join("sub.json")).unwrap();
    fs::write(etc.join("sub.json/a.json"), spec("1")).unwrap();
    let registry = Registry::scan(&[etc]);
    assert_eq!((registry.devices().count(), registry.errors().count()), (0, 0));
}

#[test]
fn a_later_directory_wins_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    let [etc, run] = directories(root.path());
    fs::write(etc.join("x.yaml"), spec("low")).unwrap();
    fs::write(root.path().join("target"), spec("high")).unwrap();
    symlink("../target", run.join("y.yaml")).unwrap();
    let registry = Registry::scan(&[&etc, &run]);
    let offer = registry.device("acme.com/dev=a").unwrap();
    assert_eq!(offer.path, run.join("y.yaml"));
    assert_eq!(offer.device.container_edits.env, ["V=high"]);
    let shadowed = registry.shadowed();
    assert_eq!(shadowed.len(), 1);
    assert_eq!((&shadowed[0].path, &shadowed[0].by), (&etc.join("x.yaml"), &run.join("y.yaml")));
    assert_eq!(registry.errors().count(), 0);
}

#[test]
fn a_conflict_names_both_files_and_costs_only_that_device() {
    let root = tempfile::tempdir().unwrap();
    let [etc, _] = directories(root.path());
    let two = spec("2") + "- name: b\n  containerEdits: {env: [B=1]}\n";
    fs::write(etc.join("x.yaml"), spec("1")).unwrap();
    fs::write(etc.join("y.yaml"), two).unwrap();
    let registry = Registry::scan(&[&etc]);
    assert_eq!(registry.devices().map(|offer| offer.name).collect::<Vec<_>>(), ["acme.com/dev=b"]);
    let others: Vec<_> = registry
        .errors()
        .map(|(path, error)| match error {
            FileError::Conflict { other, .. } => (path.to_owned(), other.clone()),
            other => panic!("{other}"),
        })
        .collect();
    let (x, y) = (etc.join("x.yaml"), etc.join("y.yaml"));
    assert_eq!(others, [(x.clone(), y.clone()), (y, x)]);
}

#[test]
fn a_missing_directory_is_empty_and_an_unreadable_one_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let [etc, run] = directories(root.path());
    fs::write(run.join("x.yaml"), spec("1")).unwrap();
    let registry = Registry::scan(&[root.path().join("missing"), file.clone(), etc, run]);
    assert_eq!(registry.devices().count(), 1);
    assert_eq!(registry.errors().map(|(path, _)| path.to_owned()).collect::<Vec<_>>(), [file]);
}

#[test]
fn aliases_cannot_blow_up() {
    let mut bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for (old, new) in
        ["a", "b", "c", "d", "e", "f", "g", "h"].iter().zip(["b", "c", "d", "e", "f", "g", "h", "i"])
    {
        bomb += &format!("{new}: &{new} [{}]\n", [format!("*{old}").as_str(); 9].join(","));
    }
    assert!(matches!(parse_bytes(bomb.as_bytes()), Err(ParseError::Syntax { .. })));
    let long = format!("a: &a \"{}\"\nb: [{}]\n", "x".repeat(1 << 20), ["*a"; 1000].join(","));
    assert!(matches!(parse_bytes(long.as_bytes()), Err(ParseError::Syntax { .. })));
}
