// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane worker as a service and a container see it, over real sockets and rings, with the real ONNX Runtime.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "tests"
)]

mod ane_harness;

use ane_harness::client::Client;
use ane_harness::onnx::{self, TestModel, node, port, tensor as constant};
use ane_harness::{Host, config, floats, openvino, read_place, shapes_of, stock};
use lighter_devices::ane::control::{FromWorker, Outcome, Provider, Shapes, ToWorker, Wants};
use lighter_frames::{Element, Failure, Tensor};

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    ane_harness::worker_child();
}

/// Stream and shared memory.
const TRANSPORTS: [bool; 2] = [false, true];

fn tensor(element: Element, dims: &[u64]) -> Tensor {
    Tensor::new(element, dims.to_vec()).unwrap()
}

fn vector(values: &[f32]) -> (Tensor, Vec<u8>) {
    (tensor(Element::F32, &[values.len() as u64]), floats(values))
}

fn index(values: &[i64]) -> (Tensor, Vec<u8>) {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    (tensor(Element::I64, &[values.len() as u64]), bytes)
}

/// Adds one to a vector and looks at the sum: shows that the stream is served and in step.
fn add_up(client: &mut Client, values: &[f32]) {
    let wanted: Vec<f32> = values.iter().map(|value| value + 1.0).collect();
    let outputs = client.run(&[vector(values)]).expect("an answer").outputs();
    assert_eq!(outputs, [vector(&wanted)]);
}

#[test]
fn runs_of_many_shapes_are_answered_by_both_transports() {
    let Some(host) = Host::start(|_| {}) else { return };
    let (sum, product, rows) = (onnx::plus_one(), onnx::product(64, 0.5), onnx::rows());
    for model in [&sum, &product, &rows] {
        host.serve(model);
    }
    for shared in TRANSPORTS {
        let mut client = host.client(&sum, shared);
        for length in [1, 0, 7, 4096, 100_000, 2] {
            let values: Vec<f32> = (0..length).map(|at| at as f32).collect();
            add_up(&mut client, &values);
        }
        let mut client = host.client(&product, shared);
        let row = (tensor(Element::F32, &[2, 64]), floats(&[2.0; 128]));
        assert_eq!(client.run(&[row]).unwrap().outputs()[0].1, floats(&[64.0; 128]));
        let mut client = host.client(&rows, shared);
        assert_eq!(client.run(&[index(&[3, 0])]).unwrap().outputs()[0].1, floats(&[6.0, 7.0, 0.0, 1.0]));
    }
    let counters = host.report();
    assert_eq!((counters.runs, counters.errors, counters.streams_total), (16, 0, 6));
    let bytes = 2 * (4 * (1 + 7 + 4096 + 100_000 + 2) + 4 * 128 + 16);
    assert_eq!(counters.in_bytes, bytes);
    assert!(counters.engine_us > 0 && counters.model_bytes > 64 * 64 * 4);
    host.expect("counters", |message, _| match message {
        FromWorker::Counters(counters) => (counters.runs == 16).then_some(()),
        _ => None,
    });
}

#[test]
fn a_run_that_fails_is_answered_and_the_stream_goes_on() {
    let Some(host) = Host::start(|_| {}) else { return };
    let rows = onnx::rows();
    host.serve(&rows);
    for shared in TRANSPORTS {
        let mut client = host.client(&rows, shared);
        let failed = client.run(&[index(&[7])]).unwrap().failure();
        assert_eq!((failed.run, failed.failure), (1, Failure::Run));
        assert!(failed.text.contains("out of data bounds"), "{}", failed.text);
        // Inputs that are not the model's, which the engine does not get to see.
        let failed = client.run(&[vector(&[1.0])]).unwrap().failure();
        assert!(failed.text.starts_with("input index is declared as I64"), "{}", failed.text);
        let failed = client.run(&[index(&[1]), index(&[2])]).unwrap().failure();
        assert_eq!(failed.text, "2 inputs came, the model has 1");
        assert_eq!(client.run(&[index(&[4])]).unwrap().outputs()[0].1, floats(&[8.0, 9.0]));
    }
    assert_eq!(host.report().runs, 2);
}

