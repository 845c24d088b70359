// SPDX-License-Identifier: MIT OR Apache-2.0
//! A lock for moments, which survives a fork.
//!
//! The word holds the process that took the lock. A child of a fork may find it held by a thread that it does not have;
//! it then takes the lock over. So what is done under the lock must be in order at every single step.
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::fmt;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

use super::{getpid, wait};

/// Tries before the processor is given away.
const TRIES: u32 = 64;

/// A value that one thread at a time may look at.
pub(crate) struct Lock<T> {
    owner: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached by the thread that holds the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { owner: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Does something with the value; nothing that blocks, takes this lock or unwinds.
    pub(crate) fn with<R>(&self, action: impl FnOnce(&mut T) -> R) -> R {
        self.take();
        // SAFETY: this thread holds the lock, so nobody else has a reference to the value.
        let result = action(unsafe { &mut *self.value.get() });
        self.owner.store(0, Ordering::Release);
        result
    }

    /// As [`Self::with`], unless somebody holds the lock, be it a thread that a fork has left behind.
    pub(crate) fn with_if_free<R>(&self, action: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.owner.compare_exchange(0, getpid(), Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: this thread holds the lock, so nobody else has a reference to the value.
        let result = action(unsafe { &mut *self.value.get() });
        self.owner.store(0, Ordering::Release);
        Some(result)
    }

    fn take(&self) {
        let me = getpid();
        let mut tries = 0;
        loop {
            let seen = match self.owner.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return,
                Err(seen) => seen,
            };
            // Held by a process that this one was forked from.
            let is_foreign = seen != 0 && seen != me;
            if is_foreign
                && self.owner.compare_exchange(seen, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            tries += 1;
            if tries % TRIES == 0 {
                wait::give_way();
            } else {
                spin_loop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_take_turns() {
        let lock = Lock::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| lock.with(|count| *count += 1)));
            }
        });
        assert_eq!(lock.with(|count| *count), 40_000);
    }

    #[test]
    fn a_lock_of_a_process_from_before_a_fork_is_taken_over() {
        let lock = Lock::new(7);
        lock.owner.store(getpid() + 1, Ordering::Relaxed);
        assert_eq!(lock.with_if_free(|value| *value), None);
        assert_eq!(lock.with(|value| *value), 7);
        assert_eq!(lock.with_if_free(|value| *value), Some(7));
        assert_eq!(lock.owner.load(Ordering::Relaxed), 0);
    }
}
