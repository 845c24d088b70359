// SPDX-License-Identifier: MIT OR Apache-2.0
//! Judges an engine's outputs, which lie where its worker says: reads them and the processor's, and compares.

use std::os::fd::OwnedFd;

use super::super::control::TensorPlace;
use super::super::journal::{End, short_text};
use super::choice::Event;
use super::compare::{Output, Precision, compare};
use crate::text::cut;

/// Outputs of more bytes are not compared, and so their models stay on the processor.
const MAX_COMPARED_BYTES: u64 = 256 << 20;

/// Inputs and outputs of one real run.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) file: OwnedFd,
    pub(super) inputs: Vec<TensorPlace>,
    pub(super) outputs: Vec<TensorPlace>,
}

/// Compares an engine's outputs with the processor's.
pub(super) fn judge(
    sample: &Sample,
    file: &OwnedFd,
    outputs: &[TensorPlace],
    precision: Precision,
    compile_us: Option<u64>,
) -> Result<Event, End> {
    let failed = |text: String| End::Failed { text: short_text(&text) };
    let expected = read_all(&sample.file, &sample.outputs).map_err(failed)?;
    let got = read_all(file, outputs).map_err(failed)?;
    let view = |places: &'_ [TensorPlace], bytes: &'_ [Vec<u8>]| -> Vec<(u32, Vec<u64>, Vec<u8>)> {
        places
            .iter()
            .zip(bytes)
            .map(|(place, bytes)| (u32::from(place.dtype), place.dims.clone(), bytes.clone()))
            .collect()
    };
    let (expected, got) = (view(&sample.outputs, &expected), view(outputs, &got));
    fn borrow(all: &[(u32, Vec<u64>, Vec<u8>)]) -> Vec<Output<'_>> {
        all.iter().map(|(dtype, dims, bytes)| Output { dtype: *dtype, dims, bytes }).collect()
    }
    match compare(&borrow(&expected), &borrow(&got), precision) {
        Ok(agreement) => Ok(Event::Right { largest: agreement.largest, compile_us }),
        Err(difference) => Err(End::Wrong { text: short_text(&difference.to_string()) }),
    }
}

/// The tensors' bytes, wherever a worker says that they are: a file that is shorter is an error, never a fault.
fn read_all(file: &OwnedFd, places: &[TensorPlace]) -> Result<Vec<Vec<u8>>, String> {
    let total = places.iter().try_fold(0u64, |sum, place| sum.checked_add(place.bytes));
    if total.is_none_or(|total| total > MAX_COMPARED_BYTES) {
        return Err(format!("its outputs are over {MAX_COMPARED_BYTES} bytes and are not compared"));
    }
    let read = |place: &TensorPlace| {
        let mut bytes = vec![0; usize::try_from(place.bytes).ok()?];
        let mut done = 0;
        while done < bytes.len() {
            let offset = place.offset.checked_add(done as u64)?;
            let got = rustix::io::pread(file, bytes.get_mut(done..)?, offset).ok().filter(|got| *got > 0)?;
            done += got;
        }
        Some(bytes)
    };
    places.iter().map(|place| read(place).ok_or_else(|| "its outputs cannot be read".to_owned())).collect()
}

/// An end in a few words.
pub(super) fn words_of(end: &End) -> String {
    match end {
        End::Agreed { largest, us: Some(us), cpu_us: Some(cpu_us), .. } => {
            format!("right (largest difference {largest:.1e}), {us} us against the processor's {cpu_us} us")
        }
        End::Agreed { largest, .. } => format!("right (largest difference {largest:.1e})"),
        End::Wrong { text } => format!("answers wrongly: {}", cut(text)),
        End::Failed { text } => format!("fails: {}", cut(text)),
        End::Crashed { text } => format!("crashes: {}", cut(text)),
        End::Hung { text } => format!("hangs: {}", cut(text)),
    }
}
