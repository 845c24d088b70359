// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every way in which Docker can wire a container, with the device and without.

use crate::support::{BASE_IMAGE, DEVICE, Daemon, Engine, HELLO, eventually, run, stdout_of, text_of};

#[test]
fn bridge_and_none_are_served_and_the_same_without_the_device_is_refused() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    for network in ["bridge", "none"] {
        let with = engine.hello(&["--device", DEVICE, "--network", network]);
        assert_eq!(with, "served 1 devices\n", "network {network}");
        let without = engine.hello(&["--network", network]);
        assert!(without.starts_with("refused: "), "network {network}: {without}");
    }
}

#[test]
fn a_container_on_several_networks_is_served() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    for name in ["gate-net-a", "gate-net-b"] {
        run(engine.docker(["network", "rm", name]));
        stdout_of(engine.docker(["network", "create", name]));
    }
    let container = engine.sleeper(&["--device", DEVICE, "--network", "gate-net-a"]);
    stdout_of(engine.docker(["network", "connect", "gate-net-b", &container.id]));
    assert_eq!(container.hello(), "served 1 devices\n");
    drop(container);
    for name in ["gate-net-a", "gate-net-b"] {
        stdout_of(engine.docker(["network", "rm", name]));
    }
}

#[test]
fn on_the_host_network_the_gate_alone_decides() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let granted = engine.sleeper(&["--device", DEVICE, "--network", "host"]);
    assert_eq!(granted.hello(), "served 1 devices\n");
    let second = engine.sleeper(&["--device", DEVICE, "--network", "host"]);
    assert_eq!(second.hello(), "served 1 devices\n");
    let without = engine.hello(&["--network", "host"]);
    assert!(without.starts_with("refused: "), "{without}");
    eventually("the refusal is logged", || daemon.log().contains("refused").then_some(()));
    drop(granted);
    assert_eq!(second.hello(), "served 1 devices\n", "the listener outlives the first of its grants");
}

#[test]
fn a_container_in_anothers_network_needs_a_grant_of_its_own() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let owner = engine.sleeper(&["--device", DEVICE]);
    let shared = format!("container:{}", owner.id);
    let without = engine.hello(&["--network", &shared]);
    assert!(without.starts_with("refused: "), "{without}");
    assert_eq!(engine.hello(&["--network", &shared, "--device", DEVICE]), "served 1 devices\n");
    assert_eq!(owner.hello(), "served 1 devices\n", "the owner is served still");
}

#[test]
fn two_names_of_the_device_make_two_grants_and_one_endpoint() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE, "--device", "lighter.sh/metal=cpu"]);
    assert_eq!(daemon.grants(), 2);
    assert_eq!(container.hello(), "served 1 devices\n");
}

#[test]
fn a_port_that_is_taken_stops_the_container_with_the_holders_name() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let holder = engine.sleeper(&[]);
    stdout_of(
        engine
            .docker(["exec", "-d", &holder.id, "python3", "-c"])
            .arg("import socket, time\ns = socket.create_server(('127.0.0.1', 50052))\ntime.sleep(600)"),
    );
    eventually("the port is held", || {
        holder
            .exec(&[
                "python3",
                "-c",
                "import socket; socket.create_connection(('127.0.0.1', 50052), 1); print('held')",
            ])
            .contains("held")
            .then_some(())
    });
    let shared = format!("container:{}", holder.id);
    let output =
        run(engine.docker(["run", "--rm", "--network", &shared, "--device", DEVICE, BASE_IMAGE, "true"]));
    let text = text_of(&output);
    assert!(!output.status.success() && text.contains("50052") && text.contains("python3"), "{text}");
}

#[test]
fn users_exec_and_nested_namespaces_are_the_container_still() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    assert_eq!(engine.hello(&["--device", DEVICE, "--user", "1234:1234"]), "served 1 devices\n");
    let container = engine.sleeper(&["--device", DEVICE, "--privileged"]);
    assert_eq!(container.hello(), "served 1 devices\n", "exec");
    assert_eq!(
        container.exec(&["unshare", "--mount", "--pid", "--fork", "python3", "-c", HELLO]),
        "served 1 devices\n"
    );
}

#[test]
fn a_container_that_asked_for_another_device_is_refused() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let other = r#"{"cdiVersion":"0.5.0","kind":"gate.test/other","devices":[{"name":"x","containerEdits":{"env":["OTHER=1"]}}]}"#;
    let file = engine.spec_dir().join("gate.test-other.json");
    std::fs::write(&file, other).unwrap();
    let text = eventually("the engine sees the other device", || {
        let text = engine.hello(&["--device", "gate.test/other=x"]);
        (!text.contains("unresolvable")).then_some(text)
    });
    std::fs::remove_file(&file).unwrap();
    assert!(text.starts_with("refused: "), "{text}");
}

#[test]
fn a_client_that_is_gone_before_the_look_up_harms_nobody() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let container = engine.sleeper(&["--device", DEVICE]);
    let storm = "import socket\nfor _ in range(300):\n    try: socket.create_connection(('127.0.0.1', 50052), 1).close()\n    except OSError: pass\nprint('done')";
    assert_eq!(container.exec(&["python3", "-c", storm]), "done\n");
    assert_eq!(container.hello(), "served 1 devices\n");
}
