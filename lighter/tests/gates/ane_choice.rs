// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engine computes a model: the processor answers at once, OpenVINO is tried beside it, compared and timed, and the
//! program sees nothing but right answers.

use crate::ane::{ANE, Program, settings};
use crate::support::{Daemon, Engine, eventually_within, stdout_of, text_of};

const LOOP: &str = "python3 /gate/loop.py --close /models/ch_ppocr_mobile_v2.0_cls_infer.onnx 1 3 48 192";

fn models(daemon: &Daemon) -> serde_json::Value {
    let text = stdout_of(daemon.lighter().args(["ane", "list", "--json"]));
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["models"].take()
}

#[test]
fn openvino_is_compared_and_timed_while_the_processor_answers() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("openvino"));
    let program = Program::start(&engine, "ort-1.24", &["--device", ANE], LOOP);
    let attempt = eventually_within(120, "OpenVINO was tried with the model", || {
        let models = models(&daemon);
        let attempts = models.get(0)?["attempts"].as_array()?.clone();
        attempts.into_iter().find(|attempt| {
            attempt["engine"].as_str().is_some_and(|name| name.contains("openvino"))
                && !attempt["last"].is_null()
        })
    });
    assert_eq!(attempt["failures"], 0, "{attempt}");
    let chosen = eventually_within(60, "an engine is chosen", || {
        let chosen = models(&daemon)[0]["chosen"].clone();
        chosen.as_object().is_some_and(|chosen| !chosen.is_empty()).then_some(chosen)
    });
    // Runs after the choice, on whichever engine it was.
    let calls = || daemon.status()["grants"][0]["usage"]["calls"].as_u64().unwrap();
    let then = calls();
    eventually_within(60, "runs go on after the choice", || (calls() > then + 20).then_some(()));
    stdout_of(engine.docker(["exec", &program.id, "touch", "/stop"]));
    let text = program.finish();
    let line = text.lines().find(|line| line.starts_with("{\"runs\"")).unwrap_or_else(|| panic!("{text}"));
    let result: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!((&result["wrong"], &result["failed"]), (&0.into(), &0.into()), "{result}");
    let shown = text_of(&crate::support::run(daemon.lighter().args(["ane", "list"])));
    println!("ane: chosen {chosen} after {attempt}; {result}\n{shown}");
    assert!(daemon.log().contains("chosen"), "the choice and its numbers are in the log: {}", daemon.log());
    let forgotten = models(&daemon)[0]["model"].as_str().unwrap()[..8].to_owned();
    stdout_of(daemon.lighter().args(["ane", "forget", &forgotten]));
    assert_eq!(models(&daemon).as_array().unwrap().len(), 0, "the model is forgotten");
}

#[test]
fn a_pinned_processor_tries_nothing_else() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("openvino"));
    let options = ["--device", ANE, "-e", "LIGHTER_ANE_UNITS=cpu"];
    let command = "python3 /gate/models.py 30 /models/ch_ppocr_mobile_v2.0_cls_infer.onnx";
    let text = Program::start(&engine, "ort-1.24", &options, command).finish();
    assert!(text.contains("\"equal\": true"), "{text}");
    let tried = models(&daemon).to_string();
    assert!(!tried.contains("openvino"), "{tried}");
}
