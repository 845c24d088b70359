// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two things that are done to a container's ModelProto: it is looked through before ONNX Runtime gets it, and
//! its inputs are appended.
//!
//! Looked for is what would make ONNX Runtime or a provider open a file or an address: external data anywhere else
//! than in the model's own weights, and nodes that stand for a file of a provider's. Nothing else is checked here;
//! that is ONNX Runtime's work.

use lighter_frames::{Dim, Port, WEIGHTS_LOCATION};

/// Most messages within each other, as protobuf itself has it.
const MAX_DEPTH: u32 = 100;

/// Why a model is refused unseen.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum ProtoError {
    /// It ends within a field, or has fields of a kind that is not in use.
    #[error("the model is no protobuf message")]
    Malformed,
    /// Messages within messages without end.
    #[error("the model nests deeper than {MAX_DEPTH}")]
    Depth,
    /// A tensor elsewhere.
    #[error("a tensor of the model has its data at {0:?}, outside of the model")]
    Location(String),
    /// A key that says something else of external data.
    #[error("external data of the model has a key {0:?}, which is not in use")]
    Key(String),
    /// A node that stands for a compiled file.
    #[error("the model has a node of the type {0}, which stands for a file")]
    Node(String),
}

/// The messages that lead to external data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Sparse,
    Function,
    Training,
    External,
}

impl Kind {
    /// The message that a field holds, where it leads on.
    const fn within(self, field: u64) -> Option<Self> {
        match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) | (Self::Training, 1 | 2) => Some(Self::Graph),
            (Self::Model, 20) => Some(Self::Training),
            (Self::Model, 25) => Some(Self::Function),
            (Self::Graph, 1) | (Self::Function, 7) => Some(Self::Node),
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) | (Self::Sparse, 1 | 2) => Some(Self::Tensor),
            (Self::Graph, 15) | (Self::Attribute, 22 | 23) => Some(Self::Sparse),
            (Self::Node, 5) | (Self::Function, 11) => Some(Self::Attribute),
            (Self::Tensor, 13) => Some(Self::External),
            _ => None,
        }
    }
}

/// A field's number, and its bytes when it has any.
type Field<'a> = (u64, Option<&'a [u8]>);

/// Takes fields off the front of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Result<u64, ProtoError> {
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let (byte, rest) = self.0.split_first().ok_or(ProtoError::Malformed)?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(ProtoError::Malformed)
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], ProtoError> {
        let length = usize::try_from(length).map_err(|_| ProtoError::Malformed)?;
        let (taken, rest) = self.0.split_at_checked(length).ok_or(ProtoError::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn next(&mut self) -> Result<Option<Field<'a>>, ProtoError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let bytes = match tag & 7 {
            0 => self.varint().map(|_| None)?,
            1 => self.take(8).map(|_| None)?,
            2 => {
                let length = self.varint()?;
                Some(self.take(length)?)
            }
            5 => self.take(4).map(|_| None)?,
            _ => return Err(ProtoError::Malformed),
        };
        Ok(Some((tag >> 3, bytes)))
    }
}

/// Looks through a ModelProto.
///
/// # Errors
/// When something in it would lead out of it.
pub(super) fn check(model: &[u8]) -> Result<(), ProtoError> {
    let mut left = vec![(Kind::Model, model, 0)];
    while let Some((kind, message, depth)) = left.pop() {
        if depth > MAX_DEPTH {
            return Err(ProtoError::Depth);
        }
        if kind == Kind::External {
            check_external(message)?;
            continue;
        }
        let mut fields = Fields(message);
        while let Some((field, bytes)) = fields.next()? {
            let Some(bytes) = bytes else { continue };
            if let Some(within) = kind.within(field) {
                left.push((within, bytes, depth + 1));
            } else if kind == Kind::Node && field == 4 && bytes == b"EPContext" {
                return Err(ProtoError::Node(text(bytes)));
            }
        }
    }
    Ok(())
}

/// One `StringStringEntryProto`, whose last key and value count.
fn check_external(entry: &[u8]) -> Result<(), ProtoError> {
    let (mut key, mut value): (&[u8], &[u8]) = (b"", b"");
    let mut fields = Fields(entry);
    while let Some((field, bytes)) = fields.next()? {
        match (field, bytes) {
            (1, Some(bytes)) => key = bytes,
            (2, Some(bytes)) => value = bytes,
            _ => {}
        }
    }
    match key {
        b"location" if value == WEIGHTS_LOCATION.as_bytes() => Ok(()),
        b"location" => Err(ProtoError::Location(text(value))),
        b"offset" | b"length" => Ok(()),
        _ => Err(ProtoError::Key(text(key))),
    }
}

/// The start of it, for a message.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().take(100).collect()
}

fn put_varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
        value >>= 7;
    }
    to.push(u8::try_from(value).unwrap_or(0));
}

fn put_number(to: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(to, field << 3);
    put_varint(to, value);
}

