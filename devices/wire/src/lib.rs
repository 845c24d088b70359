// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the agent and the services say to each other: names, messages, frames, caps.
//!
//! The agent accepts a container's connection, decides, and hands the socket itself to the service; the two
//! speak over one `SOCK_SEQPACKET` pair, a JSON message a packet, with at most [`MAX_DESCRIPTORS`] descriptors
//! beside it. Nothing here opens, listens or decides.

mod control;
mod packet;
mod report;
mod words;

pub use control::{FromService, StreamOffer, ToService};
pub use packet::{MAX_DESCRIPTORS, MAX_PACKET_BYTES, PacketError, recv, recv_up_to, send};
pub use report::{ContainerReport, EngineState, ServiceReport};
pub use words::{
    CONTAINER_SOCKETS, Endpoint, GrantId, Kind, Owner, SOCKET_NAME, UnknownKind, socket_directory,
};

/// Version of the messages in this crate; both ends are the same binary, so a difference means that a
/// service of another installation was started, and is refused.
pub const CONTROL_VERSION: u32 = 2;