#[test]
fn shapes_that_are_not_approved_come_back_untouched() {
    let (Some(first), Some(second)) = (Host::start(|_| {}), Host::start(|_| {})) else { return };
    let sum = onnx::plus_one();
    first.load(&sum).unwrap();
    second.serve(&sum);
    let approved = shapes_of(&[tensor(Element::F32, &[3])]);
    first.say(&ToWorker::Approve { model: sum.hash, shapes: approved });
    for shared in TRANSPORTS {
        let mut client = first.client(&sum, shared);
        add_up(&mut client, &[1.0, 2.0, 3.0]);
        client.send_run(&[vector(&[1.0; 50_000])]);
        let (handover, wants, files) = first.back(client.number);
        assert_eq!(wants, Wants::Shapes(Shapes(vec![vec![50_000]])));
        assert_eq!((handover.ring, handover.pending.is_some()), (shared, !shared));
        second.hand_on(handover, &files);
        drop(files);
        assert_eq!(client.reply().unwrap().outputs(), [vector(&[2.0; 50_000])]);
        add_up(&mut client, &[5.0]);
    }
    assert_eq!((first.report().runs, second.report().runs), (2, 4));
}

#[test]
fn a_recall_takes_effect_at_the_next_run() {
    let Some(host) = Host::start(|_| {}) else { return };
    let sum = onnx::plus_one();
    host.serve(&sum);
    let shapes = Shapes(vec![vec![2]]);
    for shared in TRANSPORTS {
        let mut client = host.client(&sum, shared);
        add_up(&mut client, &[1.0, 2.0]);
        host.say(&ToWorker::Recall { model: sum.hash, shapes: shapes.clone() });
        host.report();
        add_up(&mut client, &[1.0]);
        client.send_run(&[vector(&[1.0, 2.0])]);
        let (handover, _, files) = host.back(client.number);
        host.say(&ToWorker::Approve { model: sum.hash, shapes: shapes.clone() });
        host.hand_on(handover, &files);
        assert_eq!(client.reply().unwrap().outputs(), [vector(&[2.0, 3.0])]);
    }
}

#[test]
fn what_a_provider_cannot_do_is_handed_on_with_its_data() {
    let (Some(library), Some(cpu)) = (openvino(), Host::start(|_| {})) else { return };
    let provider = Host::spawn(lighter_devices::ane::control::WorkerConfig {
        provider: Provider::OpenVino,
        bind_shapes: true,
        ..config(library)
    });
    // Any length is declared, one alone compiles.
    let ports = |name, dims: &[Option<u64>]| [port(name, Element::F32, dims)];
    let w = constant("w", Element::F32, &[2, 2], &floats(&[1.0, 0.0, 0.0, 1.0]));
    let model = TestModel::new(
        &[node("MatMul", &["x", "w"], &["y"], &[])],
        &[w],
        &[],
        &ports("x", &[None, None]),
        &ports("y", &[None, None]),
    );
    cpu.serve(&model);
    provider.serve(&model);
    for shared in TRANSPORTS {
        // What failed is not tried again unless the service says so.
        let shapes = Shapes(vec![vec![1, 3]]);
        provider.say(&ToWorker::Approve { model: model.hash, shapes });
        let mut client = provider.client(&model, shared);
        let pair = (tensor(Element::F32, &[1, 2]), floats(&[3.0, 4.0]));
        let same = std::slice::from_ref(&pair);
        assert_eq!(client.run(same).unwrap().outputs(), same);
        client.send_run(&[(tensor(Element::F32, &[1, 3]), floats(&[1.0, 2.0, 3.0]))]);
        let (handover, wants, files) = provider.back(client.number);
        let Wants::Another { shapes, reason } = wants else { panic!("{wants:?}") };
        assert_eq!(shapes, Shapes(vec![vec![1, 3]]));
        assert!(reason.starts_with("the model does not compile"), "{reason}");
        assert_eq!(files.len(), 2, "the socket, and the ring or the data");
        cpu.hand_on(handover, &files);
        drop(files);
        let failed = client.reply().unwrap().failure();
        assert_eq!((failed.run, failed.failure), (2, Failure::Run));
        assert_eq!(client.run(same).unwrap().outputs(), same, "in step");
    }
}

