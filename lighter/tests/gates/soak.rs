// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many containers: a hundred at once, a thousand one after another, with nothing left behind.

use std::path::Path;

use crate::support::{BASE_IMAGE, DEVICE, Daemon, Engine, HELLO, children, eventually, run, stdout_of};

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn files_below(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn ten_at_once_are_all_served() {
    at_once(10);
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_hundred_at_once_are_all_served() {
    at_once(100);
}

fn at_once(count: usize) {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let name = |index: usize| format!("gate-many-{index}");
    let remove = || {
        let names: Vec<String> = (0..count).map(name).collect();
        run(engine.docker(["rm", "-f"]).args(names));
    };
    remove();
    std::thread::scope(|scope| {
        for index in 0..count {
            let engine = &engine;
            scope.spawn(move || {
                stdout_of(engine.docker([
                    "run",
                    "-d",
                    "--device",
                    DEVICE,
                    "--name",
                    &name(index),
                    BASE_IMAGE,
                    "sleep",
                    "600",
                ]));
            });
        }
    });
    assert_eq!(daemon.grants(), count);
    let answers: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let engine = &engine;
                scope.spawn(move || stdout_of(engine.docker(["exec", &name(index), "python3", "-c", HELLO])))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    remove();
    assert!(answers.iter().all(|answer| answer == "served 1 devices\n"), "{answers:?}");
    eventually("every grant has ended", || (daemon.grants() == 0).then_some(()));
}

#[test]
fn twenty_one_after_another_leave_nothing_behind() {
    one_after_another(20);
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_thousand_one_after_another_leave_nothing_behind() {
    one_after_another(1000);
}

fn one_after_another(count: usize) {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let round = || {
        assert_eq!(engine.hello(&["--device", DEVICE]), "served 1 devices\n");
    };
    // The first rounds fill what is filled once (caches, thread stacks).
    (0..3).for_each(|_| round());
    let service = u32::try_from(daemon.status()["services"]["metal"]["pid"].as_u64().unwrap()).unwrap();
    let settle = || {
        eventually("every grant has ended", || (daemon.grants() == 0).then_some(()));
        eventually("every worker has ended", || children(service).is_empty().then_some(()));
        (descriptors(daemon.pid()), descriptors(service), files_below(&daemon.dir.path().join("state")))
    };
    let before = settle();
    (0..count).for_each(|_| round());
    eventually("descriptors and files are as they were", || (settle() == before).then_some(()));
    assert_eq!(files_below(&daemon.dir.path().join("state/grants")), 0);
}
