// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engine computes one model with one set of shapes. Pure: events in, the next step out.
//!
//! ```text
//!             sample          attempt           right        timed, 5 of each
//!  beginning ───────► sampled ───────► attempted ─────► timing ─────┐
//!                        ▲                │ wrong, failed,          │
//!                        │                ▼ crashed, hung           ▼
//!                        └── next candidate, if there is one ◄──────┘     none left ──► settled
//! ```
//! Meanwhile the processor answers. A candidate that answers wrongly is never timed. Of those that answer rightly the
//! one with the least time wins, and only when it is a tenth faster than the processor between whose runs its own were
//! taken: machines are noisy. A user who pins a class of engines or one engine gets the best that answers rightly,
//! however long it takes.

use super::super::journal::End;

/// Timed runs of each side.
pub(super) const ROUNDS: usize = 5;
/// A candidate wins with at most this share of the processor's time, in percent.
const WINS_BELOW_PERCENT: u64 = 90;

/// Number of an engine in the list of the host's engines.
pub(super) type EngineIndex = usize;

/// An engine that may compute the model, and what is known of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    pub(super) engine: EngineIndex,
    /// Times from an earlier time: (its own, the processor's).
    pub(super) known: Option<(u64, u64)>,
}

/// What is done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Have the processor's worker send the inputs and outputs of its next run.
    Sample,
    /// Load the model at this engine, run the sample there, compare.
    Attempt(EngineIndex),
    /// Take the time of one run: of the processor (`None`), or of an engine.
    Time(Option<EngineIndex>),
    /// Nothing more: this engine is chosen, or the processor.
    Settled(Option<EngineIndex>),
}

/// What has happened.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Event {
    /// The sample is there.
    Sampled,
    /// There will be no sample, or the processor itself cannot be timed.
    Broken,
    /// The candidate gave the processor's answer.
    Right {
        /// Largest difference.
        largest: f64,
        /// Time to compile.
        compile_us: Option<u64>,
    },
    /// It did not, in whatever way.
    Bad(End),
    /// The time of one run, as the last step asked for.
    Timed(u64),
}

/// How a candidate did, for the journal.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finished {
    pub(super) engine: EngineIndex,
    pub(super) end: End,
}

#[derive(Debug, Clone, PartialEq)]
enum Phase {
    Sampling,
    Attempting,
    Timing { largest: f64, compile_us: Option<u64>, own: Vec<u64>, cpu: Vec<u64> },
    Settled(Option<EngineIndex>),
}

/// The choice for one model and one set of shapes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    /// Best first.
    candidates: Vec<Candidate>,
    at: usize,
    /// Whether the user pinned the candidates.
    pinned: bool,
    phase: Phase,
    /// The best so far: engine, its time and the processor's.
    best: Option<(EngineIndex, u64, u64)>,
    finished: Vec<Finished>,
}

impl Choice {
    /// A choice among these, best first; the first step with it.
    pub(super) fn new(candidates: Vec<Candidate>, pinned: bool) -> (Self, Step) {
        let phase = if candidates.is_empty() { Phase::Settled(None) } else { Phase::Sampling };
        let mut choice = Self { candidates, at: 0, pinned, phase, best: None, finished: Vec::new() };
        choice.leave_out_slow();
        let step = match choice.phase {
            Phase::Settled(engine) => Step::Settled(engine),
            _ => Step::Sample,
        };
        (choice, step)
    }

    /// Candidates that are known to be slower than the processor need no attempt.
    fn leave_out_slow(&mut self) {
        if !self.pinned {
            self.candidates.retain(|candidate| candidate.known.is_none_or(|(own, cpu)| wins(own, cpu)));
            if self.candidates.is_empty() {
                self.phase = Phase::Settled(None);
            }
        }
    }

    /// The engine of the attempt or the times that are under way.
    pub(super) fn trying(&self) -> Option<EngineIndex> {
        match self.phase {
            Phase::Attempting | Phase::Timing { .. } => Some(self.candidates.get(self.at)?.engine),
            Phase::Sampling | Phase::Settled(_) => None,
        }
    }

