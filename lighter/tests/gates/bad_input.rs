// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a user sees when something is wrong.

use std::process::Command;

use crate::support::{BASE_IMAGE, DEVICE, Daemon, Engine, HELLO, eventually, run, stdout_of, text_of};

#[test]
fn without_a_daemon_the_container_does_not_start_and_docker_run_says_why() {
    let engine = Engine::take();
    let mut daemon = Daemon::start(&engine);
    daemon.kill();
    let output = run(engine.docker(["run", "--rm", "--device", DEVICE, BASE_IMAGE, "true"]));
    let text = text_of(&output);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("lighter-hook") && text.contains(DEVICE) && text.contains("lighter start"),
        "{text}"
    );
}

#[test]
fn an_unknown_device_is_refused_by_the_engine() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let output =
        run(engine.docker(["run", "--rm", "--device", "lighter.sh/metal=nosuch", BASE_IMAGE, "true"]));
    assert!(
        !output.status.success() && text_of(&output).contains("lighter.sh/metal=nosuch"),
        "{}",
        text_of(&output)
    );
}

#[test]
fn a_second_daemon_on_the_same_state_is_told_who_holds_it() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let second = run(daemon.lighter().arg("start"));
    let text = text_of(&second);
    assert!(!second.status.success() && text.contains(&daemon.pid().to_string()), "{text}");
    assert_eq!(engine.hello(&["--device", DEVICE]), "served 1 devices\n", "the first is unharmed");
}

#[test]
fn a_malformed_spec_beside_ours_hides_nothing_and_is_listed() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let file = engine.spec_dir().join("gate.test-broken.json");
    std::fs::write(&file, "{ this is no JSON").unwrap();
    let listing =
        stdout_of(daemon.lighter().args(["cdi", "list", "--json", "--spec-dir"]).arg(engine.spec_dir()));
    let served = engine.hello(&["--device", DEVICE]);
    std::fs::remove_file(&file).unwrap();
    let listing: serde_json::Value = serde_json::from_str(&listing).unwrap();
    assert_eq!(listing["errors"][0]["path"], file.to_str().unwrap());
    assert!(
        listing["devices"].as_array().unwrap().iter().any(|device| device["name"] == DEVICE),
        "{listing}"
    );
    assert_eq!(served, "served 1 devices\n");
}

#[test]
fn a_client_that_speaks_rubbish_or_resets_in_mid_upload_harms_nobody() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE]);
    let rubbish = r#"
import os, socket, struct
for payload in (os.urandom(4096), struct.pack("<BQ", 14, 2**63), struct.pack("<BQ", 200, 0)):
    s = socket.create_connection(("127.0.0.1", 50052), 5)
    s.sendall(payload); s.settimeout(5)
    try: s.recv(100)
    except OSError: pass
s = socket.create_connection(("127.0.0.1", 50052), 5)
s.sendall(struct.pack("<BQ", 14, 24) + bytes(24)); s.recv(100)
s.sendall(struct.pack("<BQ", 6, 1 << 20) + bytes(5000))
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); s.close()
print("done")
"#;
    assert_eq!(container.exec(&["python3", "-c", rubbish]), "done\n");
    assert_eq!(container.exec(&["python3", "-c", HELLO]), "served 1 devices\n");
    assert_eq!(engine.hello(&["--device", DEVICE]), "served 1 devices\n");
    eventually("the refused request is logged", || daemon.log().contains("WARN").then_some(()));
}

#[test]
fn a_missing_engine_is_said_by_doctor_with_the_way_out() {
    let engine = Engine::take();
    let nowhere =
        "libraries = { base = \"/nonexistent/libggml-base.so.0\", registry = \"/nonexistent/libggml.so.0\" }";
    let daemon = Daemon::with(&engine, nowhere);
    let output = run(daemon.lighter().arg("doctor"));
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("lighter.sh/metal") && text.contains("remedy: "), "{text}");
}

#[test]
fn a_bad_configuration_is_refused_and_names_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "[metal]\nmax_bites = 3\n").unwrap();
    let output = run(Command::new(env!("CARGO_BIN_EXE_lighter")).arg("--config").arg(&file).arg("start"));
    let text = text_of(&output);
    assert!(!output.status.success() && text.contains("max_bites") && text.contains("config.toml"), "{text}");
}
