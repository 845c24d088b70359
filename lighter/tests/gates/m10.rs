// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gate m10: a stock ONNX Runtime in a container computes on the host's. Ten models answer as the container's own
//! processor does, to the bit, and the daemon counts their runs; without the device nothing is there.

use crate::ane::{ANE, Program, settings};
use crate::support::{Daemon, Engine, text_of};

/// PP-OCR's three, voice activity, file types, ResNet-50 with its weights inside, with any batch, and beside.
const MODELS: [&str; 10] = [
    "ch_ppocr_mobile_v2.0_cls_infer",
    "ch_PP-OCRv4_det_infer",
    "ch_PP-OCRv4_rec_infer",
    "magika",
    "silero_vad_op18_ifless",
    "silero_vad_16k_op15",
    "silero_vad",
    "resnet50",
    "resnet50-batch",
    "resnet50-external",
];
const RUNS: u64 = 2;

fn command() -> String {
    let models: Vec<_> = MODELS.iter().map(|model| format!("/models/{model}.onnx")).collect();
    format!("python3 /gate/models.py {RUNS} {}", models.join(" "))
}

#[test]
fn ten_models_through_the_device_answer_as_the_containers_own_processor_does() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let program = Program::start(&engine, "ort-1.32", &["--device", ANE], &command());
    let text = program.finish();
    let lines: Vec<serde_json::Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let names: Vec<_> = lines.iter().map(|line| line["model"].as_str().unwrap()).collect();
    assert_eq!(names, MODELS, "{text}");
    for line in &lines {
        assert!(line["equal"].as_bool().unwrap(), "{line}\n{text}");
    }
    let usage = &daemon.status()["grants"][0]["usage"];
    let calls = usage["calls"].as_u64().unwrap();
    assert!(
        calls >= RUNS * MODELS.len() as u64,
        "{calls} runs on the host: the container computed itself\n{text}"
    );
    assert_eq!(usage["errors"], 0, "{}", daemon.log());
    println!("m10: {} models equal to the bit, {calls} runs on the host", lines.len());
}

#[test]
fn the_same_command_without_the_device_is_refused() {
    let engine = Engine::take();
    let _daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let text = Program::start(&engine, "ort-1.32", &[], &command()).finish();
    assert!(
        text.contains("no ane device: LIGHTER_ANE_EP is not set") && !text.contains("\"equal\""),
        "{text}"
    );
}

#[test]
fn a_container_that_only_mounts_the_files_computes_for_itself() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let mounted = |from: String, to: &str| format!("{from}:{to}:ro");
    let dir = daemon.dir.path().display();
    let options = [
        "-v".to_owned(),
        mounted(format!("{dir}/client/ane"), "/usr/lib/lighter/ane"),
        "-v".to_owned(),
        mounted(format!("{dir}/state/ane"), "/run/lighter/ane"),
        "-e".to_owned(),
        "LIGHTER_ANE_EP=/usr/lib/lighter/ane/liblighter_ane_ep.so".to_owned(),
    ];
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let command = "python3 /gate/models.py 2 /models/ch_ppocr_mobile_v2.0_cls_infer.onnx";
    let text = Program::start(&engine, "ort-1.32", &options, command).finish();
    assert!(text.contains("\"equal\": true"), "its own processor answers: {text}");
    assert_eq!(daemon.grants(), 0);
    assert!(daemon.log().contains("refused"), "{}", daemon.log());
}

/// The newest is what the other gates use.
#[test]
fn older_versions_of_the_runtime_compute_on_the_host() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    for version in ["ort-1.24", "ort-1.26"] {
        let before = daemon.log().len();
        let command =
            "python3 /gate/models.py 3 /models/ch_ppocr_mobile_v2.0_cls_infer.onnx /models/magika.onnx";
        let program = Program::start(&engine, version, &["--device", ANE], command);
        let text = program.finish();
        assert_eq!(text.matches("\"equal\":").count(), 2, "{version}: {text}\n{}", &daemon.log()[before..]);
        let calls = daemon.status()["grants"][0]["usage"]["calls"].as_u64().unwrap();
        assert!(calls >= 6, "{version}: {calls} runs on the host\n{text}");
        println!("m10: {version} in the container, 1.32 on the host: {}", text.replace('\n', " "));
    }
}

#[test]
fn doctor_names_the_engine_and_the_devices_settings() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let report = text_of(&crate::support::run(daemon.lighter().args(["doctor"])));
    assert!(report.contains("lighter.sh/ane") && report.contains("CPU"), "{report}");
    assert!(report.contains("1.32.0"), "{report}");
}
