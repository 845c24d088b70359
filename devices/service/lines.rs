// SPDX-License-Identifier: MIT OR Apache-2.0
//! A worker's standard error as bounded, printable lines.

use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

/// Longest line that is kept; the rest of it is left out.
const MAX_LINE_BYTES: usize = 1024;

/// Splits what comes through a pipe into lines.
#[derive(Debug)]
pub(crate) struct Lines {
    pipe: Option<OwnedFd>,
    splitter: Splitter,
}

impl Lines {
    /// Reads from `pipe` without ever waiting for it.
    pub(crate) fn new(pipe: Option<OwnedFd>) -> Self {
        let pipe = pipe.filter(|pipe| {
            rustix::fs::fcntl_getfl(pipe)
                .and_then(|flags| rustix::fs::fcntl_setfl(pipe, flags | OFlags::NONBLOCK))
                .is_ok()
        });
        Self { pipe, splitter: Splitter::default() }
    }

    /// The pipe while it is open.
    pub(crate) fn pipe(&self) -> Option<&OwnedFd> {
        self.pipe.as_ref()
    }

    /// The lines that are there.
    pub(crate) fn read(&mut self) -> Vec<String> {
        let Some(pipe) = &self.pipe else { return Vec::new() };
        let mut buffer = [0; 4096];
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) => {
                self.pipe = None;
                self.splitter.finish()
            }
            Ok(got) => self.splitter.add(buffer.get(..got).unwrap_or_default()),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Vec::new(),
            Err(_) => {
                self.pipe = None;
                Vec::new()
            }
        }
    }
}

#[derive(Debug, Default)]
struct Splitter {
    line: Vec<u8>,
}

impl Splitter {
    fn add(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = MAX_LINE_BYTES.saturating_sub(self.line.len());
            self.line.extend_from_slice(part.get(..room).unwrap_or(part));
            if part.ends_with(b"\n") {
                lines.extend(self.finish());
            }
        }
        lines
    }

    fn finish(&mut self) -> Vec<String> {
        let line = std::mem::take(&mut self.line);
        // What a container makes ggml print must not steer an administrator's terminal.
        let text: String =
            String::from_utf8_lossy(&line).trim().chars().filter(|c| !c.is_control()).collect();
        if text.is_empty() { Vec::new() } else { vec![text] }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_split_cut_and_cleaned() {
        let mut splitter = Splitter::default();
        assert_eq!(splitter.add(b"on"), Vec::<String>::new());
        assert_eq!(splitter.add(b"e\r\n\n\x1b[31mtwo\nthr"), ["one", "[31mtwo"]);
        assert_eq!(splitter.finish(), ["thr"]);
        let long = splitter.add(&[vec![b'x'; 5000], b"\n".to_vec()].concat());
        assert_eq!(long[0].len(), MAX_LINE_BYTES);
    }

    proptest! {
        #[test]
        fn the_parts_do_not_matter(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 0usize..300) {
            let cut = cut.min(bytes.len());
            let (mut whole, mut parts) = (Splitter::default(), Splitter::default());
            let mut expected = whole.add(&bytes);
            expected.extend(whole.finish());
            let mut got = parts.add(&bytes[..cut]);
            got.extend(parts.add(&bytes[cut..]));
            got.extend(parts.finish());
            prop_assert_eq!(got, expected);
        }
    }
}
