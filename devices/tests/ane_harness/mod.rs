// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plays the service for a real ane worker with a real ONNX Runtime, and a container on either transport.
//!
//! `LIGHTER_TEST_ORT` names folders with unpacked wheels of ONNX Runtime (`tools/wheels ort-1.32 openvino`), or
//! libraries themselves, separated by colons. Unset, the tests say loudly that they did not run.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod client;
pub(crate) mod onnx;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lighter_devices::ane::control::{
    Bytes, FromWorker, Handover, Model, ModelHash, ModelPort, Outcome, Provider, Shapes, TensorPlace,
    ToWorker, Trial, WORKER_VERSION, WorkerConfig, WorkerCounters,
};
use lighter_frames::Tensor;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use self::client::Client;
use self::onnx::TestModel;

/// How long anything may take before a test fails instead of hanging.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The libraries below the folders, each with whether OpenVINO is part of it.
pub(crate) fn libraries() -> Vec<(PathBuf, bool)> {
    let Some(folders) = std::env::var_os("LIGHTER_TEST_ORT") else {
        eprintln!(
            "NOT RUN: set LIGHTER_TEST_ORT to unpacked wheels of ONNX Runtime (tools/wheels ort-1.32 openvino)"
        );
        return Vec::new();
    };
    std::env::split_paths(&folders).filter_map(|folder| library_in(&folder)).collect()
}

fn library_in(folder: &Path) -> Option<(PathBuf, bool)> {
    if folder.is_file() {
        let with_openvino = folder.with_file_name("libonnxruntime_providers_openvino.so").exists();
        return Some((folder.to_owned(), with_openvino));
    }
    let capi = folder.join("onnxruntime/capi");
    let folder = if capi.is_dir() { capi } else { folder.to_owned() };
    let names: Vec<PathBuf> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let library = names.iter().find(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libonnxruntime.so"))
    })?;
    Some((library.clone(), folder.join("libonnxruntime_providers_openvino.so").exists()))
}

/// The plain ONNX Runtime.
pub(crate) fn stock() -> Option<PathBuf> {
    let found = libraries().into_iter().find(|(_, openvino)| !openvino);
    if found.is_none() {
        eprintln!("NOT RUN: LIGHTER_TEST_ORT names no plain ONNX Runtime");
    }
    found.map(|(path, _)| path)
}

/// The one with OpenVINO.
pub(crate) fn openvino() -> Option<PathBuf> {
    let found = libraries().into_iter().find(|(_, openvino)| *openvino);
    if found.is_none() {
        eprintln!("NOT RUN: LIGHTER_TEST_ORT names no onnxruntime-openvino");
    }
    found.map(|(path, _)| path)
}

/// What the worker's process does; each test file has a function that calls it, started by [`Host::start`].
pub(crate) fn worker_child() {
    if std::env::var_os("LIGHTER_TEST_WORKER").is_some() {
        let control = rustix::io::dup(rustix::stdio::stdin()).unwrap();
        if let Err(error) = lighter_devices::ane::worker::run(control) {
            panic!("{error}");
        }
    }
}

pub(crate) fn config(library: PathBuf) -> WorkerConfig {
    WorkerConfig {
        version: WORKER_VERSION,
        library,
        provider: Provider::Cpu,
        options: BTreeMap::new(),
        bind_shapes: false,
        max_bound: 4,
        threads: 1,
        max_run_bytes: 64 << 20,
        max_streams: 32,
        cache_dir: None,
    }
}

type Heard = (FromWorker, Vec<OwnedFd>);

/// The service's side of one worker.
pub(crate) struct Host {
    control: Arc<OwnedFd>,
    pub(crate) child: Mutex<Child>,
    heard: Receiver<Heard>,
    kept: Mutex<Vec<Heard>>,
    next: std::cell::Cell<u64>,
    home: tempfile::TempDir,
}

impl Host {
    /// Starts a worker of the plain ONNX Runtime, or says why the test does not run.
    pub(crate) fn start(change: impl FnOnce(&mut WorkerConfig)) -> Option<Self> {
        let mut config = config(stock()?);
        change(&mut config);
        Some(Self::spawn(config))
    }

