// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device, and a backend: one stream of computation on it.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::graph::Graph;
use super::library::{Ggml, text_of};
use super::raw::{Opaque, SetThreads};

/// Why the engine failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The device gives no backend.
    #[error("{device} cannot be opened")]
    Open {
        /// Its name.
        device: String,
    },
    /// A graph failed.
    #[error("{device} failed to compute a graph of {nodes} nodes (ggml status {status})")]
    Compute {
        /// The device's name.
        device: String,
        /// The graph's nodes.
        nodes: usize,
        /// ggml's number.
        status: i32,
    },
}

/// What computes: ggml's device. Devices live as long as the process.
#[derive(Debug, Clone)]
pub struct Device {
    pub(super) ggml: Arc<Ggml>,
    pub(super) raw: Opaque,
}

// SAFETY: a device is a static record of a backend; ggml's registry hands the same one to every thread.
unsafe impl Send for Device {}
// SAFETY: as above; the functions called through it only read it.
unsafe impl Sync for Device {}

impl Device {
    pub(super) fn new(ggml: Arc<Ggml>, raw: Opaque) -> Self {
        Self { ggml, raw }
    }

    /// The library it belongs to.
    #[must_use]
    pub fn ggml(&self) -> &Arc<Ggml> {
        &self.ggml
    }

    /// ggml's short name.
    #[must_use]
    pub fn name(&self) -> String {
        // SAFETY: the device is valid, and its name lives as long.
        unsafe { text_of((self.ggml.f.ggml_backend_dev_name)(self.raw)) }
    }

    /// ggml's description.
    #[must_use]
    pub fn description(&self) -> String {
        // SAFETY: as for the name.
        unsafe { text_of((self.ggml.f.ggml_backend_dev_description)(self.raw)) }
    }

    /// Whether it is the host's processor.
    #[must_use]
    pub fn is_cpu(&self) -> bool {
        // SAFETY: the device is valid. Number 0 is GGML_BACKEND_DEVICE_TYPE_CPU.
        unsafe { (self.ggml.f.ggml_backend_dev_type)(self.raw) == 0 }
    }

    /// Free and total bytes.
    #[must_use]
    pub fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is valid, and the two numbers live during the call.
        unsafe { (self.ggml.f.ggml_backend_dev_memory)(self.raw, &raw mut free, &raw mut total) }
        (free as u64, total as u64)
    }

    /// Its default type of buffers. The others of a CPU rearrange weights, which would break reading them back.
    pub(super) fn buffer_type(&self) -> Opaque {
        // SAFETY: the device is valid.
        unsafe { (self.ggml.f.ggml_backend_dev_buffer_type)(self.raw) }
    }

    /// What addresses of tensors must be a multiple of.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        // SAFETY: the buffer type belongs to the device.
        unsafe { (self.ggml.f.ggml_backend_buft_get_alignment)(self.buffer_type()) as u64 }
    }

    /// Bytes of the largest buffer.
    #[must_use]
    pub fn max_buffer_bytes(&self) -> u64 {
        // SAFETY: as for the alignment.
        unsafe { (self.ggml.f.ggml_backend_buft_get_max_size)(self.buffer_type()) as u64 }
    }

    /// Whether its buffers are plain memory of this process.
    #[must_use]
    pub fn is_host(&self) -> bool {
        // SAFETY: as for the alignment.
        unsafe { (self.ggml.f.ggml_backend_buft_is_host)(self.buffer_type()) }
    }

    /// Opens a stream of computation.
    ///
    /// # Errors
    /// When the device gives none.
    pub fn open(&self, threads: Option<u16>) -> Result<Backend, EngineError> {
        let f = &self.ggml.f;
        // SAFETY: the device is valid; no parameters is allowed.
        let raw = unsafe { (f.ggml_backend_dev_init)(self.raw, std::ptr::null()) };
        if raw.is_null() {
            return Err(EngineError::Open { device: self.name() });
        }
        if let Some(threads) = threads {
            // SAFETY: the registration belongs to the device; the function of this name has this type.
            unsafe {
                let registration = (f.ggml_backend_dev_backend_reg)(self.raw);
                let address = (f.ggml_backend_reg_get_proc_address)(
                    registration,
                    c"ggml_backend_set_n_threads".as_ptr(),
                );
                if !address.is_null() {
                    let set_threads = std::mem::transmute::<Opaque, SetThreads>(address);
                    set_threads(raw, threads.into());
                }
            }
        }
        Ok(Backend { device: self.clone(), raw })
    }
}

/// A stream of computation on a device; one client's own.
#[derive(Debug)]
pub struct Backend {
    device: Device,
    raw: Opaque,
}

// SAFETY: a backend may be used by one thread at a time, and moving it between calls is allowed.
unsafe impl Send for Backend {}

impl Backend {
    /// Starts a graph; [`Backend::finish`] waits for it. On a host device it has ended when this returns.
    ///
    /// # Errors
    /// When the device reports failure.
    pub fn compute(&mut self, graph: &mut Graph) -> Result<(), EngineError> {
        // SAFETY: both are valid, and the graph keeps the memory alive that its tensors lie in.
        let status = unsafe { (self.device.ggml.f.ggml_backend_graph_compute_async)(self.raw, graph.raw()) };
        if status == 0 {
            Ok(())
        } else {
            Err(EngineError::Compute { device: self.device.name(), nodes: graph.nodes(), status })
        }
    }

    /// Waits for everything that was started.
    pub fn finish(&mut self) {
        // SAFETY: the backend is valid.
        unsafe { (self.device.ggml.f.ggml_backend_synchronize)(self.raw) }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.finish();
        // SAFETY: valid, and not used after.
        unsafe { (self.device.ggml.f.ggml_backend_free)(self.raw) }
    }
}
