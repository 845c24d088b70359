// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection to the host's service: greeting, the model, runs.

use alloc::string::String;
use alloc::vec::Vec;

use lighter_frames::{HEADER_BYTES, Header, Hello, HelloOk, Message, OrtVersion, Transport};

use super::ring::Ring;
use super::trouble::Trouble;
use super::{Input, Outputs, shared, streamed};
use crate::package::Package;
use crate::settings::Settings;
use crate::sys::memory::Mapping;
use crate::sys::socket::Stream;
use crate::sys::{Descriptor, Errno};

/// How long the service may take to greet: it may have to ask the container engine first.
const GREETING_MS: u32 = 10_000;
/// How long to say whether it has a model.
const LOOKING_UP_MS: u32 = 30_000;
/// How long to make a session of it.
const LOADING_MS: u32 = 600_000;
/// How long a stream may take nothing or bring nothing in the middle of a message.
pub(super) const STALLED_MS: u32 = 60_000;
/// Most of a model that is sent at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// How the host is reached, and what it is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) socket: String,
    pub(crate) transport: Transport,
    pub(crate) units: String,
    pub(crate) ort: OrtVersion,
}

impl Host {
    pub(crate) fn of(settings: &Settings, ort: OrtVersion) -> Self {
        Self {
            socket: settings.socket.clone(),
            transport: settings.transport,
            units: settings.units.clone(),
            ort,
        }
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(super) stream: Stream,
    pub(super) ring: Option<Ring>,
    /// Number of the last run.
    pub(super) run: u32,
    host: HelloOk,
}

impl Connection {
    /// Connects and greets.
    pub(crate) fn open(host: &Host) -> Result<Self, Trouble> {
        let stream = Stream::connect(&host.socket)?;
        let hello = Hello { ort: host.ort, transport: host.transport, units: host.units.clone() };
        stream.send(&[&Message::Hello(hello).encode()?], None, STALLED_MS)?;
        match receive(&stream, GREETING_MS)? {
            Message::HelloOk(ok) => Ok(Self { stream, ring: None, run: 0, host: ok }),
            other => Err(unexpected(other)),
        }
    }

    /// What the host said of itself.
    pub(crate) const fn host(&self) -> HelloOk {
        self.host
    }

    /// Makes the host load a model, and sends it when the host does not have it.
    pub(crate) fn load(&mut self, package: &Package) -> Result<(), Trouble> {
        if package.model.file_bytes() > self.host.max_model_bytes {
            return Err(Trouble::Answer("the model is larger than the host takes"));
        }
        self.stream.send(&[&Message::Model(package.model.clone()).encode()?], None, STALLED_MS)?;
        match receive(&self.stream, LOOKING_UP_MS)? {
            Message::Have => {}
            Message::Want => self.send_model(package)?,
            other => return Err(unexpected(other)),
        }
        match receive(&self.stream, LOADING_MS)? {
            Message::Loaded(loaded) if loaded.hash == package.model.hash => Ok(()),
            Message::Loaded(_) => Err(Trouble::Answer("it loaded another model")),
            other => Err(unexpected(other)),
        }
    }

    fn send_model(&self, package: &Package) -> Result<(), Trouble> {
        let frame = Message::Sending.encode()?;
        if self.host.transport == Transport::SharedMemory {
            self.stream.send(&[&frame], Some(&package.file), STALLED_MS)?;
            return Ok(());
        }
        self.stream.send(&[&frame], None, STALLED_MS)?;
        let bytes = usize::try_from(package.model.file_bytes()).map_err(|_| Errno::INVALID)?;
        let mapping = Mapping::read_only(&package.file, bytes)?;
        for chunk in mapping.sealed_bytes().chunks(CHUNK_BYTES) {
            self.stream.send(&[chunk], None, STALLED_MS)?;
        }
        Ok(())
    }

    /// Runs the loaded model.
    pub(crate) fn run(&mut self, inputs: Vec<Input<'_>>, outputs: &mut impl Outputs) -> Result<(), Trouble> {
        self.run = self.run.wrapping_add(1);
        let bytes = inputs.iter().fold(0_u64, |sum, input| sum.saturating_add(input.tensor.bytes()));
        if bytes > self.host.max_run_bytes {
            return Err(Trouble::Answer("the inputs are larger than the host takes"));
        }
        match self.host.transport {
            Transport::SharedMemory => shared::run(self, inputs, outputs),
            Transport::Stream => streamed::run(self, inputs, outputs),
        }
    }

    /// Sends a message with a descriptor beside it.
    pub(super) fn send(&self, message: &Message, descriptor: Option<&Descriptor>) -> Result<(), Trouble> {
        Ok(self.stream.send(&[&message.encode()?], descriptor, STALLED_MS)?)
    }
}

/// The next message. Waits so long for its start.
pub(super) fn receive(stream: &Stream, at_most_ms: u32) -> Result<Message, Trouble> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header, at_most_ms)?;
    let header = Header::decode(&header)?;
    let mut body = alloc::vec![0; usize::try_from(header.body_bytes).map_err(|_| Errno::INVALID)?];
    stream.read_exact(&mut body, STALLED_MS)?;
    Ok(Message::decode(header, &body)?)
}

/// What an answer out of turn means.
pub(super) fn unexpected(message: Message) -> Trouble {
    match message {
        Message::Refused(refused) => Trouble::Refused(refused),
        Message::Failed(failed) => Trouble::Failed(failed),
        other => Trouble::Unexpected(other.kind()),
    }
}
