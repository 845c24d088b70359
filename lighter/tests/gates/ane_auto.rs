// SPDX-License-Identifier: MIT OR Apache-2.0
//! Python programs that are not changed at all, with the hook that its user opts in to.

use crate::ane::{ANE, Program, calls, settings};
use crate::support::{Daemon, Engine};

const RUNS: u64 = 5;
const OPTED_IN: [&str; 4] =
    ["-e", "LIGHTER_ANE_AUTO=1", "-e", "PYTHONPATH=/usr/lib/lighter/ane:/runtime:/base"];

/// Runs the program and gives what it wrote, and the digest of its outputs.
fn digest(engine: &Engine, options: &[&str], check: impl FnOnce()) -> (String, String) {
    let command = format!("python3 /gate/plain.py /models/resnet50.onnx {RUNS} 1x3x224x224");
    let program = Program::start(engine, "ort-1.32", options, &command);
    let text = program.finish();
    check();
    let digest = text.lines().find_map(|line| line.strip_prefix("digest ")).map(str::to_owned);
    (digest.unwrap_or_else(|| panic!("{text}")), text)
}

#[test]
fn an_unchanged_program_computes_on_the_host_once_its_user_opts_in() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let with_device = [&["--device", ANE], &OPTED_IN[..]].concat();
    let (own, _) = digest(&engine, &["--device", ANE], || assert_eq!(calls(&daemon), 0, "nobody opted in"));
    let (remote, text) = digest(&engine, &with_device, || assert_eq!(calls(&daemon), RUNS));
    assert_eq!(remote, own, "{text}");
    println!("auto: {RUNS} runs of an unchanged program on the host, equal to the bit");
}

#[test]
fn without_the_device_the_unchanged_program_runs_by_itself() {
    let engine = Engine::take();
    let _daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let (own, text) = digest(&engine, &[], || {});
    assert!(!text.contains("lighter"), "{text}");
    // Its folder is not in such a container, so there is no hook that could say anything.
    let (opted_in, text) = digest(&engine, &OPTED_IN, || {});
    assert_eq!(opted_in, own, "{text}");
}
