// SPDX-License-Identifier: MIT OR Apache-2.0
//! The allocator: lists of free blocks in sizes of powers of two, and the kernel's own pages for what is larger.
//!
//! Small memory is kept for the next use and never goes back to the kernel; a library that lives as long as its program
//! has little of it. Survives a fork: every step under the lock leaves the lists in order.
#![allow(unsafe_code)]
#![cfg_attr(not(panic = "abort"), allow(dead_code, reason = "under test only"))]

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::null_mut;

use crate::sys::lock::Lock;
use crate::sys::memory::{give_pages, resize_pages, take_pages};

/// Sizes from 16 bytes to 32 KiB.
const CLASSES: usize = 12;
const LEAST_BYTES: usize = 16;
const MOST_BYTES: usize = LEAST_BYTES << (CLASSES - 1);
const CHUNK_BYTES: usize = 256 << 10;
const PAGE_BYTES: usize = 4096;

/// The allocator.
#[derive(Debug)]
pub(crate) struct Heap {
    lists: Lock<Lists>,
}

#[derive(Debug)]
struct Lists {
    /// Per size the first free block; each holds the address of the next.
    free: [*mut u8; CLASSES],
    /// Where the newest chunk is still unused, and how much of it.
    chunk: *mut u8,
    chunk_left: usize,
}

// SAFETY: the addresses are of memory that belongs to the allocator alone.
unsafe impl Send for Lists {}

impl Heap {
    pub(crate) const fn new() -> Self {
        Self { lists: Lock::new(Lists { free: [null_mut(); CLASSES], chunk: null_mut(), chunk_left: 0 }) }
    }
}

/// Which list a layout belongs to; `None` for pages of its own.
fn class(layout: Layout) -> Option<usize> {
    let bytes = layout.size().max(layout.align()).max(LEAST_BYTES);
    if bytes > MOST_BYTES {
        return None;
    }
    let exponent = bytes.next_power_of_two().trailing_zeros() - LEAST_BYTES.trailing_zeros();
    usize::try_from(exponent).ok()
}

const fn pages(bytes: usize) -> usize {
    bytes.saturating_add(PAGE_BYTES - 1) & !(PAGE_BYTES - 1)
}

impl Lists {
    /// A block; null when the kernel has no more.
    fn take(&mut self, class: usize) -> *mut u8 {
        let Some(first) = self.free.get_mut(class) else { return null_mut() };
        let block = *first;
        if !block.is_null() {
            // SAFETY: a free block holds the address of the next one.
            *first = unsafe { block.cast::<*mut u8>().read() };
            return block;
        }
        let bytes = LEAST_BYTES << class;
        if self.chunk_left < bytes {
            let chunk = take_pages(CHUNK_BYTES);
            if chunk.is_null() {
                return null_mut();
            }
            self.chunk_left = 0;
            self.chunk = chunk;
            self.chunk_left = CHUNK_BYTES;
        }
        // From the end, so that a block of a power of two is aligned to its own size: smaller ones may lie above it.
        let end = (self.chunk_left & !(bytes - 1)) - bytes;
        self.chunk_left = end;
        // SAFETY: within the chunk.
        unsafe { self.chunk.add(end) }
    }

    fn give(&mut self, block: *mut u8, class: usize) {
        if let Some(first) = self.free.get_mut(class) {
            // SAFETY: a block of at least 16 bytes, aligned to its size, that nobody uses any more.
            unsafe { block.cast::<*mut u8>().write(*first) };
            *first = block;
        }
    }
}

// SAFETY: blocks are as large and as aligned as asked, live until given back, and do not overlap.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class(layout) {
            // Nothing here needs more than a page's alignment.
            _ if layout.align() > PAGE_BYTES => null_mut(),
            Some(class) => self.lists.with(|lists| lists.take(class)),
            None => take_pages(pages(layout.size())),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match class(layout) {
            Some(class) => self.lists.with(|lists| lists.give(block, class)),
            // SAFETY: pages of that length from `alloc`.
            None => unsafe { give_pages(block, pages(layout.size())) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size does not overflow when rounded up to the alignment.
        let new = unsafe { Layout::from_size_align_unchecked(new_bytes, layout.align()) };
        match (class(layout), class(new)) {
            // SAFETY: pages of that length from `alloc`.
            (None, None) => unsafe { resize_pages(block, pages(layout.size()), pages(new_bytes)) },
            (Some(old), Some(new)) if old == new => block,
            // SAFETY: a new block, the smaller of both lengths, and the old block given back once.
            _ => unsafe {
                let moved = self.alloc(new);
                if !moved.is_null() {
                    moved.copy_from_nonoverlapping(block, layout.size().min(new_bytes));
                    self.dealloc(block, layout);
                }
                moved
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(bytes: usize, align: usize) -> Layout {
        Layout::from_size_align(bytes, align).unwrap()
    }

    proptest! {
        #[test]
        fn blocks_keep_their_content_and_do_not_overlap(
            steps in prop::collection::vec((1..100_000_usize, 0..7_u32, 1..100_000_usize), 1..60),
        ) {
            let heap = Heap::new();
            let mut live = Vec::new();
            for (round, (bytes, align, new_bytes)) in steps.into_iter().enumerate() {
                let mark = u8::try_from(round % 255 + 1).unwrap();
                let first = layout(bytes, 1 << align);
                // SAFETY: filled and checked within each block's own length; each is given back once.
                unsafe {
                    let block = heap.alloc(first);
                    prop_assert!(!block.is_null() && block.addr().is_multiple_of(first.align()));
                    block.write_bytes(mark, bytes);
                    let block = heap.realloc(block, first, new_bytes);
                    prop_assert!(block.addr().is_multiple_of(first.align()));
                    let kept = bytes.min(new_bytes);
                    prop_assert!(core::slice::from_raw_parts(block, kept).iter().all(|byte| *byte == mark));
                    block.write_bytes(mark, new_bytes);
                    live.push((block, layout(new_bytes, 1 << align), mark));
                    if round % 3 == 2 {
                        let (block, layout, mark) = live.swap_remove(round % live.len());
                        prop_assert!(core::slice::from_raw_parts(block, layout.size()).iter().all(|byte| *byte == mark));
                        heap.dealloc(block, layout);
                    }
                }
            }
            for (block, layout, mark) in live {
                // SAFETY: as above.
                unsafe {
                    prop_assert!(core::slice::from_raw_parts(block, layout.size()).iter().all(|byte| *byte == mark));
                    heap.dealloc(block, layout);
                }
            }
        }
    }

    #[test]
    fn a_block_that_is_given_back_is_used_again() {
        let heap = Heap::new();
        // SAFETY: one block, given back and taken again.
        unsafe {
            let first = heap.alloc(layout(100, 8));
            heap.dealloc(first, layout(100, 8));
            assert_eq!(heap.alloc(layout(128, 8)), first);
        }
    }
}
