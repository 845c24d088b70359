// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a run through an ane worker costs over the same run in this process: 602 KB in, 4 KB out, nothing to compute,
//! by shared memory and by stream, all in turns; what of it is the way there and back, by a run of four bytes; and
//! what a run in this process costs when the processor has done something else before it, as it has in a worker.
//!
//! usage: LIGHTER_TEST_ORT=FOLDER ane_overhead [RUNS]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "measuring"
)]

#[path = "../tests/ane_harness/mod.rs"]
mod ane_harness;

use std::collections::BTreeMap;
use std::io::{IoSlice, Write};
use std::time::{Duration, Instant};

use ane_harness::client::Client;
use ane_harness::{Host, onnx};
use lighter_devices::ane::control::Provider;
use lighter_devices::ane::ort::{Input, ModelBytes, Ort, ProviderSetup, Session, SessionSetup};
use lighter_frames::{Element, Message, Run, Tensor, ring};

fn main() {
    if std::env::var_os("LIGHTER_TEST_WORKER").is_some() {
        return ane_harness::worker_child();
    }
    let runs = std::env::args().nth(1).and_then(|runs| runs.parse().ok()).unwrap_or(4000_usize);
    let Some(host) = Host::start(|_| {}) else { return };
    let model = onnx::slice();
    host.serve(&model);
    let shape = Tensor::new(Element::F32, vec![1, 150_528]).unwrap();
    let data = vec![7_u8; usize::try_from(shape.bytes()).unwrap()];
    let frame = Message::Run(Run { run: 1, data_offset: 0, inputs: vec![shape.clone()] }).encode().unwrap();

    let session = in_process(&model);
    let mut copy = Vec::new();
    let mut local = || {
        let outputs = session.run(&[Input::new(&shape, &data).unwrap()], None).unwrap();
        copy.clear();
        copy.extend_from_slice(outputs[0].data().unwrap());
    };
    let mut shared = host.client(&model, true);
    let mut by_ring = || {
        shared.ring.as_ref().unwrap().write(ring::DATA, &data);
        shared.send_head(&frame);
        assert_eq!(shared.reply().unwrap().data[0].len(), 4096);
    };
    let mut stream = host.client(&model, false);
    let mut by_stream = || {
        send(&mut stream, &frame, &data);
        assert_eq!(stream.reply().unwrap().data[0].len(), 4096);
    };
    let (small, one) = (onnx::plus_one(), Tensor::new(Element::F32, vec![1]).unwrap());
    host.serve(&small);
    let tiny = Message::Run(Run { run: 1, data_offset: 0, inputs: vec![one] }).encode().unwrap();
    let (mut tiny_shared, mut tiny_stream) = (host.client(&small, true), host.client(&small, false));
    let mut tiny_by_ring = || {
        tiny_shared.send_head(&tiny);
        tiny_shared.reply().unwrap();
    };
    let mut tiny_by_stream = || {
        send(&mut tiny_stream, &tiny, &[0; 4]);
        tiny_stream.reply().unwrap();
    };
    let mut times: [Vec<Duration>; 6] = Default::default();
    // In blocks: a change from one to the other at each run would measure cold caches.
    for _ in 0..runs.div_ceil(100) {
        time(&mut times[0], &mut local);
        time(&mut times[1], &mut by_ring);
        time(&mut times[2], &mut by_stream);
        time(&mut times[3], &mut tiny_by_ring);
        time(&mut times[4], &mut tiny_by_stream);
        time_rested(&mut times[5], &mut local);
    }
    let base = median(&mut times[0]);
    let names = [
        "in this process",
        "shared memory",
        "stream",
        "shared memory, 4 bytes",
        "stream, 4 bytes",
        "in this process, rested",
    ];
    println!("microseconds of {runs} runs            least   median   median over in-process");
    for (name, times) in names.iter().zip(&mut times) {
        let middle = median(times);
        println!("{name:<24} {:14.1} {middle:8.1} {:8.1}", us(times[0]), middle - base);
    }
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn in_process(model: &onnx::TestModel) -> Session {
    let ort = Ort::open(&ane_harness::stock().unwrap()).unwrap();
    let provider = ProviderSetup { provider: Provider::Cpu, options: BTreeMap::new() };
    let setup = SessionSetup { provider, threads: 1, cache_dir: None };
    let proto = model.whole();
    let bytes = ModelBytes { proto: &proto, weights: &[], inputs: &model.inputs, outputs: &model.outputs };
    Session::new(&ort, &setup, bytes).unwrap()
}

fn time(into: &mut Vec<Duration>, run: &mut dyn FnMut()) {
    run();
    for _ in 0..100 {
        let start = Instant::now();
        run();
        into.push(start.elapsed());
    }
}

fn time_rested(into: &mut Vec<Duration>, run: &mut dyn FnMut()) {
    for _ in 0..100 {
        std::thread::sleep(Duration::from_micros(20));
        let start = Instant::now();
        run();
        into.push(start.elapsed());
    }
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    us(times[times.len() / 2])
}

/// Head and data without putting them together first.
fn send(stream: &mut Client, frame: &[u8], data: &[u8]) {
    let mut pieces = [IoSlice::new(frame), IoSlice::new(data)];
    let mut left = pieces.as_mut_slice();
    while !left.is_empty() {
        let sent = stream.socket.write_vectored(left).unwrap();
        IoSlice::advance_slices(&mut left, sent);
    }
}
