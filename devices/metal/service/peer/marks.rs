// SPDX-License-Identifier: MIT OR Apache-2.0
//! What maps and files of a client say about its protocol. Pure.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use memchr::memmem;

/// Longest text that is searched for, and a little.
pub(super) const OVERLAP_BYTES: usize = 64;

/// In every client: what it prints when its server goes away.
const ANY: &[u8] = b"RPC server crashed or returned malformed response";
/// Since major 4.
const UPGRADE: &[u8] = b"client needs upgrade to protocol";
/// Since major 6.
const HANDSHAKE: &[u8] = b"RPC handshake failed for";
/// Since major 8.
const COMMUNICATOR: &[u8] = b"pairwise communicator";
/// More versions than this in one program are no evidence.
const MAX_VERSIONS: usize = 16;

/// One mapped file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapped {
    pub(super) range: (u64, u64),
    pub(super) path: PathBuf,
}

/// Files of `/proc/PID/maps` that may hold ggml's RPC client, the likeliest first, each once.
pub(super) fn candidates(maps: &str, program: Option<&Path>) -> Vec<Mapped> {
    let mut found: Vec<(u8, Mapped)> = Vec::new();
    for mapped in maps.lines().filter_map(parse_line) {
        if found.iter().any(|(_, known)| known.path == mapped.path) {
            continue;
        }
        let name =
            mapped.path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        let rank = if name.contains("ggml-rpc") {
            0
        } else if name.contains("ggml-base") {
            1
        } else if program == Some(mapped.path.as_path()) {
            2
        } else if ["ggml", "llama", "whisper"].iter().any(|part| name.contains(part)) {
            3
        } else {
            continue;
        };
        found.push((rank, mapped));
    }
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, mapped)| mapped).collect()
}

/// `start-end perms offset dev inode path`; `None` for what is no file.
fn parse_line(line: &str) -> Option<Mapped> {
    let mut rest = line;
    let mut word = || {
        let trimmed = rest.trim_start_matches(' ');
        let (word, after) = trimmed.split_once(' ').unwrap_or((trimmed, ""));
        rest = after;
        word
    };
    let range = word();
    let (_permissions, _offset, _device, inode) = (word(), word(), word(), word());
    let path = rest.trim_start_matches(' ');
    let (start, end) = range.split_once('-')?;
    let range = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    if !path.starts_with('/') || inode == "0" || inode.is_empty() {
        return None;
    }
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    Some(Mapped { range, path: PathBuf::from(path) })
}

/// What was found in files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Marks {
    any: bool,
    upgrade: bool,
    handshake: bool,
    communicator: bool,
    /// Texts of the form of ggml's version, as minor and patch of `0.minor.patch`.
    versions: BTreeSet<(u16, u16)>,
}

impl Marks {
    pub(super) fn add(&mut self, other: &Self) {
        self.any |= other.any;
        self.upgrade |= other.upgrade;
        self.handshake |= other.handshake;
        self.communicator |= other.communicator;
        self.versions.extend(&other.versions);
    }

    /// Whether more files could not change the answer: the RPC client is among them, and ggml's version.
    pub(super) fn is_enough(&self) -> bool {
        self.any && !self.versions.is_empty()
    }

    /// Searches a piece of a file. Pieces overlap by [`OVERLAP_BYTES`].
    pub(super) fn search(&mut self, piece: &[u8]) {
        for (mark, text) in [
            (&mut self.any, ANY),
            (&mut self.upgrade, UPGRADE),
            (&mut self.handshake, HANDSHAKE),
            (&mut self.communicator, COMMUNICATOR),
        ] {
            *mark = *mark || memmem::find(piece, text).is_some();
        }
        for place in memmem::find_iter(piece, b"\x000.") {
            if self.versions.len() > MAX_VERSIONS {
                return;
            }
            self.versions.extend(piece.get(place + 3..).and_then(parse_version));
        }
    }

    fn has_version(&self, minors: std::ops::RangeInclusive<u16>) -> bool {
        self.versions.len() <= MAX_VERSIONS && self.versions.iter().any(|(minor, _)| minors.contains(minor))
    }
}

/// `27.0` and a zero byte.
fn parse_version(bytes: &[u8]) -> Option<(u16, u16)> {
    let end = bytes.iter().take(12).position(|byte| *byte == 0)?;
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    let (minor, patch) = text.split_once('.')?;
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?;
    Some((number(minor)?, number(patch)?))
}

