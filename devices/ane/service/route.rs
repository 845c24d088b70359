// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a container's streams go.
//!
//! The processor's worker has a stream first. A run of shapes that it has not seen comes back to the service, which
//! thereby learns of them, lets the processor run them, and begins to look for a better engine. Once one is chosen, the
//! processor is told to give these shapes back, and streams move at the boundaries of their runs:
//!
//! ```text
//! new ──► processor ──other shapes──► service ──► processor, or the engine chosen for these shapes ──┐
//!                                        ▲───────────────── other shapes, evicted, failed ───────────┘
//! ```

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use lighter_frames::{Loaded, Message, Refusal};

use super::super::config::Units;
use super::super::control::{Handover, Model, ModelHash, ModelPort, Shapes, ToWorker, Wants};
use super::super::journal::{Advice, End, Key, Line, now_s, short_text};
use super::choice::EngineIndex;
use super::frames_io::Frames;
use super::live::{Live, LoadState};
use super::models::{ModelFile, identity};
use super::setup::{Ready, refuse};
use super::warden::Warden;
use crate::text::cut;

/// Shapes of one model for which an engine is chosen; a model with more keeps the rest on the processor.
const MAX_SHAPES: usize = 16;

/// A model that the container uses.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) file: Arc<ModelFile>,
    /// As workers are told of it.
    pub(super) model: Model,
    /// Its name in the journal, which does not depend on pins.
    pub(super) journal_id: ModelHash,
    pub(super) label: String,
    pub(super) units: Units,
    /// Streams that wait until the processor has it.
    pub(super) waiting: Vec<Waiting>,
    pub(super) shapes: BTreeMap<Shapes, ShapeState>,
    /// The shapes that an engine was chosen for last: where a new stream is likely to be right.
    pub(super) latest: Option<Shapes>,
    /// Whether the processor runs whatever shapes come.
    pub(super) takes_all: bool,
    /// Whether loading it is written in the journal as an attempt.
    pub(super) load_key: Option<Key>,
}

/// A stream that waits.
#[derive(Debug)]
pub(super) enum Waiting {
    /// A new one.
    New { stream: u64, socket: OwnedFd },
    /// One that came back from a worker.
    Back { handover: Handover, descriptors: Vec<OwnedFd>, shapes: Shapes },
}

/// What is known of one model's shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShapeState {
    /// Nothing is chosen, and nothing is under way.
    Fresh,
    /// An engine is looked for.
    Queued,
    /// This engine is chosen; the processor where there is none.
    Settled(Option<EngineIndex>),
}

impl Warden {
    /// A stream is set up: it waits for the processor, or goes on at once.
    pub(super) fn ready(&mut self, ready: Ready) {
        let Ready { stream, socket, model, file, units } = ready;
        if self.host.is_none() {
            match self.shared.engines.get(&self.shared.program, &self.shared.config) {
                Ok(host) => self.host = Some(host),
                Err(missing) => return self.refuse(stream, &socket, &missing.reason),
            }
        }
        let key = identity(&file.hash, &model, Some(&units.to_string()));
        if !self.models.contains_key(&key) {
            let ports = |ports: &[_]| ports.iter().map(ModelPort::new).collect();
            let entry = Entry {
                journal_id: identity(&file.hash, &model, None),
                model: Model {
                    model: key,
                    proto_bytes: model.proto_bytes,
                    weights_bytes: model.weights_bytes,
                    inputs: ports(&model.inputs),
                    outputs: ports(&model.outputs),
                },
                label: cut(&model.label),
                units,
                file,
                waiting: Vec::new(),
                shapes: BTreeMap::new(),
                latest: None,
                takes_all: false,
                load_key: None,
            };
            self.note_model(&entry);
            self.models.insert(key, entry);
        }
        self.wait_or_place(key, Waiting::New { stream, socket });
    }

    /// A model that the journal does not know is written into it.
    pub(super) fn note_model(&self, entry: &Entry) {
        let mut journal = self.shared.journal();
        if journal.fold().models().contains_key(&entry.journal_id) {
            return;
        }
        let line = Line::Model {
            at_s: now_s(),
            model: entry.journal_id,
            label: entry.label.clone(),
            proto_bytes: entry.model.proto_bytes,
            weights_bytes: entry.model.weights_bytes,
        };
        if let Err(error) = journal.append(&[line]) {
            tracing::warn!(%error, "the journal does not take a model");
        }
    }

