// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real clients of older majors of ggml's RPC protocol, which `tools/old-clients` builds from source: one with a whisper.cpp
//! and ggml of protocol 3.6, one with a llama.cpp of 7.0. What the device computes for them is what their own ggml
//! computes; the plain text shows it where the text is certain, the numbers show it everywhere.

use std::path::{Path, PathBuf};

use lighter_devices::metal::service::major_of_files;

use crate::support::{
    BASE_IMAGE, DEVICE, Daemon, Engine, LLAMA_IMAGE, cache, model, run, stdout_of, text_of, whisper_model,
};

const CLIENT: &str = "/client";
const ENDPOINT: &str = "127.0.0.1:50052";
const MODEL: &str = "/models/model";
/// What follows is so certain that other kernels' order of sums does not change it; free text may part after some words.
const PROMPT: &str = "1 2 3 4";
const COMPLETION: &str =
    "/client/llama-completion -m /models/model -no-cnv --temp 0 -n 32 -c 256 -t 1 --no-warmup --simple-io";
/// The engine is another ggml, with other kernels: sums of 16-bit floats differ from the client's in the last digits.
const MOST_APART: f64 = 0.01;

/// The folder with a client's programs.
fn client(name: &str) -> PathBuf {
    let folder = cache().join("old-clients").join(name).join("bin");
    assert!(folder.exists(), "{} is missing: run `tools/old-clients {name}`", folder.display());
    folder
}

/// Options of a container that has a client and a model.
fn mounts(client: &Path, model: &Path) -> [String; 4] {
    let client = format!("{}:{CLIENT}:ro", client.display());
    ["-v".into(), client, "-v".into(), format!("{}:{MODEL}:ro", model.display())]
}

/// The number after `name` in a line such as `loop: apart 0.001, best 600 of 600, processor 90.1 us, device 180.2 us`.
fn figure(line: &str, name: &str) -> f64 {
    let rest = line.split_once(name).unwrap_or_else(|| panic!("no {name:?} in {line:?}")).1;
    let word = rest.split_whitespace().next().unwrap();
    word.trim_end_matches(',').parse().unwrap_or_else(|error| panic!("{name:?} in {line:?}: {error}"))
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_client_of_protocol_3_gets_what_its_own_processor_computes() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, "threads = 1");
    let folder = client("protocol-3");
    assert_eq!(major_of_files(&[&folder.join("protocol-3")]), Some(3));
    let options = mounts(&folder, &whisper_model());
    let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
    options.extend(["--device", DEVICE]);
    let container = engine.sleeper(&options);
    let output =
        run(engine.docker(["exec", &container.id, &format!("{CLIENT}/protocol-3"), ENDPOINT, MODEL]));
    let status = daemon.status();
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("protocol 3.6, ggml 0.9.5"), "{text}");
    for name in ["loop: ", "whisper: "] {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        let (processor, device) = (figure(line, "processor "), figure(line, "device "));
        println!(
            "old clients: protocol 3.6, {line}: {:+.0} us, ratio {:.2}",
            device - processor,
            device / processor
        );
        assert!(figure(line, "apart ") < MOST_APART, "{line}");
        let (same, all) = (figure(line, "best "), figure(line, " of "));
        assert!(same >= 0.9 * all, "{line}");
    }
    let usage = &status["grants"][0]["usage"];
    // 600 of the loop, 48 words and what hears the sound.
    assert!(usage["calls"].as_u64() > Some(648) && usage["errors"].as_u64() == Some(0), "{status}");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_client_of_protocol_7_writes_the_text_of_its_own_processor() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, "threads = 1");
    let folder = client("protocol-7");
    assert_eq!(
        major_of_files(&[&folder.join("libggml-rpc.so.0"), &folder.join("libggml-base.so.0")]),
        Some(7)
    );
    let mounts = mounts(&folder, &model());
    let completion = COMPLETION.split_whitespace().chain(["-p", PROMPT]).collect::<Vec<_>>();
    let native = stdout_of(
        engine.docker(["run", "--rm"]).args(&mounts).arg(LLAMA_IMAGE).args(&completion).args(["-ngl", "0"]),
    );
    assert!(native.contains(" 5 6 7"), "{native}");
    let id = stdout_of(engine.docker(["run", "-d", "--init", "--device", DEVICE]).args(&mounts).args([
        LLAMA_IMAGE,
        "sleep",
        "infinity",
    ]));
    let id = id.trim();
    let output = run(engine
        .docker(["exec", id, "/usr/lib/lighter/bin/lighter-env"])
        .args(&completion)
        .args(["-ngl", "99"]));
    let status = daemon.status();
    run(engine.docker(["rm", "-f", id]));
    assert!(output.status.success(), "{}", text_of(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), native);
    let usage = &status["grants"][0]["usage"];
    assert!(usage["calls"].as_u64() >= Some(32) && usage["errors"].as_u64() == Some(0), "{status}");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn without_the_device_no_old_client_is_served() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let old = run(engine
        .docker(["run", "--rm"])
        .args(mounts(&client("protocol-3"), &whisper_model()))
        .args([BASE_IMAGE, &format!("{CLIENT}/protocol-3"), ENDPOINT, MODEL]));
    assert!(!old.status.success() && !text_of(&old).contains("loop: "), "{}", text_of(&old));
    let newer = run(engine
        .docker(["run", "--rm"])
        .args(mounts(&client("protocol-7"), &model()))
        .args([LLAMA_IMAGE, &format!("{CLIENT}/llama-bench"), "-m", MODEL, "-p", "0", "-n", "4", "-r", "1"])
        .args(["-ngl", "99", "--rpc", ENDPOINT]));
    let text = text_of(&newer);
    assert!(!newer.status.success() || text.contains("ailed to connect"), "{text}");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_client_of_protocol_7_gives_up_on_a_server_that_is_set_to_8() {
    let engine = Engine::take();
    let _daemon = Daemon::with(&engine, "protocol = 8");
    let output = run(engine
        .docker(["run", "--rm", "--device", DEVICE])
        .args(mounts(&client("protocol-7"), &model()))
        .args([LLAMA_IMAGE, &format!("{CLIENT}/llama-bench"), "-m", MODEL, "-p", "0", "-n", "4", "-r", "1"])
        .args(["-ngl", "99", "--rpc", ENDPOINT]));
    let text = text_of(&output);
    assert!(!output.status.success() && text.contains("RPC handshake failed"), "{text}");
}
