// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a model in the container, by the runtime that called this library: the way out when the host cannot help.

use alloc::ffi::CString;
use alloc::vec::Vec;

use lighter_frames::{Port, WEIGHTS_LOCATION};

use crate::model::input_tail;
use crate::ort::context::Context;
use crate::ort::session::{Session, Source};
use crate::ort::{Ort, Status};
use crate::package::Package;
use crate::sys::Errno;
use crate::sys::memory::Mapping;

/// Why it did not run here either.
#[derive(Debug)]
pub(crate) enum LocalError {
    /// The runtime's own error.
    Ort(Status),
    /// No memory to read the model from.
    Kernel(Errno),
    /// The runtime made something else than the model says.
    Output(usize),
}

impl From<Status> for LocalError {
    fn from(status: Status) -> Self {
        Self::Ort(status)
    }
}

impl From<Errno> for LocalError {
    fn from(errno: Errno) -> Self {
        Self::Kernel(errno)
    }
}

/// Makes a session of a package.
pub(crate) fn session(ort: Ort, package: &Package, is_single_threaded: bool) -> Result<Session, LocalError> {
    let model = &package.model;
    let length = usize::try_from(model.file_bytes()).map_err(|_| Errno::NO_MEMORY)?;
    let mapping = Mapping::read_only(&package.file, length)?;
    let bytes = mapping.sealed_bytes();
    let proto_bytes = usize::try_from(model.proto_bytes).map_err(|_| Errno::NO_MEMORY)?;
    let weights_offset = usize::try_from(model.weights_offset()).map_err(|_| Errno::NO_MEMORY)?;
    let mut proto = bytes.get(..proto_bytes).unwrap_or_default().to_vec();
    proto.extend_from_slice(&input_tail(&model.inputs));
    let location = CString::new(WEIGHTS_LOCATION).unwrap_or_default();
    let weights = bytes.get(weights_offset..).filter(|weights| !weights.is_empty());
    let source = Source {
        proto: &proto,
        weights: weights.map(|weights| (location.as_c_str(), weights)),
        inputs: names(&model.inputs),
        outputs: names(&model.outputs),
        is_single_threaded,
    };
    Ok(Session::new(ort, &source)?)
}

fn names(ports: &[Port]) -> Vec<CString> {
    ports.iter().map(|port| CString::new(port.name.as_str()).unwrap_or_default()).collect()
}

/// Runs a session with a run's inputs, and hands its outputs on.
pub(crate) fn run(session: &Session, context: &Context<'_>) -> Result<(), LocalError> {
    let outputs = session.run(&context.values()?)?;
    for (index, view) in outputs.views().enumerate() {
        let Some(view) = view.transpose()? else { continue };
        let Some(place) = context.output(index, view.dims)? else { continue };
        if place.len() != view.data.len() {
            return Err(LocalError::Output(index));
        }
        place.copy_from_slice(view.data);
    }
    Ok(())
}
