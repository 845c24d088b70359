// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes protobuf messages. Large data stay where they are: a message keeps references to them. Pure.

use alloc::vec::Vec;

const VARINT: u64 = 0;
const LENGTH_PREFIXED: u64 = 2;
const FOUR_BYTES: u64 = 5;

/// A message in the making.
#[derive(Debug, Default, Clone)]
pub(crate) struct Proto<'a> {
    own: Vec<u8>,
    /// Data that stand elsewhere, and after how many own bytes they come.
    foreign: Vec<(usize, &'a [u8])>,
    foreign_bytes: usize,
}

impl<'a> Proto<'a> {
    pub(crate) const fn new() -> Self {
        Self { own: Vec::new(), foreign: Vec::new(), foreign_bytes: 0 }
    }

    /// Its length.
    pub(crate) fn len(&self) -> usize {
        self.own.len() + self.foreign_bytes
    }

    fn varint(&mut self, value: u64) {
        let mut left = value;
        loop {
            let [low, ..] = left.to_le_bytes();
            left >>= 7;
            if left == 0 {
                self.own.push(low & 0x7f);
                return;
            }
            self.own.push(low | 0x80);
        }
    }

    fn tag(&mut self, field: u32, kind: u64) {
        self.varint(u64::from(field) << 3 | kind);
    }

    fn length(&mut self, bytes: usize) {
        self.varint(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// A number.
    pub(crate) fn int(&mut self, field: u32, value: i64) {
        self.tag(field, VARINT);
        self.varint(value.cast_unsigned());
    }

    /// A float.
    pub(crate) fn float(&mut self, field: u32, value: f32) {
        self.tag(field, FOUR_BYTES);
        self.own.extend_from_slice(&value.to_le_bytes());
    }

    /// A text or bytes.
    pub(crate) fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.tag(field, LENGTH_PREFIXED);
        self.length(bytes.len());
        self.own.extend_from_slice(bytes);
    }

    /// Bytes that are not copied.
    pub(crate) fn reference(&mut self, field: u32, bytes: &'a [u8]) {
        self.tag(field, LENGTH_PREFIXED);
        self.length(bytes.len());
        self.foreign.push((self.own.len(), bytes));
        self.foreign_bytes += bytes.len();
    }

    /// A message within this one.
    pub(crate) fn message(&mut self, field: u32, message: &Proto<'a>) {
        self.tag(field, LENGTH_PREFIXED);
        self.length(message.len());
        let start = self.own.len();
        self.own.extend_from_slice(&message.own);
        self.foreign.extend(message.foreign.iter().map(|(at, bytes)| (start + at, *bytes)));
        self.foreign_bytes += message.foreign_bytes;
    }

    /// The same with everything copied in.
    pub(crate) fn into_owned(self) -> Proto<'static> {
        let own = self.pieces().flatten().copied().collect();
        Proto { own, foreign: Vec::new(), foreign_bytes: 0 }
    }

    /// The whole message, piece by piece.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let ends = self.foreign.iter().map(|(at, _)| *at).chain([self.own.len()]);
        let starts = [0].into_iter().chain(self.foreign.iter().map(|(at, _)| *at));
        let own = starts.zip(ends).map(|(start, end)| self.own.get(start..end).unwrap_or_default());
        let foreign = self.foreign.iter().map(|(_, bytes)| *bytes).chain([&[][..]]);
        own.zip(foreign).flat_map(|(own, foreign)| [own, foreign])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(proto: &Proto<'_>) -> Vec<u8> {
        proto.pieces().collect::<Vec<_>>().concat()
    }

    #[test]
    fn numbers_take_as_many_bytes_as_they_need() {
        let int = |value| {
            let mut proto = Proto::new();
            proto.int(1, value);
            whole(&proto)
        };
        assert_eq!(int(0), [8, 0]);
        assert_eq!(int(127), [8, 127]);
        assert_eq!(int(300), [8, 0xac, 2]);
        assert_eq!(int(-1), [8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1]);
        let mut proto = Proto::new();
        proto.int(20, 1);
        assert_eq!(whole(&proto), [0xa0, 1, 1]);
    }

    #[test]
    fn messages_nest_with_what_they_refer_to() {
        let mut inner = Proto::new();
        inner.bytes(1, b"a");
        inner.reference(9, b"weights");
        inner.float(2, 1.0);
        let mut outer = Proto::new();
        outer.int(1, 5);
        outer.message(7, &inner);
        let mut expected = vec![8, 5, 0x3a, 17, 0x0a, 1, b'a', 0x4a, 7];
        expected.extend_from_slice(b"weights");
        expected.extend_from_slice(&[0x15, 0, 0, 0x80, 0x3f]);
        assert_eq!(whole(&outer), expected);
        assert_eq!(outer.len(), expected.len());
    }

    proptest! {
        #[test]
        fn references_give_the_same_bytes_as_copies(
            parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 0..12),
        ) {
            let (mut mixed, mut copied) = (Proto::new(), Proto::new());
            for (is_reference, bytes) in &parts {
                if *is_reference {
                    mixed.reference(3, bytes);
                } else {
                    mixed.bytes(3, bytes);
                }
                copied.bytes(3, bytes);
            }
            prop_assert_eq!(mixed.len(), copied.len());
            prop_assert_eq!(whole(&mixed), whole(&copied));
        }
    }
}
