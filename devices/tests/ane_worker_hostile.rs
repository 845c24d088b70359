// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a hostile container may try on an ane worker: each attempt ends at most its own stream, and a bystander's
//! stream goes on in the same process.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "tests"
)]

mod ane_harness;

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use ane_harness::client::Client;
use ane_harness::onnx::{self, TestModel, external, memfd, node, port};
use ane_harness::{Host, floats};
use lighter_devices::ane::control::{FromWorker, ToWorker, Wants};
use lighter_frames::{Answer, Element, Failure, Header, Kind, Message, Run, Tensor, ring};
use rustix::fs::SealFlags;

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    ane_harness::worker_child();
}

const SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

fn tensor(element: Element, dims: &[u64]) -> Tensor {
    Tensor::new(element, dims.to_vec()).unwrap()
}

fn vector(values: &[f32]) -> (Tensor, Vec<u8>) {
    (tensor(Element::F32, &[values.len() as u64]), floats(values))
}

/// A bystander on a worker, and the model that all use.
struct Scene {
    host: Host,
    sum: TestModel,
    bystander: Client,
}

impl Scene {
    fn new() -> Option<Self> {
        let host = Host::start(|config| config.max_run_bytes = 8 << 20)?;
        let sum = onnx::plus_one();
        host.serve(&sum);
        let bystander = host.client(&sum, true);
        Some(Self { host, sum, bystander })
    }

    /// The stream ended by the worker, for this reason, and nobody else's did.
    fn ended(&mut self, client: &Client, reason: &str) {
        client.wait_closed();
        let error = self.host.end_of(client.number).expect("a reason");
        assert!(error.contains(reason), "{error}, not {reason}");
        let outputs = self.bystander.run(&[vector(&[1.0])]).expect("served").outputs();
        assert_eq!(outputs, [vector(&[2.0])]);
    }
}

/// A Run frame with one f32 tensor of these dimensions, written by hand.
fn hand_written(dims: &[u64], count: u16, offset: u64) -> Vec<u8> {
    let mut body = 1_u32.to_le_bytes().to_vec();
    body.extend(offset.to_le_bytes());
    body.extend(count.to_le_bytes());
    body.push(1);
    body.push(dims.len() as u8);
    dims.iter().for_each(|dim| body.extend(dim.to_le_bytes()));
    [Header { kind: Kind::Run, body_bytes: body.len() as u32 }.encode().as_slice(), &body].concat()
}

/// Heads that must end a stream, each with a part of the reason.
fn bad_heads() -> Vec<(Vec<u8>, &'static str)> {
    let good = hand_written(&[2], 1, 0);
    let changed = |at: usize, to: u8| {
        let mut frame = good.clone();
        frame[at] = to;
        frame
    };
    vec![
        (changed(0, b'X'), "no frame of lighter's"),
        (changed(4, 9), "version 9"),
        (changed(6, 200), "unknown kind of message 200"),
        (changed(11, 0xff), "over the limit"),
        (changed(15, 1), "reserved"),
        (changed(30, 8), "element is 8"),
        (changed(31, 17), "rank is 17"),
        (hand_written(&[1 << 63], 1, 0), "dimension is 9223372036854775808"),
        (hand_written(&[u64::MAX], 1, 0), "dimension is"),
        (hand_written(&[1 << 40, 1 << 40], 1, 0), "tensor is over the limit"),
        (hand_written(&[0, 1 << 40, 1 << 40], 1, 0), "tensor is over the limit"),
        (hand_written(&[1 << 32], 1, 0), "inputs of 17179869184 bytes are over the limit of 8388608"),
        (hand_written(&[1], 1024, 0), "tensors needs"),
        (hand_written(&[1], u16::MAX, 0), "tensors is 65535"),
        (hand_written(&[1], 1, 7), "data_offset is 7"),
        (hand_written(&[1], 0, 0), "after its end"),
    ]
}

