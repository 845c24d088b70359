// SPDX-License-Identifier: MIT OR Apache-2.0
//! The container's side of a stream, by either transport, and able to break every rule.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use lighter_frames::{HEADER_BYTES, Header, MAX_FRAME_BYTES, Message, Ring, Run, Tensor, ring};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;
use rustix::time::Timespec;

use super::PATIENCE;

/// A ring's memory in this process.
pub(crate) struct Memory {
    start: *mut u8,
    length: usize,
}

// SAFETY: plain memory of the process.
#[allow(unsafe_code)]
unsafe impl Send for Memory {}
// SAFETY: threads that write at the same time are what some tests are about; none reads but by a copy.
#[allow(unsafe_code)]
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, unmapped once.
        #[allow(unsafe_code)]
        unsafe {
            munmap(self.start.cast(), self.length).unwrap()
        }
    }
}

impl Memory {
    pub(crate) fn map(file: &OwnedFd, length: usize) -> Self {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at a place of the kernel's choice.
        #[allow(unsafe_code)]
        let start = unsafe { mmap(std::ptr::null_mut(), length, protection, flags, file, 0) }.unwrap();
        Self { start: start.cast(), length }
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset + 4 <= self.length);
        // SAFETY: within the mapping and aligned.
        #[allow(unsafe_code)]
        unsafe {
            &*self.start.add(offset).cast::<AtomicU32>()
        }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.length);
        // SAFETY: within the mapping.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(offset), bytes.len())
        }
    }

    pub(crate) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.length);
        let mut bytes = vec![0; length];
        // SAFETY: within the mapping.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.add(offset), bytes.as_mut_ptr(), length)
        }
        bytes
    }
}

/// A sealed ring with at least this much data area.
pub(crate) fn make_ring(data_bytes: u64) -> (OwnedFd, Memory) {
    let length = ring::bytes_for(data_bytes).unwrap();
    let file = memfd_create("ring", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, length).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let memory = Memory::map(&file, usize::try_from(length).unwrap());
    (file, memory)
}

/// A stream.
pub(crate) struct Client {
    pub(crate) number: u64,
    pub(crate) socket: UnixStream,
    pub(crate) ring: Option<Memory>,
    requests: u32,
    runs: u32,
}

/// The worker's answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) message: Message,
    pub(crate) data: Vec<Vec<u8>>,
}

impl Reply {
    pub(crate) fn outputs(self) -> Vec<(Tensor, Vec<u8>)> {
        match self.message {
            Message::Answer(answer) => answer.outputs.into_iter().zip(self.data).collect(),
            other => panic!("no answer but {other:?}"),
        }
    }

    pub(crate) fn failure(self) -> lighter_frames::Failed {
        match self.message {
            Message::Failed(failed) => failed,
            other => panic!("no failure but {other:?}"),
        }
    }
}

impl Client {
    pub(crate) fn new(number: u64, socket: UnixStream, ring: Option<Memory>) -> Self {
        Self { number, socket, ring, requests: 0, runs: 0 }
    }

    /// Runs; the data of each tensor beside it.
    pub(crate) fn run(&mut self, inputs: &[(Tensor, Vec<u8>)]) -> Option<Reply> {
        self.send_run(inputs);
        self.reply()
    }

    pub(crate) fn send_run(&mut self, inputs: &[(Tensor, Vec<u8>)]) {
        let tensors: Vec<Tensor> = inputs.iter().map(|(tensor, _)| tensor.clone()).collect();
        self.runs += 1;
        let run = Run { run: self.runs, data_offset: 0, inputs: tensors.clone() };
        let frame = Message::Run(run).encode().unwrap();
        let needed = ring::place(0, &tensors, ring::MAX_DATA_BYTES).unwrap().end;
        if self.ring.as_ref().is_some_and(|memory| needed > (memory.length - ring::DATA) as u64) {
            self.replace_ring(needed, self.requests);
        }
        if let Some(memory) = &self.ring {
            let area = (memory.length - ring::DATA) as u64;
            let placed = ring::place(0, &tensors, area).expect("the ring is large enough");
            for ((_, data), offset) in inputs.iter().zip(placed.offsets) {
                memory.write(ring::DATA + usize::try_from(offset).unwrap(), data);
            }
            self.send_head(&frame);
            return;
        }
        let mut all = frame;
        for (_, data) in inputs {
            all.extend_from_slice(data);
        }
        // A worker that has closed shows at the reply.
        let _ = self.socket.write_all(&all);
    }

    /// Puts a head into the ring and asks for it.
    pub(crate) fn send_head(&mut self, frame: &[u8]) {
        let memory = self.ring.as_ref().unwrap();
        memory.write(ring::HEAD, frame);
        self.requests = self.requests.wrapping_add(1);
        memory.word(ring::REQUEST).store(self.requests, SeqCst);
        match memory.word(ring::HOST_STATE).load(SeqCst) {
            ring::WAITING => {
                futex::wake(memory.word(ring::REQUEST), futex::Flags::empty(), 1).unwrap();
            }
            ring::ASLEEP => {
                let _ = self.socket.write_all(&Message::Bell.encode().unwrap());
            }
            _ => {}
        }
    }

