// SPDX-License-Identifier: MIT OR Apache-2.0
//! Performs the steps of choices ([`super::choice`]): one choice of a container at a time, in the background.
//!
//! A sample is the inputs and outputs of a real run, which the processor's worker sends; they stay in one memory file.
//! Nothing is tried that the journal does not know of beforehand: where it cannot be written, nothing is tried.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::super::config::{Class, Units};
use super::super::control::{ModelHash, Outcome, Shapes, TensorPlace, ToWorker, Trial};
use super::super::journal::{Advice, End, Line, now_s, shapes_text, short_text};
use super::super::probe::{AneEngine, is_meant};
use super::choice::{Candidate, Choice, EngineIndex, Event, Step};
use super::compare::Precision;
use super::judge::{Sample, judge, words_of};
use super::live::{LoadState, Phase};
use super::route::ShapeState;
use super::warden::Warden;

/// How long a sample is waited for while other choices wait.
const SAMPLE_LIMIT: Duration = Duration::from_secs(10);

/// All choices of one container.
#[derive(Debug, Default)]
pub(super) struct Trials {
    queue: VecDeque<(ModelHash, Shapes)>,
    current: Option<Current>,
    numbers: u64,
}

/// The choice that is under way.
#[derive(Debug)]
struct Current {
    model: ModelHash,
    shapes: Shapes,
    choice: Choice,
    sample: Option<Sample>,
    awaiting: Awaiting,
    deadline: Option<Instant>,
    /// What was found out, for the log.
    words: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaiting {
    Nothing,
    Sample,
    Load(EngineIndex),
    Trial { number: u64, engine: EngineIndex, compare: bool },
}

impl Trials {
    /// Puts a choice into the queue.
    pub(super) fn want(&mut self, model: ModelHash, shapes: Shapes) {
        self.queue.push_back((model, shapes));
        // Others wait: a model that does not run holds nobody up.
        if let Some(current) = &mut self.current
            && current.awaiting == Awaiting::Sample
        {
            current.deadline.get_or_insert(Instant::now() + SAMPLE_LIMIT);
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self { numbers: self.numbers, ..Self::default() };
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.current.as_ref()?.deadline
    }

    /// Whether a worker is needed for what is under way.
    pub(super) fn needs(&self, engine: EngineIndex, is_cpu: bool) -> bool {
        self.current.as_ref().is_some_and(|current| {
            let sampling = matches!(current.awaiting, Awaiting::Sample | Awaiting::Nothing);
            current.choice.trying() == Some(engine) || is_cpu && !sampling
        })
    }

    /// Whether an engine is being tried, so that its crash is the attempt's.
    pub(super) fn is_attempt_at(&self, engine: EngineIndex) -> bool {
        self.current.as_ref().is_some_and(|current| current.choice.trying() == Some(engine))
    }

    pub(super) fn is_about(&self, model: &ModelHash) -> bool {
        self.current
            .as_ref()
            .is_some_and(|current| current.model == *model && current.awaiting != Awaiting::Sample)
    }

    /// Leaves out whatever is about a model.
    fn drop_model(&mut self, model: &ModelHash) {
        self.queue.retain(|(one, _)| one != model);
        self.current.take_if(|current| current.model == *model);
    }
}

impl Warden {
    /// Begins the next choice when none is under way.
    pub(super) fn next_trial(&mut self) {
        while self.trials.current.is_none() {
            let Some((model, shapes)) = self.trials.queue.pop_front() else { return };
            let cpu = self.host.as_ref().map(|host| host.cpu);
            if cpu.and_then(|cpu| self.load_state(cpu, &model)) != Some(LoadState::Loaded) {
                self.begin_anew(model, &shapes);
                continue;
            }
            let Some((candidates, pinned)) = self.candidates(model, &shapes) else { continue };
            let (choice, step) = Choice::new(candidates, pinned);
            self.trials.current = Some(Current {
                model,
                shapes,
                choice,
                sample: None,
                awaiting: Awaiting::Nothing,
                deadline: None,
                words: Vec::new(),
            });
            self.go(step);
        }
    }

