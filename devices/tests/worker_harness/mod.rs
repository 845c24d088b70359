// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plays the service for a real worker process with a real ggml, and a client of any protocol major.
//!
//! `LIGHTER_TEST_GGML_ROOT` names a folder with a system that has libggml0 (an engine root); the worker runs
//! through that system's loader. Unset, the tests say loudly that they did not run.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lighter_devices::metal::control::{FromWorker, ToWorker, WeightKey, WorkerConfig, WorkerCounters};
use lighter_devices::metal::rpc::{LATEST_OPS, MAX_PARAMS, MAX_SOURCES, Op, WireTensor};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// How long anything may take before a test fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the engine's system is; says so when the tests cannot run.
pub(crate) fn root() -> Option<PathBuf> {
    let root = std::env::var_os("LIGHTER_TEST_GGML_ROOT").map(PathBuf::from);
    if root.is_none() {
        eprintln!("NOT RUN: set LIGHTER_TEST_GGML_ROOT to an engine root (tools/engine-root metal)");
    }
    root
}

/// What the worker's process does; each test file has a function that calls it, started by [`Host::start`].
pub(crate) fn worker_child() {
    if std::env::var_os("LIGHTER_TEST_WORKER").is_some() {
        let control = rustix::io::dup(rustix::stdio::stdin()).unwrap();
        lighter_devices::metal::worker::run(control).unwrap();
    }
}

#[derive(Default)]
struct Shelf {
    /// Content by key and its hash, for services that keep weights.
    kept: Vec<(WeightKey, u64, OwnedFd)>,
    keeps: bool,
    /// Gives other content than was asked for.
    lies: bool,
    asked: u64,
    ended: Vec<(u64, Option<String>)>,
    counters: Option<WorkerCounters>,
}

/// The service's side of one worker.
pub(crate) struct Host {
    control: Arc<OwnedFd>,
    child: Child,
    shelf: Arc<Mutex<Shelf>>,
    closed: Receiver<()>,
    next: std::cell::Cell<u64>,
}

pub(crate) fn config(root: &Path, engine: &str) -> WorkerConfig {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    WorkerConfig {
        base_library: libraries.join("libggml-base.so.0"),
        registry_library: libraries.join("libggml.so.0"),
        backends_dir: Some(libraries.join("ggml/backends0")),
        engine: engine.to_owned(),
        threads: Some(1),
        max_bytes: 256 << 20,
        max_streams: 32,
        huge_pages: true,
        share_weights: false,
    }
}

impl Host {
    /// Starts a worker, or says why the test does not run.
    pub(crate) fn start(change: impl FnOnce(&mut WorkerConfig)) -> Option<Self> {
        let root = root()?;
        let mut config = config(&root, "CPU");
        change(&mut config);
        let host = Self::spawn(&root, config);
        Some(host)
    }

    fn spawn(root: &Path, config: WorkerConfig) -> Self {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        let child = Command::new(root.join("lib64/ld-linux-x86-64.so.2"))
            .arg("--library-path")
            .arg(libraries)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "worker_child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("LIGHTER_TEST_WORKER", "1")
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        lighter_wire::send(near.as_fd(), &ToWorker::Configure(config), &[]).unwrap();
        let first = lighter_wire::recv::<FromWorker>(near.as_fd()).unwrap();
        assert!(matches!(first, Some((FromWorker::Ready { .. }, _))), "{first:?}");
        let (control, shelf) = (Arc::new(near), Arc::new(Mutex::new(Shelf::default())));
        let (close, closed) = channel();
        let (socket, state) = (Arc::clone(&control), Arc::clone(&shelf));
        std::thread::spawn(move || {
            while let Ok(Some((message, files))) = lighter_wire::recv::<FromWorker>(socket.as_fd()) {
                hear(&socket, &state, message, files);
            }
            drop(close);
        });
        Self { control, child, shelf, closed, next: std::cell::Cell::new(1) }
    }

    /// Makes the service keep weights; `lies` gives other content than was asked for.
    pub(crate) fn keep_weights(&self, lies: bool) {
        let mut shelf = self.shelf.lock().unwrap();
        (shelf.keeps, shelf.lies) = (true, lies);
    }

    /// How often the worker asked for a weight.
    pub(crate) fn asked(&self) -> u64 {
        self.shelf.lock().unwrap().asked
    }

    /// A client that has said hello; `hint` is what the service knows of its major.
    pub(crate) fn client_hinted(&self, major: u8, hint: Option<u8>) -> Client {
        let mut client = self.connect(hint);
        client.major = major;
        let hello = if major >= 4 { 24 } else { 0 };
        let answer = client.call(14, &vec![0; hello]).expect("hello");
        assert_eq!(answer[0], major, "answered with another major");
        assert_eq!(answer.len(), if major >= 4 { 28 } else { 3 });
        client
    }

    pub(crate) fn client(&self, major: u8) -> Client {
        self.client_hinted(major, Some(major))
    }