/// The major that the marks stand for. Where texts leave two majors open, ggml's version decides, and without one the
/// one that more releases have.
pub(super) fn major(marks: &Marks) -> Option<u8> {
    if !(marks.any || marks.upgrade || marks.handshake || marks.communicator) {
        return None;
    }
    if marks.communicator {
        return Some(8);
    }
    if marks.handshake {
        return Some(if marks.has_version(22..=23) && !marks.has_version(24..=26) { 6 } else { 7 });
    }
    if marks.upgrade {
        return Some(if marks.has_version(10..=17) && !marks.has_version(18..=21) { 4 } else { 5 });
    }
    // 0.9.1 to 0.9.4 speak 2 or 3, depending on the day of the build: the first message must tell.
    marks.versions.iter().any(|(minor, patch)| *minor == 9 && *patch >= 5).then_some(3)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn marks(texts: &[&[u8]]) -> Marks {
        let mut marks = Marks::default();
        marks.search(&texts.join(&b"\0"[..]));
        marks
    }

    #[test]
    fn texts_and_versions_tell_the_major() {
        assert_eq!(major(&marks(&[])), None);
        assert_eq!(major(&marks(&[b"x", b"0.27.0", b"y"])), None, "ggml without its RPC client");
        assert_eq!(major(&marks(&[ANY, UPGRADE, HANDSHAKE, COMMUNICATOR])), Some(8));
        assert_eq!(major(&marks(&[ANY, UPGRADE, HANDSHAKE, b"0.25.3", b""])), Some(7));
        assert_eq!(major(&marks(&[ANY, UPGRADE, HANDSHAKE])), Some(7));
        assert_eq!(major(&marks(&[ANY, UPGRADE, HANDSHAKE, b"0.22.0", b""])), Some(6));
        assert_eq!(major(&marks(&[ANY, UPGRADE, b"0.19.1", b""])), Some(5));
        assert_eq!(major(&marks(&[ANY, UPGRADE, b"0.15.0", b""])), Some(4));
        assert_eq!(major(&marks(&[ANY, b"0.9.5", b""])), Some(3));
        assert_eq!(major(&marks(&[ANY, b"0.9.4", b""])), None);
    }

    #[test]
    fn the_likeliest_files_come_first_and_once() {
        let maps = "\
55d0-55d1 r--p 00000000 00:2c 11 /usr/bin/llama-bench
7f10-7f20 r--p 00000000 00:2c 12                         /usr/lib/libllama.so.0
7f20-7f30 r-xp 00001000 00:2c 12                         /usr/lib/libllama.so.0
7f30-7f40 r--p 00000000 00:2c 13                         /usr/lib/ggml/my dir/libggml-rpc.so (deleted)
7f40-7f50 r--p 00000000 00:2c 14                         /usr/lib/libc.so.6
7f50-7f60 r--p 00000000 00:2c 15                         /usr/lib/libggml-base.so.0
7f60-7f70 rw-p 00000000 00:00 0                          [heap]
7f70-7f80 rw-p 00000000 00:00 0
";
        let paths: Vec<String> = candidates(maps, Some(Path::new("/usr/bin/llama-bench")))
            .into_iter()
            .map(|mapped| mapped.path.display().to_string())
            .collect();
        assert_eq!(
            paths,
            [
                "/usr/lib/ggml/my dir/libggml-rpc.so",
                "/usr/lib/libggml-base.so.0",
                "/usr/bin/llama-bench",
                "/usr/lib/libllama.so.0"
            ]
        );
    }

    proptest! {
        #[test]
        fn no_text_breaks_the_parsers(maps in ".{0,400}", bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            candidates(&maps, None);
            let mut marks = Marks::default();
            marks.search(&bytes);
            major(&marks);
        }

        #[test]
        fn a_version_is_found_wherever_it_stands(before in proptest::collection::vec(1u8.., 0..50), minor: u16, patch: u16) {
            let mut bytes = before;
            bytes.extend(format!("\00.{minor}.{patch}\0").bytes());
            let mut marks = Marks::default();
            marks.search(&bytes);
            prop_assert!(marks.versions.contains(&(minor, patch)));
        }

        #[test]
        fn a_line_parses_back(start: u32, len in 1u32.., inode in 1u64.., path in "/[a-z ]{0,20}[a-z]") {
            let (start, end) = (u64::from(start), u64::from(start) + u64::from(len));
            let line = format!("{start:08x}-{end:08x} r-xp 00000000 08:01 {inode}    {path}");
            prop_assert_eq!(parse_line(&line), Some(Mapped { range: (start, end), path: path.into() }));
        }
    }
}
