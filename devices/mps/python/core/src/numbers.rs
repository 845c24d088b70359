// SPDX-License-Identifier: MIT OR Apache-2.0
//! Storage numbers: which are in use, which were given up and wait for their FREE, which can be used again.
//!
//! A storage's number stands in the upper bits of every address of its tensors. torch calls [`deleter`] when a storage
//! goes, on any thread, with or without the interpreter's lock, and also after the interpreter's end: it only writes the
//! number down. Whoever next writes to the stream puts the FREE there first, and only then may the number serve again, so
//! the host never sees a number name two storages.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bits of an address below the storage's number.
pub(crate) const ADDRESS_BITS: u32 = 40;
/// The highest number.
pub(crate) const MAX_NUMBER: u32 = (1 << 24) - 1;

/// A storage's number, 1 to [`MAX_NUMBER`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number(u32);

impl Number {
    pub(crate) fn new(value: u64) -> Option<Self> {
        let value = u32::try_from(value).ok()?;
        (1..=MAX_NUMBER).contains(&value).then_some(Self(value))
    }

    pub(crate) fn value(self) -> u64 {
        u64::from(self.0)
    }

    pub(crate) fn address(self) -> u64 {
        self.value() << ADDRESS_BITS
    }

    /// The number of the storage that an address lies in.
    pub(crate) fn of_address(address: u64) -> Option<Self> {
        Self::new(address >> ADDRESS_BITS)
    }
}

/// Numbers that can be given out.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<Number>,
    /// The highest number that was ever given out.
    highest: u32,
}

impl Pool {
    pub(crate) const fn new() -> Self {
        Self { free: Vec::new(), highest: 0 }
    }

    /// The number that was given back last, so that the host's tables stay small; else a new one; None when all are in use.
    pub(crate) fn take(&mut self) -> Option<Number> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        if self.highest >= MAX_NUMBER {
            return None;
        }
        self.highest = self.highest.saturating_add(1);
        Some(Number(self.highest))
    }

    /// Takes numbers back whose FREE is on the stream.
    pub(crate) fn give_back(&mut self, numbers: &[Number]) {
        self.free.extend_from_slice(numbers);
    }
}

/// Numbers of storages that are gone and have no FREE on the stream yet.
#[derive(Debug)]
pub(crate) struct Freed {
    any: AtomicBool,
    numbers: Mutex<Vec<Number>>,
    /// Set in a forked child and at the end of the process: nobody will send what is written down.
    ignored: AtomicBool,
}

/// The one list of the process: torch's deleters have no other way to it.
pub(crate) static FREED: Freed =
    Freed { any: AtomicBool::new(false), numbers: Mutex::new(Vec::new()), ignored: AtomicBool::new(false) };

impl Freed {
    pub(crate) fn push(&self, number: Number) {
        // In a forked child another thread may have held the lock at the fork: it must not be asked for.
        if self.ignored.load(Ordering::Relaxed) {
            return;
        }
        if let Ok(mut numbers) = self.numbers.lock() {
            numbers.push(number);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Moves all into `into`, which is empty, the last one first. Cheap when there is none.
    pub(crate) fn take(&self, into: &mut Vec<Number>) {
        if !self.any.load(Ordering::Acquire) || self.ignored.load(Ordering::Relaxed) {
            return;
        }
        if let Ok(mut numbers) = self.numbers.lock() {
            self.any.store(false, Ordering::Relaxed);
            std::mem::swap(&mut *numbers, into);
            drop(numbers);
            into.reverse();
        }
    }

    pub(crate) fn count(&self) -> usize {
        if self.ignored.load(Ordering::Relaxed) {
            return 0;
        }
        self.numbers.lock().map_or(0, |numbers| numbers.len())
    }

    /// From here on storages go in silence.
    pub(crate) fn ignore(&self) {
        self.ignored.store(true, Ordering::Relaxed);
    }
}

/// What torch calls with a storage's address when the storage goes.
pub(crate) extern "C" fn deleter(data: *mut c_void, _context: *mut c_void) {
    if let Some(number) = Number::of_address(data as u64) {
        FREED.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_zero_and_fit_their_bits() {
        let mut pool = Pool::new();
        let first = pool.take().unwrap();
        assert_eq!(first.value(), 1);
        assert_eq!(Number::of_address(first.address() + 5), Some(first));
        assert_eq!(Number::of_address(5), None);
        assert_eq!(
            Number::new(u64::from(MAX_NUMBER)).unwrap().address() >> ADDRESS_BITS,
            u64::from(MAX_NUMBER)
        );
        assert_eq!(Number::new(u64::from(MAX_NUMBER) + 1), None);
    }

    #[test]
    fn a_number_comes_again_only_after_it_was_given_back() {
        let mut pool = Pool::new();
        let first = pool.take().unwrap();
        let second = pool.take().unwrap();
        assert_ne!(first, second);
        pool.give_back(&[first]);
        assert_eq!(pool.take(), Some(first));
        assert_eq!(pool.take().unwrap().value(), 3);
    }

    #[test]
    fn there_is_no_number_after_the_last() {
        let mut pool = Pool { free: Vec::new(), highest: MAX_NUMBER - 1 };
        assert_eq!(pool.take().map(Number::value), Some(u64::from(MAX_NUMBER)));
        assert_eq!(pool.take(), None);
    }
}
