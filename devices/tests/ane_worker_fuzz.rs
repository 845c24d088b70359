// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random frames that are nearly right, by both transports, against a real ane worker: each ends at most its own
//! stream, and another client goes on. `LIGHTER_FUZZ_MESSAGES` says how many (a long run takes a million),
//! `LIGHTER_FUZZ_SEED` where to begin.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "tests"
)]

mod ane_harness;
mod dice;

use std::io::Write;

use ane_harness::client::Client;
use ane_harness::onnx::{self, TestModel};
use ane_harness::{Host, floats};
use dice::Dice;
use lighter_devices::ane::control::FromWorker;
use lighter_frames::{Element, Message, Ring, Run, Tensor, ring};

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    ane_harness::worker_child();
}

/// Inputs that mostly fit a model, with data that mostly make sense.
fn inputs(dice: &mut Dice, model: &TestModel) -> Vec<(Tensor, Vec<u8>)> {
    let mut all = Vec::new();
    for port in &model.inputs {
        let rank = port.dims.as_ref().map_or(1, Vec::len);
        let mut dims: Vec<u64> = (0..rank).map(|_| dice.pick(&[0, 1, 1, 2, 3, 8, 64, 500])).collect();
        if let Some(declared) = &port.dims {
            for (dim, declared) in dims.iter_mut().zip(declared) {
                if let lighter_frames::Dim::Fixed(fixed) = declared
                    && !dice.chance(10)
                {
                    *dim = *fixed;
                }
            }
        }
        if dice.chance(20) {
            dims.push(dice.below(3));
        }
        let element = if dice.chance(20) { dice.pick(Element::ALL) } else { port.element };
        let tensor = Tensor::new(element, dims).unwrap();
        let mut data = vec![0; tensor.bytes() as usize];
        for chunk in data.chunks_mut(8) {
            let value = match dice.below(6) {
                0 => dice.next(),
                1 => u64::MAX,
                2 => 7,
                _ => dice.below(5),
            };
            chunk.copy_from_slice(&value.to_le_bytes()[..chunk.len()]);
        }
        all.push((tensor, data));
    }
    if dice.chance(30) {
        all.pop();
    }
    all
}

/// Sends something; true while the stream may still be served.
fn attempt(dice: &mut Dice, client: &mut Client, model: &TestModel) -> bool {
    let inputs = inputs(dice, model);
    if !dice.chance(6) {
        return client.run(&inputs).is_some();
    }
    let tensors = inputs.iter().map(|(tensor, _)| tensor.clone()).collect();
    let data_offset = dice.pick(&[0, 0, 64, 1 << 20, 1 << 30]);
    let mut frame = match dice.below(8) {
        0 => Message::Bell.encode().unwrap(),
        1 => Message::Ring(Ring { bytes: ring::bytes_for(dice.below(1 << 22)).unwrap() }).encode().unwrap(),
        2 => Message::Have.encode().unwrap(),
        _ => Message::Run(Run { run: 1, data_offset, inputs: tensors }).encode().unwrap(),
    };
    if dice.chance(2) {
        let at = dice.below(frame.len() as u64) as usize;
        frame[at] ^= 1 << dice.below(8);
    }
    if dice.chance(3) {
        frame.truncate(dice.below(frame.len() as u64) as usize);
    }
    if client.ring.is_some() && dice.chance(2) {
        client.send_head(&frame);
        return client.reply().is_some();
    }
    // Where the data belong is anybody's guess after this: the stream is left to itself, and what is not read is not
    // waited for.
    client.socket.set_nonblocking(true).unwrap();
    let _ = client.socket.write_all(&frame);
    for (_, data) in inputs {
        let _ = client.socket.write_all(&data);
    }
    let _ = client.socket.shutdown(std::net::Shutdown::Write);
    false
}

#[test]
fn nearly_right_messages_harm_nobody_else() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let messages = number("LIGHTER_FUZZ_MESSAGES").unwrap_or(3000);
    let mut round = number("LIGHTER_FUZZ_SEED").unwrap_or(1);
    let Some(host) = Host::start(|config| config.max_run_bytes = 16 << 20) else { return };
    let models = [onnx::plus_one(), onnx::rows(), onnx::product(64, 0.5), onnx::identity(Element::Bool)];
    models.iter().for_each(|model| host.serve(model));
    let mut bystander = host.client(&models[0], true);
    let mut sent = 0;
    while sent < messages {
        let mut dice = Dice(round);
        let model = &models[dice.below(4) as usize];
        let mut client = host.client(model, dice.chance(2));
        let most = 1 + dice.below(60);
        for _ in 0..most {
            sent += 1;
            if !attempt(&mut dice, &mut client, model) {
                break;
            }
        }
        let left = client.number;
        drop(client);
        host.expect("the stream's end", |message, _| match message {
            FromWorker::Ended { stream, .. } => (*stream == left).then_some(()),
            FromWorker::HandBack { stream, .. } => (stream.stream == left).then_some(()),
            _ => None,
        });
        let one = (Tensor::new(Element::F32, vec![1]).unwrap(), floats(&[1.0]));
        let outputs = bystander.run(&[one]).expect("served").outputs();
        assert_eq!(outputs[0].1, floats(&[2.0]), "seed {round}");
        round += 1;
    }
    let counters = host.report();
    assert!(counters.runs > messages / 4, "most were answered: {counters:?}");
    eprintln!("{sent} messages: {} runs, {} refusals", counters.runs, counters.errors);
}