#[test]
fn bad_heads_end_their_stream_with_a_reason() {
    let Some(mut scene) = Scene::new() else { return };
    for (frame, reason) in bad_heads() {
        let mut client = scene.host.client(&scene.sum, false);
        client.socket.write_all(&frame).unwrap();
        let failed = client.reply().expect("told why").failure();
        assert_eq!(failed.failure, Failure::Protocol);
        assert!(failed.text.contains(reason), "{}, not {reason}", failed.text);
        scene.ended(&client, reason);
        let mut client = scene.host.client(&scene.sum, true);
        client.send_head(&frame);
        let failed = client.reply().expect("told why").failure();
        assert!(failed.text.contains(reason), "{}, not {reason}", failed.text);
        scene.ended(&client, reason);
    }
}

#[test]
fn frames_of_others_and_cut_ones_end_or_go_to_the_service() {
    let Some(mut scene) = Scene::new() else { return };
    let mut client = scene.host.client(&scene.sum, false);
    client.socket.write_all(&hand_written(&[2], 1, 0)[..20]).unwrap();
    client.socket.shutdown(std::net::Shutdown::Write).unwrap();
    scene.ended(&client, "connection broke");
    let mut client = scene.host.client(&scene.sum, false);
    client.socket.write_all(&hand_written(&[2], 1, 0)).unwrap();
    client.socket.write_all(&[1, 2, 3]).unwrap();
    client.socket.shutdown(std::net::Shutdown::Write).unwrap();
    scene.ended(&client, "connection broke");
    // In a ring the head may only be a run.
    let answer = Message::Answer(Answer { run: 1, data_offset: 0, outputs: vec![] }).encode().unwrap();
    let mut client = scene.host.client(&scene.sum, true);
    client.send_head(&answer);
    scene.ended(&client, "Answer came where a run was due");
    for frame in [Message::Have, Message::Want, Message::Sending] {
        let mut client = scene.host.client(&scene.sum, false);
        let frame = frame.encode().unwrap();
        client.socket.write_all(&frame).unwrap();
        let (handover, wants, _) = scene.host.back(client.number);
        assert_eq!((wants, handover.pending.unwrap().0), (Wants::Setup, frame));
    }
}

#[test]
fn rings_that_are_none_are_refused() {
    let Some(mut scene) = Scene::new() else { return };
    let size = ring::bytes_for(1 << 20).unwrap();
    let content = vec![0; size as usize];
    let attempts = [
        (size, memfd(&content, SealFlags::empty()), "not sealed"),
        (size, memfd(&content, SealFlags::GROW), "not sealed"),
        (size, memfd(&content[..4096], SIZE), "file has 4096 bytes"),
        (size, std::fs::File::open("/dev/zero").unwrap().into(), "the ring cannot be used: file is n"),
        (size, std::fs::File::open("/proc/self/exe").unwrap().into(), "no ordinary memory"),
        (ring::bytes_for(64 << 20).unwrap(), memfd(&content, SIZE), "the limit is"),
    ];
    for (bytes, file, reason) in attempts {
        let client = scene.host.client(&scene.sum, false);
        client.send_ring(bytes, &file);
        scene.ended(&client, reason);
        // In place of a ring that is in use.
        let mut client = scene.host.client(&scene.sum, true);
        client.run(&[vector(&[1.0])]).unwrap();
        client.send_ring(bytes, &file);
        scene.ended(&client, reason);
    }
    let mut client = scene.host.client(&scene.sum, false);
    client.socket.write_all(&Message::Ring(lighter_frames::Ring { bytes: size }).encode().unwrap()).unwrap();
    scene.ended(&client, "without its memory");
    let mut client = scene.host.client(&scene.sum, true);
    let far = Message::Run(Run { run: 1, data_offset: 1 << 20, inputs: vec![tensor(Element::F32, &[1])] });
    client.send_head(&far.encode().unwrap());
    scene.ended(&client, "not within the ring");
}

