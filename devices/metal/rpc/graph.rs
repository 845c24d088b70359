// SPDX-License-Identifier: MIT OR Apache-2.0
//! The body of a graph: which nodes to compute, and the tensors that they name.

use super::tensor::{TENSOR_BYTES, WireTensor};
use super::version::Major;

/// Why a graph's body is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// The body ends before its head does.
    #[error("graph ends within its head")]
    ShortHead,
    /// The counts do not fit the body's length.
    #[error("graph of {nodes} nodes and {tensors} tensors does not fit its {bytes} bytes")]
    Counts {
        /// Nodes it says.
        nodes: u64,
        /// Tensors it says; unknown (0) where the nodes alone do not fit.
        tensors: u64,
        /// Bytes there are.
        bytes: u64,
    },
}

/// A graph's body, not yet looked into.
#[derive(Debug, Clone, Copy)]
pub struct GraphFrame<'a> {
    /// Device that computes.
    pub device: u32,
    /// Name that the client gives the graph, 0 for none.
    pub uid: u64,
    nodes: &'a [[u8; 8]],
    tensors: &'a [[u8; TENSOR_BYTES]],
}

fn split_u32(bytes: &[u8]) -> Result<(u32, &[u8]), GraphError> {
    let (head, rest) = bytes.split_first_chunk().ok_or(GraphError::ShortHead)?;
    Ok((u32::from_le_bytes(*head), rest))
}

impl<'a> GraphFrame<'a> {
    /// Divides the body.
    ///
    /// # Errors
    /// When the counts in it do not fit its length exactly.
    pub fn parse(body: &'a [u8], major: Major) -> Result<Self, GraphError> {
        let (device, rest) = if major.device_bytes() > 0 { split_u32(body)? } else { (0, body) };
        let (uid, rest) = if major.names_graphs() {
            let (head, rest) = rest.split_first_chunk().ok_or(GraphError::ShortHead)?;
            (u64::from_le_bytes(*head), rest)
        } else {
            (0, rest)
        };
        let (nodes, rest) = split_u32(rest)?;
        let counts = |tensors: u32| GraphError::Counts {
            nodes: u64::from(nodes),
            tensors: u64::from(tensors),
            bytes: body.len() as u64,
        };
        let (node_ids, rest) = rest
            .as_chunks::<8>()
            .0
            .split_at_checked(nodes as usize)
            .and_then(|(ids, _)| Some((ids, rest.get(ids.as_flattened().len()..)?)))
            .ok_or_else(|| counts(0))?;
        let (tensors, rest) = split_u32(rest)?;
        let (records, spare) = rest.as_chunks::<TENSOR_BYTES>();
        if records.len() != tensors as usize || !spare.is_empty() {
            return Err(counts(tensors));
        }
        Ok(Self { device, uid, nodes: node_ids, tensors: records })
    }

    /// Ids of the nodes to compute, in order.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.nodes.iter().map(|id| u64::from_le_bytes(*id))
    }

    /// The tensors.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = WireTensor> + use<'a> {
        self.tensors.iter().map(WireTensor::parse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(device: &[u8], nodes: u32, ids: &[u64], tensors: u32, records: usize) -> Vec<u8> {
        let mut bytes = device.to_vec();
        bytes.extend(nodes.to_le_bytes());
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(vec![0; records * TENSOR_BYTES]);
        bytes
    }

    #[test]
    fn counts_must_fit_exactly() {
        let major = Major::new(5).unwrap();
        let good = body(&[0; 4], 2, &[7, 8], 3, 3);
        let frame = GraphFrame::parse(&good, major).unwrap();
        assert_eq!(frame.nodes().collect::<Vec<_>>(), [7, 8]);
        assert_eq!(frame.tensors().len(), 3);
        for bad in [
            body(&[0; 4], u32::MAX, &[7, 8], 3, 3),
            body(&[0; 4], 2, &[7, 8], u32::MAX, 3),
            body(&[0; 4], 2, &[7, 8], 2, 3),
            good[..good.len() - 1].to_vec(),
            vec![0; 7],
        ] {
            assert!(GraphFrame::parse(&bad, major).is_err());
        }
    }

    #[test]
    fn majors_differ_in_the_head() {
        let old = body(&[], 0, &[], 0, 0);
        assert!(GraphFrame::parse(&old, Major::new(2).unwrap()).is_ok());
        let new = body(&[1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0], 0, &[], 0, 0);
        let frame = GraphFrame::parse(&new, Major::new(8).unwrap()).unwrap();
        assert_eq!((frame.device, frame.uid), (1, 9));
    }
}
