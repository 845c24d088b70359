// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes a frame's fields one after another, under the caps that reading holds them to.

use alloc::string::String;
use alloc::vec::Vec;

use crate::read::widen;
use crate::{FrameError, HEADER_BYTES, Header, Kind, MAX_BODY_BYTES};

/// A frame in the making.
pub(crate) struct Writer {
    kind: Kind,
    frame: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(kind: Kind) -> Self {
        let mut frame = Vec::with_capacity(128);
        frame.resize(HEADER_BYTES, 0);
        Self { kind, frame }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.frame.extend_from_slice(bytes);
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.frame.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn count(
        &mut self,
        field: &'static str,
        count: usize,
        cap: usize,
        allowed: &'static str,
    ) -> Result<(), FrameError> {
        match u16::try_from(count) {
            Ok(number) if count <= cap => self.u16(number),
            _ => return Err(FrameError::Value { field, value: widen(count), allowed }),
        }
        Ok(())
    }

    pub(crate) fn text(
        &mut self,
        field: &'static str,
        text: &str,
        cap: usize,
        allowed: &'static str,
    ) -> Result<(), FrameError> {
        if text.as_bytes().contains(&0) {
            return Err(FrameError::Text { field });
        }
        self.count(field, text.len(), cap, allowed)?;
        self.bytes(text.as_bytes());
        Ok(())
    }

    /// A text for people: what is over the cap is cut off, zero bytes are left out.
    pub(crate) fn cut_text(&mut self, text: &str, cap: usize) {
        let mut end = text.len().min(cap);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let clean: String =
            text.get(..end).unwrap_or_default().chars().filter(|char| *char != '\0').collect();
        self.u16(u16::try_from(clean.len()).unwrap_or(0));
        self.bytes(clean.as_bytes());
    }

    /// The whole frame.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, FrameError> {
        let length = self.frame.len().saturating_sub(HEADER_BYTES);
        let body_bytes = match u32::try_from(length) {
            Ok(bytes) if length <= MAX_BODY_BYTES => bytes,
            _ => return Err(FrameError::Body { kind: self.kind, bytes: widen(length) }),
        };
        if let Some(place) = self.frame.first_chunk_mut::<HEADER_BYTES>() {
            *place = Header { kind: self.kind, body_bytes }.encode();
        }
        Ok(self.frame)
    }
}
