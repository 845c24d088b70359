// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run with its data in the stream.

use alloc::vec::Vec;

use lighter_frames::{Message, Run, Tensor};

use super::connection::{Connection, STALLED_MS, receive, unexpected};
use super::trouble::Trouble;
use super::{Input, Outputs};

/// A run takes as long as it takes: the stream's end ends it.
const AS_LONG_AS_IT_TAKES_MS: u32 = u32::MAX;

pub(super) fn run(
    connection: &mut Connection,
    inputs: Vec<Input<'_>>,
    outputs: &mut impl Outputs,
) -> Result<(), Trouble> {
    let (tensors, data): (Vec<Tensor>, Vec<&[u8]>) =
        inputs.into_iter().map(|input| (input.tensor, input.data)).unzip();
    let frame = Message::Run(Run { run: connection.run, data_offset: 0, inputs: tensors }).encode()?;
    let pieces: Vec<&[u8]> = [&frame[..]].into_iter().chain(data).collect();
    let stream = &connection.stream;
    stream.send(&pieces, None, STALLED_MS)?;
    let message = receive(stream, AS_LONG_AS_IT_TAKES_MS)?;
    let Message::Answer(answer) = message else { return Err(unexpected(message)) };
    if answer.run != connection.run {
        return Err(Trouble::Answer("it belongs to another run"));
    }
    for (index, tensor) in answer.outputs.iter().enumerate() {
        match outputs.place(index, tensor)? {
            Some(place) => stream.read_exact(place, STALLED_MS)?,
            None => skip(connection, tensor.bytes())?,
        }
    }
    Ok(())
}

fn skip(connection: &Connection, bytes: u64) -> Result<(), Trouble> {
    let mut waste = [0; 4096];
    let mut left = bytes;
    while left > 0 {
        let now = usize::try_from(left).unwrap_or(usize::MAX).min(waste.len());
        connection.stream.read_exact(waste.get_mut(..now).unwrap_or_default(), STALLED_MS)?;
        left -= u64::try_from(now).unwrap_or(left);
    }
    Ok(())
}