    /// The engines that may be tried, best first, and whether the user pinned them.
    fn candidates(&self, model: ModelHash, shapes: &Shapes) -> Option<(Vec<Candidate>, bool)> {
        let host = self.host.as_ref()?;
        let entry = self.models.get(&model)?;
        if entry.shapes.get(shapes) != Some(&ShapeState::Queued) {
            return None;
        }
        let device = match self.device.as_str() {
            crate::ALL => Units::Auto,
            name => Units::Engine(name.to_owned()),
        };
        let pins = [&device, &self.shared.config.units, &entry.units];
        let meant = |engine: &AneEngine| pins.iter().all(|units| is_meant(engine, units));
        let mut candidates = Vec::new();
        for (index, engine) in host.engines.iter().enumerate().filter(|(index, _)| *index != host.cpu) {
            if !meant(engine) {
                continue;
            }
            let key = self.key(index, entry, &shapes_text(shapes));
            let known = match self.shared.advice(&key) {
                Advice::Skip { reason } => {
                    tracing::info!(model = %key.model, shapes = key.shapes, engine = key.engine, reason, "left out");
                    continue;
                }
                Advice::Known { us, cpu_us } => Some((us, cpu_us)),
                Advice::Try => None,
            };
            candidates.push(Candidate { engine: index, known });
        }
        let pinned = !host.engines.get(host.cpu).is_some_and(meant);
        Some((candidates, pinned))
    }

    /// Performs a step and those that follow at once from it.
    fn go(&mut self, step: Step) {
        let mut next = Some(step);
        while let Some(step) = next.take() {
            let event = match step {
                Step::Sample => self.ask_sample(),
                Step::Attempt(engine) => self.attempt(engine),
                Step::Time(engine) => {
                    let cpu = self.host.as_ref().map(|host| host.cpu);
                    let engine_or_cpu = engine.or(cpu);
                    engine_or_cpu.and_then(|one| self.send_trial(one, false))
                }
                Step::Settled(engine) => {
                    self.settled(engine);
                    None
                }
            };
            next = event.and_then(|event| self.advance(event));
        }
    }

    fn happened(&mut self, event: Event) {
        if let Some(step) = self.advance(event) {
            self.go(step);
        }
    }

    /// Takes an event into the choice, and writes down what was found out.
    fn advance(&mut self, event: Event) -> Option<Step> {
        let current = self.trials.current.as_mut()?;
        let step = current.choice.take(event);
        let results = current.choice.results();
        let (model, shapes) = (current.model, current.shapes.clone());
        for result in results {
            let Some(entry) = self.models.get(&model) else { continue };
            let key = self.key(result.engine, entry, &shapes_text(&shapes));
            let label = entry.label.clone();
            let words = words_of(&result.end);
            if !matches!(result.end, End::Agreed { .. }) {
                let text = format!(
                    "{} is not used for model {label} ({}, {}): {words}",
                    key.engine, key.model, key.shapes
                );
                tracing::warn!(container = self.container, "{text}");
                self.shared.trouble(format!("container {}: {text}", self.container));
            }
            self.shared.end(&key, result.end);
            if let Some(current) = self.trials.current.as_mut() {
                current.words.push(format!("{}: {words}", key.engine));
            }
        }
        step
    }

    fn ask_sample(&mut self) -> Option<Event> {
        let cpu = self.host.as_ref()?.cpu;
        let others_wait = !self.trials.queue.is_empty();
        let current = self.trials.current.as_mut()?;
        let (model, shapes) = (current.model, current.shapes.clone());
        current.awaiting = Awaiting::Sample;
        current.deadline = others_wait.then(|| Instant::now() + SAMPLE_LIMIT);
        let Some(live) = self.workers.get_mut(&cpu) else { return Some(Event::Broken) };
        let sent = live.say(ToWorker::Sample { model, shapes }, Vec::new());
        self.check_sent(cpu, sent);
        None
    }

    pub(super) fn sampled(
        &mut self,
        engine: EngineIndex,
        model: ModelHash,
        shapes: &Shapes,
        inputs: Vec<TensorPlace>,
        outputs: Vec<TensorPlace>,
        descriptors: Vec<OwnedFd>,
    ) {
        let is_cpu = self.is_cpu(engine);
        let Some(current) = self.trials.current.as_mut() else { return };
        let is_due = is_cpu
            && current.awaiting == Awaiting::Sample
            && current.model == model
            && current.shapes == *shapes;
        let (true, Some(file)) = (is_due, descriptors.into_iter().next()) else { return };
        current.sample = Some(Sample { file, inputs, outputs });
        (current.awaiting, current.deadline) = (Awaiting::Nothing, None);
        self.happened(Event::Sampled);
    }

