// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metal service with workers that crash, hang, lie and try to get out (`service_bad_worker`).
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_devices::metal::service::{WorkerProgram, run_with};
use lighter_devices::metal::{Libraries, MetalConfig};
use lighter_devices::service::{LinkError, ServiceLink};
use lighter_wire::{EngineState, GrantId, Owner, ServiceReport, StreamOffer};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// For what must happen; a test that fails waits this long.
const LONG: Duration = Duration::from_secs(60);

fn bad_worker() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples/service-bad-worker");
    assert!(path.exists(), "{}: build it with `cargo test -p lighter-devices`", path.display());
    path
}

struct Running {
    link: Option<ServiceLink>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start(start: &str, change: impl FnOnce(&mut MetalConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let library = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "").unwrap();
            path
        };
        let libraries = Libraries {
            base: library("libggml-base.so.0"),
            registry: library("libggml.so.0"),
            backends_dir: None,
        };
        let mut config = MetalConfig {
            libraries: Some(libraries),
            environment: [("START".to_owned(), start.to_owned())].into(),
            cache_dir: folder.path().join("cache"),
            ..MetalConfig::default()
        };
        change(&mut config);
        config.validate().unwrap();
        let program = WorkerProgram::new(&bad_worker(), ["worker", "metal"].map(Into::into).into()).unwrap();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let thread = std::thread::spawn(move || run_with(theirs, config, program).unwrap());
        let link = ServiceLink::connect(ours, LONG).unwrap();
        Self { link: Some(link), thread: Some(thread), _folder: folder }
    }

    fn link(&self) -> &ServiceLink {
        self.link.as_ref().unwrap()
    }

    /// Opens a stream of a container and sends the command.
    fn open(&self, container: &str, command: &str) -> UnixStream {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(LONG)).unwrap();
        let stream = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.link().hand_over(&offer(container, stream), far.into()).unwrap();
        // A refused stream may be closed by now.
        let _ = near.write_all(format!("{command}\n").as_bytes());
        near
    }

    /// The answer to a command; empty when the stream was closed without one.
    fn ask(&self, container: &str, command: &str) -> String {
        let stream = self.open(container, command);
        let mut line = String::new();
        let _ = BufReader::new(stream).read_line(&mut line);
        line.trim().to_owned()
    }

    fn report(&self) -> ServiceReport {
        self.link().report(LONG).unwrap()
    }

    fn until(&self, what: &str, test: impl Fn(&ServiceReport) -> bool) -> ServiceReport {
        let deadline = Instant::now() + LONG;
        loop {
            let report = self.report();
            if test(&report) {
                return report;
            }
            assert!(Instant::now() < deadline, "never: {what}; {report:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn revoke(&self, container: &str) {
        self.link().revoke(&grant(container), LONG).unwrap();
    }
}

static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.link.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn offer(container: &str, stream: u64) -> StreamOffer {
    StreamOffer {
        stream,
        grant: grant(container),
        container: container.to_owned(),
        owner: Owner(container.split('.').next().unwrap().to_owned()),
        device: "all".to_owned(),
        peer_pid: None,
        groups: Vec::new(),
    }
}

fn grant(container: &str) -> GrantId {
    GrantId(format!("grant-{container}"))
}

fn is_running(pid: &str) -> bool {
    Path::new("/proc").join(pid).exists()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn nothing_runs_before_the_first_stream_and_each_container_has_its_own_worker() {
    let service = Running::start("", |_| {});
    let report = service.report();
    assert_eq!(
        report.engine,
        EngineState::Available { name: "CPU (bad worker)".into(), version: "9.9.9".into() }
    );
    assert_eq!(report.totals["workers"], 0);
    let (a, b) = (service.ask("a", "hello"), service.ask("b", "hello"));
    let pid = |answer: &str| answer.split(' ').next_back().unwrap().to_owned();
    assert!(a.starts_with("CPU None "), "{a}");
    assert_ne!(pid(&a), pid(&b));
    assert_eq!(pid(&a), pid(&service.ask("a", "hello")), "the second stream goes to the same worker");
    let report = service.until("both streams of a are counted", |report| {
        report.containers["grant-a"].calls == 2 && report.containers["grant-a"].streams_open == 0
    });
    assert_eq!(report.totals["workers"], 2);
    assert_eq!(report.containers["grant-a"].held_bytes, 77);
    assert_eq!(report.containers["grant-b"].streams_total, 1);
}

#[test]
fn a_revoked_grants_worker_is_gone_when_the_revoke_is_confirmed() {
    let service = Running::start("", |_| {});
    let stream = service.open("a", "stay");
    let mut reader = BufReader::new(stream);
    let mut pid = String::new();
    reader.read_line(&mut pid).unwrap();
    assert!(is_running(pid.trim()));
    service.revoke("a");
    assert!(!is_running(pid.trim()));
    assert_eq!(reader.read(&mut [0]).unwrap_or(0), 0, "the stream has ended");
    service.revoke("a");
    service.revoke("never-seen");
    assert!(service.report().containers.is_empty());
}

#[test]
fn no_worker_outlives_the_service() {
    let service = Running::start("", |_| {});
    let mut reader = BufReader::new(service.open("a", "stay"));
    let mut pid = String::new();
    reader.read_line(&mut pid).unwrap();
    drop(service);
    assert!(!is_running(pid.trim()));
}

#[test]
fn no_worker_outlives_a_service_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libggml.so.0");
    std::fs::write(&library, "").unwrap();
    let libraries = Libraries { base: library.clone(), registry: library, backends_dir: None };
    let settings = MetalConfig { libraries: Some(libraries), ..MetalConfig::default() };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut service = std::process::Command::new(bad_worker())
        .args(["service", &serde_json::to_string(&settings).unwrap()])
        .stdin(theirs)
        .spawn()
        .unwrap();
    let link = ServiceLink::connect(ours, LONG).unwrap();
    let (mut near, far) = UnixStream::pair().unwrap();
    near.write_all(b"stay\n").unwrap();
    link.hand_over(&offer("a", 1), far.into()).unwrap();
    let mut pid = String::new();
    BufReader::new(near).read_line(&mut pid).unwrap();
    assert!(is_running(pid.trim()));
    service.kill().unwrap();
    service.wait().unwrap();
    let deadline = Instant::now() + LONG;
    while is_running(pid.trim()) {
        assert!(Instant::now() < deadline, "worker {pid} lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(matches!(link.report(LONG), Err(LinkError::Ended { .. })));
}

#[test]
fn a_crash_is_told_with_its_cause_and_harms_nobody_else() {
    let service = Running::start("", |_| {});
    let mut other = BufReader::new(service.open("b", "stay"));
    let mut pid = String::new();
    other.read_line(&mut pid).unwrap();
    assert_eq!(service.ask("a", "assert"), "");
    let report = service.until("the trouble is told", |report| !report.troubles.is_empty());
    let trouble = &report.troubles[0];
    assert!(trouble.contains("container a") && trouble.contains("GGML_ASSERT(a == b)"), "{trouble}");
    assert!(trouble.contains("signal: 6"), "{trouble}");
    assert!(report.containers["grant-a"].last_error.as_ref().unwrap().contains("GGML_ASSERT"));
    assert!(is_running(pid.trim()));
    assert!(service.ask("a", "hello").starts_with("CPU "), "a new worker serves the next stream");
}

#[test]
fn a_crash_loop_is_refused_for_a_while_and_others_are_not() {
    let service = Running::start("", |config| {
        config.crash_limit = 2;
        config.crash_pause_s = 600;
    });
    assert_eq!(service.ask("a", "assert"), "");
    service.until("first crash", |report| report.troubles.len() == 1);
    assert_eq!(service.ask("a", "assert"), "");
    service.until("second crash, and the refusal", |report| report.troubles.len() == 3);
    assert_eq!(service.ask("a", "hello"), "");
    let report = service.report();
    let error = report.containers["grant-a"].last_error.clone().unwrap();
    assert!(error.contains("crashed too often"), "{error}");
    assert!(service.ask("b", "hello").starts_with("CPU "));
}

#[test]
fn bad_starts_end_their_streams_and_are_told() {
    for (start, expected) in [
        ("abort", "signal: 6"),
        ("failed", "no such engine"),
        ("rubbish", "no message"),
        ("never", "not ready within 300 ms"),
    ] {
        let service = Running::start(start, |config| {
            config.start_limit_ms = if start == "never" { 300 } else { 60_000 }
        });
        assert_eq!(service.ask("a", "hello"), "", "{start}");
        let report = service.until(start, |report| !report.troubles.is_empty());
        assert!(report.troubles[0].contains(expected), "{start}: {:?}", report.troubles);
        assert_eq!(report.totals["workers"], 0, "{start}");
    }
}

#[test]
fn a_worker_that_closes_its_control_socket_is_replaced() {
    let service = Running::start("", |_| {});
    service.ask("a", "close");
    service.until("the end is noticed", |report| !report.troubles.is_empty());
    assert!(service.ask("a", "hello").starts_with("CPU "));
}

#[test]
fn a_flood_on_standard_error_stops_nothing() {
    let service = Running::start("", |_| {});
    assert_eq!(service.ask("a", "shout"), "shouted");
    assert!(service.ask("a", "hello").starts_with("CPU "));
}

#[test]
fn the_reason_of_an_ended_stream_is_kept_without_control_characters() {
    let service = Running::start("", |_| {});
    assert_eq!(service.ask("a", "complain"), "");
    let report = service.until("told", |report| {
        report.containers.get("grant-a").is_some_and(|container| container.last_error.is_some())
    });
    assert_eq!(report.containers["grant-a"].last_error.as_deref(), Some("tensor of [31m0 bytes"));
}

#[test]
fn too_many_streams_are_refused_by_name_of_the_setting() {
    let service = Running::start("", |config| config.max_streams_per_container = 2);
    let streams: Vec<UnixStream> = (0..2).map(|_| service.open("a", "stay")).collect();
    for stream in &streams {
        BufReader::new(stream).read_line(&mut String::new()).unwrap();
    }
    assert_eq!(service.ask("a", "hello"), "");
    let error = service.report().containers["grant-a"].last_error.clone().unwrap();
    assert!(error.contains("max_streams_per_container"), "{error}");
    assert!(service.ask("b", "hello").starts_with("CPU "));
}

#[test]
fn an_idle_worker_ends_and_the_next_stream_starts_another() {
    let service = Running::start("", |config| config.idle_s = 0);
    let first = service.ask("a", "hello");
    service.until("no worker", |report| report.totals["workers"] == 0);
    let second = service.ask("a", "hello");
    assert!(second.starts_with("CPU ") && second != first, "{first} {second}");
    assert!(service.report().troubles.is_empty(), "idleness is no trouble");
}

#[test]
fn a_worker_cannot_get_out() {
    let service = Running::start("", |_| {});
    let answer = service.ask("a", "sandbox");
    if is_root() {
        assert_eq!(answer, "worked:");
    } else {
        eprintln!("not root: workers have the daemon's user ({answer})");
        assert!(!answer.contains("socket") && !answer.contains("unix"), "{answer}");
    }
    let service = Running::start("", |config| config.sandbox = false);
    let answer = service.ask("a", "sandbox");
    assert!(
        answer.contains("socket") && answer.contains("passwd") && answer.contains("processes"),
        "the attempts can succeed: {answer}"
    );
}

#[test]
fn weights_are_held_once_and_cannot_be_written() {
    let service = Running::start("", |_| {});
    let hash = blake3::hash(&vec![5; 3_000_000]).to_hex();
    let expected = format!("3000000 {} written=false chmod=false", &hash[..8]);
    let answer = service.ask("a", "keep 3000000");
    if is_root() {
        assert_eq!(answer, expected);
    } else {
        assert!(answer.contains("written=false"), "{answer}");
    }
    assert_eq!(service.ask("b", "keep 3000000"), answer);
    let report = service.report();
    assert_eq!(report.totals["weights"], 1);
    assert_eq!(report.totals["weights_bytes"], 3_000_000);
    assert_eq!(report.totals["weights_saved_bytes"], 3_000_000);
    assert_eq!(service.ask("c", "find 3000000"), "none", "another owner learns nothing");
    assert_eq!(service.ask("a.2", "find 3000000"), answer, "the same owner's other container finds it");
    assert_eq!(service.ask("a", "lie 3000000"), "none");
    for container in ["a", "b", "a.2"] {
        service.revoke(container);
    }
    let report = service.report();
    assert_eq!((report.totals["weights"], report.totals["weights_bytes"]), (0, 0));
}

#[test]
fn the_disk_cache_answers_after_a_restart_of_the_service() {
    let folder = tempfile::tempdir().unwrap();
    let with_cache = |config: &mut MetalConfig| {
        config.cache_dir = folder.path().to_owned();
        config.cache_max_bytes = 1 << 30;
    };
    let service = Running::start("", with_cache);
    let answer = service.ask("a", "keep 200000");
    service.until("written", |report| report.totals["cache_bytes"] > 200_000);
    drop(service);
    let service = Running::start("", with_cache);
    assert_eq!(service.ask("a", "find 200000"), answer);
    assert_eq!(service.ask("b", "find 200000"), "none");
}

#[test]
fn switched_off_sharing_keeps_nothing() {
    let service = Running::start("", |config| config.share_weights = false);
    assert_eq!(service.ask("a", "keep 1000"), "none");
    assert_eq!(service.report().totals["weights"], 0);
}

#[test]
fn a_missing_engine_is_reported_with_a_remedy_and_streams_are_refused() {
    let service = Running::start("", |config| config.engine = "CUDA3".to_owned());
    let EngineState::Missing { reason, remedy } = service.report().engine else { panic!() };
    assert!(reason.contains("CUDA3") && !remedy.is_empty(), "{reason}; {remedy}");
    assert_eq!(service.ask("a", "hello"), "");
    let error = service.report().containers["grant-a"].last_error.clone().unwrap();
    assert!(error.contains("CUDA3"), "{error}");
}

/// ggml itself, under all restrictions. `LIGHTER_TEST_GGML_ROOT` names an engine root (`tools/engine-root metal`).
#[test]
fn a_real_worker_serves_a_client_in_the_sandbox() {
    let Some(root) = std::env::var_os("LIGHTER_TEST_GGML_ROOT") else {
        eprintln!("SKIPPED: LIGHTER_TEST_GGML_ROOT names no engine root");
        return;
    };
    real_worker_serves(&PathBuf::from(root));
}

/// A root's home is closed to the users of workers, and is where many keep what they cloned.
#[test]
fn a_real_worker_reaches_an_engine_behind_a_closed_folder() {
    let Some(root) = std::env::var_os("LIGHTER_TEST_GGML_ROOT") else {
        eprintln!("SKIPPED: LIGHTER_TEST_GGML_ROOT names no engine root");
        return;
    };
    let home = tempfile::tempdir().unwrap();
    std::fs::set_permissions(home.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let copy = home.path().join("root");
    let status = std::process::Command::new("cp").arg("-a").args([root.as_ref(), copy.as_os_str()]).status();
    assert!(status.unwrap().success());
    real_worker_serves(&copy);
}

fn real_worker_serves(root: &std::path::Path) {
    let service = Running::start("real", |config| {
        config.libraries = None;
        config.engine_root = root.to_owned();
        config.engine = "CPU".to_owned();
        config.protocol = Some(8);
    });
    let EngineState::Available { name, version } = service.report().engine else { panic!() };
    assert!(name.starts_with("CPU") && version != "9.9.9", "{name} {version}");
    let (mut near, far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(LONG)).unwrap();
    service.link().hand_over(&offer("a", 1), far.into()).unwrap();
    // HELLO with the 24 bytes of capabilities that clients send since major 4.
    near.write_all(&[&[14][..], &24u64.to_le_bytes(), &[0; 24]].concat()).unwrap();
    let mut head = [0; 8];
    near.read_exact(&mut head).unwrap();
    let mut answer = vec![0; usize::try_from(u64::from_le_bytes(head)).unwrap()];
    near.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..3], [8, 0, 0]);
    assert_eq!(service.report().totals["workers"], 1);
    assert!(service.report().troubles.is_empty());
}
