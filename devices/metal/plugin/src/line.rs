// SPDX-License-Identifier: MIT OR Apache-2.0
//! A text of bounded length without allocation: a line for the user, or a path that ends in a zero byte.

use core::ffi::CStr;

const CAPACITY: usize = 512;

/// The text. What does not fit is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    bytes: [u8; CAPACITY],
    length: usize,
}

impl Line {
    /// The parts, one after another.
    #[must_use]
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut line = Self { bytes: [0; CAPACITY], length: 0 };
        let text = parts.iter().copied().flatten();
        // One byte stays free for the end.
        for (place, byte) in line.bytes.iter_mut().take(CAPACITY - 1).zip(text) {
            *place = *byte;
            line.length += 1;
        }
        line
    }

    /// A message of the plug-in: `lighter: ` and the parts, with an end of line even if it was cut off.
    #[must_use]
    pub fn message(parts: &[&[u8]]) -> Self {
        let mut line = Self::of(&[b"lighter: "]);
        let text = parts.iter().copied().flatten();
        for (place, byte) in line.bytes.iter_mut().take(CAPACITY - 1).skip(line.length).zip(text) {
            // One line, whatever a library said.
            *place = if *byte == b'\n' { b' ' } else { *byte };
            line.length += 1;
        }
        if let Some(place) = line.bytes.get_mut(line.length) {
            *place = b'\n';
            line.length += 1;
        }
        line
    }

    /// The text.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// The text as C reads it; `None` for a text that has a zero byte in it or was cut off.
    #[must_use]
    pub fn as_c(&self) -> Option<&CStr> {
        let whole = self.length < CAPACITY - 1;
        CStr::from_bytes_with_nul(self.bytes.get(..=self.length)?).ok().filter(|_| whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined() {
        let line = Line::of(&[b"/usr/lib/", b"", b"x.so"]);
        assert_eq!(line.bytes(), b"/usr/lib/x.so");
        assert_eq!(line.as_c(), Some(c"/usr/lib/x.so"));
    }

    #[test]
    fn a_message_is_one_line_whatever_is_in_it_and_however_long() {
        assert_eq!(Line::message(&[b"a\nb"]).bytes(), b"lighter: a b\n");
        let long = Line::message(&[&[b'x'; 2000]]);
        assert_eq!(long.bytes().len(), CAPACITY);
        assert!(long.bytes().ends_with(b"x\n"));
    }

    #[test]
    fn a_path_that_does_not_fit_or_has_a_zero_byte_is_none() {
        assert_eq!(Line::of(&[&[b'x'; 2000]]).as_c(), None);
        assert_eq!(Line::of(&[b"a\0b"]).as_c(), None);
        assert_eq!(Line::of(&[&[b'x'; CAPACITY - 1]]).as_c(), None);
    }
}
