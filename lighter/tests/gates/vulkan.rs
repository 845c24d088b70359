// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metal device on an engine that is not the processor's: Vulkan, over Mesa's software driver where there is no GPU.

use crate::support::{DEVICE, Daemon, Engine, LLAMA_IMAGE, engine_root, model, run, stdout_of, text_of};

const MODEL: &str = "/models/model.gguf";
/// What follows is so certain that a GPU's order of sums does not change it; free text parts after some words.
const PROMPT: &str = "1 2 3 4";

fn daemon(engine: &Engine) -> Daemon {
    let settings = format!(
        "engine_root = \"{}\"\nengine = \"Vulkan0\"\nenvironment = {{ GGML_VK_VISIBLE_DEVICES = \"0\" }}\n",
        engine_root("metal-vulkan").display()
    );
    Daemon::with(engine, &settings)
}

/// One token at a time: a software driver takes half a minute to compile what several at once need.
fn completion() -> [&'static str; 20] {
    [
        "llama-completion",
        "-m",
        MODEL,
        "-no-cnv",
        "--temp",
        "0",
        "-n",
        "8",
        "-c",
        "256",
        "-t",
        "1",
        "-b",
        "1",
        "-ub",
        "1",
        "--no-warmup",
        "--simple-io",
        "-p",
        PROMPT,
    ]
}

#[test]
fn doctor_and_devices_name_the_vulkan_engine() {
    let engine = Engine::take();
    let daemon = daemon(&engine);
    let doctor = stdout_of(daemon.lighter().arg("doctor"));
    assert!(doctor.contains("Vulkan0") && doctor.contains("llvmpipe"), "{doctor}");
    let devices = stdout_of(daemon.lighter().arg("devices"));
    assert!(devices.contains(DEVICE) && devices.contains("lighter.sh/metal=vulkan0"), "{devices}");
}

#[test]
fn text_through_vulkan_is_that_of_the_processor() {
    let engine = Engine::take();
    let daemon = daemon(&engine);
    let mount = format!("{}:{MODEL}:ro", model().display());
    let native = stdout_of(
        engine.docker(["run", "--rm", "-v", &mount, LLAMA_IMAGE]).args(completion()).args(["-ngl", "0"]),
    );
    let id = stdout_of(engine.docker([
        "run",
        "-d",
        "--init",
        "--device",
        DEVICE,
        "-v",
        &mount,
        LLAMA_IMAGE,
        "sleep",
        "infinity",
    ]));
    let id = id.trim();
    let output = run(engine
        .docker(["exec", id, "/usr/lib/lighter/bin/lighter-env"])
        .args(completion())
        .args(["-ngl", "99"]));
    let status = daemon.status();
    run(engine.docker(["rm", "-f", id]));
    assert!(output.status.success(), "{}", text_of(&output));
    assert!(native.contains(" 5 6 7"), "{native}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), native);
    let usage = &status["grants"][0]["usage"];
    assert!(usage["engine_us"].as_u64() > Some(0) && usage["errors"].as_u64() == Some(0), "{status}");
}

#[test]
fn without_the_device_nothing_answers() {
    let engine = Engine::take();
    let _daemon = daemon(&engine);
    assert!(engine.hello(&[]).starts_with("refused: "));
}
