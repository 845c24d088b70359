// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model in this worker: its file, its ports, its compiled sessions.
//!
//! Where shapes are bound there is a session for each, the least recently used of which makes room for another;
//! else one session with the declared shapes serves all. Sessions are compiled one at a time, because providers do
//! not bear more, and are computed on one run at a time where the provider is not the processor.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use lighter_frames::{MODEL_ALIGNMENT, Port};

use super::engine::Engine;
use super::memory::{MemoryError, Sealed};
use super::policy::Policy;
use super::proto;
use crate::ane::control::{FromWorker, Model, ModelHash, Provider, Shapes};
use crate::ane::ort::{Input, ModelBytes, OrtError, Output, Session, Stop};
use crate::text::with_causes;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ModelError {
    /// Its file.
    #[error("the model's file cannot be used")]
    File(#[from] MemoryError),
    /// Its sizes.
    #[error("a model of {proto_bytes} and {weights_bytes} bytes does not fit its file")]
    Sizes {
        /// The proto.
        proto_bytes: u64,
        /// The weights.
        weights_bytes: u64,
    },
    /// A port of a type that does not travel.
    #[error("port {0:?} has a type that does not travel")]
    Port(String),
}

/// A compiled model.
#[derive(Debug)]
pub(super) struct Compiled {
    engine: Arc<Engine>,
    session: Session,
    /// Held for a run, where the provider bears one at a time.
    turn: Option<Mutex<()>>,
    pub(super) compile_us: u64,
}

impl Drop for Compiled {
    fn drop(&mut self) {
        self.engine.counters.sessions.fetch_sub(1, Relaxed);
    }
}

impl Compiled {
    /// Runs it; says how long the engine took.
    pub(super) fn run(
        &self,
        inputs: &[Input<'_>],
        stop: Option<&Stop>,
    ) -> Result<(Vec<Output>, u64), OrtError> {
        let _turn = self.turn.as_ref().map(lock);
        let start = Instant::now();
        let outputs = self.session.run(inputs, stop)?;
        Ok((outputs, micros(start)))
    }
}

/// A session, or why there is none.
type Slot = Arc<OnceLock<Result<Arc<Compiled>, String>>>;

/// Sessions with bound shapes, the most recently used last.
#[derive(Debug, Default)]
struct Bound(Vec<(Shapes, Slot)>);

impl Bound {
    /// The place for a session, and whose place it took.
    fn place(&mut self, shapes: &Shapes, most: usize) -> (Slot, Option<Shapes>) {
        if let Some(at) = self.0.iter().position(|(there, _)| there == shapes) {
            let entry = self.0.remove(at);
            let slot = Arc::clone(&entry.1);
            self.0.push(entry);
            return (slot, None);
        }
        let gone = (self.0.len() >= most.max(1)).then(|| self.0.remove(0).0);
        let slot = Slot::default();
        self.0.push((shapes.clone(), Arc::clone(&slot)));
        (slot, gone)
    }
}

/// A model.
#[derive(Debug)]
pub(super) struct LoadedModel {
    pub(super) hash: ModelHash,
    pub(super) inputs: Vec<Port>,
    pub(super) outputs: Vec<Port>,
    engine: Arc<Engine>,
    file: Sealed,
    proto_bytes: usize,
    weights_offset: usize,
    policy: Mutex<Policy>,
    checked: OnceLock<Result<(), String>>,
    declared: Mutex<Slot>,
    bound: Mutex<Bound>,
    forgotten: AtomicBool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

impl LoadedModel {
    /// Maps a model. Takes no longer for a large one.
    pub(super) fn new(engine: &Arc<Engine>, model: &Model, file: &OwnedFd) -> Result<Self, ModelError> {
        let Model { proto_bytes, weights_bytes, .. } = *model;
        let sizes = || ModelError::Sizes { proto_bytes, weights_bytes };
        let offset = proto_bytes.checked_next_multiple_of(MODEL_ALIGNMENT).ok_or_else(sizes)?;
        let file_bytes = offset.checked_add(weights_bytes).ok_or_else(sizes)?;
        let file = Sealed::new(file, file_bytes)?;
        let number = |bytes: u64| usize::try_from(bytes).map_err(|_| sizes());
        let ports = |ports: &[crate::ane::control::ModelPort]| {
            let port = |port: &crate::ane::control::ModelPort| {
                port.port().ok_or_else(|| ModelError::Port(port.name.clone()))
            };
            ports.iter().map(port).collect::<Result<Vec<Port>, _>>()
        };
        let loaded = Self {
            hash: model.model,
            inputs: ports(&model.inputs)?,
            outputs: ports(&model.outputs)?,
            engine: Arc::clone(engine),
            file,
            proto_bytes: number(proto_bytes)?,
            weights_offset: number(offset)?,
            policy: Mutex::default(),
            checked: OnceLock::new(),
            declared: Mutex::default(),
            bound: Mutex::default(),
            forgotten: AtomicBool::new(false),
        };
        engine.counters.model_bytes.fetch_add(file_bytes, Relaxed);
        Ok(loaded)
    }

    fn proto(&self) -> &[u8] {
        self.file.bytes().get(..self.proto_bytes).unwrap_or_default()
    }

    pub(super) fn policy(&self) -> MutexGuard<'_, Policy> {
        lock(&self.policy)
    }

    /// The last holder tells the service.
    pub(super) fn forget(&self) {
        self.forgotten.store(true, Relaxed);
    }

    /// The session for runs of these shapes, compiled when it is not there.
    ///
    /// # Errors
    /// In the provider's words.
    pub(super) fn session(&self, shapes: &Shapes) -> Result<Arc<Compiled>, String> {
        if !self.engine.config.bind_shapes {
            let slot = Arc::clone(&*lock(&self.declared));
            return slot.get_or_init(|| self.compile(None)).clone();
        }
        let most = usize::try_from(self.engine.config.max_bound).unwrap_or(usize::MAX);
        let (slot, gone) = lock(&self.bound).place(shapes, most);
        if let Some(gone) = gone
            && self.policy().evict(&gone)
        {
            self.engine.link.say(&FromWorker::Evicted { model: self.hash, shapes: gone }, &[]);
        }
        slot.get_or_init(|| self.compile(Some(shapes))).clone()
    }

    /// Looks the model through, once. Nothing is compiled that was not.
    ///
    /// # Errors
    /// When something in it leads out of it.
    pub(super) fn check(&self) -> Result<(), String> {
        let check = || proto::check(self.proto()).map_err(|error| error.to_string());
        self.checked.get_or_init(check).clone()
    }

    /// Whether [`Self::session`] would have nothing to compile.
    pub(super) fn is_compiled(&self, shapes: &Shapes) -> bool {
        if !self.engine.config.bind_shapes {
            return lock(&self.declared).get().is_some();
        }
        lock(&self.bound).0.iter().any(|(there, slot)| there == shapes && slot.get().is_some())
    }

    /// Drops a session, so that the next run compiles another. ONNX Runtime's allocator takes no large request for
    /// good once it has refused an absurd one, and a worker outlives the container's process that made it.
    pub(super) fn renew(&self, shapes: &Shapes, old: &Arc<Compiled>) {
        let is_old = |slot: &Slot| matches!(slot.get(), Some(Ok(there)) if Arc::ptr_eq(there, old));
        let mut declared = lock(&self.declared);
        if is_old(&declared) {
            *declared = Slot::default();
        }
        lock(&self.bound).0.retain(|(of, slot)| of != shapes || !is_old(slot));
    }

    fn compile(&self, shapes: Option<&Shapes>) -> Result<Arc<Compiled>, String> {
        self.check()?;
        let _one = lock(&self.engine.compiling);
        let start = Instant::now();
        let inputs = shapes.map_or_else(|| self.inputs.clone(), |all| proto::bound(&self.inputs, &all.0));
        // A provider that keeps what it compiled must not take one model, or one shape of it, for another.
        let key = format!("{}-{}", self.hash, shapes.map_or_else(String::new, shape_key));
        let keys = self.engine.setup.provider.cache_keys();
        let metadata: Vec<(&str, &str)> = keys.iter().map(|name| (*name, key.as_str())).collect();
        let proto = [self.proto(), &proto::tail(&inputs, &metadata)].concat();
        let weights = self.file.bytes().get(self.weights_offset..).unwrap_or_default();
        let bytes = ModelBytes { proto: &proto, weights, inputs: &self.inputs, outputs: &self.outputs };
        let session =
            Session::new(&self.engine.ort, &self.engine.setup, bytes).map_err(|error| with_causes(&error))?;
        self.engine.counters.sessions.fetch_add(1, Relaxed);
        let exclusive = self.engine.setup.provider.provider != Provider::Cpu;
        let turn = exclusive.then(Mutex::default);
        let engine = Arc::clone(&self.engine);
        Ok(Arc::new(Compiled { engine, session, turn, compile_us: micros(start) }))
    }
}

/// Shapes as a part of a file's name: letters and digits, and not too many.
fn shape_key(shapes: &Shapes) -> String {
    blake3::hash(shapes.to_string().as_bytes()).to_hex().chars().take(32).collect()
}

impl Drop for LoadedModel {
    fn drop(&mut self) {
        let bytes = u64::try_from(self.file.bytes().len()).unwrap_or(0);
        self.engine.counters.model_bytes.fetch_sub(bytes, Relaxed);
        if self.forgotten.load(Relaxed) {
            // Sessions go before the service hears of it: it may count on the memory.
            *lock(&self.declared) = Slot::default();
            lock(&self.bound).0.clear();
            self.engine.link.say(&FromWorker::Forgotten { model: self.hash }, &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_makes_room() {
        let shapes = |dim: u64| Shapes(vec![vec![dim]]);
        let mut bound = Bound::default();
        let (first, _) = bound.place(&shapes(1), 2);
        assert_eq!(bound.place(&shapes(2), 2).1, None);
        assert!(Arc::ptr_eq(&bound.place(&shapes(1), 2).0, &first), "used again");
        assert_eq!(bound.place(&shapes(3), 2).1, Some(shapes(2)));
        assert_eq!(bound.place(&shapes(3), 2).1, None);
        assert_eq!(bound.place(&shapes(4), 0).1, Some(shapes(1)));
    }
}
