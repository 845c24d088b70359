// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane service with engines that are fast, slow, wrong, crash and hang (`service_bad_engine`), and with hostile
//! containers. Every answer that a container gets is checked.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod client;
mod hostile;
mod real;

use lighter_devices::ane::config::Units;
use lighter_devices::ane::journal::{End, Line, now_s};
use lighter_frames::Refusal;
use lighter_wire::EngineState;

use client::{Client, Container, Running, SetUp, children, until};

const PROTO: &[u8] = b"a model of the test's own";

/// Runs until it is so.
fn run_until(container: &mut Container<'_>, what: &str, mut test: impl FnMut() -> bool) {
    until(what, || {
        container.run(4);
        test()
    });
}

/// Runs until the choice for four numbers is written down; the engine that was chosen.
fn chosen(service: &Running, container: &mut Container<'_>) -> String {
    let mut engine = None;
    run_until(container, "an engine is chosen", || {
        let journal = service.journal();
        let chosen = journal.fold().models().values().find_map(|facts| facts.chosen.get("4"));
        engine = chosen.map(|chosen| chosen.key.engine.clone());
        engine.is_some()
    });
    engine.unwrap()
}

/// How the attempts with an engine ended: failures, and the last end.
fn record(service: &Running, engine: &str) -> (u32, Option<End>) {
    let journal = service.journal();
    let records = journal.fold().models().values().flat_map(|facts| &facts.records);
    records
        .filter(|(key, _)| key.engine == engine && !key.shapes.is_empty())
        .map(|(_, record)| (record.failures, record.last.clone()))
        .next()
        .unwrap_or_default()
}

#[test]
fn nothing_runs_before_the_first_stream_and_the_processor_answers_at_once() {
    let service = Running::start("cpu=cpu", |_| {});
    let report = service.report();
    assert_eq!(report.engine, EngineState::Available { name: "cpu (test)".into(), version: "1.99.0".into() });
    assert_eq!(report.totals["workers"], 0);
    let mut container = Container::new(&service, "a", PROTO);
    container.run(4);
    container.run(7);
    let report = service.report();
    assert_eq!(report.totals["workers"], 1);
    let account = &report.containers["grant-a"];
    assert_eq!((account.calls, account.streams_total, account.streams_open), (2, 1, 1));
    assert_eq!((account.in_bytes, account.out_bytes, account.errors), (44, 44, 0));
    assert_eq!(account.held_bytes, 4096);
}

