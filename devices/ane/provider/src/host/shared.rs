// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run with its data in shared memory; `lighter_frames::ring` says who does what in which order.

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use lighter_frames::ring::{ANSWER, ASLEEP, AWAKE, CONTAINER_STATE, HOST_STATE, REQUEST, WAITING, place};
use lighter_frames::{Answer, Message, Ring as RingMessage, Run, Tensor};

use super::connection::{Connection, receive, unexpected};
use super::ring::Ring;
use super::trouble::Trouble;
use super::{Input, Outputs};
use crate::sys::Errno;
use crate::sys::wait::{futex_wait, futex_wake};

/// How often the stream's end is looked at while the host computes.
const LOOKS_MS: u32 = 100;
/// Room for outputs before the first one is known.
const FIRST_OUTPUT_BYTES: u64 = 256 << 10;

pub(super) fn run(
    connection: &mut Connection,
    inputs: Vec<Input<'_>>,
    outputs: &mut impl Outputs,
) -> Result<(), Trouble> {
    let (tensors, data): (Vec<Tensor>, Vec<&[u8]>) =
        inputs.into_iter().map(|input| (input.tensor, input.data)).unzip();
    let run = connection.run;
    let placed = place(0, &tensors, lighter_frames::ring::MAX_DATA_BYTES).ok_or(Errno::NO_MEMORY)?;
    if connection.ring.as_ref().is_none_or(|ring| ring.data_bytes() < placed.end) {
        replace_ring(connection, placed.end.max(FIRST_OUTPUT_BYTES), run.wrapping_sub(1))?;
    }
    let ring = connection.ring.as_ref().ok_or(Errno::NO_MEMORY)?;
    for (offset, data) in placed.offsets.iter().zip(data) {
        ring.put_data(*offset, data)?;
    }
    ring.put_head(&Message::Run(Run { run, data_offset: 0, inputs: tensors }).encode()?)?;
    ring.word(REQUEST).store(run, Ordering::SeqCst);
    match ring.word(HOST_STATE).load(Ordering::SeqCst) {
        AWAKE => {}
        ASLEEP => connection.send(&Message::Bell, None)?,
        _ => futex_wake(ring.word(REQUEST)),
    }
    loop {
        match answer(connection)? {
            Message::Answer(answer) => return take(connection, &answer, outputs),
            Message::Grow(grow) if grow.run == run => {
                // The outputs wait in the host; the answer comes in the new ring.
                replace_ring(connection, grow.data_bytes, run)?;
            }
            other => return Err(unexpected(other)),
        }
    }
}

/// Makes a ring for so much data, in which this run is the last asked for, and hands it to the host.
fn replace_ring(connection: &mut Connection, data_bytes: u64, request: u32) -> Result<(), Trouble> {
    let (ring, file) = Ring::new(data_bytes, request, connection.run.wrapping_sub(1))?;
    connection.send(&Message::Ring(RingMessage { bytes: ring.bytes() }), Some(&file))?;
    if let Some(old) = connection.ring.replace(ring) {
        // A host that waits there does not look at the stream.
        futex_wake(old.word(REQUEST));
    }
    Ok(())
}

/// Waits until the host has answered, and reads what it says.
fn answer(connection: &Connection) -> Result<Message, Trouble> {
    let ring = connection.ring.as_ref().ok_or(Errno::NO_MEMORY)?;
    let word = ring.word(ANSWER);
    let has_answered = || word.load(Ordering::SeqCst) == connection.run;
    while !has_answered() {
        ring.word(CONTAINER_STATE).store(WAITING, Ordering::SeqCst);
        let seen = word.load(Ordering::SeqCst);
        if seen != connection.run {
            futex_wait(word, seen, LOOKS_MS);
        }
        ring.word(CONTAINER_STATE).store(AWAKE, Ordering::SeqCst);
        if !has_answered() && connection.stream.has_input()? {
            // A host that cannot go on says so on the stream; bells mean nothing more.
            match receive(&connection.stream, LOOKS_MS)? {
                Message::Bell => {}
                other => return Err(unexpected(other)),
            }
        }
    }
    let (header, body) = ring.head()?;
    Ok(Message::decode(header, &body)?)
}

fn take(connection: &Connection, answer: &Answer, outputs: &mut impl Outputs) -> Result<(), Trouble> {
    if answer.run != connection.run {
        return Err(Trouble::Answer("it belongs to another run"));
    }
    let ring = connection.ring.as_ref().ok_or(Errno::NO_MEMORY)?;
    let placed = place(answer.data_offset, &answer.outputs, ring.data_bytes());
    let placed = placed.ok_or(Trouble::Answer("the outputs go beyond the shared memory"))?;
    for (index, (tensor, offset)) in answer.outputs.iter().zip(placed.offsets).enumerate() {
        if let Some(place) = outputs.place(index, tensor)? {
            ring.get_data(offset, place)?;
        }
    }
    Ok(())
}
