// SPDX-License-Identifier: MIT OR Apache-2.0
//! The head of a file in the disk cache. Pure.
//!
//! ```text
//! offset 0   magic "ltrggml1"      the last byte is the version
//!        8   length                u64, little endian
//!       16   ggml's FNV-1a-64      u64, little endian
//!       24   BLAKE3 of the bytes
//!       56   BLAKE3 of the owner
//!       88   first 8 bytes of BLAKE3 of all above
//! ```

/// Bytes of a head; the weight follows.
pub(super) const HEAD_BYTES: usize = 96;
const CHECKED_BYTES: usize = 88;
const MAGIC: [u8; 8] = *b"ltrggml1";

/// What a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) len: u64,
    pub(super) fnv: u64,
    pub(super) hash: [u8; 32],
    pub(super) owner: [u8; 32],
}

/// Why bytes are no head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeadError {
    #[error("no file of this cache, or of another version of it")]
    Magic,
    #[error("the head is damaged")]
    Check,
}

impl Head {
    pub(super) fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let parts: [&[u8]; 5] =
            [&MAGIC, &self.len.to_le_bytes(), &self.fnv.to_le_bytes(), &self.hash, &self.owner];
        let mut bytes = [0; HEAD_BYTES];
        let body = parts.concat();
        let check = check(&body);
        for (to, from) in bytes.iter_mut().zip(body.iter().chain(&check)) {
            *to = *from;
        }
        bytes
    }

    pub(super) fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Self, HeadError> {
        let (body, found) = bytes.split_at(CHECKED_BYTES);
        let mut reader = body;
        let magic: [u8; 8] = take(&mut reader).ok_or(HeadError::Magic)?;
        if magic != MAGIC {
            return Err(HeadError::Magic);
        }
        if found != check(body) {
            return Err(HeadError::Check);
        }
        let mut parse = || {
            Some(Self {
                len: u64::from_le_bytes(take(&mut reader)?),
                fnv: u64::from_le_bytes(take(&mut reader)?),
                hash: take(&mut reader)?,
                owner: take(&mut reader)?,
            })
        };
        parse().ok_or(HeadError::Check)
    }
}

fn take<const N: usize>(reader: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = reader.split_first_chunk::<N>()?;
    *reader = rest;
    Some(*head)
}

fn check(body: &[u8]) -> [u8; 8] {
    blake3::hash(body).as_bytes().first_chunk::<8>().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_head_parses_back(len: u64, fnv: u64, hash: [u8; 32], owner: [u8; 32]) {
            let head = Head { len, fnv, hash, owner };
            prop_assert_eq!(Head::parse(&head.to_bytes()), Ok(head));
        }

        #[test]
        fn any_changed_byte_is_seen(place in 0..HEAD_BYTES, change in 1u8.., len: u64) {
            let mut bytes = Head { len, fnv: 1, hash: [2; 32], owner: [3; 32] }.to_bytes();
            bytes[place] ^= change;
            prop_assert!(Head::parse(&bytes).is_err());
        }

        #[test]
        fn rubbish_is_refused(bytes in proptest::array::uniform32(any::<u8>())) {
            let mut head = [0; HEAD_BYTES];
            head[..32].copy_from_slice(&bytes);
            prop_assert!(Head::parse(&head).is_err());
        }
    }
}
