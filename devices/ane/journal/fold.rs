// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a journal's lines say in the end. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{End, Key, Line};
use crate::ane::control::ModelHash;

/// Most models that are remembered; the longest unseen are forgotten first.
const MAX_MODELS: usize = 4096;
/// Most different keys of one model; the shapes of a model may be many.
const MAX_KEYS: usize = 256;
/// For how long times are believed: machines get other work, drivers get better.
const TIMES_LAST_S: u64 = 7 * 24 * 3600;

/// What is known of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelFacts {
    /// Its own name; may be empty.
    pub label: String,
    /// Length of its proto.
    pub proto_bytes: u64,
    /// Length of its weights.
    pub weights_bytes: u64,
    /// When a line about it was last written.
    pub seen_s: u64,
    /// What was tried with it.
    pub records: BTreeMap<Key, Record>,
    /// What was chosen, by shapes.
    pub chosen: BTreeMap<String, Chosen>,
}

/// The engine that was chosen for a model's shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// What.
    pub key: Key,
    /// When.
    pub at_s: u64,
}

/// What is known of one key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// Attempts that have not ended, as far as the journal knows.
    pub open: u32,
    /// Attempts that ended otherwise than with an answer.
    pub failures: u32,
    /// The last end.
    pub last: Option<End>,
    /// When the last line was written.
    pub at_s: u64,
}

/// Whether an engine is to be tried.
#[derive(Debug, Clone, PartialEq)]
pub enum Advice {
    /// Nothing speaks against it.
    Try,
    /// Its answers were right, and these were the times: the engine's and the processor's.
    Known {
        /// Its least time.
        us: u64,
        /// The processor's.
        cpu_us: u64,
    },
    /// Leave it out.
    Skip {
        /// Why.
        reason: String,
    },
}

/// All that the lines say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fold {
    models: BTreeMap<ModelHash, ModelFacts>,
    unreadable: u64,
}

impl Fold {
    /// Takes one more line.
    pub fn add(&mut self, line: &Line) {
        match line {
            Line::Model { at_s, model, label, proto_bytes, weights_bytes } => {
                let facts = self.facts(*model, *at_s);
                facts.label.clone_from(label);
                (facts.proto_bytes, facts.weights_bytes) = (*proto_bytes, *weights_bytes);
            }
            Line::Attempt { at_s, key } => {
                let record = self.record(key, *at_s);
                record.open = record.open.saturating_add(1);
            }
            Line::Ended { at_s, key, end } => {
                let record = self.record(key, *at_s);
                record.open = record.open.saturating_sub(1);
                if !matches!(end, End::Agreed { .. }) {
                    record.failures = record.failures.saturating_add(1);
                }
                record.last = Some(end.clone());
            }
            Line::Chosen { at_s, key } => {
                let facts = self.facts(key.model, *at_s);
                if facts.chosen.len() < MAX_KEYS || facts.chosen.contains_key(&key.shapes) {
                    facts.chosen.insert(key.shapes.clone(), Chosen { key: key.clone(), at_s: *at_s });
                }
            }
            Line::Forgot { model, .. } => {
                self.models.remove(model);
            }
        }
    }

    /// Counts a line that could not be read.
    pub fn add_unreadable(&mut self) {
        self.unreadable += 1;
    }

    /// Lines that could not be read.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }

    /// The models, by hash.
    #[must_use]
    pub fn models(&self) -> &BTreeMap<ModelHash, ModelFacts> {
        &self.models
    }

    /// The models whose hash begins with these digits or whose label is this.
    #[must_use]
    pub fn find(&self, name: &str) -> Vec<ModelHash> {
        let is_meant = |(hash, facts): &(&ModelHash, &ModelFacts)| {
            name.len() >= 4 && hash.to_string().starts_with(name) || !name.is_empty() && facts.label == name
        };
        self.models.iter().filter(is_meant).map(|(hash, _)| *hash).collect()
    }

    /// Whether to try, when `attempts` may fail in all. `running` of the open attempts are under way elsewhere and
    /// have not crashed.
    #[must_use]
    pub fn advice(&self, key: &Key, attempts: u32, running: u32, now_s: u64) -> Advice {
        let record = self.models.get(&key.model).and_then(|facts| facts.records.get(key));
        let Some(record) = record else { return Advice::Try };
        if let Some(End::Wrong { text }) = &record.last {
            return Advice::Skip { reason: format!("it answered wrongly: {text}") };
        }
        let failed = record.failures.saturating_add(record.open.saturating_sub(running));
        if failed >= attempts {
            let how = match &record.last {
                Some(End::Failed { text } | End::Crashed { text } | End::Hung { text }) => text.as_str(),
                _ => "the service ended while it was tried",
            };
            return Advice::Skip { reason: format!("it failed {failed} times: {how}") };
        }
        match record.last {
            Some(End::Agreed { us: Some(us), cpu_us: Some(cpu_us), .. })
                if now_s.saturating_sub(record.at_s) < TIMES_LAST_S =>
            {
                Advice::Known { us, cpu_us }
            }
            _ => Advice::Try,
        }
    }

    fn facts(&mut self, model: ModelHash, at_s: u64) -> &mut ModelFacts {
        if !self.models.contains_key(&model) && self.models.len() >= MAX_MODELS {
            let oldest = self.models.iter().min_by_key(|(_, facts)| facts.seen_s).map(|(hash, _)| *hash);
            if let Some(oldest) = oldest {
                self.models.remove(&oldest);
            }
        }
        let facts = self.models.entry(model).or_default();
        facts.seen_s = facts.seen_s.max(at_s);
        facts
    }

    fn record(&mut self, key: &Key, at_s: u64) -> &mut Record {
        let records = &mut self.facts(key.model, at_s).records;
        if !records.contains_key(key) && records.len() >= MAX_KEYS {
            let oldest = records.iter().min_by_key(|(_, record)| record.at_s).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                records.remove(&oldest);
            }
        }
        let record = records.entry(key.clone()).or_default();
        record.at_s = record.at_s.max(at_s);
        record
    }

    /// Lines that say the same.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        let mut hashes: BTreeSet<(u64, ModelHash)> = BTreeSet::new();
        hashes.extend(self.models.iter().map(|(hash, facts)| (facts.seen_s, *hash)));
        for (at_s, model) in hashes {
            let Some(facts) = self.models.get(&model) else { continue };
            lines.push(Line::Model {
                at_s,
                model,
                label: facts.label.clone(),
                proto_bytes: facts.proto_bytes,
                weights_bytes: facts.weights_bytes,
            });
            for (key, record) in &facts.records {
                let at_s = record.at_s;
                let attempt = || Line::Attempt { at_s, key: key.clone() };
                let failed = matches!(record.last, Some(ref end) if !matches!(end, End::Agreed { .. }));
                let earlier = record.failures.saturating_sub(u32::from(failed));
                for _ in 0..earlier {
                    let end = End::Failed { text: "an earlier attempt".to_owned() };
                    lines.extend([attempt(), Line::Ended { at_s, key: key.clone(), end }]);
                }
                if let Some(end) = &record.last {
                    lines.extend([attempt(), Line::Ended { at_s, key: key.clone(), end: end.clone() }]);
                }
                lines.extend((0..record.open).map(|_| attempt()));
            }
            for chosen in facts.chosen.values() {
                lines.push(Line::Chosen { at_s: chosen.at_s, key: chosen.key.clone() });
            }
        }
        lines
    }
}