#[test]
fn samples_and_trials_carry_the_same_numbers() {
    let Some(host) = Host::start(|_| {}) else { return };
    let model = onnx::product(64, 0.25);
    host.serve(&model);
    let x: Vec<f32> = (0..64).map(|at| at as f32).collect();
    let row = (tensor(Element::F32, &[1, 64]), floats(&x));
    for shared in TRANSPORTS {
        let shapes = Shapes(vec![vec![1, 64]]);
        host.say(&ToWorker::Sample { model: model.hash, shapes });
        host.report();
        let mut client = host.client(&model, shared);
        let answer = client.run(std::slice::from_ref(&row)).unwrap().outputs();
        let (inputs, outputs, file) = host.sample();
        assert_eq!(read_place(&file, &inputs[0]), row.1);
        assert_eq!(read_place(&file, &outputs[0]), answer[0].1);
        let (outcome, results) = host.trial(model.hash, &inputs, &file, 3);
        let Outcome::Ran { compile_us: None, run_us, outputs } = outcome else { panic!("{outcome:?}") };
        assert_eq!(run_us.len(), 3);
        assert_eq!(read_place(&results.unwrap(), &outputs[0]), answer[0].1);
        // One sample was asked for, and one came.
        client.run(std::slice::from_ref(&row)).unwrap();
        let mut wrong = inputs.clone();
        wrong[0].dims = vec![64, 1];
        let (outcome, _) = host.trial(model.hash, &wrong, &file, 1);
        assert!(matches!(&outcome, Outcome::NotRun { reason } if reason.contains("64x1")), "{outcome:?}");
    }
    let elsewhere = onnx::plus_one().hash;
    let (outcome, _) = host.trial(elsewhere, &[], &onnx::memfd(&[1], rustix::fs::SealFlags::empty()), 1);
    assert!(matches!(&outcome, Outcome::NotRun { reason } if reason.contains("not loaded")));
}