    /// Tries an engine: in the journal first.
    fn attempt(&mut self, engine: EngineIndex) -> Option<Event> {
        let current = self.trials.current.as_ref()?;
        let (model, shapes) = (current.model, shapes_text(&current.shapes));
        let key = self.key(engine, self.models.get(&model)?, &shapes);
        if !self.shared.begin(&key) {
            // Without the journal a crash would be repeated for ever.
            return Some(Event::Broken);
        }
        if self.load_state(engine, &model) == Some(LoadState::Loaded) {
            return self.send_trial(engine, true);
        }
        if self.load_state(engine, &model).is_none()
            && let Err(text) = self.load(engine, model)
        {
            return Some(Event::Bad(End::Failed { text: short_text(&text) }));
        }
        // A worker that starts has a limit of its own.
        let is_up = self.workers.get(&engine).is_some_and(|live| matches!(live.phase, Phase::Up));
        let deadline = is_up.then(|| Instant::now() + self.compile_limit());
        let current = self.trials.current.as_mut()?;
        (current.awaiting, current.deadline) = (Awaiting::Load(engine), deadline);
        None
    }

    fn compile_limit(&self) -> Duration {
        Duration::from_millis(self.shared.config.compile_limit_ms)
    }

    /// A worker takes messages from here on: what it was started for is under way.
    pub(super) fn trial_worker_ready(&mut self, engine: EngineIndex) {
        let deadline = Instant::now() + self.compile_limit();
        if let Some(current) = &mut self.trials.current
            && current.awaiting == Awaiting::Load(engine)
        {
            current.deadline = Some(deadline);
        }
    }

    pub(super) fn trial_loaded(&mut self, engine: EngineIndex, model: ModelHash) {
        let Some(current) = &self.trials.current else { return };
        if current.awaiting == Awaiting::Load(engine)
            && current.model == model
            && let Some(event) = self.send_trial(engine, true)
        {
            self.happened(event);
        }
    }

    pub(super) fn trial_not_loaded(&mut self, engine: EngineIndex, model: ModelHash, reason: &str) {
        let Some(current) = &self.trials.current else { return };
        if current.awaiting == Awaiting::Load(engine) && current.model == model {
            self.happened(Event::Bad(End::Failed { text: short_text(reason) }));
        }
    }

    /// Has a worker run the sample once: for its outputs, or for its time.
    fn send_trial(&mut self, engine: EngineIndex, compare: bool) -> Option<Event> {
        let config = &self.shared.config;
        let limit_ms = if compare { config.compile_limit_ms } else { 0 }.saturating_add(config.run_limit_ms);
        let is_cpu = self.is_cpu(engine);
        self.trials.numbers += 1;
        let number = self.trials.numbers;
        let failed = |is_cpu: bool, text: String| {
            Some(if is_cpu { Event::Broken } else { Event::Bad(End::Failed { text: short_text(&text) }) })
        };
        let current = self.trials.current.as_mut()?;
        let model = current.model;
        let Some(sample) = &current.sample else { return Some(Event::Broken) };
        let file = match sample.file.try_clone() {
            Ok(file) => file,
            Err(error) => return failed(is_cpu, format!("its sample cannot be passed on: {error}")),
        };
        let trial = Trial { trial: number, model, inputs: sample.inputs.clone(), runs: 1, outputs: compare };
        current.awaiting = Awaiting::Trial { number, engine, compare };
        current.deadline = Some(Instant::now() + Duration::from_millis(limit_ms));
        let Some(live) = self.workers.get_mut(&engine) else {
            return failed(is_cpu, "its worker is gone".to_owned());
        };
        let sent = live.say(ToWorker::Trial(trial), vec![file]);
        self.check_sent(engine, sent);
        None
    }

    pub(super) fn trial_done(
        &mut self,
        engine: EngineIndex,
        number: u64,
        outcome: Outcome,
        descriptors: &[OwnedFd],
    ) {
        let is_cpu = self.is_cpu(engine);
        let precision = self.precision(engine);
        let Some(current) = self.trials.current.as_mut() else { return };
        let Awaiting::Trial { number: due, engine: asked, compare } = current.awaiting else { return };
        if (due, asked) != (number, engine) {
            return;
        }
        (current.awaiting, current.deadline) = (Awaiting::Nothing, None);
        let event = match outcome {
            Outcome::NotCompiled { .. } | Outcome::NotRun { .. } if is_cpu => Event::Broken,
            Outcome::NotCompiled { reason } => {
                Event::Bad(End::Failed { text: format!("does not compile: {}", short_text(&reason)) })
            }
            Outcome::NotRun { reason } => {
                Event::Bad(End::Failed { text: format!("does not run: {}", short_text(&reason)) })
            }
            Outcome::Ran { compile_us, outputs, .. } if compare => {
                match (&current.sample, descriptors.first()) {
                    (Some(sample), Some(file)) => {
                        judge(sample, file, &outputs, precision, compile_us).unwrap_or_else(Event::Bad)
                    }
                    _ => Event::Bad(End::Failed { text: "sent no outputs".to_owned() }),
                }
            }
            Outcome::Ran { run_us, .. } => match run_us.into_iter().min() {
                Some(us) => Event::Timed(us),
                None if is_cpu => Event::Broken,
                None => Event::Bad(End::Failed { text: "sent no time".to_owned() }),
            },
        };
        self.happened(event);
    }

