// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one ordered stream to the host: its buffer, the storage numbers, and writing it to the socket.
//!
//! Whole messages are appended under one lock, so their order on the wire is the order of the calls. One thread writes at
//! a time; the others go on appending. A write is first tried without waiting and with the interpreter's lock kept:
//! giving that up for a few microseconds would let another thread take it for milliseconds. What the socket does not take
//! at once is written with the lock given up. A thread of this library, which never needs the interpreter, writes what is
//! left over when no call has come for a moment.
//!
//! No thread may ask for the interpreter's lock while it holds this one. A process forked while there is a connection must
//! not touch the stream at all, and its lock may be held by a thread that the child does not have: everything here first
//! asks [`is_child`].
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use crate::numbers::{FREED, Number, Pool};
use crate::socket::{Batch, SignalsBlocked, Written};

/// Message kinds of the protocol.
const CALL: u8 = 1;
const FREE: u8 = 2;
const ALLOC: u8 = 7;
/// Bytes that new tensors may take before the host hears of them, so that frees do not wait behind allocations.
const MAX_PENDING_BYTES: u64 = 32 << 20;
/// A thread that finds another one writing waits for it only above this.
const MAX_WAITING_BYTES: usize = 1 << 20;
/// How long no call must have come before the flusher writes; and how long it looks away after it saw calls coming.
const IDLE: Duration = Duration::from_micros(150);
const BUSY: Duration = Duration::from_micros(500);

/// Set in a child that was forked while there was a connection.
static CHILD: AtomicBool = AtomicBool::new(false);
/// Whether there has been a connection, so that a fork matters.
static CONNECTED: AtomicBool = AtomicBool::new(false);

/// The stream.
#[derive(Debug)]
pub(crate) struct Stream {
    state: Mutex<State>,
    /// `sending` ended, or there is something for the flusher to do.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    buffer: Vec<u8>,
    /// An empty buffer to go on with while the other is written.
    spare: Vec<u8>,
    pool: Pool,
    gone: Vec<Number>,
    socket: i32,
    sending: bool,
    flusher_sleeps: bool,
    /// Why the flusher's write failed; whoever flushes next tells Python.
    failed: Option<Errno>,
    pending_bytes: u64,
    flush_bytes: usize,
    counters: Counters,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) flushes: u64,
    /// Bytes that were ever put on the stream.
    appended: u64,
}

/// What to do about a flush next.
#[derive(Debug)]
pub(crate) enum Step {
    /// Everything is written.
    Done,
    /// Another thread writes.
    Wait,
    /// There is no socket, or writing to it failed for this reason.
    NoSocket(Option<Errno>),
    /// Write this.
    Write(Batch),
}

/// Whether this is a forked child, which has no stream.
pub(crate) fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

extern "C" fn after_fork_in_child() {
    if CONNECTED.load(Ordering::Relaxed) {
        CHILD.store(true, Ordering::Relaxed);
        FREED.ignore();
    }
}

/// Lets every later fork be known.
pub(crate) fn watch_forks() {
    // SAFETY: the handler is async-signal-safe (it stores to atomics) and this library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
}