fn put_bytes(to: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(to, field << 3 | 2);
    put_varint(to, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
    to.extend_from_slice(bytes);
}

/// The ports with the dimensions of a run in place of the declared ones.
pub(super) fn bound(ports: &[Port], shapes: &[Vec<u64>]) -> Vec<Port> {
    let bind = |(port, dims): (&Port, &Vec<u64>)| Port {
        dims: Some(dims.iter().copied().map(Dim::Fixed).collect()),
        ..port.clone()
    };
    ports.iter().zip(shapes).map(bind).collect()
}

/// What is appended to a ModelProto: a graph that has these inputs and nothing else, which protobuf merges with the
/// model's own, and metadata.
pub(super) fn tail(inputs: &[Port], metadata: &[(&str, &str)]) -> Vec<u8> {
    let mut graph = Vec::new();
    for port in inputs {
        let mut tensor = Vec::new();
        put_number(&mut tensor, 1, port.element.number().into());
        if let Some(dims) = &port.dims {
            let mut shape = Vec::new();
            for dim in dims {
                let mut one = Vec::new();
                if let Dim::Fixed(value) = dim {
                    put_number(&mut one, 1, *value);
                }
                put_bytes(&mut shape, 1, &one);
            }
            put_bytes(&mut tensor, 2, &shape);
        }
        let (mut kind, mut info) = (Vec::new(), Vec::new());
        put_bytes(&mut kind, 1, &tensor);
        put_bytes(&mut info, 1, port.name.as_bytes());
        put_bytes(&mut info, 2, &kind);
        put_bytes(&mut graph, 11, &info);
    }
    let mut model = Vec::new();
    put_bytes(&mut model, 7, &graph);
    for (key, value) in metadata {
        let mut entry = Vec::new();
        put_bytes(&mut entry, 1, key.as_bytes());
        put_bytes(&mut entry, 2, value.as_bytes());
        put_bytes(&mut model, 14, &entry);
    }
    model
}

#[cfg(test)]
mod tests {
    use lighter_frames::Element;
    use proptest::prelude::*;

    use super::*;

    fn message(fields: &[(u64, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (field, content) in fields {
            put_bytes(&mut bytes, *field, content);
        }
        bytes
    }

    fn entry(key: &str, value: &str) -> Vec<u8> {
        message(&[(1, key.as_bytes()), (2, value.as_bytes())])
    }

    /// A tensor with external data, wrapped into the messages of these fields, the outermost first.
    fn wrapped(path: &[u64], external: &[u8]) -> Vec<u8> {
        let tensor = message(&[(8, b"name"), (13, external)]);
        path.iter().rev().fold(tensor, |inner, field| message(&[(*field, &inner)]))
    }

    #[test]
    fn data_outside_of_the_model_is_found_wherever_it_is_named() {
        let places: &[&[u64]] = &[
            &[7, 5],
            &[7, 15, 1],
            &[7, 15, 2],
            &[7, 1, 5, 5],
            &[7, 1, 5, 10],
            &[7, 1, 5, 22, 1],
            &[7, 1, 5, 23, 2],
            &[7, 1, 5, 6, 5],
            &[7, 1, 5, 11, 1, 5, 6, 5],
            &[25, 7, 5, 5],
            &[25, 11, 5],
            &[20, 1, 5],
            &[20, 2, 5],
        ];
        for place in places {
            check(&wrapped(place, &entry("location", "w"))).unwrap();
            check(&wrapped(place, &entry("offset", "64"))).unwrap();
            for elsewhere in ["/etc/passwd", "", "w/../x", "ww", "*/_ORT_MEM_ADDR_/*"] {
                let refused = check(&wrapped(place, &entry("location", elsewhere))).unwrap_err();
                assert_eq!(refused, ProtoError::Location(elsewhere.to_owned()), "{place:?}");
            }
            assert!(matches!(check(&wrapped(place, &entry("basepath", "/"))), Err(ProtoError::Key(_))));
        }
    }

    #[test]
    fn the_last_value_counts_as_in_protobuf() {
        let twice = [entry("location", "w"), entry("location", "/etc/passwd")].concat();
        assert!(check(&wrapped(&[7, 5], &twice)).is_err());
        let twice = [message(&[(1, b"checksum")]), entry("location", "w")].concat();
        check(&wrapped(&[7, 5], &twice)).unwrap();
    }

    #[test]
    fn a_node_that_stands_for_a_file_is_refused() {
        let node = |kind: &[u8]| message(&[(7, &message(&[(1, &message(&[(4, kind)]))]))]);
        check(&node(b"Conv")).unwrap();
        assert_eq!(check(&node(b"EPContext")), Err(ProtoError::Node("EPContext".to_owned())));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&[0x3a_u8][..], &[0x3a, 5, 1], &[0x80; 11], &[0x0b], &[0x0c], &[0x09, 1, 2]] {
            assert_eq!(check(bytes), Err(ProtoError::Malformed), "{bytes:?}");
        }
        let deep: Vec<u64> = [7].into_iter().chain([1, 5, 6].repeat(40)).chain([5]).collect();
        assert_eq!(check(&wrapped(&deep, &entry("location", "w"))), Err(ProtoError::Depth));
    }

    #[test]
    fn a_tail_has_the_inputs_and_nothing_else() {
        let port = Port { name: "x".into(), element: Element::F32, dims: None };
        // dim { dim_value: 2 }, dim { dim_value: 300 }
        let shape = message(&[(1, &[8, 2]), (1, &[8, 0xac, 2])]);
        let tensor = [vec![8, 1], message(&[(2, &shape)])].concat();
        let info = message(&[(1, b"x"), (2, &message(&[(1, &tensor)]))]);
        let wanted = message(&[(7, &message(&[(11, &info)])), (14, &entry("k", "v"))]);
        assert_eq!(tail(&bound(std::slice::from_ref(&port), &[vec![2, 300]]), &[("k", "v")]), wanted);
        let info = message(&[(1, b"x"), (2, &message(&[(1, &[8, 1])]))]);
        assert_eq!(tail(&[port], &[]), message(&[(7, &message(&[(11, &info)]))]));
    }

    proptest! {
        #[test]
        fn any_bytes_are_looked_through_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = check(&bytes);
        }
    }
}
