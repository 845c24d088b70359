// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which major of ggml's RPC protocol a client speaks, from the ggml that the client itself has mapped.
//!
//! The client's first message does not say its major, and every client gives up on a server of another one. The
//! texts in its ggml tell: some came with a certain major, and ggml's version narrows the rest down. The files are a
//! container's: they are only searched, within bounds, and a wrong answer costs that client its connection.

mod marks;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

use self::marks::{Mapped, Marks, major};

/// More than this of `/proc/PID/maps` is not read.
const MAX_MAPS_BYTES: u64 = 8 << 20;
/// Most files of one client that are searched.
const MAX_FILES: usize = 12;
/// Most bytes of one file that are searched: texts come before the code of GPUs.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Files whose marks are remembered.
const MAX_REMEMBERED: usize = 512;
const CHUNK_BYTES: usize = 1 << 20;

/// A file's content, as far as the kernel tells contents apart.
type FileId = (u64, u64, i64, i64, u64);

/// Finds majors, and remembers what is in which file.
#[derive(Debug, Default)]
pub(super) struct Peers {
    known: Mutex<HashMap<FileId, Marks>>,
}

impl Peers {
    /// The major of the process, when its files tell.
    pub(super) fn major(&self, pid: u32) -> Option<u8> {
        let mut text = String::new();
        let maps = File::open(format!("/proc/{pid}/maps")).ok()?;
        maps.take(MAX_MAPS_BYTES).read_to_string(&mut text).ok()?;
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
        let files = marks::candidates(&text, program.as_deref());
        let mut all = Marks::default();
        for mapped in files.iter().take(MAX_FILES) {
            if let Some(file) = open_mapped(pid, mapped)
                && let Some(found) = self.marks(&File::from(file))
            {
                all.add(&found);
            }
            // The rest of a big client need not be read.
            if all.is_enough() {
                break;
            }
        }
        let major = major(&all);
        tracing::debug!(pid, ?major, files = files.len(), "client's ggml");
        major
    }

    fn marks(&self, file: &File) -> Option<Marks> {
        let found = rustix::fs::fstat(file).ok()?;
        if !rustix::fs::FileType::from_raw_mode(found.st_mode).is_file() {
            return None;
        }
        #[allow(
            clippy::useless_conversion,
            clippy::unnecessary_fallible_conversions,
            reason = "architectures differ"
        )]
        let id = (
            found.st_dev,
            found.st_ino,
            i64::try_from(found.st_mtime).ok()?,
            i64::try_from(found.st_mtime_nsec).ok()?,
            u64::try_from(found.st_size).ok()?,
        );
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(marks) = known().get(&id) {
            return Some(marks.clone());
        }
        // Without the lock: other containers' streams do not wait for a big file.
        let marks = search(file)?;
        let mut known = known();
        if known.len() >= MAX_REMEMBERED {
            known.clear();
        }
        known.insert(id, marks.clone());
        Some(marks)
    }
}

/// The major that these files of a ggml speak; for a user who wants to know, and for tests.
#[must_use]
pub fn major_of_files(paths: &[&Path]) -> Option<u8> {
    let mut all = Marks::default();
    for path in paths {
        all.add(&search(&File::open(path).ok()?)?);
    }
    major(&all)
}

fn search(file: &File) -> Option<Marks> {
    let mut marks = Marks::default();
    let mut reader = file.take(MAX_FILE_BYTES);
    let mut buffer = vec![0; CHUNK_BYTES + marks::OVERLAP_BYTES];
    let mut kept = 0;
    loop {
        let got = match reader.read(buffer.get_mut(kept..)?) {
            Ok(0) => return Some(marks),
            Ok(got) => got,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => return None,
        };
        let end = kept + got;
        marks.search(buffer.get(..end)?);
        // A text may lie across two reads.
        let from = end.saturating_sub(marks::OVERLAP_BYTES);
        buffer.copy_within(from..end, 0);
        kept = end - from;
    }
}

/// Opens a file that the process has mapped: the very file where the kernel lets us, else by its name in the
/// process's own root, from which no link leads out.
fn open_mapped(pid: u32, mapped: &Mapped) -> Option<OwnedFd> {
    // A pipe under the name of a library must not make us wait.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let (start, end) = mapped.range;
    let by_range = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
    if let Ok(file) = openat(CWD, by_range, flags, Mode::empty()) {
        return Some(file);
    }
    let root =
        openat(CWD, format!("/proc/{pid}/root"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    openat2(root, &mapped.path, flags, Mode::empty(), resolve).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A running program with these texts behind its code, under this name.
    fn with_running<T>(name: &str, texts: &[&str], test: impl FnOnce(u32) -> T) -> T {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::copy("/bin/sleep", &path).unwrap();
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(texts.join("\0").as_bytes()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        drop(file);
        let mut child = std::process::Command::new(&path).arg("600").spawn().unwrap();
        // The kernel lets the parent go on before the new program is mapped.
        let maps = format!("/proc/{}/maps", child.id());
        while !std::fs::read_to_string(&maps).unwrap().contains("libc.so") {
            std::thread::yield_now();
        }
        let result = test(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        result
    }

    #[test]
    fn a_running_client_tells_its_major() {
        let texts = ["", "x RPC handshake failed for %s", "pairwise communicator", ""];
        let peers = Peers::default();
        assert_eq!(with_running("my-chat", &texts, |pid| peers.major(pid)), Some(8));
        assert_eq!(with_running("sleep", &[], |pid| peers.major(pid)), None);
        assert_eq!(peers.known.lock().unwrap().len(), 2);
    }

    #[test]
    fn a_process_that_is_gone_is_unknown() {
        assert_eq!(Peers::default().major(u32::MAX / 2), None);
    }

    #[test]
    fn a_text_across_two_reads_is_found() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![b'x'; CHUNK_BYTES + marks::OVERLAP_BYTES - 10]).unwrap();
        file.write_all(b"pairwise communicator initialized").unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        assert_eq!(major(&search(&file).unwrap()), Some(8));
    }
}
