// SPDX-License-Identifier: MIT OR Apache-2.0
//! One stream of a container: its runs, one after another, on a thread of its own, by either transport.
//!
//! The order is always the same: the head is read (out of a copy), then looked at, then it is decided who serves
//! it, and only then are data touched. So a run that this worker may not serve goes back untouched.

mod in_ring;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use lighter_frames::{Answer, Element, Failed, Failure, Message, Run, Tensor, ring};

use super::compute::{Verdict, compute, gather, send_sample};
use super::engine::Engine;
use super::memory::{Buffer, MemoryError};
use super::model::LoadedModel;
use super::parcel;
use super::ring::{Ring, RingError};
use super::socket::{Socket, SocketError};
use crate::ane::control::{Shapes, Wants};
use crate::ane::ort::{Input, OrtError, Output, Stop};
use crate::text::with_causes;

/// A buffer larger than this is given back after use.
const KEEP_BUFFER_BYTES: usize = 64 << 20;

/// Why a stream was ended by this side.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    /// Its socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Its ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A ring without its memory.
    #[error("a ring came without its memory")]
    NoMemory,
    /// Another frame than the one that was due.
    #[error("{got} came where {wanted} was due")]
    Frame {
        /// What came.
        got: String,
        /// What was due.
        wanted: &'static str,
    },
    /// Inputs over the limit.
    #[error("inputs of {bytes} bytes are over the limit of {limit}")]
    TooMuch {
        /// How much.
        bytes: u64,
        /// The most.
        limit: u64,
    },
    /// Data outside of the ring.
    #[error("inputs of {bytes} bytes at {offset} are not within the ring")]
    Outside {
        /// How much.
        bytes: u64,
        /// Where.
        offset: u64,
    },
    /// Memory for the data.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Outputs that ONNX Runtime does not give.
    #[error(transparent)]
    Ort(#[from] OrtError),
}

impl StreamError {
    /// Whether the client broke the rules, and can be told so.
    fn is_clients(&self) -> bool {
        !matches!(self, Self::Socket(SocketError::Broken(_)) | Self::Memory(_) | Self::Ort(_))
    }
}

/// How a stream left this worker.
#[derive(Debug)]
pub(super) enum End {
    /// The client closed it.
    Closed,
    /// To the service.
    Back {
        /// What for.
        wants: Wants,
        /// What was read of it.
        pending: Option<Vec<u8>>,
        /// Its ring.
        ring: Option<File>,
        /// Data that were read behind `pending`.
        data: Option<OwnedFd>,
    },
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) engine: Arc<Engine>,
    pub(super) model: Arc<LoadedModel>,
    pub(super) number: u64,
    pub(super) socket: Socket,
    pub(super) ring: Option<Ring>,
    pub(super) buffer: Buffer,
    /// Ends its run when the stream is to end.
    pub(super) stop: Arc<Stop>,
}

/// The longest ring that a worker with this limit of a run maps.
pub(super) fn ring_limit(max_run_bytes: u64) -> u64 {
    ring::bytes_for(max_run_bytes.saturating_mul(2).min(ring::MAX_DATA_BYTES)).unwrap_or(0)
}

impl Stream {
    /// Serves until the stream ends or must go back.
    ///
    /// # Errors
    /// When this side ends it; the client has been told where that is possible.
    pub(super) fn serve(mut self) -> Result<End, StreamError> {
        let served = self.serve_runs();
        if let Err(error) = &served
            && error.is_clients()
        {
            let text = with_causes(error);
            self.tell(&Message::Failed(Failed { run: 0, failure: Failure::Protocol, text }));
        }
        served
    }

    fn serve_runs(&mut self) -> Result<End, StreamError> {
        loop {
            if let Some(ring) = &self.ring
                && ring.wait()
            {
                match self.run_in_ring()? {
                    None => continue,
                    Some(end) => return Ok(end),
                }
            }
            let Some(frame) = self.socket.next()? else { return Ok(End::Closed) };
            if let Some(ring) = &self.ring {
                ring.wake_up();
            }
            let end = match frame.message {
                Message::Bell if self.ring.is_some() => None,
                Message::Ring(announced) => {
                    self.ring = Some(self.open_ring(announced, frame.file)?);
                    None
                }
                Message::Run(run) if self.ring.is_none() => self.run_in_stream(&run, frame.bytes)?,
                _ => Some(self.back(Wants::Setup, Some(frame.bytes), None)?),
            };
            if let Some(end) = end {
                return Ok(end);
            }
        }
    }

