// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs in a ring. Its memory is the container's as well: what an engine looks at before it uses it is copied out
//! first, the rest is computed on where it stands.

use lighter_frames::{Answer, Failed, Failure, Grow, Message, Run, Tensor, ring};

use super::{End, Stream, StreamError, clean, length, lengths};
use crate::ane::control::{Shapes, Wants};
use crate::ane::ort::Output;
use crate::ane::worker::compute::{Source, Verdict, mixed, send_sample};
use crate::ane::worker::memory::Buffer;
use crate::ane::worker::socket::SocketError;

/// Data this short are copied out of a ring whatever their type: among them are the numbers by which an operation
/// decides how far to go.
const SMALL_BYTES: u64 = 4096;

impl Stream {
    pub(super) fn run_in_ring(&mut self) -> Result<Option<End>, StreamError> {
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
        self.keep(buffer);
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
        let inputs = mixed(&run.inputs, &sources, buffer.bytes(), &ring.memory);
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
}

/// Whether data must be copied before they are used.
fn is_copied(tensor: &Tensor) -> bool {
    tensor.element().is_integer() || tensor.bytes() <= SMALL_BYTES
}
