// SPDX-License-Identifier: MIT OR Apache-2.0
//! The front for a container's process: the vtest protocol over its unix socket, as Mesa's Venus driver speaks it.
//!
//! One process, one client. Commands of Vulkan go through memory that client and renderer share; the socket carries the
//! set-up, pieces of memory and fences.
//!
//! Stock clients wait for ever when their server dies, so two things are done in a way of their own:
//! - a request with an answer stays unread to its last word until the answer is out: if this process dies before, the
//!   kernel tells the client (ECONNRESET), where a plain end of the stream would have it read again and again;
//! - what a client polls for a fence is a pipe and not an eventfd: if this process dies, its end closes, which Mesa takes
//!   for a lost device.

mod channel;
pub mod request;
pub mod timelines;

use std::os::fd::OwnedFd;

use rustix::pipe::{PipeFlags, pipe_with};

use self::channel::{Channel, ChannelError};
use self::request::{Batch, Command, MAX_RINGS, Point, Request, RequestError};
use self::timelines::{TimelineError, Timelines};
use super::session::{Session, SessionError};
use super::virgl::{BLOB_MEM_HOST3D, CAPSET_VENUS, NewBlob};

/// The version that is enough for Venus; later ones add what only native contexts use.
const PROTOCOL_VERSION: u32 = 3;
/// The number that says how many timelines a context has.
const PARAM_MAX_TIMELINES: u32 = 1;
/// A client's only context.
const CONTEXT: u32 = 1;
/// What a wait's pipe gets.
const SIGNAL: &[u8] = b"1";

