// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run's way through the engine, for streams and for trials.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use lighter_frames::{Failure, Tensor};

use super::engine::Engine;
use super::memory::{Buffer, Shared};
use super::model::{LoadedModel, micros};
use super::parcel;
use super::stream::length;
use crate::ane::control::{FromWorker, Outcome, Provider, Shapes, TensorPlace, Trial};
use crate::ane::ort::{Input, Output, Stop};
use crate::text::with_causes;

/// Most timed runs of one trial.
const MAX_RUNS: u32 = 100;

/// What came of a run.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Outputs.
    Outputs(Vec<Output>),
    /// The answer is that there is none.
    Refused(Failure, String),
    /// This provider has no answer; another may.
    Another(String),
}

/// Runs a model for a stream.
pub(super) fn compute(
    engine: &Engine,
    model: &LoadedModel,
    stream: u64,
    shapes: &Shapes,
    inputs: &[Input<'_>],
    stop: &Stop,
) -> Verdict {
    let is_last = engine.config.provider == Provider::Cpu;
    let refused =
        |failure, text| if is_last { Verdict::Refused(failure, text) } else { Verdict::Another(text) };
    let _running = engine.running(stream);
    let compiled = match model.session(shapes) {
        Ok(compiled) => compiled,
        // A model that compiles for some shapes and not for others fails for these only.
        Err(text) if engine.config.bind_shapes => return refused(Failure::Run, text),
        Err(text) => return refused(Failure::Model, text),
    };
    match compiled.run(inputs, Some(stop)) {
        Ok((outputs, us)) => {
            engine.counters.engine_us.fetch_add(us, Relaxed);
            Verdict::Outputs(outputs)
        }
        Err(error) => {
            let text = with_causes(&error);
            if is_about_memory(&text) {
                model.renew(shapes, &compiled);
            }
            refused(Failure::Run, text)
        }
    }
}

/// Whether a run failed for want of memory, as far as ONNX Runtime's words tell.
fn is_about_memory(text: &str) -> bool {
    ["alloc", "Alloc", "SafeInt"].iter().any(|word| text.contains(word))
}

/// Inputs in private memory. One that is not within is left out, which the session notices.
pub(super) fn gather<'a>(tensors: &'a [Tensor], offsets: &[usize], bytes: &'a [u8]) -> Vec<Input<'a>> {
    let input = |(tensor, offset): (&'a Tensor, &usize)| {
        Input::new(tensor, bytes.get(*offset..)?.get(..length(tensor))?)
    };
    tensors.iter().zip(offsets).filter_map(input).collect()
}

/// Where an input stands.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    /// In the worker's own memory.
    Private(usize),
    /// In the ring.
    Ring(usize),
}

/// Inputs in private memory and in a ring; `None` when one is not within.
pub(super) fn mixed<'a>(
    tensors: &'a [Tensor],
    sources: &[Source],
    private: &'a [u8],
    ring: &'a Shared,
) -> Option<Vec<Input<'a>>> {
    let input = |(tensor, source): (&'a Tensor, &Source)| match source {
        Source::Private(offset) => Input::new(tensor, private.get(*offset..)?.get(..length(tensor))?),
        Source::Ring(offset) => {
            let part = ring.part(*offset, length(tensor))?;
            // SAFETY: within the mapping, which lives as long as the borrow. Only floats are left in the ring, which
            // an engine computes with.
            Some(unsafe { Input::shared(tensor, part.as_ptr()) })
        }
    };
    tensors.iter().zip(sources).map(input).collect()
}

/// Sends inputs and outputs of a run to the service.
pub(super) fn send_sample(
    engine: &Engine,
    model: &LoadedModel,
    shapes: &Shapes,
    inputs: &[Tensor],
    data: &[&[u8]],
    outputs: &[Output],
) {
    let mut tensors: Vec<(&Tensor, &[u8])> = inputs.iter().zip(data.iter().copied()).collect();
    for output in outputs {
        match output.data() {
            Ok(data) => tensors.push((output.tensor(), data)),
            Err(error) => return tracing::warn!(%error, "a sample could not be taken"),
        }
    }
    match parcel::pack(&tensors) {
        Ok((file, mut places)) => {
            let outputs = places.split_off(inputs.len().min(places.len()));
            let (model, shapes) = (model.hash, shapes.clone());
            let message = FromWorker::Sampled { model, shapes, inputs: places, outputs };
            engine.link.say(&message, &[file.as_fd()]);
        }
        Err(error) => tracing::warn!(%error, "a sample could not be taken"),
    }
}

/// Runs a trial; says what came of it, with a file of its outputs where they were asked for.
pub(super) fn trial(
    engine: &Engine,
    model: &LoadedModel,
    trial: &Trial,
    file: &OwnedFd,
) -> (Outcome, Option<OwnedFd>) {
    let not_run = |reason: String| (Outcome::NotRun { reason }, None);
    let mut buffer = Buffer::default();
    let unpacked = parcel::unpack(&trial.inputs, file, engine.config.max_run_bytes, &mut buffer);
    let (tensors, offsets): (Vec<Tensor>, Vec<usize>) = match unpacked {
        Ok(unpacked) => unpacked.into_iter().unzip(),
        Err(error) => return not_run(with_causes(&error)),
    };
    let shapes = Shapes(tensors.iter().map(|tensor| tensor.dims().to_vec()).collect());
    let fits = tensors.len() == model.inputs.len();
    if !fits || !model.inputs.iter().zip(&tensors).all(|(port, tensor)| port.takes(tensor)) {
        return not_run(format!("inputs of shapes {shapes} do not fit the model"));
    }
    // Streams count up from 1, trials down from the end.
    let _running = engine.running(u64::MAX - trial.trial);
    let was_there = model.is_compiled(&shapes);
    let compiled = match model.session(&shapes) {
        Ok(compiled) => compiled,
        Err(reason) => return (Outcome::NotCompiled { reason }, None),
    };
    let compile_us = (!was_there).then_some(compiled.compile_us);
    let inputs = gather(&tensors, &offsets, buffer.bytes());
    let outputs = match compiled.run(&inputs, None) {
        Ok((outputs, _)) => outputs,
        Err(error) => return not_run(with_causes(&error)),
    };
    let mut run_us = Vec::new();
    for _ in 0..trial.runs.min(MAX_RUNS) {
        let start = Instant::now();
        match compiled.run(&inputs, None) {
            Ok(_) => run_us.push(micros(start)),
            Err(error) => return not_run(with_causes(&error)),
        }
    }
    match trial.outputs.then(|| pack_outputs(&outputs)).transpose() {
        Ok(None) => (Outcome::Ran { compile_us, run_us, outputs: Vec::new() }, None),
        Ok(Some((file, outputs))) => (Outcome::Ran { compile_us, run_us, outputs }, Some(file)),
        Err(reason) => not_run(reason),
    }
}

fn pack_outputs(outputs: &[Output]) -> Result<(OwnedFd, Vec<TensorPlace>), String> {
    let mut tensors = Vec::with_capacity(outputs.len());
    for output in outputs {
        tensors.push((output.tensor(), output.data().map_err(|error| with_causes(&error))?));
    }
    parcel::pack(&tensors).map_err(|error| with_causes(&error))
}
