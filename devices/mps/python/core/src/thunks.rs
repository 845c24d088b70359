// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions that return a constant, for the tables of virtual functions that the takeover gives torch.
//!
//! Each returns its number in the first result register and 0 in the second, whatever it is called with: as a whole number
//! that is the number, as c10's Device or Stream (a struct of up to 16 bytes) it is device type `number`, index 0, stream 0.

/// What both result registers hold.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    first: u64,
    second: u64,
}

type Thunk = extern "C" fn() -> Pair;

extern "C" fn zero() -> Pair {
    Pair { first: 0, second: 0 }
}

extern "C" fn one() -> Pair {
    Pair { first: 1, second: 0 }
}

extern "C" fn mps() -> Pair {
    Pair { first: 13, second: 0 }
}

/// Each number and the function that returns it.
pub(crate) const THUNKS: [(u64, Thunk); 3] = [(0, zero), (1, one), (13, mps)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_returns_its_number_and_nothing_else() {
        for (number, thunk) in THUNKS {
            assert_eq!(thunk(), Pair { first: number, second: 0 });
        }
    }
}
