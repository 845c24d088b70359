// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vulkan instances by the hundred, one after another and many frames of work in one: nothing grows.

use crate::gpu::{CHECK, GPU, TRIXIE, container, daemon};
use crate::support::{Daemon, Engine, children, eventually, stdout_of};

/// Instances before the first look: what is allocated once has been.
const WARM: u32 = 20;
const INSTANCES: u32 = 300;
/// Rounds of allocation, computation and freeing in one instance.
const ROUNDS: u32 = 3000;

#[derive(Debug, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    processes: usize,
    threads: usize,
    resident_kib: u64,
}

fn held(daemon: &Daemon) -> Held {
    let pid = daemon.status()["services"]["gpu"]["pid"].as_u64().unwrap();
    let pid = u32::try_from(pid).unwrap();
    // The last instance's processes may still be ending.
    eventually("the service has no processes", || children(pid).is_empty().then_some(()));
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    Held {
        descriptors: count("fd"),
        processes: children(pid).len(),
        threads: count("task"),
        resident_kib: resident.trim().trim_end_matches(" kB").parse().unwrap(),
    }
}

#[test]
#[ignore = "long: part of `make gates`"]
fn hundreds_of_instances_and_thousands_of_rounds_leave_nothing_behind() {
    let engine = Engine::take();
    let daemon = daemon(&engine, "");
    let loop_of = |times: u32| {
        format!("i=0; while [ $i -lt {times} ]; do {CHECK} check >/dev/null || exit 1; i=$((i + 1)); done")
    };
    let run = |command: &[&str]| stdout_of(container(&engine, &["--device", GPU], TRIXIE, command));
    run(&["sh", "-c", &loop_of(WARM)]);
    let before = held(&daemon);
    run(&["sh", "-c", &loop_of(INSTANCES)]);
    run(&[CHECK, "repeat", &ROUNDS.to_string()]);
    let after = held(&daemon);
    println!("gpu: {INSTANCES} instances and {ROUNDS} rounds: {before:?}, then {after:?}");
    assert_eq!(
        (after.descriptors, after.processes, after.threads),
        (before.descriptors, before.processes, before.threads)
    );
    assert!(after.resident_kib <= before.resident_kib + 1024, "{before:?}, then {after:?}");
}