    fn precision(&self, engine: EngineIndex) -> Precision {
        match self.host.as_ref().and_then(|host| host.engines.get(engine)).map(|engine| engine.class) {
            Some(Class::Cpu) => Precision::Full,
            _ => Precision::Half,
        }
    }

    /// What is under way takes too long.
    pub(super) fn trial_late(&mut self) {
        let Some(current) = &mut self.trials.current else { return };
        match current.awaiting {
            Awaiting::Sample => {
                let (model, shapes) = (current.model, current.shapes.clone());
                self.trials.current = None;
                self.trials.queue.push_back((model, shapes));
            }
            Awaiting::Load(engine) | Awaiting::Trial { engine, .. } => {
                let text = "what it was asked took too long (ane.compile_limit_ms, ane.run_limit_ms)";
                self.hung(engine, text);
            }
            Awaiting::Nothing => current.deadline = None,
        }
    }

    /// A worker has broken: an attempt with it has failed, and without the processor there is no choice.
    pub(super) fn trial_lost(&mut self, engine: EngineIndex, end: End) {
        if self.trials.is_attempt_at(engine) {
            self.happened(Event::Bad(end));
        }
        if self.is_cpu(engine) {
            self.no_processor();
        }
    }

    /// The processor's worker is gone: all choices are begun anew with the next runs. That is no engine's fault.
    pub(super) fn no_processor(&mut self) {
        let current = self.trials.current.take();
        if let Some(current) = &current
            && let Some(engine) = current.choice.trying()
            && let Some(entry) = self.models.get(&current.model)
        {
            let key = self.key(engine, entry, &shapes_text(&current.shapes));
            self.shared.withdraw(&key);
        }
        let waiting = std::mem::take(&mut self.trials.queue);
        for (model, shapes) in
            current.map(|current| (current.model, current.shapes)).into_iter().chain(waiting)
        {
            self.begin_anew(model, &shapes);
        }
    }

    /// Leaves out whatever is under way about a model.
    pub(super) fn drop_trials(&mut self, model: &ModelHash) {
        if let Some(current) = self.trials.current.as_ref().filter(|current| current.model == *model)
            && let Some(engine) = current.choice.trying()
            && let Some(entry) = self.models.get(model)
        {
            self.shared.abandon(&self.key(engine, entry, &shapes_text(&current.shapes)));
        }
        self.trials.drop_model(model);
    }

    fn begin_anew(&mut self, model: ModelHash, shapes: &Shapes) {
        if let Some(state) = self.models.get_mut(&model).and_then(|entry| entry.shapes.get_mut(shapes)) {
            *state = ShapeState::Fresh;
        }
    }

    /// The end of a choice: from the next boundary of a run on, the chosen engine has these shapes.
    fn settled(&mut self, engine: Option<EngineIndex>) {
        let Some(current) = self.trials.current.take() else { return };
        let Some(cpu) = self.host.as_ref().map(|host| host.cpu) else { return };
        let Current { model, shapes, words, .. } = current;
        let Some(entry) = self.models.get_mut(&model) else { return };
        entry.shapes.insert(shapes.clone(), ShapeState::Settled(engine));
        if engine.is_some() {
            entry.latest = Some(shapes.clone());
        }
        let Some(entry) = self.models.get(&model) else { return };
        let key = self.key(engine.unwrap_or(cpu), entry, &shapes_text(&shapes));
        tracing::info!(
            container = self.container,
            model = %key.model,
            label = entry.label,
            shapes = key.shapes,
            engine = key.engine,
            found = words.join("; "),
            "engine chosen"
        );
        if !self.shared.is_chosen(&key) {
            self.shared.note(Line::Chosen { at_s: now_s(), key });
        }
        if let Some(engine) = engine
            && self.approve(engine, model, &shapes)
        {
            self.recall(cpu, model, &shapes);
        }
    }
}
