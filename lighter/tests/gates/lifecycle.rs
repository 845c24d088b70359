// SPDX-License-Identifier: MIT OR Apache-2.0
//! Containers, the daemon and the engine that come and go.

use std::process::{Command, Stdio};

use crate::support::{DEVICE, Daemon, Engine, eventually, run, stdout_of};

#[test]
fn a_restarted_container_is_granted_anew_and_a_late_poststop_ends_nothing() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE]);
    assert_eq!(container.hello(), "served 1 devices\n");
    stdout_of(engine.docker(["restart", "-t", "0", &container.id]));
    assert_eq!(container.hello(), "served 1 devices\n");
    assert_eq!(daemon.grants(), 1);
    let mut hook = Command::new(env!("CARGO_BIN_EXE_lighter-hook"))
        .args(["release", "--socket"])
        .arg(daemon.dir.path().join("state/hook.sock"))
        .arg(DEVICE)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let state = serde_json::json!({"ociVersion": "1.0.2", "id": container.id, "status": "stopped", "bundle": "/nowhere"});
    serde_json::to_writer(hook.stdin.take().unwrap(), &state).unwrap();
    assert!(hook.wait().unwrap().success());
    assert_eq!(container.hello(), "served 1 devices\n", "the container of the same id lives");
    assert_eq!(daemon.grants(), 1);
}

#[test]
fn a_grant_ends_with_its_container_however_that_ends() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let stopped = engine.sleeper(&["--device", DEVICE]);
    let killed = engine.sleeper(&["--device", DEVICE]);
    assert_eq!(daemon.grants(), 2);
    stdout_of(engine.docker(["stop", "-t", "0", &stopped.id]));
    eventually("the stopped container's grant ends", || (daemon.grants() == 1).then_some(()));
    stdout_of(Command::new("kill").args(["-9", &killed.pid().to_string()]));
    eventually("the killed container's grant ends", || (daemon.grants() == 0).then_some(()));
    let files = || std::fs::read_dir(daemon.dir.path().join("state/grants")).unwrap().count();
    eventually("no state file is left", || (files() == 0).then_some(()));
}

#[test]
fn grants_survive_a_restart_and_a_crash_of_the_daemon() {
    let engine = Engine::take();
    let mut daemon = Daemon::start(&engine);
    let survivor = engine.sleeper(&["--device", DEVICE]);
    let gone = engine.sleeper(&["--device", DEVICE]);
    daemon.stop();
    drop(gone);
    daemon.launch();
    assert_eq!(daemon.grants(), 1, "the container that ended meanwhile is forgotten");
    assert_eq!(survivor.hello(), "served 1 devices\n", "after an orderly restart");
    daemon.kill();
    daemon.launch();
    assert_eq!(survivor.hello(), "served 1 devices\n", "after a crash");
}

#[test]
fn the_engine_may_restart_with_and_without_live_restore() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    engine.script(&["restart", "--live-restore"]);
    let container = engine.sleeper(&["--device", DEVICE]);
    engine.script(&["restart", "--live-restore"]);
    assert_eq!(container.hello(), "served 1 devices\n", "the container lived on");
    engine.script(&["restart", "--live-restore=false"]);
    engine.script(&["restart", "--live-restore=false"]);
    eventually("the containers' grants ended with them", || (daemon.grants() == 0).then_some(()));
}

#[test]
fn a_device_that_is_switched_off_goes_and_comes_back() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE]);
    stdout_of(daemon.lighter().args(["config", "--metal", "off"]));
    assert!(container.hello().starts_with("refused: "), "its grant has ended");
    assert!(!engine.spec_dir().join("lighter.sh-metal.json").exists());
    eventually("the engine no longer offers it", || {
        engine.hello(&["--device", DEVICE]).contains("unresolvable").then_some(())
    });
    let doctor = run(daemon.lighter().args(["doctor", "--json"]));
    let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let metal = report["devices"]
        .as_array()
        .unwrap()
        .iter()
        .find(|entry| entry["device"] == "lighter.sh/metal")
        .unwrap();
    assert_eq!(metal["state"], "off");
    stdout_of(daemon.lighter().args(["config", "--metal", "on"]));
    eventually("it is served again", || {
        (engine.hello(&["--device", DEVICE]) == "served 1 devices\n").then_some(())
    });
}

#[test]
fn a_service_that_is_killed_comes_back_on_the_same_endpoint() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE]);
    let pid = || daemon.status()["services"]["metal"]["pid"].as_u64();
    let first = pid().unwrap();
    stdout_of(Command::new("kill").args(["-9", &first.to_string()]));
    eventually("a new service runs", || pid().filter(|pid| *pid != first));
    assert_eq!(container.hello(), "served 1 devices\n");
    assert!(daemon.log().contains("service ended and is started again"));
}
