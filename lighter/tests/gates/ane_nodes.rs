// SPDX-License-Identifier: MIT OR Apache-2.0
//! ONNX's own node tests on the ane device: whatever the container's own processor can run, the device answers alike.

use crate::ane::{ANE, calls, image, settings};
use crate::ane_suites::{Guest, python};
use crate::support::{Daemon, Engine};

/// What a run of the tests must at least come to.
struct Least {
    compared: u64,
    on_device: u64,
}

/// The figures with lengths in place of lists.
fn without_names(figures: &serde_json::Value) -> String {
    let text = |(name, value): (&String, &serde_json::Value)| {
        format!(
            "{name} {}",
            value.as_array().map_or_else(|| value.to_string(), |list| list.len().to_string())
        )
    };
    figures.as_object().unwrap().iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Gives the figures of a run in which nothing was wrong.
fn node_tests(container: &str, host: &str, least: &Least) -> serde_json::Value {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(host));
    let guest = Guest::start(&engine, &image(), &python(container), &["--device", ANE]);
    let text = guest.exec(&["python3", "/gate/nodes.py"]);
    let line = text.lines().find(|line| line.starts_with("{\"ort\"")).unwrap_or_else(|| panic!("{text}"));
    let figures: serde_json::Value = serde_json::from_str(line).unwrap();
    println!("node tests, {container} in the container, {host} on the host: {}", without_names(&figures));
    let figure = |name: &str| figures[name].as_u64().unwrap_or_default();
    for list in ["different", "failed"] {
        assert!(figures[list].as_array().unwrap().is_empty(), "{list}: {}\n{}", figures[list], daemon.log());
    }
    assert!(figure("compared") >= least.compared && figure("on_device") >= least.on_device, "{line}");
    assert_eq!(calls(&daemon), figure("runs_on_host"), "by the host's account and the container's");
    figures
}

/// Nothing is left to the container that the host was asked for.
fn same_version(version: &str, least: &Least) {
    let figures = node_tests(version, version, least);
    assert_eq!(figures["runs_in_container"], 0, "{}", figures["in_container"]);
    assert_eq!(figures["rounded"], serde_json::json!([]));
}

#[test]
#[ignore = "long: part of `make gates`"]
fn node_tests_of_the_newest_runtime_answer_alike() {
    same_version("ort-1.32", &Least { compared: 1590, on_device: 1526 });
}

#[test]
#[ignore = "long: part of `make gates`"]
fn node_tests_of_the_oldest_runtime_answer_alike() {
    same_version("ort-1.24", &Least { compared: 1355, on_device: 1295 });
}

/// Between releases the meaning of operators moves: what has moved is not sent.
#[test]
#[ignore = "long: part of `make gates`"]
fn node_tests_of_an_older_runtime_than_the_hosts_answer_alike() {
    node_tests("ort-1.24", "ort-1.32", &Least { compared: 1355, on_device: 1200 });
}

/// What the older one cannot load, the container runs.
#[test]
#[ignore = "long: part of `make gates`"]
fn node_tests_of_a_newer_runtime_than_the_hosts_answer_alike() {
    node_tests("ort-1.32", "ort-1.24", &Least { compared: 1590, on_device: 1200 });
}