    /// Gives the stream back. Bytes that came with it and were not read go after what was.
    fn back(
        &mut self,
        wants: Wants,
        pending: Option<Vec<u8>>,
        data: Option<&[u8]>,
    ) -> Result<End, StreamError> {
        let data = [data.unwrap_or_default(), self.socket.left()].concat();
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let file = (length > 0).then(|| parcel::sealed_file(&[(0, &data)], length));
        let data = file.transpose().map_err(SocketError::Broken)?;
        let ring = self.ring.take().map(|ring| {
            ring.leave();
            ring.memory.into_file()
        });
        Ok(End::Back { wants, pending, ring, data })
    }

    fn open_ring(&self, announced: lighter_frames::Ring, file: Option<File>) -> Result<Ring, StreamError> {
        let file = file.ok_or(StreamError::NoMemory)?;
        Ok(Ring::new(file, announced.bytes, ring_limit(self.engine.config.max_run_bytes))?)
    }

    /// Sends a small frame by the stream's own way.
    fn tell(&mut self, message: &Message) {
        let Ok(frame) = message.encode() else { return };
        let Some(ring) = &mut self.ring else { return self.socket.ring(&frame) };
        if ring.answer(&frame) {
            self.ring_bell();
        }
    }

    fn ring_bell(&self) {
        if let Ok(bell) = Message::Bell.encode() {
            self.socket.ring(&bell);
        }
    }

    /// Refuses what is over the limit, and says of the rest whether this worker serves it.
    fn accept(&self, run: &Run) -> Result<(Shapes, bool), StreamError> {
        let (bytes, limit) = (run.data_bytes(), self.engine.config.max_run_bytes);
        if bytes > limit {
            return Err(StreamError::TooMuch { bytes, limit });
        }
        let shapes = Shapes(run.inputs.iter().map(|tensor| tensor.dims().to_vec()).collect());
        let serves = self.model.policy().serves(&shapes);
        Ok((shapes, serves))
    }

    /// Why inputs do not fit the model's ports, if they do not.
    fn misfit(&self, inputs: &[Tensor]) -> Option<String> {
        let ports = &self.model.inputs;
        if ports.len() != inputs.len() {
            return Some(format!("{} inputs came, the model has {}", inputs.len(), ports.len()));
        }
        let (port, tensor) = ports.iter().zip(inputs).find(|(port, tensor)| !port.takes(tensor))?;
        let (element, dims) = (tensor.element(), tensor.dims());
        Some(format!(
            "input {} is declared as {:?} {:?}, {element:?} {dims:?} came",
            port.name, port.element, port.dims
        ))
    }

    fn run_in_stream(&mut self, run: &Run, head: Vec<u8>) -> Result<Option<End>, StreamError> {
        let (shapes, serves) = self.accept(run)?;
        if !serves {
            return self.back(Wants::Shapes(shapes), Some(head), None).map(Some);
        }
        let placed =
            ring::place(0, &run.inputs, u64::MAX).ok_or(StreamError::Outside { bytes: 0, offset: 0 })?;
        let mut buffer = std::mem::take(&mut self.buffer);
        let offsets = lengths(&placed.offsets);
        {
            let room = buffer.room(usize::try_from(placed.end).unwrap_or(usize::MAX))?;
            for (tensor, offset) in run.inputs.iter().zip(&offsets) {
                let part = room.get_mut(*offset..).and_then(|rest| rest.get_mut(..length(tensor)));
                let part = part.unwrap_or_default();
                self.socket.data(part)?;
                clean(tensor, part);
            }
        }
        let verdict = match self.misfit(&run.inputs) {
            Some(text) => Verdict::Refused(Failure::Run, text),
            None => {
                let inputs = gather(&run.inputs, &offsets, buffer.bytes());
                let verdict = self.compute(run, &shapes, &inputs);
                if let Verdict::Outputs(outputs) = &verdict
                    && self.model.policy().take_sample(&shapes)
                {
                    let data: Vec<&[u8]> = parts(&run.inputs, &offsets, buffer.bytes());
                    send_sample(&self.engine, &self.model, &shapes, &run.inputs, &data, outputs);
                }
                verdict
            }
        };
        let end = match verdict {
            Verdict::Outputs(outputs) => {
                self.answer_in_stream(run, &outputs)?;
                None
            }
            Verdict::Refused(failure, text) => {
                self.tell(&Message::Failed(Failed { run: run.run, failure, text }));
                None
            }
            Verdict::Another(reason) => {
                let data = parts(&run.inputs, &offsets, buffer.bytes()).concat();
                Some(self.back(Wants::Another { shapes, reason }, Some(head), Some(&data))?)
            }
        };
        self.keep(buffer);
        Ok(end)
    }