    fn wait_or_place(&mut self, model: ModelHash, waiting: Waiting) {
        let Some(cpu) = self.host.as_ref().map(|host| host.cpu) else { return };
        if self.load_state(cpu, &model) == Some(LoadState::Loaded) {
            return self.place(model, waiting);
        }
        match self.load_on_processor(cpu, model) {
            Ok(()) => {
                if let Some(entry) = self.models.get_mut(&model) {
                    entry.waiting.push(waiting);
                }
            }
            Err((refusal, reason)) => self.turn_away(waiting, refusal, &reason),
        }
    }

    fn turn_away(&mut self, waiting: Waiting, refusal: Refusal, reason: &str) {
        match waiting {
            Waiting::New { stream, socket } => {
                refuse(&socket, refusal, reason);
                self.refused(stream, reason);
            }
            // Its client sees the end of the stream, and begins anew.
            Waiting::Back { handover, .. } => self.refused(handover.stream, reason),
        }
    }

    /// Has the processor's worker load a model, unless it is known to break it.
    fn load_on_processor(&mut self, cpu: EngineIndex, model: ModelHash) -> Result<(), (Refusal, String)> {
        if self.load_state(cpu, &model).is_some() {
            return Ok(());
        }
        let Some(entry) = self.models.get(&model) else { return Ok(()) };
        let key = self.key(cpu, entry, "");
        match self.shared.advice(&key) {
            Advice::Skip { reason } => {
                return Err((
                    Refusal::Model,
                    format!("the host's ONNX Runtime does not take this model: {reason}"),
                ));
            }
            Advice::Known { .. } => {}
            Advice::Try => {
                let known = self.shared.journal().fold().models().get(&key.model).is_some_and(|facts| {
                    matches!(
                        facts.records.get(&key).and_then(|record| record.last.as_ref()),
                        Some(End::Agreed { .. })
                    )
                });
                if !known {
                    self.shared.begin(&key);
                    if let Some(entry) = self.models.get_mut(&model) {
                        entry.load_key = Some(key);
                    }
                }
            }
        }
        self.load(cpu, model).map_err(|reason| (Refusal::Busy, reason))
    }

    /// Sends a model to an engine's worker, which is started where need be.
    pub(super) fn load(&mut self, engine: EngineIndex, model: ModelHash) -> Result<(), String> {
        if let Err(reason) = self.start(engine) {
            self.shared.trouble(format!("container {}: {reason}", self.container));
            return Err(reason);
        }
        let (Some(entry), Some(live)) = (self.models.get(&model), self.workers.get_mut(&engine)) else {
            return Err("it is gone".to_owned());
        };
        let file =
            entry.file.file.try_clone().map_err(|error| format!("its file cannot be passed on: {error}"))?;
        let sent = live.say(ToWorker::Load(entry.model.clone()), vec![file]);
        live.models.insert(model, LoadState::Loading);
        if self.check_sent(engine, sent) { Ok(()) } else { Err("its worker takes no message".to_owned()) }
    }

    /// A worker has a model.
    pub(super) fn loaded(&mut self, engine: EngineIndex, model: ModelHash, compile_us: u64) {
        let Some(live) = self.workers.get_mut(&engine) else { return };
        let Some(state) = live.models.get_mut(&model) else { return };
        *state = LoadState::Loaded;
        if !self.is_cpu(engine) {
            return self.trial_loaded(engine, model);
        }
        let Some(entry) = self.models.get_mut(&model) else { return };
        let waiting = std::mem::take(&mut entry.waiting);
        if let Some(key) = entry.load_key.take() {
            let compile_us = Some(compile_us);
            self.shared.end(&key, End::Agreed { largest: 0.0, compile_us, us: None, cpu_us: None });
        }
        for waiting in waiting {
            self.place(model, waiting);
        }
    }

    /// A worker cannot use a model.
    pub(super) fn load_failed(&mut self, engine: EngineIndex, model: ModelHash, reason: &str) {
        if let Some(live) = self.workers.get_mut(&engine) {
            live.models.remove(&model);
        }
        if !self.is_cpu(engine) {
            return self.trial_not_loaded(engine, model, reason);
        }
        let Some(mut entry) = self.models.remove(&model) else { return };
        if let Some(key) = entry.load_key.take() {
            self.shared.end(&key, End::Failed { text: short_text(reason) });
        }
        for waiting in std::mem::take(&mut entry.waiting) {
            self.turn_away(waiting, Refusal::Model, reason);
        }
    }

