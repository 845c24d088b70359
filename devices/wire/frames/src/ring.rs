// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where things lie in the memory that a container and the host share, and how the two wake each other.
//!
//! ```text
//! 0        control words, each on its own 64 bytes (little-endian u32, futex words, shared between processes)
//! 4096     head: one frame, of the run or of its answer; at most MAX_FRAME_BYTES
//! DATA     data area: tensors, each at the next multiple of 64
//! ```
//!
//! A stream uses its newest ring. The container makes the memfd, seals it against shrinking and growing, and sends it
//! with a Ring frame; all words start as 0.
//!
//! *A run.* The container writes data and head, then adds 1 to [`REQUEST`]. The host sees a request that differs from
//! the one it served last, **copies the head out**, checks it, copies every integer tensor out, runs, writes data and
//! head of the answer, then stores the same number into [`ANSWER`]. Answer, Failed and Grow all count as the answer;
//! after Grow the container sends a larger Ring whose `REQUEST` holds the number of this run and whose `ANSWER` that of
//! the run before it, and the host answers there as if the request had just come, with the outputs that it has.
//!
//! *Another ring.* The container may send a Ring between runs too; both words then hold the number of the last run.
//! Behind the frame it wakes the futex of the old ring's `REQUEST`: a host that is woken without a request looks at the
//! stream.
//!
//! *Waking.* Before a side waits it stores into its state word what it is about to do, then looks at the other's word
//! once more; after a side has written its word, it reads the other's state: [`AWAKE`] needs nothing, [`WAITING`] needs
//! a futex wake of the word just written, [`ASLEEP`] needs a Bell frame on the stream. All these accesses are
//! sequentially consistent. The host waits for [`REQUEST`] under [`HOST_STATE`], the container for [`ANSWER`] under
//! [`CONTAINER_STATE`]. A Bell may be late or in vain: it only means "look". The container never sleeps on the stream, it
//! waits in steps of at most 100 ms and looks at the stream's end between them.
//!
//! *Handing over.* A host process that takes a stream over compares `REQUEST` with `ANSWER` before it waits: unequal
//! means that a run is due. The old process leaves `HOST_STATE` at `ASLEEP`, so that a
//! request made in between sends a Bell.

use crate::{HEADER_BYTES, MAX_FRAME_BYTES, MAX_RUN_BYTES, Tensor};

/// Offset of the word that the container counts up with each run.
pub const REQUEST: usize = 0;
/// Offset of the word in which the host repeats the number of the run it has answered.
pub const ANSWER: usize = 64;
/// Offset of the word that says what the host does while it waits.
pub const HOST_STATE: usize = 128;
/// Offset of the word that says what the container does while it waits.
pub const CONTAINER_STATE: usize = 192;
/// Looks at the words by itself.
pub const AWAKE: u32 = 0;
/// Waits on a futex.
pub const WAITING: u32 = 1;
/// Blocks on the stream.
pub const ASLEEP: u32 = 2;

/// Offset of the head area, [`MAX_FRAME_BYTES`] long.
pub const HEAD: usize = 4096;
/// Offset of the data area.
pub const DATA: usize = HEAD + MAX_FRAME_BYTES;
/// Every tensor starts at a multiple of this.
pub const ALIGNMENT: u64 = 64;
/// A ring's length is a multiple of this.
pub const PAGE_BYTES: u64 = 4096;
/// Largest data area: inputs and outputs side by side.
pub const MAX_DATA_BYTES: u64 = MAX_RUN_BYTES * 2;

const _: () = assert!(HEADER_BYTES < MAX_FRAME_BYTES && DATA.is_multiple_of(4096));
const DATA_OFFSET: u64 = DATA as u64;

/// Length of a ring with at least this much data area; `None` over [`MAX_DATA_BYTES`].
#[must_use]
pub fn bytes_for(data_bytes: u64) -> Option<u64> {
    if data_bytes > MAX_DATA_BYTES {
        return None;
    }
    data_bytes.checked_next_multiple_of(PAGE_BYTES)?.checked_add(DATA_OFFSET)
}

/// Whether a ring can be this long.
#[must_use]
pub const fn is_size(bytes: u64) -> bool {
    bytes >= DATA_OFFSET && bytes - DATA_OFFSET <= MAX_DATA_BYTES && bytes.is_multiple_of(PAGE_BYTES)
}

/// Length of the data area of a ring of this length; 0 for one that is too short.
#[must_use]
pub const fn data_bytes(ring_bytes: u64) -> u64 {
    ring_bytes.saturating_sub(DATA_OFFSET)
}

/// Where each tensor starts in the data area, and the length of the area that they need.
///
/// `None` when they do not fit into `area_bytes`.
#[must_use]
pub fn place(data_offset: u64, tensors: &[Tensor], area_bytes: u64) -> Option<Placed> {
    let mut offsets = alloc::vec::Vec::with_capacity(tensors.len());
    let mut at = data_offset;
    for tensor in tensors {
        at = at.checked_next_multiple_of(ALIGNMENT)?;
        offsets.push(at);
        at = at.checked_add(tensor.bytes())?;
    }
    (at <= area_bytes).then_some(Placed { offsets, end: at })
}

/// Tensors in a data area.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Where each starts, counted from the start of the data area.
    pub offsets: alloc::vec::Vec<u64>,
    /// Where the last one ends.
    pub end: u64,
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::Element;

    #[test]
    fn tensors_stand_one_after_another_on_multiples_of_64() {
        let tensor = |bytes| Tensor::new(Element::U8, vec![bytes]).unwrap();
        let tensors = [tensor(1), tensor(0), tensor(64), tensor(3)];
        let placed = place(128, &tensors, 4096).unwrap();
        assert_eq!(placed.offsets, [128, 192, 192, 256]);
        assert_eq!(placed.end, 259);
        assert_eq!(place(128, &tensors, 259), Some(placed));
        assert_eq!(place(128, &tensors, 258), None);
        assert_eq!(place(u64::MAX, &tensors, u64::MAX), None);
    }

    #[test]
    fn sizes_are_pages_between_the_bare_ring_and_the_cap() {
        assert_eq!(bytes_for(0), Some(DATA_OFFSET));
        assert_eq!(bytes_for(1), Some(DATA_OFFSET + 4096));
        assert_eq!(bytes_for(MAX_DATA_BYTES + 1), None);
        let largest = bytes_for(MAX_DATA_BYTES).unwrap();
        assert!(is_size(largest) && !is_size(largest + 4096) && !is_size(DATA_OFFSET - 4096));
        assert!(!is_size(DATA_OFFSET + 1));
        assert!(!is_size(1 << 63));
        assert_eq!(data_bytes(DATA_OFFSET + 4096), 4096);
    }
}
