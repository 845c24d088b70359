// SPDX-License-Identifier: MIT OR Apache-2.0
//! A worker without an engine, for the tests of the ane service: it doubles numbers, and misbehaves as it is told.
//!
//! The variable `ENGINES` says what there is and how it behaves, as `cuda=fast tensorrt=wrong`; `real` makes it an
//! ordinary worker and probe. The label of a model is not seen here; a model of one byte cannot be loaded.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::exit,
    reason = "a test program"
)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lighter_devices::ane::control::{
    Bytes, FromWorker, Handover, Model, ModelHash, Outcome, Shapes, TensorPlace, ToWorker, Trial,
    WORKER_VERSION, Wants, WorkerCounters,
};
use lighter_frames::{Answer, HEADER_BYTES, Header, Message, Run, Tensor};
use lighter_wire::{recv, send};
use rustix::fs::{MemfdFlags, memfd_create};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let engines = std::env::var("ENGINES").unwrap_or_default();
    let control = || std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    if engines == "real" {
        match args[0].as_str() {
            "probe" => lighter_devices::ane::probe::answer().unwrap(),
            _ => lighter_devices::ane::worker::run(control()).unwrap(),
        }
        return;
    }
    let engines: BTreeMap<String, String> = engines
        .split_whitespace()
        .map(|word| word.split_once('=').unwrap())
        .map(|(a, b)| (a.into(), b.into()))
        .collect();
    if args[0] == "probe" {
        let found: Vec<String> = engines
            .keys()
            .map(|name| format!(r#"{{"provider":"{name}","device":"","description":"test"}}"#))
            .collect();
        println!(r#"{{"devices":{{"version":"1.99.0","devices":[{}]}}}}"#, found.join(","));
        return;
    }
    let control = control();
    let Some((ToWorker::Configure(config), _)) = recv::<ToWorker>(&control).unwrap() else {
        panic!("no configuration")
    };
    let how = engines[config.provider.as_str()].clone();
    match how.as_str() {
        "abort" => {
            eprintln!("terminate called without reason");
            std::process::abort();
        }
        "never" => std::thread::sleep(Duration::from_secs(600)),
        "rubbish" => {
            rustix::io::write(&control, b"{\"fine\":1}").unwrap();
            std::thread::sleep(Duration::from_secs(600));
        }
        _ => {}
    }
    let worker = Arc::new(Worker { control, how, state: Mutex::default() });
    worker.say(
        &FromWorker::Ready { version: WORKER_VERSION, ort_version: "1.99.0".into(), providers: Vec::new() },
        &[],
    );
    while let Some((message, descriptors)) = recv::<ToWorker>(&worker.control).unwrap() {
        worker.take(message, descriptors);
    }
}

struct Worker {
    control: OwnedFd,
    how: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    approved: HashSet<(ModelHash, Shapes)>,
    all: HashSet<ModelHash>,
    samples: HashSet<(ModelHash, Shapes)>,
    models: HashMap<ModelHash, Model>,
    counters: WorkerCounters,
    oldest_run_us: Option<u64>,
}

impl Worker {
    fn say(&self, message: &FromWorker, descriptors: &[OwnedFd]) {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        send(&self.control, message, &borrowed).unwrap();
    }

    fn take(self: &Arc<Self>, message: ToWorker, mut descriptors: Vec<OwnedFd>) {
        let mut state = self.state.lock().unwrap();
        match message {
            ToWorker::Configure(_) => panic!("configured twice"),
            ToWorker::Load(model) => {
                let hash = model.model;
                match self.how.as_str() {
                    "crash-load" => std::process::abort(),
                    "hang-load" => return,
                    "fail-load" => {
                        let reason = "no kernel for this".to_owned();
                        return self.say(&FromWorker::LoadFailed { model: hash, reason }, &[]);
                    }
                    _ if model.proto_bytes == 1 => {
                        let reason = "it is no model".to_owned();
                        return self.say(&FromWorker::LoadFailed { model: hash, reason }, &[]);
                    }
                    _ => {}
                }
                state.models.insert(hash, model);
                self.say(&FromWorker::Loaded { model: hash, compile_us: 5 }, &[]);
            }
            ToWorker::ApproveAll { model } => drop(state.all.insert(model)),
            ToWorker::Approve { model, shapes } => drop(state.approved.insert((model, shapes))),
            ToWorker::Recall { model, shapes } => drop(state.approved.remove(&(model, shapes))),
            ToWorker::Sample { model, shapes } => drop(state.samples.insert((model, shapes))),
            ToWorker::Forget { model } => {
                state.models.remove(&model);
                self.say(&FromWorker::Forgotten { model }, &[]);
            }
            ToWorker::Report { seq } => {
                let (counters, oldest_run_us) = (state.counters.clone(), state.oldest_run_us);
                self.say(&FromWorker::Report { seq, counters, oldest_run_us }, &[]);
            }
            ToWorker::Trial(trial) => self.trial(&trial, &descriptors[0]),
            ToWorker::Stream(handover) => {
                assert!(
                    state.models.contains_key(&handover.model),
                    "a stream of a model that was not loaded"
                );
                let worker = Arc::clone(self);
                let socket = UnixStream::from(descriptors.remove(0));
                std::thread::spawn(move || worker.stream(&handover, socket));
            }
        }
    }

    fn trial(&self, trial: &Trial, file: &OwnedFd) {
        let done = |outcome, descriptors: &[OwnedFd]| {
            self.say(&FromWorker::TrialDone { trial: trial.trial, outcome }, descriptors);
        };
        match self.how.as_str() {
            "crash" => {
                eprintln!("assertion of the test engine failed");
                std::process::abort();
            }
            "hang" => return,
            "fail" => return done(Outcome::NotRun { reason: "no kernel for this".into() }, &[]),
            _ => {}
        }
        let us = match self.how.as_str() {
            "cpu" => 100,
            "slow" => 99,
            _ => 50,
        };
        let file = std::fs::File::from(file.try_clone().unwrap());
        let mut outputs = Vec::new();
        let out = memfd_create("outputs", MemfdFlags::CLOEXEC).unwrap();
        for place in &trial.inputs {
            let mut bytes = vec![0; usize::try_from(place.bytes).unwrap()];
            file.read_exact_at(&mut bytes, place.offset).unwrap();
            let doubled = self.compute(&bytes);
            let offset = outputs.iter().map(|place: &TensorPlace| place.bytes).sum();
            rustix::io::pwrite(&out, &doubled, offset).unwrap();
            outputs.push(TensorPlace { dtype: 1, dims: place.dims.clone(), offset, bytes: place.bytes });
        }
        if self.how == "short" {
            rustix::fs::ftruncate(&out, 1).unwrap();
        }
        let run_us = vec![us; usize::try_from(trial.runs).unwrap()];
        let descriptors = if trial.outputs {
            vec![out]
        } else {
            outputs.clear();
            Vec::new()
        };
        done(Outcome::Ran { compile_us: Some(7), run_us, outputs }, &descriptors);
    }

    fn compute(&self, bytes: &[u8]) -> Vec<u8> {
        let factor = if self.how == "wrong" { 3.0 } else { 2.0 };
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|raw| (f32::from_le_bytes(*raw) * factor).to_le_bytes())
            .collect()
    }

    fn stream(&self, handover: &Handover, mut socket: UnixStream) {
        let mut pending = handover.pending.clone().map_or_else(Vec::new, |bytes| bytes.0);
        loop {
            let Some((frame, run)) = next_run(&mut pending, &mut socket) else {
                self.say(&FromWorker::Ended { stream: handover.stream, error: None }, &[]);
                return;
            };
            let shapes = Shapes(run.inputs.iter().map(|tensor| tensor.dims().to_vec()).collect());
            let key = (handover.model, shapes.clone());
            let mut state = self.state.lock().unwrap();
            if !state.approved.contains(&key) && !state.all.contains(&handover.model) {
                drop(state);
                let stream = Handover { pending: Some(Bytes(frame)), ..handover.clone() };
                let message = FromWorker::HandBack { stream, wants: Wants::Shapes(shapes) };
                return self.say(&message, &[socket.into()]);
            }
            if self.how == "another" {
                drop(state);
                let stream = Handover { pending: Some(Bytes(frame)), ..handover.clone() };
                let reason = "it overflows".to_owned();
                let message = FromWorker::HandBack { stream, wants: Wants::Another { shapes, reason } };
                return self.say(&message, &[socket.into()]);
            }
            if self.how == "crash-run" {
                eprintln!("terminate called in the middle of a run");
                std::process::abort();
            }
            if self.how == "hang-run" {
                state.oldest_run_us = Some(3_600_000_000);
                drop(state);
                std::thread::sleep(Duration::from_secs(600));
                return;
            }
            let mut input = vec![0; usize::try_from(run.data_bytes()).unwrap()];
            socket.read_exact(&mut input).unwrap();
            let output = self.compute(&input);
            state.counters.runs += 1;
            state.counters.in_bytes += input.len() as u64;
            state.counters.out_bytes += output.len() as u64;
            if state.samples.remove(&key) {
                self.sampled(&key, &run.inputs[0], &input, &output);
            }
            self.say(&FromWorker::Counters(state.counters.clone()), &[]);
            drop(state);
            let answer = Message::Answer(Answer { run: run.run, data_offset: 0, outputs: run.inputs });
            let sent = socket.write_all(&answer.encode().unwrap()).and_then(|()| socket.write_all(&output));
            if sent.is_err() {
                self.say(&FromWorker::Ended { stream: handover.stream, error: Some("cut".into()) }, &[]);
                return;
            }
        }
    }

    fn sampled(&self, key: &(ModelHash, Shapes), tensor: &Tensor, input: &[u8], output: &[u8]) {
        let file = memfd_create("sample", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&file, &[input, output].concat(), 0).unwrap();
        let place = |offset| TensorPlace {
            dtype: tensor.element().number(),
            dims: tensor.dims().to_vec(),
            offset,
            bytes: tensor.bytes(),
        };
        let (inputs, outputs) = (vec![place(0)], vec![place(input.len() as u64)]);
        let (model, shapes) = key.clone();
        self.say(&FromWorker::Sampled { model, shapes, inputs, outputs }, &[file]);
    }
}

/// The next frame of a run, of what has been read before first.
fn next_run(pending: &mut Vec<u8>, socket: &mut UnixStream) -> Option<(Vec<u8>, Run)> {
    let mut fill = |bytes: &mut [u8]| {
        let from_pending = pending.len().min(bytes.len());
        bytes[..from_pending].copy_from_slice(&pending[..from_pending]);
        pending.drain(..from_pending);
        socket.read_exact(&mut bytes[from_pending..]).ok()
    };
    let mut header = [0; HEADER_BYTES];
    fill(&mut header)?;
    let parsed = Header::decode(&header).ok()?;
    let mut body = vec![0; usize::try_from(parsed.body_bytes).unwrap()];
    fill(&mut body)?;
    match Message::decode(parsed, &body).ok()? {
        Message::Run(run) => Some(([header.as_slice(), &body].concat(), run)),
        _ => None,
    }
}
