// SPDX-License-Identifier: MIT OR Apache-2.0
//! A written model as the host gets it: one sealed file in memory, and what the host is told of it.
//!
//! The file stays as long as the session: a host that has started anew gets it again, and a host that is gone for good is
//! replaced by a session of the container's own, made of the same bytes.

use alloc::string::String;
use core::ffi::CStr;

use lighter_frames::{MODEL_ALIGNMENT, Model};

use crate::model::Written;
use crate::sys::memory::{Seals, file_in_memory, seal};
use crate::sys::{Descriptor, Errno};

const NAME: &CStr = c"lighter-ane-model";
static ZEROS: [u8; 4096] = [0; 4096];

/// A model in a file, and its description.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) file: Descriptor,
    pub(crate) model: Model,
}

/// Writes and seals the file, under a name for people.
pub(crate) fn pack(written: Written<'_>, label: String) -> Result<Package, Errno> {
    let file = file_in_memory(NAME)?;
    let mut hasher = blake3::Hasher::new();
    let mut put = |bytes: &[u8]| {
        hasher.update(bytes);
        file.write_all(bytes)
    };
    written.proto.pieces().try_for_each(&mut put)?;
    let proto_bytes = u64::try_from(written.proto.len()).map_err(|_| Errno::INVALID)?;
    let padding = proto_bytes.next_multiple_of(MODEL_ALIGNMENT) - proto_bytes;
    put(zeros(usize::try_from(padding).unwrap_or(0)))?;
    for (space, data) in &written.weights.pieces {
        put(zeros(*space))?;
        put(data)?;
    }
    let hash = hasher.finalize().into();
    seal(&file, Seals::Content)?;
    let weights_bytes = u64::try_from(written.weights.bytes).map_err(|_| Errno::INVALID)?;
    let Written { inputs, outputs, .. } = written;
    Ok(Package { file, model: Model { hash, proto_bytes, weights_bytes, inputs, outputs, label } })
}

/// Fewer than [`MODEL_ALIGNMENT`] zeros.
fn zeros(bytes: usize) -> &'static [u8] {
    ZEROS.get(..bytes).unwrap_or(&ZEROS)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::model::Weights;
    use crate::proto::Proto;
    use crate::sys::memory::Mapping;

    #[test]
    fn the_file_is_the_proto_then_the_weights_and_cannot_be_changed() {
        let mut proto = Proto::new();
        proto.reference(7, b"graph");
        let weights = Weights { pieces: vec![(0, &[1; 3]), (61, &[2; 2])], bytes: 66 };
        let written = Written { proto, weights, inputs: Vec::new(), outputs: Vec::new() };
        let package = pack(written, "net".into()).unwrap();
        assert_eq!((package.model.proto_bytes, package.model.weights_bytes), (7, 66));
        assert!(package.file.write_all(b"x").is_err());
        let mapping = Mapping::read_only(&package.file, 4096 + 66).unwrap();
        let bytes = mapping.sealed_bytes();
        let mut expected = vec![0x3a, 5];
        expected.extend_from_slice(b"graph");
        expected.resize(4096, 0);
        expected.extend_from_slice(&[1, 1, 1]);
        expected.resize(4096 + 64, 0);
        expected.extend_from_slice(&[2, 2]);
        assert!(bytes == expected);
        assert_eq!(package.model.hash, *blake3::hash(&expected).as_bytes());
        assert_eq!(package.model.file_bytes(), 4096 + 66);
    }
}
