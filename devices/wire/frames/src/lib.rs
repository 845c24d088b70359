// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a container's provider library and the host's ane service say to each other over one stream.
//!
//! Bytes in, messages out, and back; no I/O, no allocation beyond what the bytes carry, no unsafe code. Used by the
//! library in the container (which has no C library), by the service and by its workers. Everything is checked once,
//! in decoding: a decoded message holds no size that overflows, no dimension, rank, name or count over its cap.
//!
//! # Frames
//!
//! A frame is a [`Header`] of [`HEADER_BYTES`] bytes and a body of at most [`MAX_BODY_BYTES`]. Numbers are
//! little-endian. The header is the same in every version, and so is [`Refused`]: a peer of another version can be told
//! so in its own words. What travels *beside* a frame (descriptors, data) is not in its length.
//!
//! # Setting a stream up
//!
//! ```text
//! container                                        host (service)
//!   Hello{ort, transport, units}          ──►
//!                                         ◄──      HelloOk{ort, transport, caps} | Refused
//!   Model{hash, sizes, inputs, outputs…}  ──►
//!                                         ◄──      Have | Want | Refused
//!   Sending + the model                   ──►                                        (only after Want)
//!                                         ◄──      Loaded{hash} | Refused
//!   Ring{bytes} + descriptor              ──►                                        (shared memory only, no answer)
//! ```
//!
//! After Have or Want the last answer may take as long as a session takes to make. One stream serves one model; a
//! container opens as many streams as it has runs at a time. After Loaded there are only runs.
//!
//! The transport in [`HelloOk`] decides, not the one asked for. *Shared memory*: descriptors travel by `SCM_RIGHTS`
//! with the **first byte** of their frame, one a frame, and never before HelloOk allowed it. *Stream*: no descriptors;
//! data follow their frame in the stream itself.
//!
//! # The model's bytes
//!
//! `[ModelProto][zeros up to a multiple of 4096][weights]`, see [`Model::file_bytes`]. Tensors of 1 KB and more are
//! external data with the location [`WEIGHTS_LOCATION`], their offsets counted from the start of the weights and
//! multiples of 64. Shared memory: a memfd sealed against writing, shrinking and growing. Stream: the bytes follow
//! Sending. [`Model::hash`] is BLAKE3 of all these bytes; a host computes it itself and believes no container.
//!
//! The ModelProto has **no `graph.input`**: whoever makes a session appends a second ModelProto with `graph.input` alone
//! (protobuf merges the two), in the order of [`Model::inputs`], with the dimensions of a run, or those of the [`Port`]s
//! for a session of free shapes. Bound shapes let ONNX Runtime's optimiser choose other kernels, whose answers differ in
//! the last bit: only a session of free shapes on the processor gives the very bits of the container's own. Two models of
//! equal bytes can differ in their ports, so a key must hold the ports too.
//!
//! # Runs
//!
//! ```text
//!   Run{run, data_offset, tensors} + data  ──►
//!                                          ◄──     Answer{run, data_offset, tensors} + data
//!                                                  | Failed{run, failure, text}
//!                                                  | Grow{run, bytes}                (shared memory only)
//!   Ring{bytes} + descriptor               ──►     then the Answer in the new ring    (after Grow)
//! ```
//!
//! One run at a time on a stream. Tensors stand in the order of the model's ports; their sizes follow from element and
//! dimensions ([`Tensor::bytes`]). *Stream*: the data follow their frame, one tensor after another without padding, and
//! `data_offset` is 0. *Shared memory*: frame and data lie in the ring, see [`ring`]. `run` is echoed; an answer to
//! another run ends the stream. A container may close the stream at any time, and a host may at the end of a run; the
//! container then opens another and runs again.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod error;
mod header;
mod message;
mod read;
pub mod ring;
mod run;
mod setup;
mod tensor;
mod write;

pub use error::FrameError;
pub use header::{HEADER_BYTES, Header, Kind, MAGIC, MAX_BODY_BYTES, MAX_FRAME_BYTES, VERSION};
pub use message::Message;
pub use run::{Answer, Failed, Failure, Grow, MAX_RUN_BYTES, Run};
pub use setup::{
    Hello, HelloOk, Loaded, MAX_PROTO_BYTES, MAX_UNITS_BYTES, MAX_WEIGHTS_BYTES, MODEL_ALIGNMENT, Model,
    OrtVersion, Refusal, Refused, Ring, Transport, WEIGHTS_LOCATION,
};
pub use tensor::{Dim, Element, MAX_DIM, MAX_NAME_BYTES, MAX_PORTS, MAX_RANK, Port, Tensor};

/// Longest text that says why something was refused or failed; longer ones are cut in encoding.
pub const MAX_TEXT_BYTES: usize = 1024;