#[test]
fn heads_and_data_that_change_under_the_worker_harm_nobody_else() {
    let Some(mut scene) = Scene::new() else { return };
    let rows = onnx::rows();
    scene.host.serve(&rows);
    let head = |count: u64| {
        let inputs = vec![tensor(Element::I64, &[count])];
        Message::Run(Run { run: 1, data_offset: 0, inputs }).encode().unwrap()
    };
    let (long, short) = (head(4096), head(1));
    for round in 0..20 {
        let mut client = scene.host.client(&rows, true);
        let memory = client.ring.take().unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Writes what is right and what is wrong, as fast as it can, into head and data.
            scope.spawn(|| {
                let mut turn = 0_u64;
                while !stop.load(Relaxed) {
                    let wild = if turn.is_multiple_of(2) { 1_i64 << 40 } else { 3 };
                    for at in 0..64 {
                        memory.write(ring::DATA + at * 8, &wild.to_le_bytes());
                    }
                    memory.write(ring::HEAD, if turn.is_multiple_of(3) { &long } else { &short });
                    memory.write(ring::HEAD + 16 + 14, &[if round % 2 == 0 { 7 } else { 1 }]);
                    turn += 1;
                }
            });
            for request in 1..=200_u32 {
                memory.word(ring::REQUEST).store(request, SeqCst);
                if client.socket.write_all(&Message::Bell.encode().unwrap()).is_err() {
                    break;
                }
                let until = std::time::Instant::now() + ane_harness::PATIENCE;
                while memory.word(ring::ANSWER).load(SeqCst) != request && !client.is_closed() {
                    assert!(std::time::Instant::now() < until, "the worker is stuck");
                    std::hint::spin_loop();
                }
            }
            stop.store(true, Relaxed);
        });
        drop(client);
        let outputs = scene.bystander.run(&[vector(&[1.0])]).expect("served").outputs();
        assert_eq!(outputs, [vector(&[2.0])]);
    }
}

#[test]
fn wild_words_in_a_ring_are_only_its_own_trouble() {
    let Some(mut scene) = Scene::new() else { return };
    let mut client = scene.host.client(&scene.sum, true);
    client.run(&[vector(&[1.0])]).unwrap();
    let memory = client.ring.as_ref().unwrap();
    for word in [ring::REQUEST, ring::ANSWER, ring::HOST_STATE, ring::CONTAINER_STATE] {
        for value in [u32::MAX, 7, 0x8000_0000] {
            memory.word(word).store(value, SeqCst);
            let _ = (&client.socket).write_all(&Message::Bell.encode().unwrap());
        }
    }
    // A client that never reads, and says that it sleeps.
    let mut deaf = scene.host.client(&scene.sum, true);
    for _ in 0..2000 {
        deaf.ring.as_ref().unwrap().word(ring::CONTAINER_STATE).store(ring::ASLEEP, SeqCst);
        deaf.send_run(&[vector(&[1.0])]);
    }
    let outputs = scene.bystander.run(&[vector(&[1.0])]).expect("served").outputs();
    assert_eq!(outputs, [vector(&[2.0])]);
}

#[test]
fn models_that_lead_out_of_themselves_are_refused() {
    let Some(scene) = Scene::new() else { return };
    let ports = |name| [port(name, Element::F32, &[None, Some(64)])];
    let product = || node("MatMul", &["x", "w1"], &["y"], &[]);
    let located = |location: &str, offset: u64, length: u64| {
        let w = external("w1", Element::F32, &[64, 64], location, offset, length);
        TestModel::new(&[product()], &[w], &[0; 64 * 64 * 4], &ports("x"), &ports("y"))
    };
    let full = 64 * 64 * 4;
    let refused = |model: &TestModel, reason: &str| {
        let error = scene.host.load(model).unwrap_err();
        assert!(error.contains(reason), "{error}, not {reason}");
    };
    scene.host.load(&located("w", 0, full)).unwrap();
    refused(&located("/etc/passwd", 0, full), "has its data at \"/etc/passwd\"");
    refused(&located("*/_ORT_MEM_ADDR_/*", 4096, full), "outside of the model");
    refused(&located("w", 64, full), "the model does not compile");
    refused(&located("w", u64::MAX, full), "the model does not compile");
    let ports = |name| [port(name, Element::F32, &[None])];
    let context = node("EPContext", &["x"], &["y"], &[]);
    refused(&TestModel::new(&[context], &[], &[], &ports("x"), &ports("y")), "stands for a file");
    refused(&TestModel::from_proto(vec![0xff; 100], &[], &[], &[]), "no protobuf message");
    let unknown = node("NoSuchThing", &["x"], &["y"], &[]);
    refused(&TestModel::new(&[unknown], &[], &[], &ports("x"), &ports("y")), "NoSuchThing");
}

