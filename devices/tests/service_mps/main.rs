// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mps service with workers that crash, hang, lie and try to get out (`bad_host.py` in this machine's own Python),
//! and with real ones ([`real`]).
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod probes;
mod real;
mod running;

use std::io::Read;

use self::running::{Running, is_running, kill};

#[test]
fn nothing_runs_before_the_first_stream_and_each_stream_has_its_own_worker() {
    let service = Running::start("", |_| {});
    assert_eq!(service.report().totals["workers"], 0);
    let (_one, first) = service.ask_and_stay("a", "stay");
    let (_two, second) = service.ask_and_stay("a", "stay");
    let (_three, third) = service.ask_and_stay("b", "stay");
    assert!(first != second && second != third, "{first} {second} {third}");
    let report = service.report();
    assert_eq!((report.totals["workers"], report.totals["spare_workers"]), (3, 0));
    assert_eq!(report.totals["storages"], 9);
    let a = &report.containers["grant-a"];
    assert_eq!((a.streams_open, a.streams_total, a.calls, a.held_bytes), (2, 2, 2, 154));
}

#[test]
fn a_worker_ends_with_its_stream_and_what_it_did_stays_counted() {
    let service = Running::start("", |_| {});
    let answer = service.ask("a", "hello");
    let pid = answer.strip_prefix("cpu ").unwrap();
    let report = service.until("the worker is gone", |report| report.totals["workers"] == 0);
    assert!(!is_running(pid));
    let a = &report.containers["grant-a"];
    assert_eq!((a.calls, a.held_bytes, a.streams_open, a.streams_total), (5, 0, 0, 1));
    assert!(report.troubles.is_empty(), "an end is no trouble: {:?}", report.troubles);
}

#[test]
fn a_worker_is_told_the_configured_limits() {
    let service = Running::start("", |config| {
        config.threads = Some(3);
        config.max_bytes_per_stream = Some(1 << 30);
        config.max_storages_per_stream = 7;
        config.max_signatures_per_stream = 8;
    });
    let answer = service.ask("a", "settings");
    let expected = r#"{"version": 1, "device": "cpu", "threads": 3, "max_bytes": 1073741824, "max_storages": 7, "max_signatures": 8}"#;
    assert_eq!(answer, expected);
}

#[test]
fn a_revoked_grants_workers_are_gone_when_the_revoke_is_confirmed() {
    let service = Running::start("", |_| {});
    let (mut stream, one) = service.ask_and_stay("a", "stay");
    let (_second, two) = service.ask_and_stay("a", "stay");
    let (_other, other) = service.ask_and_stay("b", "stay");
    service.revoke("a");
    assert!(!is_running(&one) && !is_running(&two));
    assert!(is_running(&other));
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "the stream has ended");
    service.revoke("a");
    service.revoke("never-seen");
    assert_eq!(service.report().totals["workers"], 1);
}

#[test]
fn no_worker_outlives_the_service() {
    let service = Running::start(START_OUTLIVES, |config| config.spare = true);
    let (_stream, pid) = service.ask_and_stay("a", "stay");
    service.until("a spare", |report| report.totals["spare_workers"] == 1);
    let all = workers(START_OUTLIVES);
    assert_eq!(all.len(), 2, "{all:?}");
    drop(service);
    assert!(!is_running(&pid));
    assert_eq!(workers(START_OUTLIVES), Vec::<String>::new());
}

/// How the workers of one test are told from those of the others, which run beside them.
const START_OUTLIVES: &str = "outlives";

/// Processes of the bad package with this start.
fn workers(start: &str) -> Vec<String> {
    let variable = format!("START={start}\0");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let is_meant = |entry: &std::fs::DirEntry| {
        let variables = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&variables).contains(&variable)
            && String::from_utf8_lossy(&line).contains("worker")
    };
    processes.filter(is_meant).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn the_spare_is_taken_by_the_next_stream_of_any_container_and_replaced() {
    let service = Running::start("spared", |config| config.spare = true);
    let (_one, first) = service.ask_and_stay("a", "stay");
    service.until("a spare", |report| report.totals["spare_workers"] == 1);
    let mut waiting = workers("spared");
    waiting.retain(|pid| *pid != first);
    let (_two, second) = service.ask_and_stay("b", "stay");
    assert_eq!(waiting, [second]);
    let report = service.until("another spare", |report| report.totals["spare_workers"] == 1);
    assert_eq!(report.totals["workers"], 2);
}

#[test]
fn a_spare_that_nobody_wants_ends() {
    let service = Running::start("", |config| {
        config.spare = true;
        config.spare_idle_s = 0;
    });
    let (_stream, _) = service.ask_and_stay("a", "stay");
    let report = service.until("no spare", |report| report.totals["spare_workers"] == 0);
    assert!(report.troubles.is_empty(), "{:?}", report.troubles);
}

#[test]
fn a_crash_is_told_with_its_cause_and_harms_nobody_else() {
    let service = Running::start("", |_| {});
    let (_other, pid) = service.ask_and_stay("b", "stay");
    assert_eq!(service.ask("a", "crash"), "");
    let report = service.until("the trouble is told", |report| !report.troubles.is_empty());
    let trouble = &report.troubles[0];
    assert!(trouble.contains("container a") && trouble.contains("MemoryError: a shard"), "{trouble}");
    assert!(report.containers["grant-a"].last_error.as_ref().unwrap().contains("MemoryError"));
    assert!(is_running(&pid));
    assert!(service.ask("a", "hello").starts_with("cpu "), "the next stream is served");
}