    /// Passes a stream to the worker that serves it now. The processor has the model.
    fn place(&mut self, model: ModelHash, waiting: Waiting) {
        let (handover, descriptors, shapes) = match waiting {
            Waiting::New { stream, socket } => {
                let Some(entry) = self.models.get(&model) else { return };
                let hash = entry.file.hash;
                let frames = Frames::new(&socket, self.shared.config.setup_limit());
                if let Err(error) = frames.send(&Message::Loaded(Loaded { hash })) {
                    tracing::debug!(container = self.container, stream, %error, "stream ended in its set-up");
                    return;
                }
                (Handover { stream, model, ring: false, pending: None }, vec![socket], None)
            }
            Waiting::Back { handover, descriptors, shapes } => (handover, descriptors, Some(shapes)),
        };
        let engine = self.engine_for(model, shapes.as_ref());
        let Some(engine) = engine else { return };
        if self.is_cpu(engine)
            && let Some(shapes) = shapes
            && !self.approve(engine, model, &shapes)
        {
            return;
        }
        let look = Instant::now() + self.look_after();
        let Some(live) = self.workers.get_mut(&engine) else { return };
        let stream = handover.stream;
        let sent = live.say(ToWorker::Stream(handover), descriptors);
        live.streams.insert(stream, model);
        live.look_at.get_or_insert(look);
        self.check_sent(engine, sent);
    }

    /// The engine that was chosen, while its worker may serve these shapes; else the processor.
    fn engine_for(&self, model: ModelHash, shapes: Option<&Shapes>) -> Option<EngineIndex> {
        let cpu = self.host.as_ref()?.cpu;
        let entry = self.models.get(&model)?;
        let chosen = shapes.or(entry.latest.as_ref()).and_then(|shapes| {
            let Some(ShapeState::Settled(Some(engine))) = entry.shapes.get(shapes) else { return None };
            let live = self.workers.get(engine)?;
            live.approved.contains(&(model, shapes.clone())).then_some(*engine)
        });
        Some(chosen.unwrap_or(cpu))
    }

    /// Lets a worker serve shapes.
    pub(super) fn approve(&mut self, engine: EngineIndex, model: ModelHash, shapes: &Shapes) -> bool {
        let Some(live) = self.workers.get_mut(&engine) else { return false };
        let message = ToWorker::Approve { model, shapes: shapes.clone() };
        let sent = live.say(message, Vec::new());
        live.approved.insert((model, shapes.clone()));
        // Streams for it are on their way.
        live.idle_since = Instant::now();
        self.check_sent(engine, sent)
    }

    /// Has a worker give shapes back.
    pub(super) fn recall(&mut self, engine: EngineIndex, model: ModelHash, shapes: &Shapes) {
        let Some(live) = self.workers.get_mut(&engine) else { return };
        live.approved.remove(&(model, shapes.clone()));
        if live.models.contains_key(&model) {
            let sent = live.say(ToWorker::Recall { model, shapes: shapes.clone() }, Vec::new());
            self.check_sent(engine, sent);
        }
    }

    /// A stream comes back from a worker.
    pub(super) fn hand_back(
        &mut self,
        engine: EngineIndex,
        stream: Handover,
        wants: Wants,
        descriptors: Vec<OwnedFd>,
    ) {
        let Some(live) = self.workers.get_mut(&engine) else { return };
        let was_there = live.streams.remove(&stream.stream) == Some(stream.model);
        if live.streams.is_empty() {
            live.idle_since = Instant::now();
        }
        // The socket, the ring, and what was read besides the pending bytes.
        let due = 1 + usize::from(stream.ring);
        if !was_there || !(due..=due + 1).contains(&descriptors.len()) {
            return self.crashed(engine, "it hands back what it does not have");
        }
        let (model, number) = (stream.model, stream.stream);
        let shapes = match wants {
            Wants::Setup => {
                // Its client sees the end of the stream.
                return self.warn(&format!("stream {number} ended: it sent what belongs into a set-up"));
            }
            Wants::Another { reason, .. } if self.is_cpu(engine) => {
                return self.warn(&format!("stream {number} ended: {}", cut(&reason)));
            }
            Wants::Another { shapes, reason } => {
                self.failed_in_use(engine, model, &shapes, &End::Failed { text: short_text(&reason) });
                shapes
            }
            Wants::Shapes(shapes) => shapes,
        };
        self.seen(model, &shapes);
        self.wait_or_place(model, Waiting::Back { handover: stream, descriptors, shapes });
    }

