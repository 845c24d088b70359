// SPDX-License-Identifier: MIT OR Apache-2.0
//! The wrapper over ONNX Runtime, with the real library: every element type, empty and optional things, weights in
//! memory, and what is refused.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation, reason = "tests")]

mod ane_harness;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ane_harness::onnx::{self, TestModel, attribute, external, node, port};
use ane_harness::{floats, libraries, openvino, stock};
use lighter_devices::ane::control::Provider;
use lighter_devices::ane::ort::{
    Input, ModelBytes, Ort, OrtError, Output, ProviderSetup, Session, SessionSetup,
};
use lighter_frames::{Dim, Element, Port, Tensor};

fn setup(provider: Provider) -> SessionSetup {
    let provider = ProviderSetup { provider, options: BTreeMap::new() };
    SessionSetup { provider, threads: 1, cache_dir: None }
}

fn session(ort: &Arc<Ort>, provider: Provider, model: &TestModel) -> Result<Session, OrtError> {
    let proto = model.whole();
    let bytes =
        ModelBytes { proto: &proto, weights: &model.weights, inputs: &model.inputs, outputs: &model.outputs };
    Session::new(ort, &setup(provider), bytes)
}

fn tensor(element: Element, dims: &[u64]) -> Tensor {
    Tensor::new(element, dims.to_vec()).unwrap()
}

fn run(session: &Session, inputs: &[(Tensor, Vec<u8>)]) -> Result<Vec<(Tensor, Vec<u8>)>, OrtError> {
    let inputs: Vec<Input<'_>> =
        inputs.iter().map(|(tensor, data)| Input::new(tensor, data).unwrap()).collect();
    let own = |output: &Output| Ok((output.tensor().clone(), output.data()?.to_vec()));
    session.run(&inputs, None)?.iter().map(own).collect()
}

#[test]
fn every_library_says_what_it_is() {
    for (path, has_openvino) in libraries() {
        let ort = Ort::open(&path).unwrap();
        assert!(ort.version().starts_with("1."), "{}", ort.version());
        assert!(ort.providers().iter().any(|name| name == "CPUExecutionProvider"));
        assert_eq!(ort.require(Provider::OpenVino).is_ok(), has_openvino);
        let missing = ort.require(Provider::CoreMl).unwrap_err().to_string();
        assert!(missing.contains("no CoreMLExecutionProvider; it has"), "{missing}");
    }
}

#[test]
fn what_is_no_onnx_runtime_is_refused_by_its_path() {
    let refused = Ort::open(Path::new("/nowhere/libonnxruntime.so")).unwrap_err().to_string();
    assert_eq!(refused, "cannot load ONNX Runtime from /nowhere/libonnxruntime.so");
    let refused = Ort::open(Path::new("libc.so.6")).unwrap_err().to_string();
    assert_eq!(refused, "libc.so.6 is not ONNX Runtime: it has no OrtGetApiBase");
}

#[test]
fn every_element_type_goes_through_unchanged() {
    let Some(path) = stock() else { return };
    let ort = Ort::open(&path).unwrap();
    for element in Element::ALL {
        let session = session(&ort, Provider::Cpu, &onnx::identity(*element)).unwrap();
        let shape = tensor(*element, &[2, 3]);
        let data: Vec<u8> = (0..shape.bytes()).map(|at| (at % 2) as u8).collect();
        let out = run(&session, &[(shape.clone(), data.clone())]).unwrap();
        assert_eq!(out, [(shape, data)], "{element:?}");
        let empty = tensor(*element, &[0, 3]);
        assert_eq!(run(&session, &[(empty.clone(), vec![])]).unwrap(), [(empty, vec![])], "{element:?}");
    }
}

#[test]
fn ports_are_known_with_their_shapes() {
    let Some(path) = stock() else { return };
    let ort = Ort::open(&path).unwrap();
    let session = session(&ort, Provider::Cpu, &onnx::product(8, 1.0)).unwrap();
    let wanted = |name: &str| Port {
        name: name.to_owned(),
        element: Element::F32,
        dims: Some(vec![Dim::Free, Dim::Fixed(8)]),
    };
    assert_eq!(session.input_ports().unwrap(), [wanted("x")]);
    assert_eq!(session.output_ports().unwrap(), [wanted("y")]);
}

#[test]
fn weights_stand_in_memory_and_are_bounded() {
    for (path, has_openvino) in libraries() {
        let ort = Ort::open(&path).unwrap();
        let providers =
            if has_openvino { vec![Provider::Cpu, Provider::OpenVino] } else { vec![Provider::Cpu] };
        for provider in providers {
            let mut model = onnx::product(64, 0.5);
            let row = tensor(Element::F32, &[1, 64]);
            let made = session(&ort, provider, &model).unwrap();
            // The session must not depend on the memory that it was made from.
            model.weights.fill(0);
            drop(model);
            let out = run(&made, &[(row, floats(&[2.0; 64]))]).unwrap();
            assert_eq!(out[0].1, floats(&[64.0; 64]), "{provider}");
        }
    }
    let Some(path) = stock() else { return };
    let ort = Ort::open(&path).unwrap();
    for (offset, length) in
        [(64, 1 << 20), (1 << 40, 64 * 64 * 4), (u64::MAX / 2, 64 * 64 * 4), (1024, 64 * 64 * 4)]
    {
        let w = external("w1", Element::F32, &[64, 64], "w", offset, length);
        let ports = |name| [port(name, Element::F32, &[None, Some(64)])];
        let product = node("MatMul", &["x", "w1"], &["y"], &[]);
        let weights = vec![0; 64 + 64 * 64 * 4];
        let model = TestModel::new(&[product], &[w], &weights, &ports("x"), &ports("y"));
        assert!(session(&ort, Provider::Cpu, &model).is_err(), "{offset}+{length}");
    }
}