    /// What was found out since the last call.
    pub(super) fn results(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.finished)
    }

    /// Takes an event in; an event that does not belong to the phase changes nothing and asks for nothing.
    pub(super) fn take(&mut self, event: Event) -> Option<Step> {
        let phase = std::mem::replace(&mut self.phase, Phase::Sampling);
        match (phase, event) {
            (Phase::Sampling, Event::Sampled) => Some(self.attempt()),
            (Phase::Sampling | Phase::Attempting | Phase::Timing { .. }, Event::Broken) => {
                Some(self.settle(None))
            }
            (Phase::Attempting, Event::Right { largest, compile_us }) => {
                Some(self.right(largest, compile_us))
            }
            (Phase::Attempting | Phase::Timing { .. }, Event::Bad(end)) => {
                self.finish(end);
                Some(self.next())
            }
            (Phase::Timing { largest, compile_us, mut own, mut cpu }, Event::Timed(us)) => {
                // The processor is first in each round.
                if cpu.len() == own.len() {
                    cpu.push(us)
                } else {
                    own.push(us)
                }
                if own.len() < ROUNDS {
                    let turn = (cpu.len() > own.len()).then(|| self.current()).flatten();
                    self.phase = Phase::Timing { largest, compile_us, own, cpu };
                    return Some(Step::Time(turn));
                }
                let least = |times: &[u64]| times.iter().copied().min().unwrap_or(u64::MAX);
                Some(self.timed(largest, compile_us, least(&own), least(&cpu)))
            }
            (phase, _) => {
                self.phase = phase;
                None
            }
        }
    }

    fn current(&self) -> Option<EngineIndex> {
        self.candidates.get(self.at).map(|candidate| candidate.engine)
    }

    fn attempt(&mut self) -> Step {
        match self.current() {
            Some(engine) => {
                self.phase = Phase::Attempting;
                Step::Attempt(engine)
            }
            None => {
                let chosen = self.best.map(|(engine, _, _)| engine);
                self.settle(chosen)
            }
        }
    }

    fn next(&mut self) -> Step {
        self.at += 1;
        self.attempt()
    }

    fn right(&mut self, largest: f64, compile_us: Option<u64>) -> Step {
        if self.pinned {
            self.finish(End::Agreed { largest, compile_us, us: None, cpu_us: None });
            let chosen = self.current();
            return self.settle(chosen);
        }
        match self.candidates.get(self.at).and_then(|candidate| candidate.known) {
            Some((own, cpu)) => self.timed(largest, compile_us, own, cpu),
            None => {
                self.phase = Phase::Timing { largest, compile_us, own: Vec::new(), cpu: Vec::new() };
                Step::Time(None)
            }
        }
    }

    fn timed(&mut self, largest: f64, compile_us: Option<u64>, own: u64, cpu: u64) -> Step {
        self.finish(End::Agreed { largest, compile_us, us: Some(own), cpu_us: Some(cpu) });
        if let Some(engine) = self.current()
            && wins(own, cpu)
            && self.best.is_none_or(|(_, best, best_cpu)| is_less(own, cpu, best, best_cpu))
        {
            self.best = Some((engine, own, cpu));
        }
        self.next()
    }

    fn finish(&mut self, end: End) {
        if let Some(engine) = self.current() {
            self.finished.push(Finished { engine, end });
        }
    }

    fn settle(&mut self, engine: Option<EngineIndex>) -> Step {
        self.phase = Phase::Settled(engine);
        Step::Settled(engine)
    }
}

fn wins(own_us: u64, cpu_us: u64) -> bool {
    u128::from(own_us) * 100 <= u128::from(cpu_us) * u128::from(WINS_BELOW_PERCENT)
}

/// Compares shares of the processor's time: two candidates were timed at different moments.
fn is_less(own: u64, cpu: u64, other: u64, other_cpu: u64) -> bool {
    u128::from(own) * u128::from(other_cpu) < u128::from(other) * u128::from(cpu)
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
