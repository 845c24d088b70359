// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gate m12: Debian's llama.cpp in a container computes on the host's engine. Its greedy text equals native's
//! byte for byte, its speed is put beside native's, and without the device it is refused.

use crate::support::{DEVICE, Daemon, Engine, LLAMA_IMAGE, model, run, stdout_of, text_of};

const MODEL: &str = "/models/model.gguf";
const PROMPT: &str = "The sea is";

/// As many as the native runs have, so that the two compare.
const ONE_THREAD: &str = "threads = 1";

fn mount() -> String {
    format!("{}:{MODEL}:ro", model().display())
}

fn completion() -> Vec<&'static str> {
    vec![
        "llama-completion",
        "-m",
        MODEL,
        "-no-cnv",
        "--temp",
        "0",
        "--seed",
        "1",
        "-n",
        "64",
        "-c",
        "512",
        "-t",
        "1",
        "-p",
        PROMPT,
    ]
}

#[test]
fn greedy_text_through_the_device_equals_native_byte_for_byte() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, ONE_THREAD);
    let mount = mount();
    let native = stdout_of(
        engine.docker(["run", "--rm", "-v", &mount, LLAMA_IMAGE]).args(completion()).args(["-ngl", "0"]),
    );
    assert!(native.len() > PROMPT.len() + 40, "native wrote too little to compare: {native:?}");
    let device = stdout_of(
        engine
            .docker(["run", "--rm", "--device", DEVICE, "-v", &mount, LLAMA_IMAGE])
            .args(completion())
            .args(["-ngl", "99"]),
    );
    assert_eq!(device, native);
    let report = stdout_of(daemon.lighter().args(["doctor"]));
    assert!(report.contains("lighter.sh/metal") && report.contains("on: "), "{report}");
}

#[test]
fn the_same_command_without_the_device_is_refused() {
    let engine = Engine::take();
    let _daemon = Daemon::start(&engine);
    let mount = mount();
    let output = run(engine.docker(["run", "--rm", "-v", &mount, LLAMA_IMAGE]).args([
        "llama-bench",
        "-m",
        MODEL,
        "--rpc",
        "127.0.0.1:50052",
        "-ngl",
        "99",
        "-p",
        "8",
        "-n",
        "4",
        "-r",
        "1",
    ]));
    let text = text_of(&output);
    assert!(!output.status.success() || text.contains("ailed to connect"), "{text}");
}

#[test]
fn llama_bench_through_the_device_gives_figures_beside_native() {
    let engine = Engine::take();
    let _daemon = Daemon::with(&engine, ONE_THREAD);
    let mount = mount();
    let bench = ["-m", MODEL, "-p", "64", "-n", "32", "-r", "2", "-t", "1", "-o", "json"];
    let figures = |text: &str| -> Vec<f64> {
        let start = text.find('[').unwrap_or_else(|| panic!("no JSON in {text}"));
        let rows: serde_json::Value = serde_json::from_str(text.get(start..).unwrap()).unwrap();
        rows.as_array().unwrap().iter().map(|row| row["avg_ts"].as_f64().unwrap()).collect()
    };
    let native = figures(&stdout_of(
        engine
            .docker(["run", "--rm", "-v", &mount, LLAMA_IMAGE, "llama-bench"])
            .args(bench)
            .args(["-ngl", "0"]),
    ));
    let device = figures(&stdout_of(
        engine
            .docker(["run", "--rm", "--device", DEVICE, "-v", &mount, LLAMA_IMAGE, "llama-bench"])
            .args(bench)
            .args(["-ngl", "99", "--rpc", "127.0.0.1:50052"]),
    ));
    assert_eq!((native.len(), device.len()), (2, 2), "a prompt row and a generation row each");
    assert!(device.iter().all(|rate| *rate > 0.0));
    println!(
        "m12: prompt {:.2} of native ({:.0} against {:.0} t/s), generation {:.2} of native ({:.0} against {:.0} t/s)",
        device[0] / native[0],
        device[0],
        native[0],
        device[1] / native[1],
        device[1],
        native[1]
    );
}
