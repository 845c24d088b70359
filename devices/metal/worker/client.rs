// SPDX-License-Identifier: MIT OR Apache-2.0
//! One client: its stream from hello to end, on a thread of its own.
//!
//! ```text
//!   hello ──► commands, one after the other ──► end of stream, or the first that is refused
//! ```
//!
//! A refused command ends the stream: the protocol has no word for an error, and a client would go on with
//! answers that it never got. All that the client had goes with it.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::engine::Engine;
use super::link::Link;
use super::plan::{Plan, PlanError, plan};
use super::shape::ShapeError;
use super::space::{Space, SpaceError};
use super::weights::UploadError;
use crate::metal::ggml::{Backend, EngineError, GraphError, MemoryError};
use crate::metal::rpc::{
    Command, Era, FrameError, GraphFrame, HelloAnswer, MAX_GRAPH_BYTES, Major, Reader, UnknownMajor,
    candidates, choose_major, recompute, reply,
};

/// Most graphs that a client keeps; it forgets its own when it reaches this many.
const MAX_GRAPHS: usize = 1024;
/// Most bytes that they take together.
const MAX_GRAPHS_BYTES: usize = 2 << 30;
/// A body buffer larger than this is given back after use.
const KEEP_BODY_BYTES: usize = 8 << 20;
/// Longest body that is read at once; longer ones are content that goes where it belongs in pieces.
pub(super) const PIECE_BYTES: usize = 16 << 20;

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    /// It broke.
    #[error("connection broke")]
    Stream(#[source] std::io::Error),
    /// It did not begin with a hello.
    #[error("first command is {number}, not a hello: the client's llama.cpp is older than September 2025")]
    NoHello {
        /// The command.
        number: u8,
    },
    /// A major that is not served.
    #[error(transparent)]
    Major(#[from] UnknownMajor),
    /// A frame that is none.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A body that is none.
    #[error("body of {0:?} is malformed")]
    Body(Command),
    /// A device that is not there.
    #[error("device {0} does not exist")]
    Device(u32),
    /// A shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A place.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// A region outside its tensor.
    #[error("bytes {offset}+{bytes} are not within a tensor of {len}")]
    Region {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// Bytes of the tensor.
        len: u64,
    },
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// An upload.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// A graph's body.
    #[error(transparent)]
    GraphFrame(#[from] crate::metal::rpc::GraphError),
    /// A graph.
    #[error("graph is refused")]
    Plan(#[from] PlanError),
    /// A graph that is not there.
    #[error("graph {uid} is to be computed again, but is not kept")]
    NoGraph {
        /// Its name.
        uid: u64,
    },
    /// Too many graphs.
    #[error("graphs of more than {MAX_GRAPHS_BYTES} bytes")]
    GraphBytes,
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// ggml has no room.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The engine keeps notes on a tensor.
    #[error("the engine keeps notes on single tensors, which is not served")]
    Notes,
}

/// An accepted socket.
#[derive(Debug)]
pub(super) struct Socket(Arc<OwnedFd>);

impl Socket {
    /// Takes a socket over: it blocks, and sends at once.
    pub(super) fn new(socket: Arc<OwnedFd>) -> Self {
        // A unix socket has no such option; a socket that cannot be made to block will fail when read.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        let _ = rustix::io::ioctl_fionbio(&socket, false);
        Self(socket)
    }
}

impl Read for Socket {
    fn read(&mut self, target: &mut [u8]) -> std::io::Result<usize> {
        Ok(rustix::io::read(&self.0, target)?)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// One client and all that it has.
pub(super) struct Client {
    pub(super) reader: Reader<Socket>,
    pub(super) engine: Arc<Engine>,
    pub(super) link: Arc<Link>,
    pub(super) major: Major,
    // Graphs go before the memory they use, and the backend that may still compute them before both.
    backend: Option<Backend>,
    fallback: Option<Backend>,
    graphs: HashMap<u64, Plan>,
    graphs_bytes: usize,
    pub(super) space: Space,
    eras: Vec<Era>,
    pub(super) body: Vec<u8>,
    counted_in: u64,
}

/// Serves a client until its stream ends.
///
/// # Errors
/// When it ends by anything but the client's own closing between two commands.
pub(super) fn serve(
    socket: Socket,
    hint: Option<u8>,
    engine: Arc<Engine>,
    link: Arc<Link>,
) -> Result<(), ClientError> {
    let mut reader = Reader::new(socket);
    let Some((number, bytes)) = reader.frame().map_err(ClientError::Stream)? else { return Ok(()) };
    if number != Command::Hello.number() {
        return Err(ClientError::NoHello { number });
    }
    let choice = choose_major(hint, bytes)?;
    let major = choice.major;
    if choice.hint_refuted {
        tracing::warn!(?hint, major = major.number(), "client's hello is not of the expected protocol");
    }
    let bytes = Command::Hello.body(major).admit(bytes)?;
    let mut hello = vec![0; usize::try_from(bytes).unwrap_or(0)];
    reader.read_into(&mut hello).map_err(ClientError::Stream)?;
    reply(reader.source(), HelloAnswer::new(major).bytes()).map_err(ClientError::Stream)?;
    let mut client = Client {
        reader,
        major,
        backend: None,
        fallback: None,
        graphs: HashMap::new(),
        graphs_bytes: 0,
        space: Space::new(Arc::clone(&engine)),
        eras: candidates(major).to_vec(),
        body: Vec::new(),
        counted_in: 0,
        engine,
        link,
    };
    let ended = client.commands();
    client.count_in();
    ended
}

impl Client {
    fn commands(&mut self) -> Result<(), ClientError> {
        while let Some((number, bytes)) = self.reader.frame().map_err(ClientError::Stream)? {
            let command = Command::new(number, self.major)?;
            let bytes = command.body(self.major).admit(bytes)?;
            self.engine.counters.calls.fetch_add(1, Relaxed);
            self.one(command, bytes)?;
            self.count_in();
        }
        Ok(())
    }

    fn count_in(&mut self) {
        let taken = self.reader.taken();
        self.engine.counters.in_bytes.fetch_add(taken - self.counted_in, Relaxed);
        self.counted_in = taken;
    }

    fn one(&mut self, command: Command, bytes: u64) -> Result<(), ClientError> {
        match command {
            Command::SetTensor => self.set_tensor(bytes),
            Command::SetTensor2d => self.set_rows(bytes),
            Command::GraphCompute => self.compute(bytes),
            _ => {
                // All others are short: their caps are checked, and the longest holds eleven records.
                let body = self.read_body(bytes)?;
                let done = self.short(command, &body);
                self.body = body;
                done
            }
        }
    }

    /// Reads a body into the client's buffer, which the caller puts back.
    pub(super) fn read_body(&mut self, bytes: u64) -> Result<Vec<u8>, ClientError> {
        let len = usize::try_from(bytes.min(MAX_GRAPH_BYTES)).unwrap_or(0);
        let mut body = std::mem::take(&mut self.body);
        if body.capacity() < len {
            // Fresh zeroed pages come as they are filled; a client that only promises bytes gets none.
            body = vec![0; len];
        } else {
            body.resize(len, 0);
        }
        self.reader.read_into(&mut body).map_err(ClientError::Stream)?;
        Ok(body)
    }

    fn short(&mut self, command: Command, body: &[u8]) -> Result<(), ClientError> {
        match command {
            Command::GraphRecompute => {
                let (device, uid) = recompute(body, self.major).ok_or(ClientError::Body(command))?;
                self.only_device(device)?;
                self.recompute(uid)
            }
            Command::GetTensor => self.get_tensor(body),
            Command::GetTensor2d => self.get_rows(body),
            Command::MemsetTensor => self.fill_tensor(body),
            Command::CopyTensor => self.copy_tensor(body),
            Command::SetTensorHash => self.find_tensor(body),
            Command::InitTensor => self.init_tensor(body),
            Command::GetAllocSize => self.alloc_size(body),
            _ => self.small(command, body),
        }
    }

    pub(super) fn answer(&self, body: &[u8]) -> Result<(), ClientError> {
        let sent = reply(self.reader.source(), body).map_err(ClientError::Stream)?;
        self.engine.counters.out_bytes.fetch_add(sent, Relaxed);
        Ok(())
    }

    /// The age of ggml that the client seems to have.
    pub(super) fn age(&self) -> Option<&Era> {
        self.eras.first()
    }

    /// Answers a change with nothing, in the majors that wait for that.
    pub(super) fn acknowledge(&self) -> Result<(), ClientError> {
        if self.major.answers_changes() { self.answer(&[]) } else { Ok(()) }
    }

    pub(super) fn only_device(&self, device: u32) -> Result<(), ClientError> {
        if device == 0 { Ok(()) } else { Err(ClientError::Device(device)) }
    }

    /// Waits until memory shows what was computed.
    pub(super) fn settle(&mut self) {
        if !self.engine.host
            && let Some(backend) = &mut self.backend
        {
            let since = Instant::now();
            backend.finish();
            self.count_engine(since);
        }
    }

    fn count_engine(&self, since: Instant) {
        let spent = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.engine.counters.engine_us.fetch_add(spent, Relaxed);
    }

    /// Drops the graphs that use memory from which content has moved.
    pub(super) fn drop_stale(&mut self) {
        let moved = self.space.take_moved();
        if !moved.is_empty() {
            self.settle();
            self.drop_graphs_of(&moved);
        }
    }

    pub(super) fn drop_graphs_of(&mut self, memories: &[std::rc::Rc<crate::metal::ggml::Memory>]) {
        self.graphs.retain(|_, plan| !memories.iter().any(|memory| plan.uses(memory)));
        self.graphs_bytes = self.graphs.values().map(Plan::bytes).sum();
    }

    fn compute(&mut self, bytes: u64) -> Result<(), ClientError> {
        let body = self.read_body(bytes)?;
        let done = self.compute_body(&body);
        self.body = if body.capacity() > KEEP_BODY_BYTES { Vec::new() } else { body };
        done?;
        if self.major.answers_graph() { self.answer(&[0]) } else { Ok(()) }
    }

    fn compute_body(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let frame = GraphFrame::parse(body, self.major)?;
        self.settle();
        let plan = self.plan(&frame)?;
        self.drop_stale();
        let bytes = plan.bytes();
        // A client that names its graphs computes one without a name only once.
        let keep = !self.major.names_graphs() || frame.uid != 0;
        if self.graphs.len() >= MAX_GRAPHS && !self.graphs.contains_key(&frame.uid) {
            self.graphs.clear();
            self.graphs_bytes = 0;
        }
        if keep {
            self.graphs_bytes += bytes;
            if let Some(old) = self.graphs.insert(frame.uid, plan) {
                self.graphs_bytes -= old.bytes();
            }
            if self.graphs_bytes > MAX_GRAPHS_BYTES {
                return Err(ClientError::GraphBytes);
            }
            return self.recompute(frame.uid);
        }
        let mut plan = plan;
        let done = self.run(&mut plan);
        self.settle();
        done
    }

    /// Reads the graph with the table of each ggml that the client may have, until one makes sense of it.
    fn plan(&mut self, frame: &GraphFrame<'_>) -> Result<Plan, ClientError> {
        let mut first_error = None;
        while let Some(era) = self.eras.first().copied() {
            match plan(&self.engine, &mut self.space, frame, &era, self.major) {
                Ok(plan) => return Ok(plan),
                Err(error) if self.eras.len() == 1 => return Err(first_error.unwrap_or(error).into()),
                Err(error) => {
                    tracing::debug!(since = era.since, %error, "graph is not of this age of ggml");
                    first_error.get_or_insert(error);
                    self.eras.remove(0);
                }
            }
        }
        Err(ClientError::Body(Command::GraphCompute))
    }

    fn recompute(&mut self, uid: u64) -> Result<(), ClientError> {
        let mut plan = self.graphs.remove(&uid).ok_or(ClientError::NoGraph { uid })?;
        let done = self.run(&mut plan);
        self.graphs.insert(uid, plan);
        done
    }

    fn run(&mut self, plan: &mut Plan) -> Result<(), ClientError> {
        let mut backend = match self.backend.take() {
            Some(backend) => backend,
            None => self.engine.backend(&self.engine.device)?,
        };
        let since = Instant::now();
        let done = plan.compute(&self.engine, &mut backend, &mut self.fallback);
        self.count_engine(since);
        self.engine.counters.graphs.fetch_add(1, Relaxed);
        self.backend = Some(backend);
        Ok(done?)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Whether an error is the client's going away, which concerns nobody else.
pub(super) fn is_reset(error: &ClientError) -> bool {
    let io = match error {
        ClientError::Stream(io) | ClientError::Upload(UploadError::Stream(io)) => io,
        _ => return false,
    };
    matches!(io.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}
