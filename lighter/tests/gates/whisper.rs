// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs whose ggml has no RPC client, or has one and no option for it: the plug-in shows them the device.

use std::process::Command;

use crate::support::{
    DEVICE, Daemon, Engine, LLAMA_IMAGE, WHISPER_IMAGE, run, stdout_of, text_of, tiny_model, whisper_model,
};

const PLUGIN_DIR: &str = "/usr/lib/lighter/metal";
/// Takes ggml's RPC client out of the image, as the official images are.
const WITHOUT_CLIENT: &str = "rm /usr/lib/*/ggml/backends0/libggml-rpc.so";
/// One second of silence as a sound file, then a transcription of it.
const TRANSCRIBE: &str = "
{ printf 'RIFF\\044\\175\\000\\000WAVEfmt \\020\\000\\000\\000\\001\\000\\001\\000\\200\\076\\000\\000\\000\\175\\000\\000\\002\\000\\020\\000data\\000\\175\\000\\000'; head -c 32000 /dev/zero; } >/sound.wav
whisper-cli -m /model.bin -f /sound.wav -t 1 -l en -nf -bs 1 -bo 1 -ac 64";

/// Runs a shell script in a container of the whisper image that has the model.
fn whisper(engine: &Engine, options: &[&str], script: &str) -> &'static mut Command {
    let mount = format!("{}:/model.bin:ro", whisper_model().display());
    engine.docker(["run", "--rm", "-v", &mount]).args(options).args([WHISPER_IMAGE, "sh", "-ec", script])
}

fn take_engine() -> Engine {
    let engine = Engine::take();
    let found = run(engine.docker(["image", "inspect", WHISPER_IMAGE]));
    assert!(
        found.status.success(),
        "{WHISPER_IMAGE} is missing in the test engine: run `tools/images whisper`"
    );
    engine
}

#[test]
fn whisper_without_a_client_computes_on_the_device() {
    let engine = take_engine();
    let daemon = Daemon::with(&engine, "threads = 1");
    let mount = format!("{}:/model.bin:ro", whisper_model().display());
    let id = stdout_of(engine.docker([
        "run",
        "-d",
        "--init",
        "--device",
        DEVICE,
        "-v",
        &mount,
        WHISPER_IMAGE,
        "sleep",
        "infinity",
    ]));
    let id = id.trim();
    stdout_of(engine.docker(["exec", id, "sh", "-ec", WITHOUT_CLIENT]));
    let script = "exec /usr/lib/lighter/bin/lighter-env sh -ec \"$0\"";
    let output = run(engine.docker(["exec", id, "sh", "-ec", script, TRANSCRIBE]));
    let status = daemon.status();
    run(engine.docker(["rm", "-f", id]));
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("RPC[127.0.0.1:50052]") && text.contains("using RPC0 backend"), "{text}");
    let usage = &status["grants"][0]["usage"];
    // It writes over two hundred words, each by a graph.
    assert!(usage["calls"].as_u64() > Some(200), "{status}");
    assert!(usage["engine_us"].as_u64() > Some(0) && usage["errors"].as_u64() == Some(0), "{status}");
}

#[test]
fn whisper_with_a_client_computes_on_the_device_too() {
    let engine = take_engine();
    let _daemon = Daemon::with(&engine, "threads = 1");
    let output = run(whisper(&engine, &["--device", DEVICE], TRANSCRIBE));
    let text = text_of(&output);
    assert!(output.status.success() && text.contains("using RPC0 backend"), "{text}");
}

#[test]
fn without_the_device_whisper_computes_by_itself() {
    let engine = take_engine();
    let _daemon = Daemon::start(&engine);
    let output = run(whisper(&engine, &[], TRANSCRIBE));
    let text = text_of(&output);
    assert!(output.status.success() && !text.contains("RPC0") && text.contains("no GPU found"), "{text}");
}

#[test]
fn a_plug_in_that_cannot_serve_says_why_in_one_line_and_the_program_goes_on() {
    let engine = take_engine();
    let _daemon = Daemon::start(&engine);
    let load = |script: &str| {
        let script = format!("{WITHOUT_CLIENT}; {script}; whisper-bench --help");
        let output = run(whisper(&engine, &["--device", DEVICE], &script));
        let text = text_of(&output);
        assert!(output.status.success(), "{text}");
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("lighter: ")).collect();
        assert_eq!(lines.len(), 1, "{text}");
        lines[0].to_owned()
    };
    let copy = format!("cp -r {PLUGIN_DIR} /plugin; export GGML_BACKEND_PATH=/plugin/libggml-lighter.so");
    let line = load(&format!("{copy}; for f in /plugin/libggml-rpc-*; do echo no library >$f; done"));
    assert!(line.contains("does not fit") && line.contains("/plugin/libggml-rpc-"), "{line}");
    let line = load(&format!("{copy}; rm /plugin/libggml-rpc-*"));
    assert!(line.contains("another version"), "{line}");
    let line = load("export LIGHTER_METAL=127.0.0.1:1");
    assert!(line.contains("127.0.0.1:1 does not answer"), "{line}");
    let line = load("unset LIGHTER_METAL");
    assert!(line.contains("lighter-env"), "{line}");
}

/// Runs a shell script in a container of llama.cpp's image that has the device and a model; says whether it went well.
fn llama(engine: &Engine, script: &str) -> (bool, String) {
    let mount = format!("{}:/model.gguf:ro", tiny_model().display());
    let options = ["run", "--rm", "--device", DEVICE, "-v", &mount, LLAMA_IMAGE, "sh", "-ec", script];
    let output = run(engine.docker(options));
    (output.status.success(), text_of(&output))
}

#[test]
fn a_llama_sees_the_device_once_with_and_without_a_client_of_its_own() {
    let engine = take_engine();
    let _daemon = Daemon::start(&engine);
    for prepare in ["true", WITHOUT_CLIENT] {
        let (is_well, text) = llama(&engine, &format!("{prepare}; llama-completion --list-devices"));
        let devices = text.lines().filter(|line| line.trim_start().starts_with("RPC")).count();
        assert!(is_well && devices == 1, "{prepare}: {text}");
        assert!(!text.lines().any(|line| line.starts_with("lighter: ")), "{prepare}: {text}");
    }
    let bench = "llama-bench -m /model.gguf -p 0 -n 8 -r 1 -t 1 -ngl 99 --rpc 127.0.0.1:50052";
    let (is_well, text) = llama(&engine, &format!("{WITHOUT_CLIENT}; {bench}"));
    assert!(is_well && text.contains("| RPC "), "{text}");
}

#[test]
fn a_llama_that_no_client_fits_ends_and_says_why() {
    let engine = take_engine();
    let _daemon = Daemon::start(&engine);
    let copy = "cp -r /usr/lib/lighter/metal /plugin; export GGML_BACKEND_PATH=/plugin/libggml-lighter.so";
    let script =
        format!("{WITHOUT_CLIENT}; {copy}; rm /plugin/libggml-rpc-*; llama-completion --list-devices");
    let (is_well, text) = llama(&engine, &script);
    assert!(!is_well && text.contains("LLAMA_ARG_RPC"), "{text}");
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("lighter: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("another version"), "{text}");
}