    /// A model runs with these shapes: looks for an engine for them, once.
    fn seen(&mut self, model: ModelHash, shapes: &Shapes) {
        let Some(cpu) = self.host.as_ref().map(|host| host.cpu) else { return };
        let Some(entry) = self.models.get_mut(&model) else { return };
        let known = entry.shapes.get(shapes).copied();
        if known.is_some_and(|state| state != ShapeState::Fresh) {
            return;
        }
        if known.is_none() && entry.shapes.len() >= MAX_SHAPES {
            if !std::mem::replace(&mut entry.takes_all, true)
                && let Some(live) = self.workers.get_mut(&cpu)
            {
                let sent = live.say(ToWorker::ApproveAll { model }, Vec::new());
                self.check_sent(cpu, sent);
            }
            return;
        }
        entry.shapes.insert(shapes.clone(), ShapeState::Queued);
        self.trials.want(model, shapes.clone());
    }

    /// A worker has no session for these shapes any more: the model has too many. They stay on the processor.
    pub(super) fn evicted(&mut self, engine: EngineIndex, model: ModelHash, shapes: &Shapes) {
        if let Some(live) = self.workers.get_mut(&engine) {
            live.approved.remove(&(model, shapes.clone()));
        }
        if let Some(state) = self.models.get_mut(&model).and_then(|entry| entry.shapes.get_mut(shapes))
            && *state == ShapeState::Settled(Some(engine))
        {
            *state = ShapeState::Settled(None);
        }
    }

    /// A chosen engine fails at what it was chosen for: the processor has it again, and the journal knows.
    fn failed_in_use(&mut self, engine: EngineIndex, model: ModelHash, shapes: &Shapes, end: &End) {
        let Some(entry) = self.models.get_mut(&model) else { return };
        let Some(state @ ShapeState::Settled(Some(_))) = entry.shapes.get_mut(shapes) else { return };
        if *state != ShapeState::Settled(Some(engine)) {
            return;
        }
        *state = ShapeState::Fresh;
        let Some(entry) = self.models.get(&model) else { return };
        let key = self.key(engine, entry, &super::super::journal::shapes_text(shapes));
        self.shared.begin(&key);
        self.shared.end(&key, end.clone());
        let (End::Failed { text } | End::Crashed { text } | End::Hung { text } | End::Wrong { text }) = end
        else {
            return;
        };
        let text = format!("{} failed at model {} ({}): {text}", key.engine, entry.label, key.shapes);
        tracing::warn!(container = self.container, model = %key.model, "{text}");
        self.shared.trouble(format!("container {}: {text}", self.container));
        self.recall(engine, model, shapes);
    }

    /// A worker broke: what it was chosen for is chosen anew, and what it may have broken at is written down.
    pub(super) fn lost_worker(&mut self, engine: EngineIndex, live: &Live, text: &str, is_hung: bool) {
        let end = |text: &str| {
            let text = short_text(text);
            if is_hung { End::Hung { text } } else { End::Crashed { text } }
        };
        if self.is_cpu(engine) {
            let loading: Vec<ModelHash> = self.models.keys().copied().collect();
            for model in loading {
                let Some(entry) = self.models.get_mut(&model) else { continue };
                if let Some(key) = entry.load_key.take() {
                    self.shared.end(&key, end(text));
                }
                // Their clients see the end of the stream, and begin anew.
                entry.waiting.clear();
            }
        } else if !self.trials.is_attempt_at(engine) {
            let used: Vec<(ModelHash, Shapes)> = live
                .approved
                .iter()
                .filter(|(model, _)| live.streams.values().any(|one| one == model))
                .cloned()
                .collect();
            for (model, shapes) in used {
                self.failed_in_use(engine, model, &shapes, &end(text));
            }
        }
        self.left_worker(engine);
        self.trial_lost(engine, end(text));
    }

    /// A worker is there no more: nothing is chosen for it any longer.
    pub(super) fn left_worker(&mut self, engine: EngineIndex) {
        for entry in self.models.values_mut() {
            for state in entry.shapes.values_mut() {
                if *state == ShapeState::Settled(Some(engine)) {
                    *state = ShapeState::Fresh;
                }
            }
            if self.host.as_ref().is_some_and(|host| host.cpu == engine) {
                entry.takes_all = false;
            }
        }
    }

    /// What names an attempt in the journal.
    pub(super) fn key(&self, engine: EngineIndex, entry: &Entry, shapes: &str) -> Key {
        let engine = self.host.as_ref().and_then(|host| host.engines.get(engine));
        Key {
            model: entry.journal_id,
            shapes: shapes.to_owned(),
            engine: engine.map(|engine| engine.name.clone()).unwrap_or_default(),
            build: engine.map(|engine| self.shared.build(engine)).unwrap_or_default(),
        }
    }
}