    pub(crate) fn spawn(config: WorkerConfig) -> Self {
        let host = Self::spawn_unheard(config);
        host.expect("ready", |message, _| matches!(message, FromWorker::Ready { .. }).then_some(()));
        host
    }

    pub(crate) fn spawn_unheard(config: WorkerConfig) -> Self {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let home = tempfile::tempdir().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker_child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("LIGHTER_TEST_WORKER", "1")
            .env("HOME", home.path())
            .env_remove("XDG_CACHE_HOME")
            // Either would keep ONNX Runtime quiet by itself.
            .env_remove("CI")
            .env_remove("ORT_DISABLE_TELEMETRY")
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        lighter_wire::send(near.as_fd(), &ToWorker::Configure(config), &[]).unwrap();
        let control = Arc::new(near);
        let (tell, heard) = channel();
        let socket = Arc::clone(&control);
        std::thread::spawn(move || {
            while let Ok(Some(message)) = lighter_wire::recv::<FromWorker>(socket.as_fd()) {
                if tell.send(message).is_err() {
                    return;
                }
            }
        });
        Self {
            control,
            child: Mutex::new(child),
            heard,
            kept: Mutex::default(),
            next: std::cell::Cell::new(1),
            home,
        }
    }

    pub(crate) fn say(&self, message: &ToWorker) {
        lighter_wire::send(self.control.as_fd(), message, &[]).unwrap();
    }

    pub(crate) fn say_with(&self, message: &ToWorker, files: &[&OwnedFd]) {
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        lighter_wire::send(self.control.as_fd(), message, &files).unwrap();
    }

