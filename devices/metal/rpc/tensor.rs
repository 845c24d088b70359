// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tensor record: 296 bytes in every major.
//!
//! Any 296 bytes are a record; whether its numbers mean something is for the worker's checks, which know the
//! engine's types and the client's buffers.

/// Size of a record.
pub const TENSOR_BYTES: usize = 296;
/// Most sources of a tensor.
pub const MAX_SOURCES: usize = 10;
/// Words of an operation's parameters.
pub const MAX_PARAMS: usize = 16;

/// One tensor as a client describes it. Ids are the client's own pointers and mean nothing here but equality.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireTensor {
    /// Its id; 0 stands for "no tensor".
    pub id: u64,
    /// Number of its type.
    pub kind: u32,
    /// Handle of its buffer, 0 for none.
    pub buffer: u64,
    /// Elements in each dimension.
    pub ne: [u32; 4],
    /// Stride in bytes in each dimension.
    pub nb: [u32; 4],
    /// Number of the operation that makes it, in the client's numbering.
    pub op: u32,
    /// The operation's parameters.
    pub params: [i32; MAX_PARAMS],
    /// ggml's flags.
    pub flags: i32,
    /// Ids of the operation's inputs.
    pub src: [u64; MAX_SOURCES],
    /// Id of the tensor whose memory it looks into, 0 for none.
    pub view_src: u64,
    /// Where in that memory it begins.
    pub view_offset: u64,
    /// Its address, in the client's view of its buffer.
    pub data: u64,
    /// Its name, ended by a zero byte if shorter.
    pub name: [u8; 64],
    /// How often it is used in its graph, from protocol 5.1.
    pub use_count: i32,
}

/// Takes little-endian words off the front of a record.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        // A record has exactly the bytes of all its fields; zeros would only follow from a wrong field here.
        let (head, rest) = self.0.split_first_chunk::<N>().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *head
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn i32(&mut self) -> i32 {
        i32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

impl WireTensor {
    /// Reads one record.
    #[must_use]
    pub fn parse(record: &[u8; TENSOR_BYTES]) -> Self {
        let mut words = Words(record);
        Self {
            id: words.u64(),
            kind: words.u32(),
            buffer: words.u64(),
            ne: std::array::from_fn(|_| words.u32()),
            nb: std::array::from_fn(|_| words.u32()),
            op: words.u32(),
            params: std::array::from_fn(|_| words.i32()),
            flags: words.i32(),
            src: std::array::from_fn(|_| words.u64()),
            view_src: words.u64(),
            view_offset: words.u64(),
            data: words.u64(),
            name: words.take(),
            use_count: words.i32(),
        }
    }

    /// Reads the record at the front of a body; the rest is given back.
    #[must_use]
    pub fn split(body: &[u8]) -> Option<(Self, &[u8])> {
        let (record, rest) = body.split_first_chunk::<TENSOR_BYTES>()?;
        Some((Self::parse(record), rest))
    }

    /// The id alone, without reading the record.
    #[must_use]
    pub fn id_of(record: &[u8; TENSOR_BYTES]) -> u64 {
        Words(record).u64()
    }

    /// Writes the record, as a client does.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; TENSOR_BYTES] {
        let mut bytes = Vec::with_capacity(TENSOR_BYTES);
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.buffer.to_le_bytes());
        bytes.extend(self.ne.iter().chain(&self.nb).flat_map(|word| word.to_le_bytes()));
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.params.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.src.iter().flat_map(|word| word.to_le_bytes()));
        for word in [self.view_src, self.view_offset, self.data] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.name);
        bytes.extend(self.use_count.to_le_bytes());
        bytes.try_into().unwrap_or([0; TENSOR_BYTES])
    }

    /// The name as text, for logs: at most 64 printable characters.
    #[must_use]
    pub fn name_text(&self) -> String {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(self.name.get(..end).unwrap_or_default())
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_record_survives_a_round_trip(bytes in proptest::collection::vec(any::<u8>(), TENSOR_BYTES)) {
            let record: [u8; TENSOR_BYTES] = bytes.try_into().unwrap();
            let tensor = WireTensor::parse(&record);
            prop_assert_eq!(tensor.to_bytes(), record);
            prop_assert_eq!(WireTensor::id_of(&record), tensor.id);
        }
    }

    #[test]
    fn fields_lie_where_the_protocol_puts_them() {
        let mut record = [0; TENSOR_BYTES];
        record[8] = 7;
        record[12] = 9;
        record[52] = 3;
        record[120] = 16;
        record[220] = 5;
        record[228] = b'x';
        record[292] = 2;
        let tensor = WireTensor::parse(&record);
        assert_eq!((tensor.kind, tensor.buffer, tensor.op, tensor.flags), (7, 9, 3, 16));
        assert_eq!((tensor.data, tensor.use_count), (5, 2));
        assert_eq!(tensor.name_text(), "x");
        assert!(WireTensor::split(&record[..295]).is_none());
    }
}
