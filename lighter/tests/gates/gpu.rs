// SPDX-License-Identifier: MIT OR Apache-2.0
//! What gates of the gpu device have in common: images with a Venus driver of their own, the program that computes and compares.

use std::path::PathBuf;
use std::process::Command;

use crate::support::{Daemon, Engine, engine_root, run, stdout_of, text_of};

pub(crate) const GPU: &str = "lighter.sh/gpu=all";
/// Images by their suites.
pub(crate) const TRIXIE: &str = "lighter-test/vulkan:trixie";
pub(crate) const SID: &str = "lighter-test/vulkan:sid";
/// Where the program lies in a container.
pub(crate) const CHECK: &str = "/gate/gpu_check";

/// A daemon that offers the gpu device, with these settings besides.
pub(crate) fn daemon(engine: &Engine, settings: &str) -> Daemon {
    let root = engine_root("gpu");
    Daemon::with(engine, &format!("[gpu]\nrenderer_root = \"{}\"\n{settings}", root.display()))
}

/// The program, on this machine.
pub(crate) fn check_program() -> PathBuf {
    PathBuf::from(std::env::var_os("LIGHTER_TEST_GPU_CHECK").expect("run this by tools/test"))
}

/// The mount that brings it into a container.
pub(crate) fn mount() -> String {
    format!("{}:{CHECK}:ro", check_program().display())
}

/// `docker run` with the program, and with these options besides.
pub(crate) fn container(
    engine: &Engine,
    options: &[&str],
    image: &str,
    command: &[&str],
) -> &'static mut Command {
    engine.docker(["run", "--rm", "-v", &mount()]).args(options).arg(image).args(command)
}

/// Computes in a container on the device, and gives what the program says.
pub(crate) fn check(engine: &Engine, image: &str) -> String {
    stdout_of(container(engine, &["--device", GPU], image, &[CHECK]))
}

/// The same where it may fail.
pub(crate) fn attempt(engine: &Engine, options: &[&str], image: &str) -> (bool, String) {
    let output = run(container(engine, options, image, &[CHECK]));
    (output.status.success(), text_of(&output))
}