/// Why a client's stream ended otherwise than by its own end.
#[derive(Debug, thiserror::Error)]
pub enum VtestError {
    /// Its socket failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// It asked for what is no request.
    #[error("the client sent what is no request of Mesa's Venus driver")]
    Request(#[from] RequestError),
    /// It has too much, or the renderer cannot.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Its timelines cannot do that.
    #[error(transparent)]
    Timeline(#[from] TimelineError),
    /// It asked out of turn.
    #[error("the client asked for {what} {when}")]
    Turn {
        /// What.
        what: &'static str,
        /// Where it does not belong.
        when: &'static str,
    },
    /// No pipe for a wait.
    #[error("a wait has no pipe")]
    Pipe(#[source] std::io::Error),
}

/// What a client's turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Go on.
    Served,
    /// The client's context is there; the renderer has a process for it now.
    ContextOpened,
    /// The client has gone.
    Gone,
}

/// A client and what it has.
#[derive(Debug)]
pub struct Vtest {
    channel: Channel,
    session: Session,
    timelines: Timelines<OwnedFd>,
    name: String,
    has_context: bool,
    next_resource: u32,
    requests: u64,
}

impl Vtest {
    /// A client that has just connected.
    #[must_use]
    pub fn new(socket: OwnedFd, session: Session) -> Self {
        Self {
            channel: Channel::new(socket),
            session,
            timelines: Timelines::default(),
            name: String::new(),
            has_context: false,
            next_resource: 1,
            requests: 0,
        }
    }

    /// The client's socket, and a descriptor of the renderer's: [`Self::request`] and [`Self::fences`] serve them when they are
    /// readable.
    #[must_use]
    pub fn descriptors(&self) -> (&OwnedFd, Option<std::os::fd::BorrowedFd<'_>>) {
        let renderer = self.has_context.then(|| self.session.poll_fd(CONTEXT)).flatten();
        (self.channel.socket(), renderer)
    }

    /// The program's name, as it says it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Requests so far, bytes from the client and to it.
    #[must_use]
    pub fn traffic(&self) -> (u64, u64, u64) {
        (self.requests, self.channel.bytes_in(), self.channel.bytes_out())
    }

    /// The session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Lets waits end whose fences have been passed.
    pub fn fences(&mut self) {
        for passed in self.session.passed(CONTEXT) {
            for wait in self.timelines.ring_passed(passed.ring, passed.fence) {
                signal(&wait);
            }
        }
    }

    /// Takes in a request and answers it. Waits for the whole of it.
    ///
    /// # Errors
    /// When the client cannot be served any more.
    pub fn request(&mut self) -> Result<Turn, VtestError> {
        let Some(header) = self.channel.header(self.session.limits().max_request_bytes)? else {
            return Ok(Turn::Gone);
        };
        let Some(payload) = self.channel.payload(&header)? else { return Ok(Turn::Gone) };
        self.requests += 1;
        let (words, _) = payload.as_chunks();
        let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let request = match header.command {
            Command::CreateRenderer => Request::name(&payload),
            command => Request::parse(command, &words)?,
        };
        let had_context = self.has_context;
        self.answer(header.command, request)?;
        self.channel.answered(&header)?;
        Ok(if self.has_context && !had_context { Turn::ContextOpened } else { Turn::Served })
    }

    fn answer(&mut self, command: Command, request: Request<'_>) -> Result<(), VtestError> {
        match request {
            Request::CreateRenderer(name) => self.name = name,
            Request::Ping => self.channel.reply(command, &[])?,
            Request::ResourceBusyWait => self.channel.reply(command, &[0])?,
            Request::ProtocolVersion(version) => {
                self.channel.reply(command, &[version.min(PROTOCOL_VERSION)])?;
            }
            Request::GetParam(param) => {
                let known = param == PARAM_MAX_TIMELINES;
                self.channel.reply(command, if known { &[1, MAX_RINGS] } else { &[0, 0] })?;
            }
            Request::GetCapset { id, version } => {
                let (newest, words) = self.session.capset();
                let mut reply = vec![0];
                if id == CAPSET_VENUS && version <= newest {
                    reply = vec![1];
                    reply.extend_from_slice(words);
                }
                self.channel.reply(command, &reply)?;
            }
            Request::ContextInit { capset } => self.open_context(capset)?,
            Request::CreateBlob(blob) => {
                if blob.memory != BLOB_MEM_HOST3D {
                    return Err(VtestError::Turn { what: "memory", when: "that is not the renderer's" });
                }
                let resource = self.next_resource;
                self.next_resource = self.next_resource.wrapping_add(1).max(1);
                self.session.create_blob(&NewBlob {
                    resource,
                    context: CONTEXT,
                    flags: blob.flags,
                    blob: blob.blob,
                    size_bytes: blob.size_bytes,
                })?;
                let (memory, _) = self.session.export_blob(resource)?;
                self.channel.reply(command, &[resource])?;
                self.channel.descriptor(&memory)?;
            }
            Request::ResourceUnref(resource) => self.session.remove_blob(CONTEXT, resource),
            Request::SyncCreate(value) => {
                let sync = self.timelines.create(value)?;
                self.channel.reply(command, &[sync])?;
            }
            Request::SyncUnref(sync) => self.timelines.remove(sync),
            Request::SyncRead(sync) => {
                self.fences();
                let [low, high] = halves(self.timelines.value(sync)?);
                self.channel.reply(command, &[low, high])?;
            }
            Request::SyncWrite(point) => self.reach(&[point]),
            Request::SyncWait { any, points } => self.wait(command, any, points)?,
            Request::Submit(batches) => {
                for batch in batches {
                    self.submit(batch)?;
                }
            }
        }
        Ok(())
    }

    fn open_context(&mut self, capset: u32) -> Result<(), VtestError> {
        if capset != CAPSET_VENUS {
            return Err(VtestError::Turn { what: "a context", when: "that is not Vulkan's" });
        }
        if self.has_context {
            return Err(VtestError::Turn { what: "a context", when: "and has one already" });
        }
        self.session.open_context(CONTEXT, &self.name)?;
        self.has_context = true;
        Ok(())
    }

    fn wait(&mut self, command: Command, any: bool, points: Vec<Point>) -> Result<(), VtestError> {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
            .map_err(|errno| VtestError::Pipe(errno.into()))?;
        if let Some(reached) = self.timelines.wait(any, points, ours)? {
            signal(&reached);
        }
        self.channel.reply(command, &[])?;
        self.channel.descriptor(&theirs)?;
        Ok(())
    }

    fn submit(&mut self, batch: Batch<'_>) -> Result<(), VtestError> {
        if !batch.commands.is_empty() {
            self.session.submit(CONTEXT, &mut batch.commands.to_vec())?;
        }
        match batch.ring {
            _ if batch.points.is_empty() => {}
            None => self.reach(&batch.points),
            Some(ring) => {
                let fence = self.session.fence(CONTEXT, ring)?;
                self.timelines.await_ring(ring, fence, batch.points)?;
                // It may have been passed within the call.
                self.fences();
            }
        }
        Ok(())
    }

    fn reach(&mut self, points: &[Point]) {
        for wait in self.timelines.reach(points) {
            signal(&wait);
        }
    }
}

/// Makes a wait's pipe readable. A client that has closed its end waits no more.
fn signal(pipe: &OwnedFd) {
    let _ = rustix::io::write(pipe, SIGNAL);
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// Runs the parser and the timelines over one input, for a fuzzer: the input is a client's stream. What comes of it does not
/// matter; that it ends, and takes no more than the stream carries, does.
pub fn fuzz_entry(input: &[u8]) {
    let mut timelines: Timelines<()> = Timelines::default();
    let mut rest = input;
    while let Some((head, behind)) = rest.split_first_chunk() {
        let Ok(header) = request::Header::parse(*head, input.len() as u64) else { return };
        let Some((payload, behind)) = behind.split_at_checked(header.payload_bytes) else { return };
        rest = behind;
        if header.command == Command::CreateRenderer {
            drop(Request::name(payload));
            continue;
        }
        let (words, _) = payload.as_chunks();
        let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let Ok(parsed) = Request::parse(header.command, &words) else { return };
        match parsed {
            Request::SyncCreate(value) => drop(timelines.create(value)),
            Request::SyncUnref(sync) => timelines.remove(sync),
            Request::SyncRead(sync) => drop(timelines.value(sync)),
            Request::SyncWrite(point) => drop(timelines.reach(&[point])),
            Request::SyncWait { any, points } => drop(timelines.wait(any, points, ())),
            Request::Submit(batches) => {
                for (batch, fence) in batches.into_iter().zip(0..) {
                    match batch.ring {
                        None => drop(timelines.reach(&batch.points)),
                        Some(ring) => {
                            drop(timelines.await_ring(ring, fence, batch.points));
                            drop(timelines.ring_passed(ring, fence / 2));
                        }
                    }
                }
            }
            _ => {}
        }
    }
}
