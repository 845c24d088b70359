// SPDX-License-Identifier: MIT OR Apache-2.0
//! Letting go of models: those that no stream uses when room is needed, and those that a user has had forgotten.

use super::super::control::{ModelHash, ToWorker};
use super::choice::EngineIndex;
use super::live::Live;
use super::route::Entry;
use super::warden::Warden;

impl Warden {
    /// Lets go of models that no stream uses.
    pub(super) fn forget_unused(&mut self) {
        let unused: Vec<ModelHash> =
            self.models.keys().filter(|model| !self.is_used(model)).copied().collect();
        for model in unused {
            self.forget(&model);
        }
    }

    fn is_used(&self, model: &ModelHash) -> bool {
        let has_stream = |live: &Live| live.streams.values().any(|one| one == model);
        self.models.get(model).is_some_and(|entry| !entry.waiting.is_empty())
            || self.trials.is_about(model)
            || self.workers.values().any(has_stream)
    }

    fn forget(&mut self, model: &ModelHash) {
        self.drop_trials(model);
        self.models.remove(model);
        let engines: Vec<EngineIndex> = self.workers.keys().copied().collect();
        for engine in engines {
            let Some(live) = self.workers.get_mut(&engine) else { continue };
            live.approved.retain(|(one, _)| one != model);
            if live.models.remove(model).is_some() {
                let sent = live.say(ToWorker::Forget { model: *model }, Vec::new());
                self.check_sent(engine, sent);
            }
        }
    }

    /// Looks whether a user has had a model forgotten: then all is begun anew with it.
    pub(super) fn notice_forgotten(&mut self) {
        if self.models.is_empty() || !self.shared.journal_changed() {
            return;
        }
        let gone: Vec<ModelHash> = {
            let journal = self.shared.journal();
            let known = journal.fold().models();
            let is_gone = |(_, entry): &(&ModelHash, &Entry)| !known.contains_key(&entry.journal_id);
            self.models.iter().filter(is_gone).map(|(model, _)| *model).collect()
        };
        for model in gone {
            self.begin_again(model);
        }
    }

    fn begin_again(&mut self, model: ModelHash) {
        tracing::info!(container = self.container, %model, "model forgotten");
        if !self.is_used(&model) {
            return self.forget(&model);
        }
        self.drop_trials(&model);
        let Some(entry) = self.models.get_mut(&model) else { return };
        let shapes = std::mem::take(&mut entry.shapes);
        entry.latest = None;
        if let Some(entry) = self.models.get(&model) {
            self.note_model(entry);
        }
        let engines: Vec<EngineIndex> = self.workers.keys().copied().collect();
        for (shapes, engine) in shapes.keys().flat_map(|shapes| engines.iter().map(move |one| (shapes, *one)))
        {
            self.recall(engine, model, shapes);
        }
    }
}
