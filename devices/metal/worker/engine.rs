// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all clients of a worker share: the device, the limits, the counters.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use crate::metal::control::{WorkerConfig, WorkerCounters};
use crate::metal::ggml::{Backend, Device, EngineError, Ggml, LoadError};

/// Why the engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// ggml could not be loaded.
    #[error("ggml could not be loaded")]
    Load(#[from] LoadError),
    /// ggml does not offer the device.
    #[error("ggml offers no device {engine}, only {offered}: is its backend package installed?")]
    NoDevice {
        /// What was configured.
        engine: String,
        /// What there is.
        offered: String,
    },
    /// The device does not open.
    #[error("the engine could not be opened")]
    Device(#[from] EngineError),
}

/// A count that goes back when dropped.
#[derive(Debug)]
pub(super) struct Counted {
    engine: Arc<Engine>,
    of: fn(&Engine) -> &AtomicU64,
    amount: u64,
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.of)(&self.engine).fetch_sub(self.amount, Relaxed);
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) streams_open: AtomicU64,
    pub(super) streams_total: AtomicU64,
    pub(super) calls: AtomicU64,
    pub(super) graphs: AtomicU64,
    pub(super) in_bytes: AtomicU64,
    pub(super) out_bytes: AtomicU64,
    pub(super) held_bytes: AtomicU64,
    pub(super) shared_bytes: AtomicU64,
    pub(super) engine_us: AtomicU64,
    pub(super) errors: AtomicU64,
}

/// The device and what clients share of it.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) ggml: Arc<Ggml>,
    pub(super) device: Device,
    /// Computes what the device does not; `None` where the device is the host's processor itself.
    pub(super) fallback: Option<Device>,
    /// Buffers are plain memory of this process.
    pub(super) host: bool,
    pub(super) alignment: u64,
    pub(super) max_buffer_bytes: u64,
    pub(super) config: WorkerConfig,
    pub(super) counters: Counters,
    /// Backends are opened one at a time: not every driver bears two.
    opening: Mutex<()>,
}

impl Engine {
    /// Loads ggml and finds the device.
    ///
    /// # Errors
    /// When one of both is not there.
    pub(super) fn open(config: WorkerConfig) -> Result<Arc<Self>, OpenError> {
        let ggml =
            Ggml::open(&config.base_library, &config.registry_library, config.backends_dir.as_deref())?;
        let devices = ggml.devices();
        let device = devices.iter().find(|device| device.name() == config.engine).cloned();
        let device = device.ok_or_else(|| OpenError::NoDevice {
            engine: config.engine.clone(),
            offered: devices.iter().map(Device::name).collect::<Vec<_>>().join(", "),
        })?;
        let fallback = if device.is_cpu() { None } else { devices.into_iter().find(Device::is_cpu) };
        // Opened once here, so that an engine that does not work is known before the first client.
        drop(device.open(config.threads)?);
        Ok(Arc::new(Self {
            host: device.is_host(),
            alignment: device.alignment().max(1),
            max_buffer_bytes: device.max_buffer_bytes(),
            ggml,
            device,
            fallback,
            config,
            counters: Counters::default(),
            opening: Mutex::new(()),
        }))
    }

    /// Opens a stream of computation for one client.
    ///
    /// # Errors
    /// When the device gives none.
    pub(super) fn backend(&self, device: &Device) -> Result<Backend, EngineError> {
        let _one = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        device.open(self.config.threads)
    }

    /// Takes `bytes` of the container's share of memory, until the result is dropped.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Counted> {
        let most = self.config.max_bytes;
        let held = &self.counters.held_bytes;
        let taken =
            held.try_update(Relaxed, Relaxed, |held| held.checked_add(bytes).filter(|sum| *sum <= most));
        if let Err(held) = taken {
            // The client only sees that it got nothing.
            tracing::warn!(
                asked_bytes = bytes,
                held_bytes = held,
                limit_bytes = most,
                "the container's share of memory is used up (metal.max_bytes_per_container)"
            );
            return None;
        }
        Some(Counted { engine: Arc::clone(self), of: |engine| &engine.counters.held_bytes, amount: bytes })
    }

    /// Counts bytes as shared until the result is dropped.
    pub(super) fn count_shared(self: &Arc<Self>, bytes: u64) -> Counted {
        self.counters.shared_bytes.fetch_add(bytes, Relaxed);
        Counted { engine: Arc::clone(self), of: |engine| &engine.counters.shared_bytes, amount: bytes }
    }

    /// Takes one of the container's streams, until the result is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Counted> {
        let most = u64::from(self.config.max_streams);
        let open = &self.counters.streams_open;
        open.try_update(Relaxed, Relaxed, |open| (open < most).then_some(open + 1)).ok()?;
        self.counters.streams_total.fetch_add(1, Relaxed);
        Some(Counted { engine: Arc::clone(self), of: |engine| &engine.counters.streams_open, amount: 1 })
    }

    /// Free and total bytes as a client should see them: the device's, within the container's share.
    pub(super) fn memory(&self) -> (u64, u64) {
        let (free, total) = self.device.memory();
        let most = self.config.max_bytes;
        let left = most.saturating_sub(self.counters.held_bytes.load(Relaxed));
        (free.min(left), total.min(most))
    }

    /// What the counters say.
    pub(super) fn report(&self) -> WorkerCounters {
        let counters = &self.counters;
        WorkerCounters {
            streams_open: counters.streams_open.load(Relaxed),
            streams_total: counters.streams_total.load(Relaxed),
            calls: counters.calls.load(Relaxed),
            graphs: counters.graphs.load(Relaxed),
            in_bytes: counters.in_bytes.load(Relaxed),
            out_bytes: counters.out_bytes.load(Relaxed),
            held_bytes: counters.held_bytes.load(Relaxed),
            shared_bytes: counters.shared_bytes.load(Relaxed),
            engine_us: counters.engine_us.load(Relaxed),
            errors: counters.errors.load(Relaxed),
        }
    }
}