#[test]
fn bound_sessions_make_room_and_say_so() {
    let Some(library) = openvino() else { return };
    let host = Host::spawn(lighter_devices::ane::control::WorkerConfig {
        provider: Provider::OpenVino,
        bind_shapes: true,
        max_bound: 1,
        ..config(library)
    });
    let model = onnx::product(64, 0.25);
    host.load(&model).unwrap();
    let file = onnx::memfd(&floats(&[1.0; 128]), rustix::fs::SealFlags::empty());
    let place = |rows: u64| lighter_devices::ane::control::TensorPlace {
        dtype: 1,
        dims: vec![rows, 64],
        offset: 0,
        bytes: rows * 256,
    };
    let (outcome, results) = host.trial(model.hash, &[place(1)], &file, 2);
    let Outcome::Ran { compile_us: Some(_), outputs, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(read_place(&results.unwrap(), &outputs[0]), floats(&[16.0; 64]));
    let (outcome, _) = host.trial(model.hash, &[place(1)], &file, 1);
    assert!(matches!(outcome, Outcome::Ran { compile_us: None, .. }), "compiled once");
    let first = Shapes(vec![vec![1, 64]]);
    host.say(&ToWorker::Approve { model: model.hash, shapes: first.clone() });
    let mut client = host.client(&model, true);
    let row = (tensor(Element::F32, &[1, 64]), floats(&[1.0; 64]));
    assert_eq!(client.run(std::slice::from_ref(&row)).unwrap().outputs()[0].1, floats(&[16.0; 64]));
    host.trial(model.hash, &[place(2)], &file, 1);
    host.expect("eviction", |message, _| match message {
        FromWorker::Evicted { shapes, .. } => (*shapes == first).then_some(()),
        _ => None,
    });
    client.send_run(&[row]);
    assert_eq!(host.back(client.number).1, Wants::Shapes(first));
}

#[test]
fn an_answer_that_does_not_fit_the_ring_waits_for_a_larger_one() {
    let Some(host) = Host::start(|_| {}) else { return };
    let repeats: Vec<u8> = [1_i64, 2048].iter().flat_map(|value| value.to_le_bytes()).collect();
    let repeats = constant("repeats", Element::I64, &[2], &repeats);
    let ports = |name| [port(name, Element::F32, &[Some(1), None])];
    let tile = node("Tile", &["x", "repeats"], &["y"], &[]);
    let model = TestModel::new(&[tile], &[repeats], &[], &ports("x"), &ports("y"));
    host.serve(&model);
    for shared in TRANSPORTS {
        let mut client = host.client(&model, shared);
        for length in [1024, 2, 3000] {
            let x = (tensor(Element::F32, &[1, length]), floats(&vec![3.0; length as usize]));
            let outputs = client.run(&[x]).unwrap().outputs();
            assert_eq!(outputs[0].0.dims(), [1, length * 2048]);
            assert_eq!(outputs[0].1, floats(&vec![3.0; length as usize * 2048]));
        }
    }
    // A ring may also be replaced between runs.
    let mut client = host.client(&model, true);
    let x = (tensor(Element::F32, &[1, 2]), floats(&[3.0; 2]));
    client.run(std::slice::from_ref(&x)).unwrap();
    client.replace_ring(8 << 20, 1);
    assert_eq!(client.run(&[x]).unwrap().outputs()[0].1, floats(&[3.0; 4096]));
}

#[test]
fn a_forgotten_model_is_gone_with_its_streams() {
    let Some(host) = Host::start(|_| {}) else { return };
    let (sum, rows) = (onnx::plus_one(), onnx::rows());
    host.serve(&sum);
    host.serve(&rows);
    let held = host.report().model_bytes;
    let mut clients: Vec<Client> = TRANSPORTS.map(|shared| host.client(&sum, shared)).into();
    clients.iter_mut().for_each(|client| add_up(client, &[1.0]));
    host.say(&ToWorker::Forget { model: sum.hash });
    clients.iter().for_each(Client::wait_closed);
    host.expect("forgotten", |message, _| match message {
        FromWorker::Forgotten { model } => (*model == sum.hash).then_some(()),
        _ => None,
    });
    let counters = host.report();
    assert_eq!((counters.streams_open, counters.model_bytes < held), (0, true));
    let client = host.client(&sum, false);
    let error = host.end_of(client.number).unwrap();
    assert!(error.ends_with("is not loaded"), "{error}");
    let mut other = host.client(&rows, true);
    assert_eq!(other.run(&[index(&[0])]).unwrap().outputs()[0].1, floats(&[0.0, 1.0]));
}

#[test]
fn a_run_without_end_is_seen_and_ends_with_its_model() {
    let Some(host) = Host::start(|_| {}) else { return };
    let rounds = onnx::rounds();
    host.serve(&rounds);
    let trips = |count: i64| (tensor(Element::I64, &[]), count.to_le_bytes().to_vec());
    for shared in TRANSPORTS {
        host.serve(&rounds);
        let mut client = host.client(&rounds, shared);
        assert_eq!(client.run(&[trips(3)]).unwrap().outputs()[0].1, floats(&[3.0]));
        assert_eq!(host.oldest_run_us(), None);
        client.send_run(&[trips(i64::MAX)]);
        while host.oldest_run_us().is_none_or(|us| us < 20_000) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        host.say(&ToWorker::Forget { model: rounds.hash });
        host.end_of(client.number);
        host.expect("forgotten", |message, _| matches!(message, FromWorker::Forgotten { .. }).then_some(()));
    }
}

#[test]
fn many_streams_at_a_time_get_their_own_answers() {
    let Some(host) = Host::start(|config| config.max_streams = 8) else { return };
    let sum = onnx::plus_one();
    host.serve(&sum);
    let clients: Vec<Client> = (0..8).map(|at| host.client(&sum, at % 2 == 0)).collect();
    let over = host.client(&sum, false);
    assert_eq!(host.end_of(over.number).unwrap(), "more than 8 streams are open");
    std::thread::scope(|scope| {
        for (at, mut client) in clients.into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..50 {
                    let values = vec![(at * 1000 + round) as f32; 1 + (round * 37) % 5000];
                    add_up(&mut client, &values);
                }
            });
        }
    });
    assert_eq!(host.report().runs, 400);
}

