// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter cdi list` and `lighter cdi inject` as scripts use them: output, error line, exit code.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test states what must hold")]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// Two directories: a good file in each, the second's shadowing one device, and a broken file.
struct Host {
    root: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { root: tempfile::tempdir().unwrap() };
        for directory in [host.low(), host.high()] {
            fs::create_dir(directory).unwrap();
        }
        let device = |name: &str, value: &str| json!({ "name": name, "containerEdits": { "env": [format!("V={value}")] } });
        let spec = |devices: Vec<Value>| {
            json!({ "cdiVersion": "0.3.0", "kind": "acme.com/dev", "devices": devices }).to_string()
        };
        fs::write(host.low().join("x.json"), spec(vec![device("b", "low"), device("a", "low")])).unwrap();
        fs::write(host.high().join("y.yaml"), spec(vec![device("a", "high")])).unwrap();
        fs::write(host.high().join("broken.json"), "{").unwrap();
        host
    }

    fn low(&self) -> PathBuf {
        self.root.path().join("low")
    }

    fn high(&self) -> PathBuf {
        self.root.path().join("high")
    }

    /// Runs `lighter cdi VERB` over both directories, with `input` as standard input.
    fn lighter(&self, verb: &str, arguments: &[&str], input: &str) -> Output {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lighter"))
            .args(["cdi", verb, "--spec-dir"])
            .arg(self.low())
            .arg("--spec-dir")
            .arg(self.high())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A command that fails early does not read it.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn path_text(path: &Path) -> Value {
    json!(path.to_str().unwrap())
}

#[test]
fn list_has_the_form_that_scripts_rely_on() {
    let host = Host::new();
    let output = host.lighter("list", &["--json"], "");
    assert!(output.status.success());
    let listing: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&listing), ["devices", "errors"]);
    let devices = json!([
        { "name": "acme.com/dev=a", "path": path_text(&host.high().join("y.yaml")) },
        { "name": "acme.com/dev=b", "path": path_text(&host.low().join("x.json")) },
    ]);
    assert_eq!(listing["devices"], devices);
    assert_eq!(listing["errors"].as_array().unwrap().len(), 1);
    assert_eq!(keys(&listing["errors"][0]), ["error", "path"]);
    assert_eq!(listing["errors"][0]["path"], path_text(&host.high().join("broken.json")));
}

#[test]
fn list_for_people_names_devices_and_says_what_is_wrong() {
    let host = Host::new();
    let output = host.lighter("list", &[], "");
    assert!(output.status.success());
    let devices: Vec<_> = text(&output.stdout).lines().collect();
    assert_eq!(devices.len(), 2);
    assert!(
        devices[0].starts_with("acme.com/dev=a  ") && devices[0].ends_with("/high/y.yaml"),
        "{devices:?}"
    );
    let notes = text(&output.stderr);
    assert!(notes.contains("broken.json: line 1: "), "{notes}");
    assert!(notes.contains("low/x.json: its acme.com/dev=a is hidden by the one in "), "{notes}");
}

#[test]
fn inject_prints_the_whole_spec() {
    let host = Host::new();
    let file = host.root.path().join("config.json");
    let spec = json!({ "ociVersion": "1.2.0", "process": { "cwd": "/", "env": ["V=image"] }, "future": [1] });
    fs::write(&file, spec.to_string()).unwrap();
    let mut expected = spec.clone();
    expected["process"]["env"] = json!(["V=high"]);
    let from_file = host.lighter("inject", &["--spec", file.to_str().unwrap(), "acme.com/dev=a"], "");
    let from_input = host.lighter("inject", &["--spec", "-", "--", "acme.com/dev=a"], &spec.to_string());
    for output in [from_file, from_input] {
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), expected);
        assert!(output.stderr.is_empty());
    }
}

#[test]
fn inject_prints_nothing_but_one_line_on_an_error() {
    let host = Host::new();
    let spec = json!({ "ociVersion": "1.2.0" }).to_string();
    let cases: [(&[&str], &str, &str); 6] = [
        (&["--spec", "-", "acme.com/dev=a", "acme.com/dev=nope"], &spec, "\"acme.com/dev=nope\""),
        (&["--spec", "-", "--", "two\nlines"], &spec, "\"two\\nlines\""),
        (&["--spec", "-", "acme.com/dev=a"], "{", "standard input is not an OCI spec in JSON"),
        (&["--spec", "-", "acme.com/dev=a"], "[]", "the OCI spec is malformed"),
        (&["--spec", "-", "acme.com/dev=a"], "{\"process\": 5}", "process is not an object"),
        (&["--spec", "/nowhere/config.json", "acme.com/dev=a"], "", "/nowhere/config.json"),
    ];
    for (arguments, input, cause) in cases {
        let output = host.lighter("inject", arguments, input);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let error = text(&output.stderr);
        assert!(error.ends_with('\n') && error.lines().count() == 1, "{arguments:?}: {error}");
        assert!(error.contains(cause), "{arguments:?}: {error}");
    }
}
