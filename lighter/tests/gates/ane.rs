// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the gates of the ane device share: its settings, and containers with a stock ONNX Runtime.

use std::path::PathBuf;

use crate::support::{Daemon, Engine, cache, eventually_within, repo, run, stdout_of, text_of};

pub(crate) const ANE: &str = "lighter.sh/ane=all";

/// An image whose Python is of the same version as the one that fetched the wheels.
pub(crate) fn image() -> String {
    std::env::var("LIGHTER_TEST_PYTHON_IMAGE").unwrap_or_else(|_| "lighter-test/python:bookworm".to_owned())
}

/// A folder of `tools/wheels`.
pub(crate) fn wheels(name: &str) -> PathBuf {
    let folder = cache().join("wheels").join(name);
    assert!(folder.exists(), "{} is missing: run `tools/wheels`", folder.display());
    folder
}

/// ONNX Runtime's library in a folder of `tools/wheels`.
pub(crate) fn library(name: &str) -> PathBuf {
    let folder = wheels(name).join("onnxruntime/capi");
    let is_library = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libonnxruntime.so.1."))
    };
    let found = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).find(is_library);
    found.unwrap_or_else(|| panic!("no libonnxruntime in {}", folder.display()))
}

/// The section of a daemon's configuration that serves the device with this library.
pub(crate) fn settings(name: &str) -> String {
    format!("[ane]\nlibrary = \"{}\"\n", library(name).display())
}

/// Runs that the host has done for the one container that there is.
pub(crate) fn calls(daemon: &Daemon) -> u64 {
    daemon.status()["grants"][0]["usage"]["calls"].as_u64().unwrap_or_default()
}

/// A container that runs one command and then stays, so that its grant can still be asked about.
pub(crate) struct Program<'a> {
    engine: &'a Engine,
    pub(crate) id: String,
}

impl<'a> Program<'a> {
    /// Starts it, with the wheels of `runtime` and the models of `tools/wheels` in reach.
    pub(crate) fn start(engine: &'a Engine, runtime: &str, options: &[&str], command: &str) -> Self {
        let image = image();
        let found = run(engine.docker(["image", "inspect", &image]));
        assert!(found.status.success(), "image {image} is missing: run `tools/images python-bookworm`");
        let mount = |from: PathBuf, to: &str| format!("{}:{to}:ro", from.display());
        let id = stdout_of(
            engine
                .docker(["run", "-d", "--init", "--network", "none", "-e", "PYTHONPATH=/runtime:/base"])
                .args(["-v", &mount(wheels(runtime), "/runtime"), "-v", &mount(wheels("base"), "/base")])
                .args(["-v", &mount(wheels("models"), "/models")])
                .args(["-v", &mount(repo().join("lighter/tests/gates/ane"), "/gate")])
                .args(options)
                .args([&image, "sh", "-c", &format!("{command}; echo ended with $?; sleep infinity")]),
        );
        Self { engine, id: id.trim().to_owned() }
    }

    /// What it has written so far.
    pub(crate) fn written(&self) -> String {
        text_of(&run(self.engine.docker(["logs", &self.id])))
    }

    /// Waits for the command's end and gives what it wrote.
    pub(crate) fn finish(&self) -> String {
        eventually_within(300, "the program in the container ends", || {
            let text = self.written();
            text.contains("ended with ").then_some(text)
        })
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the container wrote\n{}", self.written());
        }
        run(self.engine.docker(["rm", "-f", "-v", &self.id]));
    }
}