#[test]
fn a_client_that_leaves_ends_its_stream_only() {
    let Some(host) = Host::start(|_| {}) else { return };
    let sum = onnx::plus_one();
    host.serve(&sum);
    let mut stays = host.client(&sum, true);
    for shared in TRANSPORTS {
        let mut client = host.client(&sum, shared);
        add_up(&mut client, &[1.0]);
        let number = client.number;
        drop(client);
        assert_eq!(host.end_of(number), None);
        add_up(&mut stays, &[2.0]);
    }
}

/// How often the threads of a process have been put to sleep and woken.
fn switches(pid: u32) -> u64 {
    let of = |task: std::path::PathBuf| -> u64 {
        let status = std::fs::read_to_string(task.join("status")).unwrap_or_default();
        let lines = status.lines().filter_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        lines.filter_map(|count| count.trim().parse::<u64>().ok()).sum()
    };
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.map(|task| of(task.unwrap().path())).sum()
}

#[test]
fn nothing_moves_in_a_worker_without_runs() {
    let Some(host) = Host::start(|config| config.threads = 2) else { return };
    let sum = onnx::plus_one();
    host.serve(&sum);
    let mut clients: Vec<Client> = TRANSPORTS.map(|shared| host.client(&sum, shared)).into();
    clients.iter_mut().for_each(|client| add_up(client, &[1.0; 10_000]));
    // The last counters come once, a moment after the last run.
    host.expect("counters", |message, _| match message {
        FromWorker::Counters(counters) => (counters.runs == 2).then_some(()),
        _ => None,
    });
    let pid = host.child.lock().unwrap().id();
    std::thread::sleep(std::time::Duration::from_millis(200));
    let before = switches(pid);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(switches(pid), before, "a thread woke up");
    clients.iter_mut().for_each(|client| add_up(client, &[1.0]));
}

#[test]
fn a_library_that_cannot_be_used_is_named() {
    if stock().is_none() {
        return;
    }
    let failed = |config| {
        let host = Host::spawn_unheard(config);
        let reason = host.expect("failure", |message, _| match message {
            FromWorker::Failed { reason } => Some(reason.clone()),
            _ => None,
        });
        host.child.lock().unwrap().wait().unwrap();
        // It ended with an error, as it must.
        std::mem::forget(host);
        reason
    };
    let reason = failed(config("/nowhere/libonnxruntime.so".into()));
    assert!(reason.starts_with("cannot load ONNX Runtime from /nowhere/libonnxruntime.so"), "{reason}");
    let mut coreml = config(stock().unwrap());
    coreml.provider = Provider::CoreMl;
    let reason = failed(coreml);
    assert!(reason.contains("has no CoreMLExecutionProvider"), "{reason}");
    let mut old = config(stock().unwrap());
    old.version = 99;
    assert!(failed(old).contains("speaks version 99"));
}
