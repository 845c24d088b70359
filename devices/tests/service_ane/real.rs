// SPDX-License-Identifier: MIT OR Apache-2.0
//! The service with its own worker and a real ONNX Runtime, where there is one: `LIGHTER_TEST_ORT` names
//! libonnxruntime, else it is looked for where the test tools put it.

use std::path::PathBuf;

use crate::client::{Container, Running};

/// A ModelProto that doubles: `y = x + x`, without `graph.input`, as containers send it.
fn doubling() -> Vec<u8> {
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let length = u8::try_from(bytes.len()).unwrap();
        assert!(length < 128 && number < 16);
        [&[number << 3 | 2, length], bytes].concat()
    }
    let node = [field(1, b"x"), field(1, b"x"), field(2, b"y"), field(4, b"Add")].concat();
    // TypeProto{tensor_type{elem_type: float}}
    let value_type = field(1, &[1 << 3, 1]);
    let output = [field(1, b"y"), field(2, &value_type)].concat();
    let graph = [field(1, &node), field(2, b"doubling"), field(12, &output)].concat();
    // OperatorSetIdProto{version: 13}
    let opset = [2 << 3, 13];
    // ir_version 8
    [vec![1 << 3, 8], field(7, &graph), field(8, &opset)].concat()
}

/// The library of the unpacked wheel that has OpenVINO, or of the one that has not, among those that `LIGHTER_TEST_ORT`
/// names.
fn library(with_openvino: bool) -> Option<PathBuf> {
    let named = std::env::var_os("LIGHTER_TEST_ORT");
    let folders = named.iter().flat_map(std::env::split_paths).map(|folder| folder.join("onnxruntime/capi"));
    let has_openvino = |folder: &PathBuf| folder.join("libonnxruntime_providers_openvino.so").exists();
    let folder = folders.into_iter().find(|folder| folder.is_dir() && has_openvino(folder) == with_openvino);
    let is_library =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("libonnxruntime.so.");
    let found = folder.and_then(|folder| {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).find(is_library)
    });
    if found.is_none() {
        eprintln!("NOT RUN: LIGHTER_TEST_ORT names no such ONNX Runtime (tools/wheels ort-1.32 openvino)");
    }
    found
}

#[test]
fn the_processor_of_a_real_onnx_runtime_answers() {
    let Some(path) = library(false) else { return };
    let service = Running::start("real", |config| config.library = Some(path));
    let proto = doubling();
    let mut container = Container::new(&service, "a", &proto);
    for count in [4, 4, 9, 0, 4] {
        container.run(count);
    }
    assert_eq!(container.reconnects, 1);
    assert_eq!(service.runs("cpu"), 5);
    let account = &service.report().containers["grant-a"];
    assert_eq!((account.calls, account.errors), (5, 0), "{:?}", account.last_error);
}

#[test]
fn openvino_is_tried_and_compared() {
    let Some(path) = library(true) else { return };
    let service = Running::start("real", |config| config.library = Some(path));
    let proto = doubling();
    let mut container = Container::new(&service, "a", &proto);
    crate::client::until("OpenVINO was tried", || {
        container.run(4);
        let journal = service.journal();
        journal.fold().models().values().any(|facts| {
            facts.records.iter().any(|(key, record)| key.engine == "openvino-cpu" && record.last.is_some())
        })
    });
    let journal = service.journal();
    let (_, record) = journal
        .fold()
        .models()
        .values()
        .flat_map(|facts| &facts.records)
        .find(|(key, _)| key.engine == "openvino-cpu")
        .unwrap();
    assert_eq!(record.failures, 0, "{:?} {:?}", record.last, service.report().troubles);
    assert_eq!(container.reconnects, 1);
}

#[test]
fn a_pinned_openvino_takes_over_and_gives_other_shapes_back() {
    let Some(path) = library(true) else { return };
    let service = Running::start("real", |config| {
        config.library = Some(path);
        config.units = "openvino-cpu".parse().unwrap();
    });
    let proto = doubling();
    let mut container = Container::new(&service, "a", &proto);
    crate::client::until("OpenVINO computes", || {
        container.run(4);
        service.runs("openvino-cpu") > 10
    });
    let before = service.runs("cpu");
    container.run(9);
    assert_eq!(service.runs("cpu"), before + 1);
    container.run(4);
    assert_eq!(container.reconnects, 1);
    assert!(service.report().troubles.is_empty(), "{:?}", service.report().troubles);
}
