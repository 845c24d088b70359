// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `/proc` tells about one process. Every read is capped; a process that has gone is an `io::Error`, never a panic.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat, stat};

use crate::ns::NsId;

const MAX_STAT_BYTES: u64 = 8 << 10;
const MAX_COMMAND_BYTES: u64 = 256;

/// Reads a file that must be no larger than `max_bytes`.
pub(crate) fn read_capped(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    // Not blocking: the path may be somebody's fifo.
    let fd = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
    let mut bytes = Vec::new();
    std::fs::File::from(fd).take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > max_bytes) {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("{} is larger than {max_bytes} bytes", path.display()),
        ));
    }
    Ok(bytes)
}

/// The namespace of a process; `kind` as in `/proc/PID/ns`.
pub(crate) fn ns_id(pid: u32, kind: &str) -> io::Result<NsId> {
    Ok(NsId::from_stat(&stat(format!("/proc/{pid}/ns/{kind}"))?))
}

/// When a process started, in clock ticks since boot: with the pid, a name that is not used twice.
pub(crate) fn start_time(pid: u32) -> io::Result<u64> {
    let text = read_capped(Path::new(&format!("/proc/{pid}/stat")), MAX_STAT_BYTES)?;
    parse_start_time(&text).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has an unknown form")))
}

/// The start time out of a `stat` file. The command in parentheses may itself hold parentheses and spaces.
pub(crate) fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let after = stat.iter().rposition(|&byte| byte == b')')?.checked_add(1)?;
    let rest = std::str::from_utf8(stat.get(after..)?).ok()?;
    // State is the third field of the file and the first after the command; the start time is the 22nd.
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// What a user calls the process: its command line, or its name where it has none.
pub(crate) fn command(pid: u32) -> String {
    let line = read_up_to(&format!("/proc/{pid}/cmdline"));
    let words = line.split(|&byte| byte == 0).filter(|word| !word.is_empty()).map(String::from_utf8_lossy);
    let text = words.collect::<Vec<_>>().join(" ");
    if text.is_empty() { name(pid) } else { printable(&text) }
}

/// The short name of a process, which is read without touching its memory.
pub(crate) fn name(pid: u32) -> String {
    printable(&String::from_utf8_lossy(&read_up_to(&format!("/proc/{pid}/comm"))))
}

fn printable(text: &str) -> String {
    let plain: String = text.trim().chars().map(|c| if c.is_control() { '?' } else { c }).take(120).collect();
    if plain.is_empty() { "unknown".into() } else { plain }
}

fn read_up_to(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        // A half-read command still tells a user more than none.
        let _ = file.take(MAX_COMMAND_BYTES).read_to_end(&mut bytes);
    }
    bytes
}

/// All processes, in no order that means anything.
pub(crate) fn pids() -> io::Result<Vec<u32>> {
    Ok(std::fs::read_dir("/proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect())
}

/// The pid behind a pidfd as this process sees it; `None` when it has ended or lives in a pid namespace out of sight.
pub(crate) fn pid_of_pidfd(pidfd: impl AsFd) -> io::Result<Option<u32>> {
    let fd = pidfd.as_fd().as_raw_fd();
    let text = read_capped(Path::new(&format!("/proc/self/fdinfo/{fd}")), MAX_STAT_BYTES)?;
    parse_pidfd_info(&String::from_utf8_lossy(&text))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is no pidfd"))
        .map(|pid| u32::try_from(pid).ok().filter(|&pid| pid != 0))
}

/// The `Pid:` line of a pidfd's `fdinfo`: -1 when the process has gone, 0 when it cannot be seen from here.
pub(crate) fn parse_pidfd_info(text: &str) -> Option<i64> {
    text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()
}

/// Whether the process behind a pidfd has ended.
pub(crate) fn has_ended(pidfd: impl AsFd) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })))?;
    Ok(ready > 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn the_own_process_is_told_right() {
        let pid = std::process::id();
        assert!(start_time(pid).unwrap() > 0);
        assert!(pids().unwrap().contains(&pid));
        assert_ne!(command(pid), "unknown");
        let raw = i32::try_from(pid).unwrap();
        let pidfd = pidfd_open(Pid::from_raw(raw).unwrap(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of_pidfd(&pidfd).unwrap(), Some(pid));
        assert!(!has_ended(&pidfd).unwrap());
        assert!(pid_of_pidfd(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn a_command_with_parentheses_does_not_shift_the_fields() {
        let stat = b"7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 9 9";
        assert_eq!(parse_start_time(stat), Some(4242));
    }

    #[test]
    fn a_file_over_its_cap_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0; 11]).unwrap();
        assert!(read_capped(file.path(), 10).unwrap_err().to_string().contains("larger than 10"));
        assert_eq!(read_capped(file.path(), 11).unwrap().len(), 11);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), text in ".{0,60}") {
            let _ = parse_start_time(&bytes);
            let _ = parse_pidfd_info(&text);
        }
    }
}