#[test]
fn streams_move_to_the_engine_that_is_right_and_faster() {
    let service = Running::start("cpu=cpu cuda=fast", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cuda");
    run_until(&mut container, "cuda runs it", || service.runs("cuda") > 5);
    let on_processor = service.runs("cpu");
    container.run(4);
    assert_eq!(service.runs("cpu"), on_processor, "the processor has it no more");
    container.run(9);
    assert_eq!(service.runs("cpu"), on_processor + 1, "other shapes are the processor's");
    let mut second = Client::new(&service, "a", PROTO);
    assert_eq!(second.run(&[1.0, 2.0, 3.0, 4.0]).unwrap(), [2.0, 4.0, 6.0, 8.0]);
    assert_eq!(container.reconnects, 1, "no stream ended");
    let Some(End::Agreed { us, cpu_us, .. }) = record(&service, "cuda").1 else { panic!("no times") };
    assert_eq!((us, cpu_us), (Some(50), Some(100)));
    assert!(service.report().troubles.is_empty());
}

#[test]
fn an_engine_that_is_hardly_faster_is_not_chosen_unless_it_is_pinned() {
    let service = Running::start("cpu=cpu cuda=slow", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cpu");
    assert_eq!(service.runs("cuda"), 0);
    let SetUp::Done(mut pinned) = Client::set_up(service.open("b"), PROTO, "cuda") else { panic!("refused") };
    until("cuda runs it", || {
        assert_eq!(pinned.run(&[1.0]).unwrap(), [2.0]);
        service.runs("cuda") > 0
    });
}

#[test]
fn the_configuration_pins_too() {
    let service = Running::start("cpu=cpu cuda=fast", |config| config.units = "cpu".parse().unwrap());
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cpu");
    assert_eq!(record(&service, "cuda"), (0, None), "it is not tried");
    drop(service);
    let service = Running::start("cpu=cpu", |config| config.units = Units::Engine("tensorrt".into()));
    let EngineState::Missing { reason, .. } = service.report().engine else { panic!("is there") };
    assert!(reason.contains("tensorrt") && reason.contains("cpu"), "{reason}");
}

#[test]
fn an_engine_that_answers_wrongly_is_never_used() {
    let service = Running::start("cpu=cpu cuda=wrong tensorrt=short", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cpu");
    assert!(service.has_trouble("cuda is not used for model test 25"));
    assert!(service.has_trouble("answers wrongly: output 0, element 1: 3 in place of 2"));
    assert!(service.has_trouble("tensorrt is not used"));
    for _ in 0..20 {
        container.run(4);
    }
    assert_eq!((service.runs("cuda"), service.runs("tensorrt")), (0, 0));
    // Not even by whoever pins it, nor after a restart.
    let service = Running::start_in(service.end(), "cpu=cpu cuda=wrong", |_| {});
    let SetUp::Done(mut pinned) = Client::set_up(service.open("a"), PROTO, "cuda") else { panic!("refused") };
    for _ in 0..20 {
        assert_eq!(pinned.run(&[0.0, 1.0, 2.0, 3.0]).unwrap(), [0.0, 2.0, 4.0, 6.0]);
    }
    assert_eq!(service.runs("cuda"), 0);
    assert_eq!(record(&service, "cuda").0, 1, "it was tried once");
}

#[test]
fn an_engine_that_crashes_hangs_or_fails_is_tried_again_once_and_then_left_out() {
    for (how, word) in [
        ("crash", "crashes"),
        ("crash-load", "crashes"),
        ("abort", "crashes"),
        ("rubbish", "crashes"),
        ("hang", "hangs"),
        ("hang-load", "hangs"),
        ("never", "hangs"),
        ("fail", "fails: does not run: no kernel"),
        ("fail-load", "fails: no kernel"),
    ] {
        let engines = format!("cpu=cpu cuda={how}");
        let limits = |config: &mut lighter_devices::ane::AneConfig| {
            (config.compile_limit_ms, config.run_limit_ms) = (200, 200);
            config.start_limit_ms = if how == "never" { 500 } else { 20_000 };
        };
        let mut folder = tempfile::tempdir().unwrap();
        for attempts in 1..=3u32 {
            let service = Running::start_in(folder, &engines, limits);
            if attempts > 1 {
                // The choice is written down already, so it is the attempts that tell.
                let mut container = Container::new(&service, "a", PROTO);
                run_until(&mut container, "the attempt has ended", || {
                    record(&service, "cuda").0 >= attempts.min(2)
                });
                (0..50).for_each(|_| container.run(4));
            } else {
                let mut container = Container::new(&service, "a", PROTO);
                assert_eq!(chosen(&service, &mut container), "cpu", "{how}");
                assert!(service.has_trouble(word), "{how}: {:?}", service.report().troubles);
                assert_eq!(container.reconnects, 1, "{how}: no stream ended");
            }
            assert_eq!(record(&service, "cuda").0, attempts.min(2), "{how}");
            assert_eq!(service.runs("cuda"), 0, "{how}");
            folder = service.end();
        }
    }
}

#[test]
fn an_attempt_that_the_service_does_not_survive_counts_as_a_crash() {
    let service = Running::start("cpu=cpu cuda=fast", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cuda");
    let mut journal = service.journal();
    let (key, _) = journal
        .fold()
        .models()
        .values()
        .flat_map(|facts| facts.records.clone())
        .find(|(key, _)| key.engine == "cuda")
        .unwrap();
    let folder = service.end();
    // As a service leaves it that is killed in the middle, twice.
    let attempt = Line::Attempt { at_s: now_s(), key };
    journal.append(&[attempt.clone(), attempt]).unwrap();
    let service = Running::start_in(folder, "cpu=cpu cuda=fast", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    (0..100).for_each(|_| container.run(4));
    assert_eq!(service.runs("cuda"), 0);
}

#[test]
fn an_engine_that_breaks_in_use_is_left_for_the_processor() {
    for (how, word) in [
        ("crash-run", "in the middle of a run"),
        ("hang-run", "a run took longer"),
        ("another", "it overflows"),
    ] {
        let service = Running::start(&format!("cpu=cpu cuda={how}"), |config| config.run_limit_ms = 400);
        let mut container = Container::new(&service, "a", PROTO);
        run_until(&mut container, "it broke twice", || record(&service, "cuda").0 >= 2);
        assert!(service.has_trouble(word), "{how}: {:?}", service.report().troubles);
        let reconnects = container.reconnects;
        (0..100).for_each(|_| container.run(4));
        assert_eq!(container.reconnects, reconnects, "{how}: it is left out");
        assert_eq!(service.runs("cuda"), 0);
    }
}

#[test]
fn the_processors_worker_is_killed_in_the_middle_of_a_run() {
    let service = Running::start("cpu=cpu", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    container.run(4);
    for round in 1..=2 {
        let before = service.runs("cpu");
        let mut client = Client::new(&service, "a", PROTO);
        client.begin(&[1.0]);
        let own: Vec<u32> = children().into_iter().filter(|pid| is_worker_of(&service, *pid)).collect();
        assert_eq!(own.len(), 1);
        for pid in own {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        // Answered before the kill, or not at all; never wrongly.
        if let Some(output) = client.finish() {
            assert_eq!(output, [2.0]);
        }
        container.run(4);
        assert!(container.reconnects > round);
        assert!(service.runs("cpu") >= before, "counts never fall");
    }
    assert!(service.has_trouble("worker of cpu broke"));
    assert!(service.report().containers["grant-a"].last_error.is_some());
}

/// Whether a process is a worker of this service: tests run side by side.
fn is_worker_of(service: &Running, pid: u32) -> bool {
    let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mark = format!("MARK={}", service.folder.path().display());
    variables.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
}

#[test]
fn workers_that_crash_one_after_another_have_their_container_refused_for_a_while() {
    let service = Running::start("cpu=abort", |config| config.crash_pause_s = 2);
    for _ in 0..3 {
        assert!(matches!(Client::set_up(service.open("a"), PROTO, ""), SetUp::Ended | SetUp::Refused(_)));
    }
    until("it is refused", || {
        let SetUp::Refused(refused) = set_up_raw(&service, "a") else { return false };
        refused.refusal == Refusal::Busy && refused.text.contains("crashed too often")
    });
    assert!(service.has_trouble("crash one after another"));
}

/// A set-up that may be refused before its greeting is read.
fn set_up_raw(service: &Running, container: &str) -> SetUp {
    Client::set_up(service.open(container), b"another model", "")
}

#[test]
fn a_model_that_the_processor_cannot_load_is_refused_for_good() {
    let service = Running::start("cpu=cpu", |_| {});
    let SetUp::Refused(refused) = Client::set_up(service.open("a"), b"x", "") else { panic!("it is taken") };
    assert_eq!((refused.refusal, refused.text.as_str()), (Refusal::Model, "it is no model"));
    Container::new(&service, "a", PROTO).run(4);
}

#[test]
fn a_model_that_crashes_the_processor_when_it_is_loaded_is_refused_after_two_attempts() {
    let service = Running::start("cpu=crash-load", |config| config.crash_limit = 100);
    until("it is refused", || match Client::set_up(service.open("a"), PROTO, "") {
        SetUp::Refused(refused) => {
            refused.refusal == Refusal::Model && refused.text.contains("failed 2 times")
        }
        SetUp::Ended => false,
        SetUp::Done(_) => panic!("it is taken"),
    });
}

#[test]
fn the_end_of_a_grant_ends_its_workers_and_frees_its_models() {
    let service = Running::start("cpu=cpu", |_| {});
    let mut kept = Container::new(&service, "b", PROTO);
    kept.run(4);
    let workers =
        || -> Vec<u32> { children().into_iter().filter(|pid| is_worker_of(&service, *pid)).collect() };
    let before = workers();
    let mut client = Client::new(&service, "a", PROTO);
    assert!(client.run(&[1.0]).is_some());
    assert!(workers().len() > before.len());
    service.revoke("a");
    until("its stream ends", || client.run(&[1.0]).is_none());
    let report = service.report();
    assert!(!report.containers.contains_key("grant-a"));
    assert_eq!(report.totals["model_bytes"], 4096);
    kept.run(4);
    assert!(workers().iter().all(|pid| before.contains(pid)));
}

#[test]
fn idle_workers_end_and_come_back() {
    let service = Running::start("cpu=cpu", |config| config.idle_s = 0);
    let mut client = Client::new(&service, "a", PROTO);
    assert!(client.run(&[1.0]).is_some());
    assert_eq!(service.report().totals["workers"], 1, "it has a stream");
    drop(client);
    until("it ends", || service.report().totals["workers"] == 0);
    Container::new(&service, "a", PROTO).run(4);
    assert_eq!(service.report().containers["grant-a"].calls, 2);
}

#[test]
fn a_model_that_is_forgotten_is_judged_anew() {
    let service = Running::start("cpu=cpu cuda=wrong", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cpu");
    let mut journal = service.journal();
    let model = *journal.fold().models().keys().next().unwrap();
    journal.append(&[Line::Forgot { at_s: now_s(), model }]).unwrap();
    // A running service notices with the next thing that happens to it.
    service.report();
    run_until(&mut container, "it is tried again", || {
        service.report().troubles.iter().filter(|text| text.contains("answers wrongly")).count() == 2
    });
}

#[test]
fn many_models_take_the_place_of_unused_ones() {
    let service = Running::start("cpu=cpu", |config| config.max_models_per_container = 3);
    for number in 1..=20u8 {
        let proto = [PROTO, &[number]].concat();
        let mut client = Client::new(&service, "a", &proto);
        assert_eq!(client.run(&[1.0]).unwrap(), [2.0]);
    }
    assert!(service.report().totals["model_bytes"] <= 3 * 4096);
    let used: Vec<Client> =
        (1..=3u8).map(|number| Client::new(&service, "a", &[PROTO, &[number]].concat())).collect();
    let SetUp::Refused(refused) = Client::set_up(service.open("a"), PROTO, "") else {
        panic!("is taken: {:?}", service.report())
    };
    assert!(refused.text.contains("ane.max_models_per_container"), "{}", refused.text);
    drop(used);
}

#[test]
fn many_shapes_are_left_to_the_processor() {
    let service = Running::start("cpu=cpu cuda=slow", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    for count in 1..60 {
        container.run(count);
    }
    container.run(1);
    assert_eq!(container.reconnects, 1);
    assert_eq!(service.runs("cpu"), 60);
}

#[test]
fn concurrent_streams_of_one_container_move_together() {
    let service = Running::start("cpu=cpu cuda=fast", |_| {});
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let service = &service;
            scope.spawn(move || {
                let mut container = Container::new(service, "a", PROTO);
                run_until(&mut container, "cuda runs it", || service.runs("cuda") > 100);
                assert_eq!(container.reconnects, 1);
            });
        }
    });
}

#[test]
fn without_onnx_runtime_the_reason_is_told() {
    let service = Running::start("cpu=cpu", |config| {
        let _ = std::fs::remove_file(config.library.as_ref().unwrap());
    });
    let SetUp::Refused(refused) = Client::set_up(service.open("a"), PROTO, "") else { panic!("is taken") };
    assert_eq!(refused.refusal, Refusal::Busy);
    assert!(refused.text.contains("ane.library"), "{}", refused.text);
    assert!(matches!(service.report().engine, EngineState::Missing { .. }));
}

#[test]
fn a_silent_container_does_not_keep_a_stream_for_ever() {
    let service = Running::start("cpu=cpu", |config| config.setup_limit_ms = 100);
    let mut silent = service.open("a");
    let Some(lighter_frames::Message::Refused(refused)) = client::receive(&mut silent) else {
        panic!("it may stay")
    };
    assert!(refused.text.contains("sent nothing"), "{}", refused.text);
    assert!(client::receive(&mut silent).is_none());
}

#[test]
fn an_idle_container_begins_its_choice_anew_when_it_comes_back() {
    let service = Running::start("cpu=cpu cuda=fast", |config| config.idle_s = 1);
    let mut container = Container::new(&service, "a", PROTO);
    // One run makes the choice begin; its sample never comes.
    container.run(4);
    drop(container);
    until("its workers end", || service.report().totals["workers"] == 0);
    let mut container = Container::new(&service, "a", PROTO);
    assert_eq!(chosen(&service, &mut container), "cuda");
    run_until(&mut container, "cuda runs it", || service.runs("cuda") > 5);
}
