// SPDX-License-Identifier: MIT OR Apache-2.0
//! One stream of a container: its runs, one after another, on a thread of its own, by either transport.
//!
//! The order is always the same: the head is read (out of a copy), then looked at, then it is decided who serves
//! it, and only then are data touched. So a run that this worker may not serve goes back untouched.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use lighter_frames::{Answer, Element, Failed, Failure, Grow, Message, Run, Tensor, ring};

use super::compute::{Verdict, compute, gather, send_sample};
use super::engine::Engine;
use super::memory::{Buffer, MemoryError};
use super::model::LoadedModel;
use super::parcel;
use super::ring::{Ring, RingError};
use super::socket::{Socket, SocketError};
use crate::ane::control::{Shapes, Wants};
use crate::ane::ort::{Input, OrtError, Output};

/// A buffer larger than this is given back after use.
const KEEP_BUFFER_BYTES: usize = 64 << 20;
/// Data this short are copied out of a ring whatever their type: among them are the numbers by which an operation
/// decides how far to go.
const SMALL_BYTES: u64 = 4096;

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
            let text = super::line_of(error);
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
        buffer.trim(KEEP_BUFFER_BYTES);
        self.buffer = buffer;
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

    fn run_in_ring(&mut self) -> Result<Option<End>, StreamError> {
        let Some(ring) = &mut self.ring else { return Ok(None) };
        let run = match ring.head()? {
            Message::Run(run) => run,
            other => {
                return Err(StreamError::Frame { got: format!("{:?}", other.kind()), wanted: "a run" });
            }
        };
        let (shapes, serves) = self.accept(&run)?;
        if !serves {
            return self.back(Wants::Shapes(shapes), None, None).map(Some);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let verdict = match self.misfit(&run.inputs) {
            Some(text) => Verdict::Refused(Failure::Run, text),
            None => self.compute_in_ring(&run, &shapes, &mut buffer)?,
        };
        buffer.trim(KEEP_BUFFER_BYTES);
        self.buffer = buffer;
        match verdict {
            Verdict::Outputs(outputs) => self.answer_in_ring(&run, &outputs)?,
            Verdict::Refused(failure, text) => {
                self.tell(&Message::Failed(Failed { run: run.run, failure, text }));
            }
            Verdict::Another(reason) => {
                return self.back(Wants::Another { shapes, reason }, None, None).map(Some);
            }
        }
        Ok(None)
    }

    /// Copies out what must not change while it is used, and computes on the rest where it stands.
    fn compute_in_ring(
        &self,
        run: &Run,
        shapes: &Shapes,
        buffer: &mut Buffer,
    ) -> Result<Verdict, StreamError> {
        let outside = || StreamError::Outside { bytes: run.data_bytes(), offset: run.data_offset };
        let ring = self.ring.as_ref().ok_or(StreamError::NoMemory)?;
        let placed = ring::place(run.data_offset, &run.inputs, ring.data_bytes()).ok_or_else(outside)?;
        let starts: Vec<usize> = lengths(&placed.offsets).iter().map(|at| at + ring::DATA).collect();
        let copied: Vec<Tensor> = run.inputs.iter().filter(|tensor| is_copied(tensor)).cloned().collect();
        let private = ring::place(0, &copied, u64::MAX).ok_or_else(outside)?;
        let room = buffer.room(usize::try_from(private.end).unwrap_or(usize::MAX))?;
        let mut offsets = private.offsets.iter();
        let mut sources = Vec::with_capacity(run.inputs.len());
        for (tensor, start) in run.inputs.iter().zip(&starts) {
            let next = if is_copied(tensor) { offsets.next() } else { None };
            let Some(offset) = next else {
                sources.push(Source::Ring(*start));
                continue;
            };
            let offset = usize::try_from(*offset).unwrap_or(usize::MAX);
            let part = room.get_mut(offset..).and_then(|rest| rest.get_mut(..length(tensor)));
            let part = part.ok_or_else(outside)?;
            if !ring.memory.read(*start, part) {
                return Err(outside());
            }
            clean(tensor, part);
            sources.push(Source::Private(offset));
        }
        let inputs = super::compute::mixed(&run.inputs, &sources, buffer.bytes(), &ring.memory);
        let inputs = inputs.ok_or_else(outside)?;
        let verdict = self.compute(run, shapes, &inputs);
        if let Verdict::Outputs(outputs) = &verdict
            && self.model.policy().take_sample(shapes)
        {
            let mut copies = Vec::new();
            for (tensor, start) in run.inputs.iter().zip(&starts) {
                let mut copy = vec![0; length(tensor)];
                if ring.memory.read(*start, &mut copy) {
                    clean(tensor, &mut copy);
                }
                copies.push(copy);
            }
            let data: Vec<&[u8]> = copies.iter().map(Vec::as_slice).collect();
            send_sample(&self.engine, &self.model, shapes, &run.inputs, &data, outputs);
        }
        Ok(verdict)
    }

    fn answer_in_ring(&mut self, run: &Run, outputs: &[Output]) -> Result<(), StreamError> {
        let tensors: Vec<Tensor> = outputs.iter().map(|output| output.tensor().clone()).collect();
        let outside = || StreamError::Outside { bytes: run.data_bytes(), offset: 0 };
        let placed = ring::place(0, &tensors, ring::MAX_DATA_BYTES).ok_or_else(outside)?;
        if self.ring.as_ref().is_some_and(|ring| placed.end > ring.data_bytes()) {
            self.grow(run, placed.end)?;
        }
        let ring = self.ring.as_ref().ok_or(StreamError::NoMemory)?;
        for (output, offset) in outputs.iter().zip(lengths(&placed.offsets)) {
            if !ring.memory.write(offset.saturating_add(ring::DATA), output.data()?) {
                return Err(StreamError::Outside { bytes: placed.end, offset: 0 });
            }
        }
        let answer = Message::Answer(Answer { run: run.run, data_offset: 0, outputs: tensors });
        self.tell(&answer);
        Ok(())
    }

    /// Asks for a larger ring, and waits for it.
    fn grow(&mut self, run: &Run, data_bytes: u64) -> Result<(), StreamError> {
        // Asleep before it is told: whatever the container does next must ring.
        if let Some(ring) = &self.ring {
            ring.leave();
        }
        self.tell(&Message::Grow(Grow { run: run.run, data_bytes }));
        loop {
            let Some(frame) = self.socket.next()? else {
                return Err(SocketError::Broken(std::io::ErrorKind::UnexpectedEof.into()).into());
            };
            match frame.message {
                Message::Bell => {}
                Message::Ring(announced) => {
                    let mut larger = self.open_ring(announced, frame.file)?;
                    if larger.data_bytes() < data_bytes {
                        return Err(StreamError::Outside { bytes: data_bytes, offset: 0 });
                    }
                    if let Some(old) = &self.ring {
                        larger.take_over(old);
                    }
                    larger.wake_up();
                    self.ring = Some(larger);
                    return Ok(());
                }
                other => {
                    let got = format!("{:?}", other.kind());
                    return Err(StreamError::Frame { got, wanted: "a larger ring" });
                }
            }
        }
    }

    fn compute(&self, run: &Run, shapes: &Shapes, inputs: &[Input<'_>]) -> Verdict {
        let mut verdict = compute(&self.engine, &self.model, self.number, shapes, inputs);
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

/// Where an input stands.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    /// In the worker's own memory.
    Private(usize),
    /// In the ring.
    Ring(usize),
}

/// Whether data must be copied before they are used.
fn is_copied(tensor: &Tensor) -> bool {
    tensor.element().is_integer() || tensor.bytes() <= SMALL_BYTES
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
