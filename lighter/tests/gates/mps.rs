// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the gates of the mps device share: its settings, and stock images with a torch of their own.

use std::path::PathBuf;

use crate::ane_suites::{Guest, mounts};
use crate::support::{Daemon, Engine, cache, repo, run};

pub(crate) const MPS: &str = "lighter.sh/mps=all";
/// Debian's own torch: 2.6 under Python 3.13, and 2.14 under Python 3.14.
pub(crate) const TRIXIE: &str = "lighter-test/torch:trixie";
pub(crate) const SID: &str = "lighter-test/torch:sid";
/// The newest that `tools/torch` has pinned.
const NEWEST: &str = "2.15.0-cp311";
/// Where PyPI's torch is in a container that has it mounted, before lighter's own package.
const PATHS: &str = "PYTHONPATH=/torch:/usr/lib/lighter/mps/python";

/// The Python of the host that computes; its workers are other users, so it lies where they can read.
pub(crate) fn python() -> String {
    std::env::var("LIGHTER_TEST_TORCH_PYTHON").unwrap_or_else(|_| "/usr/bin/python3".to_owned())
}

/// The folder of `tools/torch` for that Python.
pub(crate) fn torch() -> PathBuf {
    let folder = std::env::var_os("LIGHTER_TEST_TORCH")
        .map_or_else(|| cache().join("torch").join(NEWEST), PathBuf::from);
    assert!(folder.exists(), "{} is missing: run `tools/torch`", folder.display());
    folder
}

/// The section of a daemon's configuration that serves the device with the host's processor, and more lines of it.
pub(crate) fn settings(more: &str) -> String {
    format!(
        "[mps]\ntorch_python = \"{}\"\ntorch_path = [\"{}\"]\nstate_dir = \"@dir@/mps\"\nengine = \"cpu\"\nthreads = 1\n{more}\n",
        python(),
        torch().display()
    )
}

/// The gate's programs, for any container.
fn programs() -> Vec<String> {
    mounts(&[
        (repo().join("lighter/tests/gates/mps"), "/gate"),
        (repo().join("devices/mps/python/tests"), "/tests"),
    ])
}

/// A container with PyPI's torch, which is linked to CUDA, and with lighter's package from the mount.
pub(crate) fn wheel<'a>(engine: &'a Engine, more: &[&str]) -> Guest<'a> {
    let mut options = programs();
    options.extend(mounts(&[(torch(), "/torch")]));
    options.extend(["-e", PATHS, "--network", "none"].map(str::to_owned));
    Guest::start(engine, &crate::ane::image(), &options, more)
}

/// A container with Debian's torch, into which pip has installed lighter's package from the mount, with no network.
pub(crate) fn debian<'a>(engine: &'a Engine, image: &str) -> Guest<'a> {
    let mut options = programs();
    options.extend(["--device", MPS, "--network", "none"].map(str::to_owned));
    let guest = Guest::start(engine, image, &options, &[]);
    // Debian keeps pip out of its own folders unless told.
    guest.exec(&[
        "pip",
        "install",
        "--quiet",
        "--break-system-packages",
        "--root-user-action",
        "ignore",
        "lighter-mps",
    ]);
    guest
}

/// Runs a program of the gate in a container.
pub(crate) fn program(guest: &Guest<'_>, arguments: &[&str]) -> String {
    guest.exec(&[&["python3"][..], arguments].concat())
}

/// The JSON lines in what a program wrote.
pub(crate) fn lines(text: &str) -> Vec<serde_json::Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// What a program wrote that may fail.
pub(crate) fn attempt(engine: &Engine, guest: &Guest<'_>, command: &[&str]) -> std::process::Output {
    run(engine.docker(["exec", &guest.id]).args(command))
}

/// What the daemon says of the one grant that there is.
pub(crate) fn usage(daemon: &Daemon) -> serde_json::Value {
    daemon.status()["grants"][0]["usage"].clone()
}

/// The device's service.
pub(crate) fn service(daemon: &Daemon) -> Option<u32> {
    daemon.status()["services"]["mps"]["pid"].as_u64().map(|pid| u32::try_from(pid).unwrap())
}