impl Stream {
    pub(crate) const fn new() -> Self {
        Self {
            state: Mutex::new(State {
                buffer: Vec::new(),
                spare: Vec::new(),
                pool: Pool::new(),
                gone: Vec::new(),
                socket: -1,
                sending: false,
                flusher_sleeps: false,
                failed: None,
                pending_bytes: 0,
                flush_bytes: 2048,
                counters: Counters { calls: 0, bytes_sent: 0, flushes: 0, appended: 0 },
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_flush_bytes(&self, bytes: usize) {
        self.lock().flush_bytes = bytes;
    }

    /// Takes another socket, which its owner keeps open until this is called again with -1 and has returned. Waits for a
    /// write that is going on, so the caller has given up the interpreter's lock.
    pub(crate) fn set_socket(&'static self, socket: i32) {
        if is_child() {
            return;
        }
        let mut state = self.lock();
        while state.sending {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.socket = socket;
        state.failed = None;
        if socket < 0 {
            // What was meant for the old host means nothing to another.
            state.buffer.clear();
            state.counters.appended = state.counters.bytes_sent;
        } else if !CONNECTED.swap(true, Ordering::Relaxed) {
            drop(state);
            self.start_flusher();
        } else {
            self.changed.notify_all();
        }
    }

    /// Puts whole messages on the stream, after the FREEs that are due.
    pub(crate) fn append(&self, messages: &[u8]) {
        if is_child() {
            return;
        }
        let mut state = self.lock();
        state.drain();
        state.extend(messages);
        self.wake_flusher(&mut state);
    }

    /// Numbers for new storages of together `bytes`, after the FREEs that are due; false when not so many are left.
    pub(crate) fn take_numbers(&self, count: usize, bytes: u64, into: &mut Vec<Number>) -> bool {
        if is_child() {
            return false;
        }
        let mut state = self.lock();
        state.drain();
        state.take_numbers(count, bytes, into)
    }

    /// A number for a storage whose first message Python writes. FREEs stay where they are unless the numbers run out.
    pub(crate) fn take_number(&self, bytes: u64) -> Option<Number> {
        if is_child() {
            return None;
        }
        let mut state = self.lock();
        let number = state.pool.take().or_else(|| {
            state.drain();
            state.pool.take()
        })?;
        state.pending_bytes = state.pending_bytes.saturating_add(bytes);
        Some(number)
    }

    /// Numbers of a call that failed: of the first `tried` a tensor may have been made, which goes and says so.
    pub(crate) fn take_back(&self, numbers: &[Number], tried: usize) {
        let mut state = self.lock();
        let (tried, unused) = numbers.split_at(tried.min(numbers.len()));
        for number in tried {
            // The host must know a number before its FREE comes.
            state.alloc(*number, 0, 0);
        }
        state.pool.give_back(unused);
    }

    /// Puts a CALL on the stream; true when it is time to flush.
    pub(crate) fn call(&self, signature: u32, slots: &[u8], numbers: &[Number]) -> bool {
        if is_child() {
            return true;
        }
        let mut state = self.lock();
        if numbers.is_empty() {
            state.drain();
        }
        state.extend_call(signature, slots, numbers);
        self.wake_flusher(&mut state);
        state.is_due()
    }

    /// Puts an ALLOC on the stream; true when it is time to flush.
    pub(crate) fn alloc(&self, number: Number, bytes: u64, dtype: u8) -> bool {
        if is_child() {
            return true;
        }
        let mut state = self.lock();
        state.drain();
        state.alloc(number, bytes, dtype);
        self.wake_flusher(&mut state);
        state.is_due()
    }

    pub(crate) fn has_socket(&self) -> bool {
        !is_child() && self.lock().socket >= 0
    }

    /// Bytes that are not written yet.
    pub(crate) fn pending(&self) -> usize {
        if is_child() { 0 } else { self.lock().buffer.len() }
    }

    pub(crate) fn counters(&self) -> Counters {
        if is_child() { Counters::default() } else { self.lock().counters }
    }

    /// How much was put on the stream up to now; a flush is done when so much is written.
    pub(crate) fn goal(&self) -> u64 {
        if is_child() {
            return 0;
        }
        let mut state = self.lock();
        state.drain();
        state.pending_bytes = 0;
        state.counters.appended
    }

    /// The next step of a flush up to `goal`.
    pub(crate) fn step(&self, goal: u64) -> Step {
        if is_child() {
            return Step::NoSocket(None);
        }
        let mut state = self.lock();
        if state.counters.bytes_sent >= goal || (state.buffer.is_empty() && !state.sending) {
            return Step::Done;
        }
        if state.sending {
            return Step::Wait;
        }
        state.begin()
    }

    /// As [`Stream::step`] for a call that found the buffer full: where another thread writes, that will do.
    pub(crate) fn step_when_due(&self) -> Step {
        if is_child() {
            return Step::NoSocket(None);
        }
        let mut state = self.lock();
        if state.sending {
            return if state.buffer.len() > MAX_WAITING_BYTES { Step::Wait } else { Step::Done };
        }
        if state.buffer.is_empty() { Step::Done } else { state.begin() }
    }

    /// Waits until no thread writes.
    pub(crate) fn wait(&self) {
        let mut state = self.lock();
        while state.sending {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends a write. What was not written goes back to the head of the buffer.
    pub(crate) fn finish(&self, batch: Batch) {
        let mut state = self.lock();
        state.finish(batch);
        drop(state);
        self.changed.notify_all();
    }

    fn wake_flusher(&self, state: &mut State) {
        if state.flusher_sleeps && state.socket >= 0 {
            state.flusher_sleeps = false;
            self.changed.notify_all();
        }
    }

    fn start_flusher(&'static self) {
        let blocked = SignalsBlocked::now();
        let thread = std::thread::Builder::new().name("lighter-mps-flush".into()).stack_size(64 << 10);
        // Without the thread, calls still flush every few kilobytes and at every wait.
        let _ = thread.spawn(|| self.flush_when_idle());
        drop(blocked);
    }

    fn flush_when_idle(&self) {
        let mut rest = IDLE;
        loop {
            let mut state = self.lock();
            while state.buffer.is_empty() || state.sending || state.socket < 0 || state.failed.is_some() {
                state.flusher_sleeps = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.flusher_sleeps = false;
            let seen = state.counters.appended;
            drop(state);
            std::thread::sleep(rest);
            let mut state = self.lock();
            if state.counters.appended != seen {
                rest = BUSY;
                continue;
            }
            rest = IDLE;
            if state.sending || state.buffer.is_empty() {
                continue;
            }
            let Step::Write(mut batch) = state.begin() else { continue };
            drop(state);
            let mut written = batch.write(true);
            while matches!(written, Written::Full | Written::Interrupted) {
                written = batch.write(true);
            }
            let mut state = self.lock();
            state.finish(batch);
            if let Written::Failed(error) = written {
                state.failed = Some(error);
            }
            drop(state);
            self.changed.notify_all();
        }
    }
}

impl State {
    /// Puts a FREE for all storages that are gone on the stream, and their numbers back into the pool.
    fn drain(&mut self) {
        FREED.take(&mut self.gone);
        if self.gone.is_empty() {
            return;
        }
        let before = self.buffer.len();
        self.buffer.push(FREE);
        let count = u32::try_from(self.gone.len()).unwrap_or(u32::MAX);
        self.buffer.extend_from_slice(&count.to_le_bytes());
        for number in &self.gone {
            self.buffer.extend_from_slice(&number.value().to_le_bytes());
        }
        self.count_from(before);
        self.pool.give_back(&self.gone);
        self.gone.clear();
    }

    fn count_from(&mut self, before: usize) {
        let added = self.buffer.len().saturating_sub(before);
        self.counters.appended = self.counters.appended.wrapping_add(added as u64);
    }

    fn extend(&mut self, messages: &[u8]) {
        self.buffer.extend_from_slice(messages);
        self.counters.appended = self.counters.appended.wrapping_add(messages.len() as u64);
    }

    fn extend_call(&mut self, signature: u32, slots: &[u8], numbers: &[Number]) {
        let before = self.buffer.len();
        self.buffer.push(CALL);
        self.buffer.extend_from_slice(&signature.to_le_bytes());
        self.buffer.extend_from_slice(slots);
        for number in numbers {
            self.buffer.extend_from_slice(&number.value().to_le_bytes());
        }
        self.count_from(before);
        self.counters.calls = self.counters.calls.wrapping_add(1);
    }

    fn alloc(&mut self, number: Number, bytes: u64, dtype: u8) {
        let before = self.buffer.len();
        self.buffer.push(ALLOC);
        self.buffer.extend_from_slice(&number.value().to_le_bytes());
        self.buffer.extend_from_slice(&bytes.to_le_bytes());
        self.buffer.push(dtype);
        self.count_from(before);
    }

    fn take_numbers(&mut self, count: usize, bytes: u64, into: &mut Vec<Number>) -> bool {
        for _ in 0..count {
            match self.pool.take() {
                Some(number) => into.push(number),
                None => {
                    self.pool.give_back(into);
                    into.clear();
                    return false;
                }
            }
        }
        self.pending_bytes = self.pending_bytes.saturating_add(bytes);
        true
    }

    fn is_due(&self) -> bool {
        self.buffer.len() > self.flush_bytes || self.pending_bytes > MAX_PENDING_BYTES
    }

    fn begin(&mut self) -> Step {
        if self.socket < 0 || self.failed.is_some() {
            return Step::NoSocket(self.failed.take());
        }
        self.sending = true;
        self.pending_bytes = 0;
        let bytes = std::mem::replace(&mut self.buffer, std::mem::take(&mut self.spare));
        Step::Write(Batch { bytes, sent: 0, socket: self.socket })
    }

    fn finish(&mut self, mut batch: Batch) {
        self.sending = false;
        self.counters.bytes_sent = self.counters.bytes_sent.wrapping_add(batch.sent as u64);
        self.counters.flushes = self.counters.flushes.wrapping_add(1);
        if batch.sent < batch.bytes.len() {
            batch.bytes.drain(..batch.sent);
            batch.bytes.extend_from_slice(&self.buffer);
            std::mem::swap(&mut self.buffer, &mut batch.bytes);
        }
        batch.bytes.clear();
        self.spare = batch.bytes;
    }
}
