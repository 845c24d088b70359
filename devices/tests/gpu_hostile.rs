// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clients of the gpu device that mean harm, against real sessions with the real virglrenderer: each ends with its own session and
//! nobody else's. `LIGHTER_TEST_GPU_ROOT` names a renderer root (`tools/engine-root gpu`); without it these tests say SKIPPED.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "tests"
)]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lighter_devices::engine_root::{self, Loader};

const LONG: Duration = Duration::from_secs(20);
const VENUS: u32 = 4;
/// Command numbers.
const CREATE_RENDERER: u32 = 8;
const PING: u32 = 10;
const VERSION: u32 = 11;
const CAPSET: u32 = 16;
const CONTEXT: u32 = 17;
const BLOB: u32 = 18;
const UNREF: u32 = 3;
const SYNC_CREATE: u32 = 19;
const SYNC_READ: u32 = 21;
const SYNC_WAIT: u32 = 23;
const SUBMIT: u32 = 24;

/// Sessions on a socket of their own.
struct Sessions {
    child: Child,
    socket: PathBuf,
    says: Arc<Mutex<String>>,
    _folder: tempfile::TempDir,
}

impl Sessions {
    fn start() -> Option<Self> {
        let Some(root) = std::env::var_os("LIGHTER_TEST_GPU_ROOT").map(PathBuf::from) else {
            eprintln!("SKIPPED: LIGHTER_TEST_GPU_ROOT names no renderer root");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/examples/gpu_serve");
        let program = std::env::var_os("CARGO_TARGET_DIR")
            .map_or(program, |target| PathBuf::from(target).join("debug/examples/gpu_serve"));
        let mut child = engine_root::command(&program, Loader::of_root(&root).as_ref(), &[])
            .args([&socket, &root])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let says = Arc::new(Mutex::new(String::new()));
        let (mut stderr, heard) = (child.stderr.take().unwrap(), Arc::clone(&says));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(got @ 1..) = stderr.read(&mut buffer) {
                heard.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..got]));
            }
        });
        let deadline = Instant::now() + LONG;
        while !socket.exists() {
            assert!(Instant::now() < deadline, "no socket: {}", says.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Self { child, socket, says, _folder: folder })
    }

    fn connect(&self) -> Client {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Client(stream)
    }

    /// A client as Mesa would begin, with a context.
    fn good(&self) -> Client {
        let mut client = self.connect();
        client.begin();
        client
    }

    /// Waits for words in what sessions have said.
    fn says(&self, words: &str) {
        let deadline = Instant::now() + LONG;
        while !self.says.lock().unwrap().contains(words) {
            assert!(Instant::now() < deadline, "never said {words:?}: {}", self.says.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client(UnixStream);

impl Client {
    fn send(&mut self, command: u32, words: &[u32]) {
        let head = [words.len() as u32, command];
        let bytes: Vec<u8> = head.iter().chain(words).flat_map(|word| word.to_le_bytes()).collect();
        // A session that has ended reads no more.
        let _ = self.0.write_all(&bytes);
    }

    fn words(&mut self, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; count * 4];
        self.0.read_exact(&mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    fn ask(&mut self, command: u32, words: &[u32], answer: usize) -> Vec<u32> {
        self.send(command, words);
        self.words(2 + answer).split_off(2)
    }

    fn begin(&mut self) {
        self.0.write_all(&[4u32.to_le_bytes(), CREATE_RENDERER.to_le_bytes(), *b"test"].concat()).unwrap();
        assert!(self.ask(PING, &[], 0).is_empty());
        assert_eq!(self.ask(VERSION, &[4], 1), [3]);
        self.send(CAPSET, &[VENUS, 0]);
        let head = self.words(3);
        assert_eq!(head[2], 1, "there is no Venus");
        self.words(head[0] as usize - 1);
        self.send(CONTEXT, &[VENUS]);
    }

    /// That the session has ended, and in which way.
    fn is_ended(&mut self) -> ErrorKind {
        let mut byte = [0; 256];
        loop {
            match self.0.read(&mut byte) {
                Ok(0) => return ErrorKind::UnexpectedEof,
                Ok(_) => {}
                Err(error) => return error.kind(),
            }
        }
    }
}

/// Sends something bad as a client with a context; gives how the stream ended.
fn bad(sessions: &Sessions, command: u32, words: &[u32], reason: &str) {
    let mut client = sessions.good();
    client.send(command, words);
    let end = client.is_ended();
    assert!(matches!(end, ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof), "{reason}: {end:?}");
    sessions.says(reason);
}

#[test]
fn what_is_no_request_ends_its_own_session_with_a_reason() {
    let Some(sessions) = Sessions::start() else { return };
    let mut other = sessions.good();
    bad(&sessions, 99, &[0], "command 99 is none that Mesa's Venus driver sends");
    bad(&sessions, BLOB, &[2, 1, 4096], "CreateBlob (18) has 3 words");
    bad(&sessions, SUBMIT, &[1, 0, 9, 9, 0, 0, 0, 0, 0], "batch 0 of a submission lies outside of it");
    bad(&sessions, SUBMIT, &[1, 1, 0, 0, 0, 0, 64, 0, 0], "is for ring 64");
    bad(&sessions, CONTEXT, &[VENUS], "has one already");
    bad(&sessions, CONTEXT, &[1], "that is not Vulkan's");
    bad(&sessions, SYNC_READ, &[77], "no timeline 77");
    bad(&sessions, BLOB, &[1, 1, 4096, 0, 0, 0], "not the renderer's");
    // Far more than a request may have: refused by its head.
    bad(&sessions, SUBMIT, &vec![0; (4 << 18) + 8], "more than 4194304");
    assert!(other.ask(PING, &[], 0).is_empty(), "another client was harmed");
}

#[test]
fn sizes_and_numbers_that_are_nobodys_end_their_own_session() {
    let Some(sessions) = Sessions::start() else { return };
    let mut other = sessions.good();
    bad(&sessions, BLOB, &[2, 1, 0, 1 << 31, 0, 0], "more bytes do not fit");
    bad(&sessions, BLOB, &[2, 1, u32::MAX, u32::MAX, 0, 0], "more bytes do not fit");
    bad(&sessions, BLOB, &[2, 1, 4096, 0, 5, 0], "resource_create_blob failed");
    bad(&sessions, BLOB, &[2, u32::MAX, 4096, 0, 0, 0], "resource_create_blob failed");
    // Commands that are none: the render server ends the context, or the session hears of it with the next request.
    let mut client = sessions.good();
    client.send(SUBMIT, &[1, 0, 9, 4, 0, 0, 0, 0, 0, u32::MAX, u32::MAX, u32::MAX, u32::MAX]);
    client.send(UNREF, &[12_345]);
    let sync = client.ask(SYNC_CREATE, &[0, 0], 1);
    assert_eq!(sync.len(), 1);
    drop(client);
    assert!(other.ask(PING, &[], 0).is_empty(), "another client was harmed");
}

#[test]
fn memory_is_handed_out_and_mapped_and_floods_of_it_end_at_the_limit() {
    let Some(sessions) = Sessions::start() else { return };
    let mut client = sessions.good();
    // New shared memory, 1 MiB each: the reply, then the descriptor with its byte, which nobody takes here.
    for turn in 1..=64 {
        let answer = client.ask(BLOB, &[2, 1, 1 << 20, 0, 0, 0], 1);
        assert_eq!(answer, [turn]);
        let mut byte = [0];
        client.0.read_exact(&mut byte).unwrap();
    }
    for resource in 1..=64 {
        client.send(UNREF, &[resource]);
    }
    assert!(client.ask(PING, &[], 0).is_empty());
    let mut flood = sessions.good();
    for _ in 0..100_000 {
        flood.send(SYNC_CREATE, &[0, 0]);
        let mut head = [0; 12];
        if flood.0.read_exact(&mut head).is_err() {
            break;
        }
    }
    sessions.says("has 65536 timelines already");
    let mut flood = sessions.good();
    let sync = flood.ask(SYNC_CREATE, &[0, 0], 1)[0];
    for _ in 0..2000 {
        flood.send(SYNC_WAIT, &[0, 0, sync, 1, 0]);
        let mut head = [0; 9];
        if flood.0.read_exact(&mut head).is_err() {
            break;
        }
    }
    sessions.says("waits in 1024 places");
}

#[test]
fn a_client_that_goes_in_the_middle_of_a_request_leaves_nothing_behind() {
    let Some(sessions) = Sessions::start() else { return };
    for cut in [1, 4, 7, 8, 9, 31] {
        let mut client = sessions.good();
        let whole: Vec<u8> =
            [6, BLOB, 2, 1, 4096, 0, 0, 0].iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
        client.0.write_all(&whole[..cut]).unwrap();
        drop(client);
    }
    let mut never = sessions.connect();
    never.0.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(matches!(never.is_ended(), ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof));
    sessions.good();
    // All but the last have ended by themselves.
    let pid = sessions.child.id();
    let deadline = Instant::now() + LONG;
    loop {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let all: usize = tasks
            .map(|task| {
                let list = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default();
                list.split_whitespace().count()
            })
            .sum();
        if all <= 2 {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{all} processes are left ({children}): {}",
            sessions.says.lock().unwrap()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
