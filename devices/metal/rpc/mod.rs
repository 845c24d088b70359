// SPDX-License-Identifier: MIT OR Apache-2.0
//! ggml's RPC protocol, majors 2 to 8: what its bytes mean, without ggml and without effects.
//!
//! Only the worker calls it. Every parser takes a container's bytes, so each refuses what it cannot name and
//! none allocates more than the bytes that it was given; [`fuzz_entry`] runs them all.

mod command;
mod era;
mod frames;
mod graph;
mod stream;
mod tensor;
mod version;

pub use command::{BodySize, Command, FRAME_HEAD_BYTES, FrameError, MAX_GRAPH_BYTES};
pub use era::{Era, LATEST_OPS, LATEST_UNARY_OPS, Op, candidates};
pub use frames::{
    AllocSize, CopyPair, Hash, HelloAnswer, Memset, ReadRegion, ReadRows, Rows, WriteRegion, WriteRows,
    alloc_buffer, clear_buffer, device_of, handle_of, recompute,
};
pub use graph::{GraphError, GraphFrame};
pub use stream::{Reader, reply};
pub use tensor::{MAX_PARAMS, MAX_SOURCES, TENSOR_BYTES, WireTensor};
pub use version::{Choice, Major, UnknownMajor, choose_major};

/// Runs every parser over one input, for a fuzzer: the first byte picks the protocol's major, the rest is a
/// stream of frames. What a parser answers does not matter; that it answers does.
pub fn fuzz_entry(input: &[u8]) {
    let Some((first, stream)) = input.split_first() else { return };
    let Ok(major) = Major::new(Major::OLDEST + first % (Major::NEWEST - Major::OLDEST + 1)) else { return };
    let mut reader = Reader::new(stream);
    while let Ok(Some((number, bytes))) = reader.frame() {
        let Ok(command) = Command::new(number, major) else { return };
        let Ok(bytes) = command.body(major).admit(bytes) else { return };
        // A fuzzer's input is small, so a longer body is one that its stream cannot hold.
        if bytes > stream.len() as u64 {
            return;
        }
        let mut body = vec![0; usize::try_from(bytes).unwrap_or(0)];
        if reader.read_into(&mut body).is_err() {
            return;
        }
        frames::parse_any(command, major, &body);
    }
}