#[test]
fn a_missing_optional_input_is_no_trouble() {
    let Some(path) = stock() else { return };
    let ort = Ort::open(&path).unwrap();
    let top = onnx::tensor("top", Element::F32, &[], &2.0_f32.to_le_bytes());
    let clip = node("Clip", &["x", "", "top"], &["y"], &[]);
    let ports = |name| [port(name, Element::F32, &[None])];
    let model = TestModel::new(&[clip], &[top], &[], &ports("x"), &ports("y"));
    let made = session(&ort, Provider::Cpu, &model).unwrap();
    let out = run(&made, &[(tensor(Element::F32, &[3]), floats(&[-1.0, 1.0, 5.0]))]).unwrap();
    assert_eq!(out[0].1, floats(&[-1.0, 1.0, 2.0]));
}

#[test]
fn what_does_not_travel_is_refused_by_name() {
    let Some(path) = stock() else { return };
    let ort = Ort::open(&path).unwrap();
    let refused = |op: &str, to: u64| {
        let cast = node(op, &["x"], &["y"], &[attribute("to", to)]);
        let input = [port("x", Element::F32, &[None])];
        let mut output = [port("y", Element::F32, &[None])];
        output[0].dims = None;
        let mut model = TestModel::new(&[cast], &[], &[], &input, &[]);
        // The graph's output is of a type that no port has.
        let kind = onnx::Proto::default().number(1, to);
        let info = onnx::Proto::default().text(1, "y").message(2, &onnx::Proto::default().message(1, &kind));
        let graph = onnx::Proto::default().message(12, &info);
        model.proto.extend(onnx::Proto::default().message(7, &graph).0);
        model.outputs = output.to_vec();
        let made = session(&ort, Provider::Cpu, &model).unwrap();
        assert_eq!(made.output_ports().unwrap(), []);
        run(&made, &[(tensor(Element::F32, &[1]), floats(&[1.5]))]).unwrap_err().to_string()
    };
    assert_eq!(refused("Cast", 8), "output y is a tensor of texts, which lighter does not carry");
    let cast = refused("Cast", 17);
    assert_eq!(cast, "output y is a tensor of floats of 8 bits or less, which lighter does not carry");
}

#[test]
fn errors_come_back_as_words() {
    let Some(path) = stock() else { return };
    let ort = Ort::open(&path).unwrap();
    let rubbish = TestModel::from_proto(b"no model".to_vec(), &[], &[], &[]);
    let text = session(&ort, Provider::Cpu, &rubbish).unwrap_err().to_string();
    assert!(text.starts_with("the model does not compile: "), "{text}");
    let made = session(&ort, Provider::Cpu, &onnx::rows()).unwrap();
    let index = tensor(Element::I64, &[1]);
    let text = run(&made, &[(index.clone(), 7_i64.to_le_bytes().to_vec())]).unwrap_err().to_string();
    assert!(
        text.starts_with("the run failed: ") && text.contains("indices element out of data bounds"),
        "{text}"
    );
    let out = run(&made, &[(index.clone(), 4_i64.to_le_bytes().to_vec())]).unwrap();
    assert_eq!(out[0].1, floats(&[8.0, 9.0]));
    let text = made.run(&[], None).unwrap_err().to_string();
    assert_eq!(text, "0 inputs given, the model has 1");
    let wrong = run(&made, &[(tensor(Element::F32, &[1]), floats(&[1.0]))]).unwrap_err().to_string();
    assert!(wrong.contains("Unexpected input data type"), "{wrong}");
    assert!(Input::new(&index, &[0; 7]).is_none());
}

#[test]
fn openvino_gives_the_processors_answer() {
    let Some(path) = openvino() else { return };
    let ort = Ort::open(&path).unwrap();
    let model = onnx::product(64, 0.25);
    let x: Vec<f32> = (0..64).map(|at| at as f32 / 7.0).collect();
    let inputs = [(tensor(Element::F32, &[1, 64]), floats(&x))];
    let answer = |provider| {
        let out = run(&session(&ort, provider, &model).unwrap(), &inputs).unwrap();
        let (numbers, _) = out[0].1.as_chunks::<4>();
        numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
    };
    let (cpu, other) = (answer(Provider::Cpu), answer(Provider::OpenVino));
    assert!(cpu.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-3), "{cpu:?} {other:?}");
}
