// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the fields of a body one after another. Refuses a body that is too short, by the field's name.

use alloc::string::String;

use crate::FrameError;

/// What is left of a body.
pub(crate) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(body: &'a [u8]) -> Self {
        Self { left: body }
    }

    pub(crate) const fn left(&self) -> usize {
        self.left.len()
    }

    pub(crate) fn bytes(&mut self, field: &'static str, count: usize) -> Result<&'a [u8], FrameError> {
        let Some((bytes, left)) = self.left.split_at_checked(count) else {
            return Err(FrameError::Short { field, needed: widen(count), left: widen(self.left.len()) });
        };
        self.left = left;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], FrameError> {
        let short = FrameError::Short { field, needed: widen(N), left: widen(self.left.len()) };
        let (array, left) = self.left.split_first_chunk::<N>().ok_or(short)?;
        self.left = left;
        Ok(*array)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, FrameError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, FrameError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, FrameError> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(crate) fn hash(&mut self, field: &'static str) -> Result<[u8; 32], FrameError> {
        self.array(field)
    }

    /// A number of things, each of which takes at least `least_bytes`: no more than the body can hold.
    pub(crate) fn count(
        &mut self,
        field: &'static str,
        cap: usize,
        allowed: &'static str,
        least_bytes: usize,
    ) -> Result<usize, FrameError> {
        let count = usize::from(self.u16(field)?);
        if count > cap {
            return Err(FrameError::Value { field, value: widen(count), allowed });
        }
        let needed = count.saturating_mul(least_bytes);
        if needed > self.left.len() {
            return Err(FrameError::Short { field, needed: widen(needed), left: widen(self.left.len()) });
        }
        Ok(count)
    }

    /// A length in 16 bits, then that much UTF-8 without a zero byte.
    pub(crate) fn text(
        &mut self,
        field: &'static str,
        cap: usize,
        allowed: &'static str,
    ) -> Result<String, FrameError> {
        let length = self.count(field, cap, allowed, 1)?;
        let bytes = self.bytes(field, length)?;
        if bytes.contains(&0) {
            return Err(FrameError::Text { field });
        }
        core::str::from_utf8(bytes).map(String::from).map_err(|_| FrameError::Text { field })
    }
}

/// A length on this machine as a number on the wire.
pub(crate) fn widen(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}
