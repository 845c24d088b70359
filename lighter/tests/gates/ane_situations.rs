// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane device in containers that are set up in other ways than the plainest: other users, networks, roots and user
//! namespaces, two with one model, and one with hundreds of sessions.

use std::process::Command;

use crate::ane::{ANE, calls, image, settings};
use crate::ane_suites::{Guest, computes_on_the_host, python};
use crate::support::{Daemon, Engine, repo, stdout_of};

fn situation(name: &str, options: &[&str]) {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let mut more = vec!["--device", ANE];
    more.extend(options);
    let guest = Guest::start(&engine, &image(), &python("ort-1.32"), &more);
    computes_on_the_host(&daemon, &guest, name);
}

#[test]
#[ignore = "long: part of `make gates`"]
fn another_user_than_root_computes_on_the_host() {
    situation("user 12345", &["--user", "12345:12345"]);
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_root_that_cannot_be_written_computes_on_the_host() {
    situation(
        "read-only root, no capabilities",
        &["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"],
    );
}

#[test]
#[ignore = "long: part of `make gates`"]
fn the_hosts_network_and_none_at_all_compute_on_the_host() {
    situation("--network host", &["--network", "host"]);
    situation("--network none", &["--network", "none"]);
}

#[test]
#[ignore = "long: part of `make gates`"]
fn users_that_are_mapped_to_others_compute_on_the_host() {
    let engine = Engine::remapped();
    let dir = engine.socket().parent().unwrap().to_owned();
    let image = image();
    let name = image.replace("lighter-test/python:", "python-");
    stdout_of(Command::new(repo().join("tools/images")).env("LIGHTER_ENGINE_DIR", dir).arg(name));
    {
        let daemon = Daemon::with(&engine, &settings("ort-1.32"));
        let guest = Guest::start(&engine, &image, &python("ort-1.32"), &["--device", ANE]);
        computes_on_the_host(&daemon, &guest, "--userns-remap");
    }
    engine.script(&["stop", "--purge"]);
}

/// Each has workers and an account of its own.
#[test]
#[ignore = "long: part of `make gates`"]
fn two_containers_with_one_model_at_once() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let start = || Guest::start(&engine, &image(), &python("ort-1.32"), &["--device", ANE]);
    let guests = [start(), start()];
    let command = ["python3", "/gate/models.py", "20", "/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"];
    let texts = std::thread::scope(|scope| {
        let threads = guests.each_ref().map(|guest| scope.spawn(move || guest.exec(&command)));
        threads.map(|thread| thread.join().unwrap())
    });
    let grants = daemon.status()["grants"].clone();
    for (index, text) in texts.iter().enumerate() {
        assert!(text.contains("\"equal\": true"), "{text}");
        assert_eq!(grants[index]["usage"]["calls"], 20, "{grants}");
    }
    println!("two containers with one model at once: both equal to the bit, 20 runs each on the host");
}

/// Sessions one beside the other up to the limit on streams, and one after the other past it.
#[test]
#[ignore = "long: part of `make gates`"]
fn hundreds_of_sessions() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let guest = Guest::start(&engine, &image(), &python("ort-1.32"), &["--device", ANE]);
    let text = guest.exec(&[
        "python3",
        "/gate/sessions.py",
        "/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "200",
        "300",
    ]);
    assert!(text.contains("500 sessions, 500 equal"), "{text}");
    assert_eq!(calls(&daemon), 500, "{text}\n{}", daemon.log());
    println!("sessions: {}", text.lines().last().unwrap_or_default());
}

/// 2.5 GB: a protobuf holds no more than 2 GiB, so that the weights travel beside the model. Takes 7 GB of memory and 2.7 GB of disk.
#[test]
#[ignore = "long: part of `make gates`"]
fn weights_beyond_what_a_protobuf_holds_compute_on_the_host() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let guest = Guest::start(&engine, &image(), &python("ort-1.32"), &["--device", ANE]);
    let text = guest.exec(&["python3", "/gate/big.py", "/tmp", "10"]);
    let line = text.lines().find(|line| line.starts_with("{\"weights\"")).unwrap_or_else(|| panic!("{text}"));
    let result: serde_json::Value = serde_json::from_str(line).unwrap();
    assert!(result["weights"].as_u64().unwrap() > 2 << 30, "{line}");
    assert_eq!(result["equal"], result["runs"], "{text}\n{}", daemon.log());
    assert_eq!(calls(&daemon), result["runs"].as_u64().unwrap(), "{text}\n{}", daemon.log());
    println!("big: {line}, all runs on the host");
}
