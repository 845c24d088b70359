// SPDX-License-Identifier: MIT OR Apache-2.0
//! The plug-in as it ships, in programs with a stock ONNX Runtime: `python/cases.py` says what each case shows.
//!
//! `LIGHTER_TEST_ANE_EP` names the library that `tools/build` has made; the packages come from `tools/wheels`
//! (`LIGHTER_CACHE` names another cache). Where they are missing, the tests say loudly that they did not run. Cases that
//! take long run with `--ignored`.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::process::Command;

/// Cases for every version; none takes more than a few seconds.
const EVERYWHERE: &[&str] =
    &["each_small_model", "device", "settings", "binding", "fork", "own_errors", "never_there", "unregister"];
/// What depends on this library alone.
const ONCE: &[&str] = &[
    "threads",
    "fork_alone",
    "many_sessions",
    "gone",
    "bound",
    "again",
    "not_these",
    "refuse",
    "other_version",
    "other_ort",
    "wrong_type",
    "beyond",
    "auto",
    "check",
];
/// What takes longer.
const LONG: &[&str] = &["real_models", "killed"];

/// The library under test; says so when there is none.
fn library() -> Option<PathBuf> {
    let library = std::env::var_os("LIGHTER_TEST_ANE_EP").map(PathBuf::from);
    if library.is_none() {
        eprintln!("SKIPPED: LIGHTER_TEST_ANE_EP names no liblighter_ane_ep.so (tools/build makes one)");
    }
    library
}

/// A folder of `tools/wheels`; says so when it is missing.
fn wheels(name: &str) -> Option<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let cache = std::env::var_os("LIGHTER_CACHE").map_or_else(|| here.join("../../../.cache"), PathBuf::from);
    let folder = cache.join("wheels").join(name);
    if !folder.is_dir() {
        eprintln!("SKIPPED: {} is missing (tools/wheels {name} fetches it)", folder.display());
        return None;
    }
    Some(folder.canonicalize().unwrap())
}

/// Runs cases in a program with the container's version against a host with its own.
fn run(container: &str, host: &str, cases: &[&str]) {
    let Some(library) = library() else { return };
    let (Some(base), Some(container), Some(host)) = (wheels("base"), wheels(container), wheels(host)) else {
        return;
    };
    let models = if cases.contains(&"real_models") { wheels("models") } else { Some(PathBuf::new()) };
    let Some(models) = models else { return };
    let paths = |ort: &PathBuf| std::env::join_paths([ort, &base]).unwrap();
    // The last one ends the library.
    for cases in cases.split_inclusive(|case| *case == "unregister") {
        let status = Command::new("python3")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/cases.py"))
            .args(cases)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("PYTHONPATH", paths(&container))
            .env("LIGHTER_TEST_HOST_PYTHONPATH", paths(&host))
            .env("LIGHTER_TEST_ANE_EP", &library)
            .env("LIGHTER_TEST_MODELS", &models)
            .status()
            .unwrap();
        assert!(status.success(), "{cases:?} with {} ended with {status}", container.display());
    }
}

#[test]
fn it_is_linked_to_nothing_and_shows_two_functions() {
    let Some(library) = library() else { return };
    let read = |option: &str| {
        let output = Command::new("readelf").args(["--wide", option]).arg(&library).output().unwrap();
        assert!(output.status.success(), "readelf (package binutils): {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let dynamic = read("--dynamic");
    assert!(!dynamic.contains("NEEDED"), "{dynamic}");
    assert!(!dynamic.contains("(INIT"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    assert!(!read("--segments").contains(" TLS "));
    let symbols = read("--dyn-syms");
    let mut names: Vec<&str> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().nth(7))
        .filter(|name| *name != "Name" && !name.is_empty())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["CreateEpFactories", "ReleaseEpFactory"], "{symbols}");
    let relocations = read("--relocs");
    assert!(
        relocations.lines().filter(|line| line.contains("R_")).all(|line| line.contains("RELATIVE")),
        "{relocations}"
    );
}

#[test]
fn with_the_oldest_runtime() {
    run("ort-1.24", "ort-1.24", EVERYWHERE);
}

#[test]
fn with_a_runtime_in_between() {
    run("ort-1.26", "ort-1.26", &["each_small_model", "device", "unregister"]);
}

#[test]
fn with_the_newest_runtime() {
    run("ort-1.32", "ort-1.32", ONCE);
    run("ort-1.32", "ort-1.32", EVERYWHERE);
}

#[test]
fn with_different_runtimes_on_both_sides() {
    run("ort-1.24", "ort-1.32", &["each_small_model"]);
}

#[test]
fn a_runtime_that_is_too_old_gets_a_clear_error() {
    run("ort-1.23", "ort-1.32", &["too_old"]);
}

#[test]
#[ignore = "takes minutes, and memory for three copies of 2.4 GB of weights"]
fn every_operator_and_more_weights_than_a_protobuf_holds() {
    for version in ["ort-1.24", "ort-1.26", "ort-1.32"] {
        run(version, version, &["onnx_node_tests"]);
    }
    run("ort-1.32", "ort-1.32", &["large"]);
}

#[test]
#[ignore = "takes a minute for each version"]
fn real_models_and_a_host_that_dies() {
    for version in ["ort-1.24", "ort-1.26", "ort-1.32"] {
        run(version, version, LONG);
    }
}