    /// Waits for a message; others are kept for those who wait for them.
    pub(crate) fn expect<R>(
        &self,
        what: &str,
        mut look: impl FnMut(&FromWorker, &mut Vec<OwnedFd>) -> Option<R>,
    ) -> R {
        let mut kept = self.kept.lock().unwrap();
        for at in 0..kept.len() {
            let (message, files) = &mut kept[at];
            if let Some(found) = look(message, files) {
                kept.remove(at);
                return found;
            }
        }
        let until = Instant::now() + PATIENCE;
        loop {
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((message, mut files)) => match look(&message, &mut files) {
                    Some(found) => return found,
                    None => kept.push((message, files)),
                },
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no {what} came, but {:?}", kept.iter().map(|(m, _)| m).collect::<Vec<_>>())
                }
                Err(RecvTimeoutError::Disconnected) => panic!("the worker ended before {what}"),
            }
        }
    }

    /// Loads a model and waits for it.
    pub(crate) fn load(&self, model: &TestModel) -> Result<(), String> {
        let (message, file) = model.message();
        let hash = message.model;
        self.say_with(&ToWorker::Load(message), &[&file]);
        self.expect("loaded", |message, _| match message {
            FromWorker::Loaded { model, .. } if *model == hash => Some(Ok(())),
            FromWorker::LoadFailed { model, reason } if *model == hash => Some(Err(reason.clone())),
            _ => None,
        })
    }

    /// Loads and approves a model.
    pub(crate) fn serve(&self, model: &TestModel) {
        self.load(model).unwrap();
        self.say(&ToWorker::ApproveAll { model: model.hash });
    }

    /// A stream of a model, by one of the transports.
    pub(crate) fn client(&self, model: &TestModel, shared: bool) -> Client {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(PATIENCE)).unwrap();
        let number = self.next.get();
        self.next.set(number + 1);
        let ring = shared.then(|| client::make_ring(1 << 20));
        let handover = Handover { stream: number, model: model.hash, ring: shared, pending: None };
        let far = OwnedFd::from(far);
        let mut files = vec![&far];
        files.extend(ring.iter().map(|(file, _)| file));
        self.say_with(&ToWorker::Stream(handover), &files);
        Client::new(number, near, ring.map(|(_, memory)| memory))
    }

    /// Waits until a stream has ended, and says why.
    pub(crate) fn end_of(&self, stream: u64) -> Option<String> {
        self.expect("end of a stream", |message, _| match message {
            FromWorker::Ended { stream: ended, error } if *ended == stream => Some(error.clone()),
            _ => None,
        })
    }

    /// Waits until a stream comes back.
    pub(crate) fn back(&self, number: u64) -> (Handover, lighter_devices::ane::control::Wants, Vec<OwnedFd>) {
        self.expect("a stream back", |message, files| match message {
            FromWorker::HandBack { stream, wants } if stream.stream == number => {
                Some((stream.clone(), wants.clone(), std::mem::take(files)))
            }
            _ => None,
        })
    }

    /// Hands a stream on as it came back from another worker.
    pub(crate) fn hand_on(&self, stream: Handover, files: &[OwnedFd]) {
        self.say_with(&ToWorker::Stream(stream), &files.iter().collect::<Vec<_>>());
    }

    pub(crate) fn report(&self) -> WorkerCounters {
        self.say(&ToWorker::Report { seq: 77 });
        self.expect("report", |message, _| match message {
            FromWorker::Report { seq: 77, counters, .. } => Some(counters.clone()),
            _ => None,
        })
    }

    /// How long the oldest run that goes on has taken.
    pub(crate) fn oldest_run_us(&self) -> Option<u64> {
        self.say(&ToWorker::Report { seq: 78 });
        self.expect("report", |message, _| match message {
            FromWorker::Report { seq: 78, oldest_run_us, .. } => Some(*oldest_run_us),
            _ => None,
        })
    }

    /// Waits for a sample: places of inputs and outputs, and the file.
    pub(crate) fn sample(&self) -> (Vec<TensorPlace>, Vec<TensorPlace>, OwnedFd) {
        self.expect("sample", |message, files| match message {
            FromWorker::Sampled { inputs, outputs, .. } => {
                Some((inputs.clone(), outputs.clone(), files.pop().unwrap()))
            }
            _ => None,
        })
    }

    pub(crate) fn trial(
        &self,
        model: ModelHash,
        inputs: &[TensorPlace],
        file: &OwnedFd,
        runs: u32,
    ) -> (Outcome, Option<OwnedFd>) {
        let number = self.next.get();
        self.next.set(number + 1);
        let trial = Trial { trial: number, model, inputs: inputs.to_vec(), runs, outputs: true };
        self.say_with(&ToWorker::Trial(trial), &[file]);
        self.expect("trial", |message, files| match message {
            FromWorker::TrialDone { trial, outcome } if *trial == number => {
                Some((outcome.clone(), files.pop()))
            }
            _ => None,
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The end of the control socket is what a worker ends by; shut, because a thread here holds it as well.
        let _ = rustix::net::shutdown(&self.control, rustix::net::Shutdown::Both);
        let status = self.child.lock().unwrap().wait().unwrap();
        if !std::thread::panicking() {
            assert!(status.success(), "the worker ended badly: {status}");
            let left: Vec<_> = std::fs::read_dir(self.home.path()).unwrap().collect();
            assert!(left.is_empty(), "the worker wrote into its home: {left:?}");
        }
    }
}

/// Reads a tensor out of a file.
pub(crate) fn read_place(file: &OwnedFd, place: &TensorPlace) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(place.bytes).unwrap()];
    if !bytes.is_empty() {
        assert_eq!(rustix::io::pread(file, &mut bytes, place.offset).unwrap(), bytes.len());
    }
    bytes
}

/// The message about a model's ports.
pub(crate) fn ports(ports: &[lighter_frames::Port]) -> Vec<ModelPort> {
    ports.iter().map(ModelPort::new).collect()
}

pub(crate) fn model_message(
    hash: ModelHash,
    proto: u64,
    weights: u64,
    inputs: &[lighter_frames::Port],
    outputs: &[lighter_frames::Port],
) -> Model {
    Model {
        model: hash,
        proto_bytes: proto,
        weights_bytes: weights,
        inputs: ports(inputs),
        outputs: ports(outputs),
    }
}

pub(crate) fn shapes_of(tensors: &[Tensor]) -> Shapes {
    Shapes(tensors.iter().map(|tensor| tensor.dims().to_vec()).collect())
}

pub(crate) fn bytes(text: &[u8]) -> Bytes {
    Bytes(text.to_vec())
}

pub(crate) fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
