// SPDX-License-Identifier: MIT OR Apache-2.0
//! A running mps service with a chosen package in the host's Python, and what tests ask of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_devices::mps::MpsConfig;
use lighter_devices::mps::service::run;
use lighter_devices::service::ServiceLink;
use lighter_wire::{GrantId, Owner, ServiceReport, StreamOffer};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// For what must happen; a test that fails waits this long.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// The Python of this machine, by its own path: the one that the torch of the tests is for, where there is one.
pub(crate) fn python() -> PathBuf {
    let python = std::env::var_os("LIGHTER_TEST_TORCH_PYTHON").unwrap_or_else(|| "python3".into());
    let output = Command::new(python).args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

pub(crate) fn bad_host() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/service_mps/bad_host.py")
}

pub(crate) struct Running {
    link: Option<ServiceLink>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Running {
    /// With a package that misbehaves as `start` says.
    pub(crate) fn start(start: &str, change: impl FnOnce(&mut MpsConfig)) -> Self {
        Self::with(|config| {
            config.host_package = Some(bad_host());
            config.environment.insert("START".to_owned(), start.to_owned());
            config.engine = "cpu".to_owned();
            change(config);
        })
    }

    pub(crate) fn with(change: impl FnOnce(&mut MpsConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = MpsConfig {
            torch_python: Some(python()),
            state_dir: folder.path().join("state"),
            spare: false,
            ..MpsConfig::default()
        };
        change(&mut config);
        config.validate().unwrap();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let thread = std::thread::spawn(move || run(theirs, config).unwrap());
        let link = ServiceLink::connect(ours, LONG).unwrap();
        Self { link: Some(link), thread: Some(thread), _folder: folder }
    }

    pub(crate) fn link(&self) -> &ServiceLink {
        self.link.as_ref().unwrap()
    }

    /// Opens a stream of a container and sends the bytes.
    pub(crate) fn open(&self, container: &str, bytes: &[u8]) -> UnixStream {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let (mut near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(LONG)).unwrap();
        let offer = StreamOffer {
            stream: NUMBER.fetch_add(1, Ordering::Relaxed),
            grant: grant(container),
            container: container.to_owned(),
            owner: Owner(container.to_owned()),
            device: "all".to_owned(),
            peer_pid: None,
            groups: Vec::new(),
        };
        self.link().hand_over(&offer, far.into()).unwrap();
        // A refused stream may be closed by now.
        let _ = near.write_all(bytes);
        near
    }

    /// Opens a stream and has the bad worker do something with it; gives the stream and the first line of its answer.
    pub(crate) fn ask_and_stay(&self, container: &str, command: &str) -> (UnixStream, String) {
        let stream = self.open(container, format!("{command}\n").as_bytes());
        let mut line = Vec::new();
        let _ = BufReader::new(&stream).read_until(b'\n', &mut line);
        (stream, String::from_utf8_lossy(&line).trim().to_owned())
    }

    /// The same, for the answer alone; empty when the stream was closed without one.
    pub(crate) fn ask(&self, container: &str, command: &str) -> String {
        self.ask_and_stay(container, command).1
    }

    /// Why a stream is refused, as its client reads it.
    pub(crate) fn refusal(&self, container: &str) -> String {
        let mut stream = self.open(container, b"hello\n");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer.get(..8), Some(&b"LMPS\x01\0\x01\0"[..]), "{answer:?}");
        String::from_utf8_lossy(&answer[32..]).into_owned()
    }

    pub(crate) fn report(&self) -> ServiceReport {
        self.link().report(LONG).unwrap()
    }

    pub(crate) fn until(&self, what: &str, test: impl Fn(&ServiceReport) -> bool) -> ServiceReport {
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

    pub(crate) fn revoke(&self, container: &str) {
        self.link().revoke(&grant(container), LONG).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.link.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn grant(container: &str) -> GrantId {
    GrantId(format!("grant-{container}"))
}

pub(crate) fn is_running(pid: &str) -> bool {
    Path::new("/proc").join(pid).exists()
}

pub(crate) fn kill(pid: &str) {
    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
