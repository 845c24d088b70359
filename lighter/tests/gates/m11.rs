// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gate m11: stock torch in a container has the device "mps", and trains on the host's torch as it does on its own
//! processor. The host computes on its processor, so the losses must be equal; without the device the same programs are
//! refused in one sentence.

use crate::ane_suites::Guest;
use crate::mps::{MPS, SID, TRIXIE, attempt, debian, lines, program, service, settings, usage, wheel};
use crate::support::{Daemon, Engine, children, eventually, eventually_within, stdout_of, text_of};

const CASES: [&str; 6] = ["mlp", "conv", "transformer", "gpt", "loader", "saved"];
/// Of a loss, between the device and the container's processor: two builds of torch add in another order.
const EQUAL: f64 = 1e-5;

/// Runs every training in a container and holds it against the container's own processor.
fn trains(daemon: &Daemon, guest: &Guest<'_>, name: &str) {
    let text = program(guest, &[&["/gate/train.py"][..], &CASES].concat());
    let results = lines(&text);
    let cases: Vec<_> = results.iter().map(|result| result["case"].as_str().unwrap()).collect();
    assert_eq!(cases, CASES, "{name}: {text}");
    for result in &results {
        let number = |key: &str| result[key].as_f64().unwrap();
        assert!(number("difference") <= EQUAL, "{name}: {result}");
        assert!(number("last") < number("first"), "{name} learned nothing: {result}");
        assert_eq!(result["round_trips"], 0, "{name}: {result}");
    }
    assert!(
        results[0]["last"].as_f64().unwrap() < results[0]["first"].as_f64().unwrap() / 2.0,
        "{name}: {text}"
    );
    let usage = usage(daemon);
    assert!(
        usage["calls"].as_u64().unwrap() > 1000,
        "{name}: the container computed itself: {usage}\n{}",
        daemon.log()
    );
    assert_eq!(usage["errors"], 0, "{name}: {}", daemon.log());
    println!("m11: {name}: {} trainings, {} calls on the host\n{text}", results.len(), usage["calls"]);
}

#[test]
fn the_cuda_linked_wheel_trains_on_the_host_as_on_its_own_processor() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    trains(&daemon, &wheel(&engine, &["--device", MPS]), "PyPI's torch");
}

#[test]
fn debian_13s_own_torch_trains_on_the_host() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    trains(&daemon, &debian(&engine, TRIXIE), "Debian 13's torch");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn debian_sids_own_torch_trains_on_the_host() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    trains(&daemon, &debian(&engine, SID), "Debian sid's torch");
}

/// With lighter's files mounted, but not the device; then with its socket too, where the gate decides.
#[test]
fn without_the_device_the_same_program_is_refused_in_one_sentence() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    let dir = daemon.dir.path().display();
    let package = format!("{dir}/client/mps:/usr/lib/lighter/mps:ro");
    let socket = format!("{dir}/state/mps:/run/lighter/mps:ro");
    for more in [vec!["-v", &package], vec!["-v", &package, "-v", &socket]] {
        let guest = wheel(&engine, &more);
        let output = attempt(&engine, &guest, &["python3", "/gate/train.py", "mlp"]);
        let text = text_of(&output);
        assert!(!output.status.success() && !text.contains("\"case\""), "{text}");
        assert!(text.contains("granted to this container"), "{text}");
        assert_eq!(text.matches("lighter doctor").count(), 1, "one sentence: {text}");
    }
    assert_eq!(daemon.grants(), 0);
    assert!(daemon.log().contains("refused"), "{}", daemon.log());
}

#[test]
fn a_killed_worker_is_one_clear_error_and_the_next_program_trains() {
    let engine = Engine::take();
    // Without a spare, the one worker that there is serves the one program that there is.
    let daemon = Daemon::with(&engine, &settings("spare = false"));
    let guest = wheel(&engine, &["--device", MPS]);
    let text = std::thread::scope(|scope| {
        let training = scope.spawn(|| program(&guest, &["-u", "/gate/killed.py"]));
        eventually_within(240, "the program trains", || {
            (usage(&daemon)["calls"].as_u64()? > 1000).then_some(())
        });
        let workers = children(service(&daemon).unwrap());
        assert_eq!(workers.len(), 1, "{workers:?}");
        stdout_of(std::process::Command::new("kill").args(["-KILL", &workers[0].to_string()]));
        training.join().unwrap()
    });
    let errors = lines(&text);
    assert_eq!(errors.len(), 1, "{text}");
    assert!(errors[0]["text"].as_str().unwrap().contains("the connection to the host is lost"), "{text}");
    assert!(!text.contains("Traceback"), "{text}");
    let text = program(&guest, &["/gate/train.py", "mlp"]);
    assert!(lines(&text)[0]["difference"].as_f64().unwrap() <= EQUAL, "{text}");
    println!("m11: a killed worker: {}", errors[0]);
}

#[test]
fn two_containers_train_at_once_with_their_own_seeds() {
    let engine = Engine::take();
    let _daemon = Daemon::with(&engine, &settings(""));
    let guests = [(); 2].map(|()| wheel(&engine, &["--device", MPS]));
    let result = |guest: &Guest<'_>, seed: &str| {
        let text = program(guest, &["/gate/seeds.py", seed, "100"]);
        lines(&text).pop().unwrap_or_else(|| panic!("{text}"))
    };
    let together = std::thread::scope(|scope| {
        let threads = [(&guests[0], "1"), (&guests[1], "2")]
            .map(|(guest, seed)| scope.spawn(move || result(guest, seed)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_ne!(together[0]["draw"], together[1]["draw"], "{together:?}");
    // Each again, alone and in the other's container: only the seed decides.
    assert_eq!(result(&guests[1], "1"), together[0]);
    assert_eq!(result(&guests[0], "2"), together[1]);
}

#[test]
fn memory_returns_to_where_it_was() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    let guest = wheel(&engine, &["--device", MPS]);
    let text = std::thread::scope(|scope| {
        let training = scope.spawn(|| program(&guest, &["/gate/memory.py"]));
        eventually_within(240, "the program holds memory", || {
            (usage(&daemon)["held_bytes"].as_u64()? > 0).then_some(())
        });
        stdout_of(engine.docker(["exec", &guest.id, "touch", "/stop"]));
        training.join().unwrap()
    });
    let held = lines(&text).pop().unwrap_or_else(|| panic!("{text}"));
    assert_eq!(held["early"], held["late"], "{held}");
    assert!(held["early"].as_u64().unwrap() > 3 << 20, "{held}");
    assert_eq!(held["after"], 0, "{held}");
    eventually("the host holds nothing", || (usage(&daemon)["held_bytes"] == 0).then_some(()));
    println!("m11: memory: {held}");
}

#[test]
fn doctor_names_the_hosts_torch() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    let report = text_of(&crate::support::run(daemon.lighter().args(["doctor"])));
    assert!(report.contains("lighter.sh/mps") && report.contains("2.15.0"), "{report}");
}