    /// Sends a larger ring.
    pub(crate) fn replace_ring(&mut self, data_bytes: u64, before: u32) {
        let (file, memory) = make_ring(data_bytes);
        memory.word(ring::REQUEST).store(before, SeqCst);
        memory.word(ring::ANSWER).store(before, SeqCst);
        self.send_ring(memory.length as u64, &file);
        if let Some(old) = self.ring.replace(memory) {
            // A host that waits there does not look at the stream.
            futex::wake(old.word(ring::REQUEST), futex::Flags::empty(), 1).unwrap();
        }
    }

    pub(crate) fn send_ring(&self, bytes: u64, file: &OwnedFd) {
        self.send_with_file(&Message::Ring(Ring { bytes }).encode().unwrap(), file);
    }

    pub(crate) fn send_with_file(&self, frame: &[u8], file: &OwnedFd) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let pieces = [std::io::IoSlice::new(frame)];
        let _ = sendmsg(&self.socket, &pieces, &mut ancillary, SendFlags::NOSIGNAL);
    }

    /// Takes the answer; `None` when the worker closed the stream. A larger ring is made when it asks for one.
    pub(crate) fn reply(&mut self) -> Option<Reply> {
        if self.ring.is_none() {
            return self.reply_in_stream();
        }
        loop {
            let reply = self.reply_in_ring()?;
            let Message::Grow(grow) = reply.message else { return Some(reply) };
            self.replace_ring(grow.data_bytes, self.requests.wrapping_sub(1));
        }
    }

    fn reply_in_stream(&mut self) -> Option<Reply> {
        let mut header = [0; HEADER_BYTES];
        self.read(&mut header)?;
        let header = Header::decode(&header).unwrap();
        let mut body = vec![0; header.body_bytes as usize];
        self.read(&mut body)?;
        let message = Message::decode(header, &body).unwrap();
        let mut data = Vec::new();
        if let Message::Answer(answer) = &message {
            for tensor in &answer.outputs {
                let mut one = vec![0; usize::try_from(tensor.bytes()).unwrap()];
                self.read(&mut one)?;
                data.push(one);
            }
        }
        Some(Reply { message, data })
    }

    fn read(&mut self, into: &mut [u8]) -> Option<()> {
        match self.socket.read_exact(into) {
            Ok(()) => Some(()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the worker is stuck"),
            Err(_) => None,
        }
    }

    fn reply_in_ring(&mut self) -> Option<Reply> {
        let memory = self.ring.as_ref().unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            memory.word(ring::CONTAINER_STATE).store(ring::WAITING, SeqCst);
            let answer = memory.word(ring::ANSWER).load(SeqCst);
            if answer == self.requests {
                break;
            }
            let step = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            let _ = futex::wait(memory.word(ring::ANSWER), futex::Flags::empty(), answer, Some(&step));
            if memory.word(ring::ANSWER).load(SeqCst) != self.requests && self.is_closed() {
                return None;
            }
            assert!(Instant::now() < until, "the worker is stuck");
        }
        memory.word(ring::CONTAINER_STATE).store(ring::AWAKE, SeqCst);
        let header = memory.read(ring::HEAD, HEADER_BYTES);
        let body = usize::try_from(Header::decode(header.first_chunk().unwrap()).unwrap().body_bytes);
        let frame = memory.read(ring::HEAD, HEADER_BYTES + body.unwrap().min(MAX_FRAME_BYTES));
        let message = Message::decode_frame(&frame).unwrap();
        let mut data = Vec::new();
        if let Message::Answer(answer) = &message {
            let area = (memory.length - ring::DATA) as u64;
            let placed = ring::place(answer.data_offset, &answer.outputs, area).unwrap();
            for (tensor, offset) in answer.outputs.iter().zip(placed.offsets) {
                let offset = ring::DATA + usize::try_from(offset).unwrap();
                data.push(memory.read(offset, usize::try_from(tensor.bytes()).unwrap()));
            }
        }
        Some(Reply { message, data })
    }

    /// Whether the worker closed the stream. Frames that lie in it are thrown away.
    pub(crate) fn is_closed(&self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        let mut some = [0; 4096];
        let closed = loop {
            match (&self.socket).read(&mut some) {
                Ok(0) => break true,
                Ok(_) => {}
                Err(error) => break error.kind() != std::io::ErrorKind::WouldBlock,
            }
        };
        self.socket.set_nonblocking(false).unwrap();
        closed
    }

    /// Waits until the worker has closed the stream.
    pub(crate) fn wait_closed(&self) {
        let until = Instant::now() + PATIENCE;
        while !self.is_closed() {
            assert!(Instant::now() < until, "the worker keeps the stream open");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