#[test]
fn outputs_that_no_memory_holds_are_an_error_of_their_run() {
    let Some(mut scene) = Scene::new() else { return };
    let filled = TestModel::new(
        &[node("ConstantOfShape", &["shape"], &["y"], &[])],
        &[],
        &[],
        &[port("shape", Element::I64, &[Some(1)])],
        &[port("y", Element::F32, &[None])],
    );
    scene.host.serve(&filled);
    let shape = |length: i64| (tensor(Element::I64, &[1]), length.to_le_bytes().to_vec());
    for shared in [false, true] {
        let mut client = scene.host.client(&filled, shared);
        for length in [1 << 40, i64::MAX, i64::MIN, -1, 1 << 61] {
            let failed = client.run(&[shape(length)]).expect("told why").failure();
            assert_eq!(failed.failure, Failure::Run, "{length}: {}", failed.text);
        }
        let failed = client.run(&[shape(8 << 20)]).expect("told why").failure();
        assert_eq!(failed.text, "outputs of 33554432 bytes are over the limit of 8388608");
        // ONNX Runtime's own allocator would refuse this by now.
        let answer = client.run(&[shape(1 << 20)]).unwrap().outputs();
        assert!(answer[0].1.len() == 4 << 20 && answer[0].1.iter().all(|byte| *byte == 0));
    }
    let outputs = scene.bystander.run(&[vector(&[1.0])]).expect("served").outputs();
    assert_eq!(outputs, [vector(&[2.0])]);
}

#[test]
fn files_that_are_no_models_are_refused() {
    let Some(scene) = Scene::new() else { return };
    let model = onnx::rows();
    let try_load = |change: fn(&mut lighter_devices::ane::control::Model), seals: SealFlags| {
        let (mut message, _) = model.message();
        change(&mut message);
        let file = memfd(&model.proto, seals);
        scene.host.say_with(&ToWorker::Load(message), &[&file]);
        scene.host.expect("refusal", |message, _| match message {
            FromWorker::LoadFailed { reason, .. } => Some(reason.clone()),
            FromWorker::Loaded { .. } => panic!("loaded"),
            _ => None,
        })
    };
    let all = SIZE | SealFlags::WRITE;
    assert!(try_load(|_| {}, all).contains("were announced"), "not padded");
    for (proto, weights) in [(1 << 63, 0), (u64::MAX, 1), (1, u64::MAX), (4096, 1 << 63)] {
        let (mut message, file) = model.message();
        (message.proto_bytes, message.weights_bytes) = (proto, weights);
        scene.host.say_with(&ToWorker::Load(message), &[&file]);
        scene
            .host
            .expect("refusal", |message, _| matches!(message, FromWorker::LoadFailed { .. }).then_some(()));
    }
    assert!(try_load(|_| {}, SIZE).contains("not sealed"));
    let (mut message, file) = model.message();
    message.inputs[0].dtype = 8;
    scene.host.say_with(&ToWorker::Load(message), &[&file]);
    let reason = scene.host.expect("refusal", |message, _| match message {
        FromWorker::LoadFailed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert_eq!(reason, "port \"index\" has a type that does not travel");
    let (message, _) = model.message();
    scene.host.say(&ToWorker::Load(message));
    let reason = scene.host.expect("refusal", |message, _| match message {
        FromWorker::LoadFailed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert_eq!(reason, "the service sent no file");
}