    fn answer_in_stream(&self, run: &Run, outputs: &[Output]) -> Result<(), StreamError> {
        let tensors = outputs.iter().map(|output| output.tensor().clone()).collect();
        let answer = Message::Answer(Answer { run: run.run, data_offset: 0, outputs: tensors });
        let head = answer.encode().map_err(SocketError::Frame)?;
        let mut pieces = vec![head.as_slice()];
        for output in outputs {
            pieces.push(output.data()?);
        }
        Ok(self.socket.send(&pieces)?)
    }

    /// Keeps the memory for the next run, unless it is much.
    fn keep(&mut self, mut buffer: Buffer) {
        buffer.trim(KEEP_BUFFER_BYTES);
        self.buffer = buffer;
    }

    fn compute(&self, run: &Run, shapes: &Shapes, inputs: &[Input<'_>]) -> Verdict {
        let mut verdict = compute(&self.engine, &self.model, self.number, shapes, inputs, &self.stop);
        if let Verdict::Outputs(outputs) = &verdict {
            let bytes: u64 = outputs.iter().map(|output| output.tensor().bytes()).sum();
            let limit = self.engine.config.max_run_bytes;
            if bytes > limit {
                let text = format!("outputs of {bytes} bytes are over the limit of {limit}");
                verdict = Verdict::Refused(Failure::Run, text);
            }
        }
        match &verdict {
            Verdict::Outputs(outputs) => {
                let out_bytes = outputs.iter().map(|output| output.tensor().bytes()).sum();
                self.engine.counters.runs.fetch_add(1, Relaxed);
                self.engine.counters.in_bytes.fetch_add(run.data_bytes(), Relaxed);
                self.engine.counters.out_bytes.fetch_add(out_bytes, Relaxed);
            }
            Verdict::Refused(_, text) => self.engine.counters.failed(text),
            Verdict::Another(text) => {
                // Until the service says otherwise: the next stream with these shapes need not fail as well.
                self.model.policy().recall(shapes.clone());
                self.engine.counters.failed(text);
            }
        }
        self.engine.touch();
        verdict
    }
}

/// A truth value is 0 or 1; anything else is none to the engine's compiler.
fn clean(tensor: &Tensor, data: &mut [u8]) {
    if tensor.element() == Element::Bool {
        data.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
}

pub(super) fn length(tensor: &Tensor) -> usize {
    usize::try_from(tensor.bytes()).unwrap_or(usize::MAX)
}

fn lengths(offsets: &[u64]) -> Vec<usize> {
    offsets.iter().map(|offset| usize::try_from(*offset).unwrap_or(usize::MAX)).collect()
}

/// The data of each tensor.
fn parts<'a>(tensors: &[Tensor], offsets: &[usize], bytes: &'a [u8]) -> Vec<&'a [u8]> {
    let part = |(tensor, offset): (&Tensor, &usize)| {
        bytes.get(*offset..).and_then(|rest| rest.get(..length(tensor))).unwrap_or_default()
    };
    tensors.iter().zip(offsets).map(part).collect()
}