    /// A stream on which nothing has been said.
    pub(crate) fn connect(&self, hint: Option<u8>) -> Client {
        let (near, far) = UnixStream::pair().unwrap();
        let stream = self.hand(far.as_fd(), hint);
        near.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream, socket: near, major: hint.unwrap_or(8) }
    }

    /// Hands a socket to the worker.
    pub(crate) fn hand(&self, socket: std::os::fd::BorrowedFd<'_>, major: Option<u8>) -> u64 {
        let stream = self.next.get();
        self.next.set(stream + 1);
        lighter_wire::send(self.control.as_fd(), &ToWorker::Stream { stream, major }, &[socket]).unwrap();
        stream
    }

    /// Waits until a stream has ended, and says why.
    pub(crate) fn end_of(&self, stream: u64) -> Option<String> {
        self.wait(|shelf| {
            shelf.ended.iter().find(|(ended, _)| *ended == stream).map(|(_, error)| error.clone())
        })
    }

    /// The worker's counters.
    pub(crate) fn counters(&self) -> WorkerCounters {
        self.shelf.lock().unwrap().counters = None;
        lighter_wire::send(self.control.as_fd(), &ToWorker::Report { seq: 1 }, &[]).unwrap();
        self.wait(|shelf| shelf.counters.clone())
    }

    fn wait<R>(&self, mut look: impl FnMut(&mut Shelf) -> Option<R>) -> R {
        let until = std::time::Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(&mut self.shelf.lock().unwrap()) {
                return found;
            }
            assert!(std::time::Instant::now() < until, "the worker did not answer");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends the worker in an orderly way.
    pub(crate) fn stop(mut self) {
        rustix::net::shutdown(self.control.as_fd(), rustix::net::Shutdown::Both).unwrap();
        let _ = self.closed.recv();
        assert!(self.child.wait().unwrap().success(), "the worker ended badly");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A worker that crashed has closed its socket before its end can be waited for.
            std::thread::sleep(Duration::from_millis(500));
            eprintln!("the worker's end: {:?}", self.child.try_wait());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hear(socket: &OwnedFd, state: &Mutex<Shelf>, message: FromWorker, mut files: Vec<OwnedFd>) {
    let mut shelf = state.lock().unwrap();
    match message {
        FromWorker::Ended { stream, error } => shelf.ended.push((stream, error)),
        FromWorker::Report { counters, .. } => shelf.counters = Some(counters),
        FromWorker::Keep { seq, key, fnv } => {
            shelf.asked += 1;
            let file = files.pop().filter(|_| shelf.keeps).map(|file| copy(&file, &key, shelf.lies));
            answer(socket, seq, file.as_ref());
            shelf.kept.extend(file.map(|file| (key, fnv, file)));
        }
        FromWorker::Find { seq, len, fnv } => {
            shelf.asked += 1;
            let found = shelf.kept.iter().find(|(key, hash, _)| key.len == len && *hash == fnv);
            answer(socket, seq, found.map(|(_, _, file)| file));
        }
        FromWorker::Ready { .. } | FromWorker::Failed { .. } => {}
    }
}

fn copy(file: &OwnedFd, key: &WeightKey, lies: bool) -> OwnedFd {
    let mut bytes = vec![0; usize::try_from(key.len).unwrap()];
    rustix::io::pread(file, &mut bytes, 0).unwrap();
    assert_eq!(blake3::hash(&bytes).to_hex().to_string(), key.blake3);
    if lies {
        bytes[1000] ^= 1;
    }
    let mut kept = tempfile::tempfile().unwrap();
    kept.write_all(&bytes).unwrap();
    kept.into()
}

fn answer(socket: &OwnedFd, seq: u64, file: Option<&OwnedFd>) {
    let descriptors: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    let message = ToWorker::Weight { seq, found: file.is_some() };
    lighter_wire::send(socket.as_fd(), &message, &descriptors).unwrap();
}

/// A client of the worker.
pub(crate) struct Client {
    pub(crate) stream: u64,
    pub(crate) socket: UnixStream,
    pub(crate) major: u8,
}

impl Client {
    /// Sends a command without waiting.
    pub(crate) fn send(&mut self, command: u8, body: &[u8]) {
        let mut frame = vec![command];
        frame.extend((body.len() as u64).to_le_bytes());
        frame.extend(body);
        // A stream that the worker has closed shows at the next answer.
        let _ = self.socket.write_all(&frame);
    }

    /// Sends bytes as they are.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    /// Takes an answer; `None` when the worker closed the stream.
    pub(crate) fn answer(&mut self) -> Option<Vec<u8>> {
        let mut length = [0; 8];
        self.read(&mut length)?;
        let mut body = vec![0; usize::try_from(u64::from_le_bytes(length)).unwrap()];
        self.read(&mut body)?;
        Some(body)
    }

    fn read(&mut self, into: &mut [u8]) -> Option<()> {
        match self.socket.read_exact(into) {
            Ok(()) => Some(()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the worker is stuck"),
            Err(_) => None,
        }
    }

    pub(crate) fn call(&mut self, command: u8, body: &[u8]) -> Option<Vec<u8>> {
        self.send(command, body);
        self.answer()
    }

    /// The leading device number, where the major has one.
    pub(crate) fn device(&self) -> Vec<u8> {
        if self.major >= 3 { vec![0; 4] } else { vec![] }
    }

    /// A buffer's handle and base.
    pub(crate) fn buffer(&mut self, bytes: u64) -> (u64, u64) {
        let mut body = self.device();
        body.extend(bytes.to_le_bytes());
        let answer = self.call(0, &body).expect("a buffer");
        let handle = u64::from_le_bytes(answer[..8].try_into().unwrap());
        assert_ne!(handle, 0, "no memory");
        let base = self.call(3, &handle.to_le_bytes()).expect("its base");
        (handle, u64::from_le_bytes(base.try_into().unwrap()))
    }

    pub(crate) fn set(&mut self, tensor: &WireTensor, offset: u64, bytes: &[u8]) {
        let mut body = tensor.to_bytes().to_vec();
        if self.major >= 7 {
            body.push(0);
        }
        body.extend(offset.to_le_bytes());
        body.extend(bytes);
        self.send(6, &body);
    }

    pub(crate) fn get(&mut self, tensor: &WireTensor, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        let mut body = tensor.to_bytes().to_vec();
        body.extend(offset.to_le_bytes());
        body.extend(bytes.to_le_bytes());
        self.call(8, &body)
    }

    /// The body of a graph.
    pub(crate) fn graph_body(&self, uid: u64, nodes: &[u64], tensors: &[WireTensor]) -> Vec<u8> {
        let mut body = self.device();
        if self.major >= 8 {
            body.extend(uid.to_le_bytes());
        }
        body.extend(u32::try_from(nodes.len()).unwrap().to_le_bytes());
        body.extend(nodes.iter().flat_map(|id| id.to_le_bytes()));
        body.extend(u32::try_from(tensors.len()).unwrap().to_le_bytes());
        body.extend(tensors.iter().flat_map(WireTensor::to_bytes));
        body
    }

    pub(crate) fn compute(&mut self, uid: u64, nodes: &[u64], tensors: &[WireTensor]) {
        let body = self.graph_body(uid, nodes, tensors);
        self.send(10, &body);
        if self.major < 3 {
            assert_eq!(self.answer(), Some(vec![0]));
        }
    }

    pub(crate) fn recompute(&mut self, uid: u64) {
        let mut body = self.device();
        if self.major >= 8 {
            body.extend(uid.to_le_bytes());
        }
        self.send(16, &body);
    }

    /// Adds two vectors and looks at the sum: shows that the worker still serves.
    pub(crate) fn add_up(&mut self) {
        let (handle, base) = self.buffer(4096);
        let (a, b) = (vector(1, handle, base, 8), vector(2, handle, base + 512, 8));
        let sum = result(3, Op::Add, vector(3, handle, base + 1024, 8), &[1, 2]);
        self.set(&a, 0, &floats(&[1.0; 8]));
        self.set(&b, 0, &floats(&[0.5; 8]));
        self.compute(7, &[3], &[a, b, sum]);
        assert_eq!(self.get(&sum, 0, 32).expect("the sum"), floats(&[1.5; 8]));
        let freed = handle.to_le_bytes();
        self.send(4, &freed);
        if self.major < 6 {
            assert_eq!(self.answer(), Some(vec![]));
        }
    }
}

pub(crate) fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The newest ggml's number of an operation.
pub(crate) fn number(op: Op) -> u32 {
    u32::try_from(LATEST_OPS.iter().position(|other| *other == op).unwrap()).unwrap()
}

/// A tensor without gaps of 4-byte elements.
pub(crate) fn tensor(id: u64, kind: u32, ne: [u32; 4], buffer: u64, data: u64) -> WireTensor {
    let mut nb = [4; 4];
    for i in 1..4 {
        nb[i] = nb[i - 1] * ne[i - 1];
    }
    let mut name = [0; 64];
    name[0] = b't';
    WireTensor {
        id,
        kind,
        buffer,
        ne,
        nb,
        op: 0,
        params: [0; MAX_PARAMS],
        flags: 0,
        src: [0; MAX_SOURCES],
        view_src: 0,
        view_offset: 0,
        data,
        name,
        use_count: 0,
    }
}

pub(crate) fn vector(id: u64, buffer: u64, data: u64, elements: u32) -> WireTensor {
    tensor(id, 0, [elements, 1, 1, 1], buffer, data)
}

/// Makes a tensor the result of an operation.
pub(crate) fn result(id: u64, op: Op, shape: WireTensor, sources: &[u64]) -> WireTensor {
    let mut src = [0; MAX_SOURCES];
    src[..sources.len()].copy_from_slice(sources);
    WireTensor { id, op: number(op), src, flags: 16, use_count: 1, ..shape }
}