#[test]
fn a_killed_worker_ends_its_stream_alone() {
    let service = Running::start("", |_| {});
    let (mut one, first) = service.ask_and_stay("a", "stay");
    let (_two, second) = service.ask_and_stay("a", "stay");
    kill(&first);
    assert_eq!(one.read(&mut [0]).unwrap_or(0), 0, "the stream has ended");
    let report = service.until("the trouble is told", |report| !report.troubles.is_empty());
    assert!(report.troubles[0].contains("signal: 9"), "{:?}", report.troubles);
    assert!(is_running(&second));
    assert_eq!(report.containers["grant-a"].streams_open, 1);
}

#[test]
fn a_crash_loop_is_refused_for_a_while_and_others_are_not() {
    let service = Running::start("", |config| {
        config.crash_limit = 2;
        config.crash_pause_s = 600;
    });
    assert_eq!(service.ask("a", "crash"), "");
    service.until("first crash", |report| report.troubles.len() == 1);
    assert_eq!(service.ask("a", "crash"), "");
    service.until("second crash, and the refusal", |report| report.troubles.len() == 3);
    assert!(service.refusal("a").contains("crashed too often"));
    assert!(
        service.report().containers["grant-a"].last_error.as_ref().unwrap().contains("crashed too often")
    );
    assert!(service.ask("b", "hello").starts_with("cpu "));
}

#[test]
fn bad_starts_are_told_to_client_and_host() {
    for (start, expected) in [
        ("abort", "signal: 6"),
        ("failed", "no such engine"),
        ("rubbish", "no message"),
        ("old", "version 77"),
        ("never", "not ready within 300 ms"),
    ] {
        let service = Running::start(start, |config| {
            config.start_limit_ms = if start == "never" { 300 } else { 60_000 }
        });
        assert!(service.refusal("a").contains("did not start"), "{start}");
        let report = service.until(start, |report| !report.troubles.is_empty());
        assert!(report.troubles[0].contains(expected), "{start}: {:?}", report.troubles);
        assert_eq!(report.totals["workers"], 0, "{start}");
    }
}

#[test]
fn a_client_that_does_not_wait_for_its_worker_ends_it() {
    let service = Running::start("never", |config| config.start_limit_ms = 600_000);
    let stream = service.open("a", b"hello\n");
    service.until("it starts", |report| report.totals["workers"] == 1);
    drop(stream);
    let report = service.until("it is gone", |report| report.totals["workers"] == 0);
    assert!(report.troubles.is_empty(), "{:?}", report.troubles);
}

#[test]
fn a_worker_that_says_nonsense_or_nothing_any_more_is_ended() {
    let service = Running::start("", |config| config.crash_limit = 100);
    for (number, command) in ["close", "wrong"].into_iter().enumerate() {
        assert_eq!(service.ask("a", command), "", "{command}");
        let report = service.until(command, |report| report.troubles.len() == number + 1);
        assert_eq!(report.totals["workers"], 0, "{command}");
    }
    assert_eq!(service.ask("a", "linger"), "");
    let report = service.until("it has been ended", |report| report.totals["workers"] == 0);
    assert_eq!(report.troubles.len(), 2, "its stream had ended: {:?}", report.troubles);
    assert!(service.ask("a", "hello").starts_with("cpu "));
}

#[test]
fn a_flood_of_words_stops_nobody() {
    let service = Running::start("", |_| {});
    let (_stream, answer) = service.ask_and_stay("a", "flood");
    assert_eq!(answer, "flooded");
    assert!(service.ask("a", "hello").starts_with("cpu "));
}

#[test]
fn the_reason_of_an_ended_stream_is_kept_without_control_characters() {
    let service = Running::start("", |_| {});
    assert_eq!(service.ask("a", "complain"), "");
    let report = service.until("told", |report| {
        report.containers.get("grant-a").is_some_and(|container| container.last_error.is_some())
    });
    assert_eq!(report.containers["grant-a"].last_error.as_deref(), Some("tensor of [31m0 bytes"));
    assert!(report.troubles.is_empty(), "what a client did is no trouble of the host's");
}

#[test]
fn too_many_streams_are_refused_by_name_of_the_setting() {
    let service = Running::start("", |config| config.max_streams_per_container = 2);
    let _streams = [service.ask_and_stay("a", "stay"), service.ask_and_stay("a", "stay")];
    assert!(service.refusal("a").contains("mps.max_streams_per_container"));
    assert!(service.ask("b", "hello").starts_with("cpu "));
}

#[test]
fn a_worker_cannot_get_out() {
    let service = Running::start("", |_| {});
    let answer = service.ask("a", "sandbox");
    if rustix::process::geteuid().is_root() {
        assert_eq!(answer, "worked:");
    } else {
        eprintln!("not root: workers have the daemon's user ({answer})");
        assert!(!answer.contains("socket") && !answer.contains("unix"), "{answer}");
    }
    let service = Running::start("", |config| config.sandbox = false);
    let answer = service.ask("a", "sandbox");
    assert!(
        answer.contains("socket") && answer.contains("passwd") && answer.contains("processes"),
        "the attempts can succeed: {answer}"
    );
}
