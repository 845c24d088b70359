// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real workers: lighter's package with a real torch, under all restrictions. `LIGHTER_TEST_TORCH` names a folder with
//! torch for this machine's Python (`tools/torch VERSION` prints it), `LIGHTER_TEST_ENGINE` another engine than the
//! processor.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use lighter_wire::EngineState;

use super::running::{Running, kill};

/// A service with lighter's package as it is shipped, and the torch of the tests.
fn start(folder: &Path, torch: PathBuf, spare: bool) -> Running {
    let package = folder.join("lighter-mps-host.pyz");
    let stage = folder.join("stage");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("mps/python");
    std::fs::create_dir(&stage).unwrap();
    let copies =
        [("lighter_mps_host", ""), ("lighter_mps_wire", ""), ("lighter_mps_host/__main__.py", "__main__.py")];
    for (from, to) in copies {
        let to = stage.join(to);
        assert!(Command::new("cp").arg("-r").arg(sources.join(from)).arg(&to).status().unwrap().success());
    }
    let zip = ["-m", "zipapp", "-o"].map(OsString::from);
    let zipped = Command::new("python3").args(zip).arg(&package).arg(&stage).status().unwrap();
    assert!(zipped.success());
    Running::with(|config| {
        config.host_package = Some(package);
        config.torch_path = vec![torch];
        config.engine = engine();
        config.threads = Some(1);
        config.spare = spare;
        // Tests share their machine with what else is built and run there.
        config.probe_limit_ms = 110_000;
        config.start_limit_ms = 110_000;
    })
}

fn torch() -> Option<PathBuf> {
    let found = std::env::var_os("LIGHTER_TEST_TORCH").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED: LIGHTER_TEST_TORCH names no folder with torch");
    }
    found
}

fn engine() -> String {
    std::env::var("LIGHTER_TEST_ENGINE").unwrap_or_else(|_| "cpu".to_owned())
}

/// A client's greeting, with an empty account of itself.
fn greet(service: &Running, container: &str) -> UnixStream {
    let mut stream = service.open(container, b"LMPS\x01\0\0\0\x05\0\0\0\x09\0\0\0\0");
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..8], *b"LMPS\x01\0\0\0", "{head:?}");
    let mut body = vec![0; usize::try_from(u32::from_le_bytes(head[8..].try_into().unwrap())).unwrap()];
    stream.read_exact(&mut body).unwrap();
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(text.contains("torch") && text.contains("device"), "{text}");
    stream
}

/// Sends a message that has a reply, and gives the reply's status and length.
fn call(stream: &mut UnixStream, message: &[u8]) -> (u8, usize) {
    stream.write_all(message).unwrap();
    let mut head = [0; 9];
    stream.read_exact(&mut head).unwrap();
    let bytes = usize::try_from(u64::from_le_bytes(head[1..].try_into().unwrap())).unwrap();
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).unwrap();
    (head[0], bytes)
}

const WAIT: &[u8] = &[3];

/// ALLOC of a storage of bytes.
fn allocation(number: u64, bytes: u64) -> Vec<u8> {
    [&[7][..], &number.to_le_bytes(), &bytes.to_le_bytes(), &[0]].concat()
}

#[test]
fn a_real_worker_serves_in_the_sandbox_and_its_end_is_counted() {
    let Some(torch) = torch() else { return };
    let folder = tempfile::tempdir().unwrap();
    let service = start(folder.path(), torch, true);
    let EngineState::Available { name, version } = service.report().engine else {
        panic!("{:?}", service.report())
    };
    assert!(name.starts_with(&engine()) && version.contains("(Python 3."), "{name} {version}");
    let mut stream = greet(&service, "a");
    stream.write_all(&allocation(1, 1 << 20)).unwrap();
    assert_eq!(call(&mut stream, WAIT).0, 0);
    let report =
        service.until("what it holds is told", |report| report.containers["grant-a"].held_bytes == 1 << 20);
    assert_eq!(report.totals["workers"], 1);
    service.until("a spare", |report| report.totals["spare_workers"] == 1);
    drop(stream);
    let report = service.until("the worker is gone", |report| report.totals["workers"] == 0);
    assert_eq!(report.containers["grant-a"].held_bytes, 0);
    assert!(report.troubles.is_empty(), "{:?}", report.troubles);
    let mut second = greet(&service, "b");
    assert_eq!(call(&mut second, WAIT).0, 0);
}

#[test]
fn a_client_over_its_quota_or_against_the_protocol_is_told_and_harms_nobody() {
    let Some(torch) = torch() else { return };
    let folder = tempfile::tempdir().unwrap();
    let service = start(folder.path(), torch, false);
    let mut other = greet(&service, "b");
    let mut stream = greet(&service, "a");
    stream.write_all(&allocation(1, 1 << 39)).unwrap();
    assert_eq!(call(&mut stream, WAIT).0, 1, "more than the host has");
    // No such kind.
    stream.write_all(&[250]).unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    let report = service.until("the end is told", |report| {
        report.containers.get("grant-a").is_some_and(|one| one.streams_open == 0 && one.last_error.is_some())
    });
    assert!(
        report.troubles.is_empty(),
        "a client's mistake is no trouble of the host's: {:?}",
        report.troubles
    );
    assert_eq!(call(&mut other, WAIT).0, 0);
}

#[test]
fn a_killed_real_worker_ends_its_stream_and_the_next_is_served() {
    let Some(torch) = torch() else { return };
    let folder = tempfile::tempdir().unwrap();
    let service = start(folder.path(), torch, false);
    let mut stream = greet(&service, "a");
    kill(&worker_of(&folder.path().join("lighter-mps-host.pyz")));
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    let report = service.until("the trouble is told", |report| !report.troubles.is_empty());
    assert!(report.troubles[0].contains("signal: 9"), "{:?}", report.troubles);
    drop(greet(&service, "a"));
}

/// The one process that runs this package as worker.
fn worker_of(package: &Path) -> String {
    let package = package.to_string_lossy().into_owned();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let found: Vec<String> = processes
        .filter(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains(&package) && line.contains("\0worker\0")
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    let [pid] = found.as_slice() else { panic!("{found:?}") };
    pid.clone()
}
