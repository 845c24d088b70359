// SPDX-License-Identifier: MIT OR Apache-2.0
//! Docker asked in other ways: Compose, and an engine that remaps users.

use std::process::Command;

use crate::support::{BASE_IMAGE, DEVICE, Daemon, Engine, HELLO, run, stdout_of, text_of};

#[test]
fn a_compose_file_gets_the_device_in_both_notations() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("hello.py"), HELLO).unwrap();
    let file = format!(
        "services:\n  short:\n    image: {BASE_IMAGE}\n    command: python3 /hello.py\n    volumes: ['./hello.py:/hello.py:ro']\n    devices: ['{DEVICE}']\n\
         \x20 long:\n    image: {BASE_IMAGE}\n    command: python3 /hello.py\n    volumes: ['./hello.py:/hello.py:ro']\n    deploy:\n      resources:\n        reservations:\n          devices:\n            - driver: cdi\n              capabilities: [metal]\n              device_ids: ['{DEVICE}']\n\
         \x20 without:\n    image: {BASE_IMAGE}\n    command: python3 /hello.py\n    volumes: ['./hello.py:/hello.py:ro']\n"
    );
    std::fs::write(dir.path().join("compose.yaml"), file).unwrap();
    let service = |name: &str| {
        let file = dir.path().join("compose.yaml");
        let output =
            run(engine.docker(["compose", "-p", "gate", "-f"]).arg(&file).args(["run", "--rm", "-T", name]));
        text_of(&output)
    };
    let answers = [service("short"), service("long"), service("without")];
    run(engine
        .docker(["compose", "-p", "gate", "-f"])
        .arg(dir.path().join("compose.yaml"))
        .args(["down", "-v"]));
    assert!(answers[0].contains("served 1 devices"), "{answers:?}");
    assert!(answers[1].contains("served 1 devices"), "{answers:?}");
    assert!(answers[2].contains("refused: "), "{answers:?}");
}

#[test]
fn an_engine_that_remaps_users_is_served_and_refused_alike() {
    let engine = Engine::remapped();
    let daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE]);
    let inside = stdout_of(Command::new("cat").arg(format!("/proc/{}/uid_map", container.pid())));
    assert!(!inside.trim_start().starts_with("0          0"), "users are remapped: {inside}");
    assert_eq!(container.hello(), "served 1 devices\n", "{}", daemon.log());
    let wrapped = container.exec(&["/usr/lib/lighter/bin/lighter-env", "sh", "-c", "echo $LLAMA_ARG_RPC"]);
    assert_eq!(wrapped, "127.0.0.1:50052\n");
    assert!(engine.hello(&[]).starts_with("refused: "));
    drop(container);
    drop(daemon);
    engine.script(&["stop", "--purge"]);
}
