// SPDX-License-Identifier: MIT OR Apache-2.0
//! The service under test, and a container's side of a stream.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_devices::ane::AneConfig;
use lighter_devices::ane::journal::Journal;
use lighter_devices::ane::service::run_with;
use lighter_devices::service::{ServiceLink, WorkerProgram};
use lighter_frames::{
    Dim, Element, HEADER_BYTES, Header, Hello, Message, Model, OrtVersion, Port, Refused, Run, Tensor,
    Transport,
};
use lighter_wire::{GrantId, Owner, ServiceReport, StreamOffer};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};

/// For what must happen; a test that fails waits this long.
pub(crate) const LONG: Duration = Duration::from_secs(60);

static NUMBER: AtomicU64 = AtomicU64::new(1);

fn bad_engine() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples/service-bad-engine");
    assert!(path.exists(), "{}: build it with `cargo test -p lighter-devices`", path.display());
    path
}

/// A running service.
pub(crate) struct Running {
    link: Option<ServiceLink>,
    thread: Option<JoinHandle<()>>,
    pub(crate) folder: tempfile::TempDir,
}

impl Running {
    pub(crate) fn start(engines: &str, change: impl FnOnce(&mut AneConfig)) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), engines, change)
    }

    /// With what an earlier service has left in this folder.
    pub(crate) fn start_in(
        folder: tempfile::TempDir,
        engines: &str,
        change: impl FnOnce(&mut AneConfig),
    ) -> Self {
        let library = folder.path().join("libonnxruntime.so.1.99.0");
        std::fs::write(&library, "").unwrap();
        let mut config = AneConfig {
            library: Some(library),
            environment: [("ENGINES", engines.to_owned()), ("MARK", folder.path().display().to_string())]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
            cache_dir: folder.path().join("cache"),
            state_dir: folder.path().join("state"),
            ..AneConfig::default()
        };
        change(&mut config);
        config.validate().unwrap();
        let program = WorkerProgram::new(&bad_engine(), ["worker", "ane"].map(Into::into).into()).unwrap();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let thread = std::thread::spawn(move || run_with(theirs, config, program).unwrap());
        let link = ServiceLink::connect(ours, LONG).unwrap();
        Self { link: Some(link), thread: Some(thread), folder }
    }

    fn link(&self) -> &ServiceLink {
        self.link.as_ref().unwrap()
    }

    /// Ends the service; what it wrote stays.
    pub(crate) fn end(mut self) -> tempfile::TempDir {
        self.finish();
        std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap())
    }

    fn finish(&mut self) {
        drop(self.link.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }

    /// A container's end of a new stream.
    pub(crate) fn open(&self, container: &str) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
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
        near
    }

    pub(crate) fn revoke(&self, container: &str) {
        self.link().revoke(&grant(container), LONG).unwrap();
    }

    pub(crate) fn report(&self) -> ServiceReport {
        self.link().report(LONG).unwrap()
    }

    pub(crate) fn runs(&self, engine: &str) -> u64 {
        self.report().totals.get(&format!("runs_{engine}")).copied().unwrap_or(0)
    }

    pub(crate) fn has_trouble(&self, text: &str) -> bool {
        self.report().troubles.iter().any(|trouble| trouble.contains(text))
    }

    pub(crate) fn journal(&self) -> Journal {
        let mut journal = Journal::new(&self.folder.path().join("state"));
        journal.refresh().unwrap();
        journal
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.finish();
    }
}

pub(crate) fn grant(container: &str) -> GrantId {
    GrantId(format!("grant-{container}"))
}

/// Waits until it is so.
pub(crate) fn until(what: &str, mut test: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !test() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Processes that are children of this one.
pub(crate) fn children() -> Vec<u32> {
    let mut children = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        children.extend(text.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()));
    }
    children
}

/// A model's bytes and its message.
pub(crate) fn model(proto: &[u8]) -> (Model, Vec<u8>) {
    let port =
        |name: &str| Port { name: name.to_owned(), element: Element::F32, dims: Some(vec![Dim::Free]) };
    let mut model = Model {
        hash: [0; 32],
        proto_bytes: proto.len() as u64,
        weights_bytes: 0,
        inputs: vec![port("x")],
        outputs: vec![port("y")],
        label: format!("test {}", proto.len()),
    };
    let mut bytes = proto.to_vec();
    bytes.resize(usize::try_from(model.file_bytes()).unwrap(), 0);
    model.hash = *blake3::hash(&bytes).as_bytes();
    (model, bytes)
}

pub(crate) fn hello(units: &str, transport: Transport) -> Message {
    Message::Hello(Hello {
        ort: OrtVersion { major: 1, minor: 32, patch: 0 },
        transport,
        units: units.to_owned(),
    })
}

/// The next message; `None` at the end of the stream.
pub(crate) fn receive(socket: &mut UnixStream) -> Option<Message> {
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).unwrap();
    let mut body = vec![0; usize::try_from(header.body_bytes).unwrap()];
    socket.read_exact(&mut body).ok()?;
    Some(Message::decode(header, &body).unwrap())
}

pub(crate) fn send(socket: &mut UnixStream, message: &Message) {
    // A stream that was refused may be closed.
    let _ = socket.write_all(&message.encode().unwrap());
}

/// Sends a message with descriptors beside it.
pub(crate) fn send_with(socket: &UnixStream, message: &Message, descriptors: &[BorrowedFd<'_>]) {
    let bytes = message.encode().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    let put = sendmsg(socket.as_fd(), &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
    assert_eq!(put.unwrap(), bytes.len());
}

/// A stream that is set up.
pub(crate) struct Client {
    socket: UnixStream,
    run: u32,
}

/// What a set-up ended with.
pub(crate) enum SetUp {
    Done(Client),
    Refused(Refused),
    Ended,
}

impl Client {
    pub(crate) fn new(service: &Running, container: &str, proto: &[u8]) -> Self {
        match Self::set_up(service.open(container), proto, "") {
            SetUp::Done(client) => client,
            SetUp::Refused(refused) => panic!("{refused:?}"),
            SetUp::Ended => panic!("the stream ended in its set-up: {:?}", service.report()),
        }
    }

    pub(crate) fn set_up(mut socket: UnixStream, proto: &[u8], units: &str) -> SetUp {
        let (model, bytes) = model(proto);
        send(&mut socket, &hello(units, Transport::Stream));
        match receive(&mut socket) {
            Some(Message::HelloOk(_)) => {}
            Some(Message::Refused(refused)) => return SetUp::Refused(refused),
            None => return SetUp::Ended,
            other => panic!("{other:?}"),
        }
        send(&mut socket, &Message::Model(model.clone()));
        loop {
            match receive(&mut socket) {
                Some(Message::Have) => {}
                Some(Message::Want) => {
                    send(&mut socket, &Message::Sending);
                    let _ = socket.write_all(&bytes);
                }
                Some(Message::Loaded(loaded)) => {
                    assert_eq!(loaded.hash, model.hash);
                    return SetUp::Done(Self { socket, run: 0 });
                }
                Some(Message::Refused(refused)) => return SetUp::Refused(refused),
                None => return SetUp::Ended,
                other => panic!("{other:?}"),
            }
        }
    }

    /// One run; `None` when the stream has ended.
    pub(crate) fn run(&mut self, input: &[f32]) -> Option<Vec<f32>> {
        self.begin(input);
        self.finish()
    }

    /// Sends a run.
    pub(crate) fn begin(&mut self, input: &[f32]) {
        self.run += 1;
        let tensor = Tensor::new(Element::F32, vec![input.len() as u64]).unwrap();
        let run = Message::Run(Run { run: self.run, data_offset: 0, inputs: vec![tensor] });
        let data: Vec<u8> = input.iter().flat_map(|value| value.to_le_bytes()).collect();
        let _ = self.socket.write_all(&[run.encode().unwrap(), data].concat());
    }

    /// Takes its answer.
    pub(crate) fn finish(&mut self) -> Option<Vec<f32>> {
        let answer = match receive(&mut self.socket)? {
            Message::Answer(answer) => answer,
            other => panic!("{other:?}"),
        };
        assert_eq!(answer.run, self.run);
        let mut bytes = vec![0; usize::try_from(answer.data_bytes()).unwrap()];
        self.socket.read_exact(&mut bytes).ok()?;
        Some(bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect())
    }
}

/// What a container does: runs, and begins anew where its stream ends. Checks every answer.
pub(crate) struct Container<'a> {
    service: &'a Running,
    name: &'static str,
    proto: Vec<u8>,
    client: Option<Client>,
    /// How often it began anew.
    pub(crate) reconnects: u32,
}

impl<'a> Container<'a> {
    pub(crate) fn new(service: &'a Running, name: &'static str, proto: &[u8]) -> Self {
        Self { service, name, proto: proto.to_vec(), client: None, reconnects: 0 }
    }

    /// One right answer to numbers of this count.
    pub(crate) fn run(&mut self, count: u8) {
        let input: Vec<f32> = (0..count).map(f32::from).collect();
        let expected: Vec<f32> = input.iter().map(|value| value * 2.0).collect();
        for _ in 0..20 {
            let mut client = match self.client.take() {
                Some(client) => client,
                None => {
                    self.reconnects += 1;
                    match Client::set_up(self.service.open(self.name), &self.proto, "") {
                        SetUp::Done(client) => client,
                        SetUp::Ended => continue,
                        SetUp::Refused(refused) => panic!("{refused:?}"),
                    }
                }
            };
            if let Some(output) = client.run(&input) {
                assert_eq!(output, expected);
                self.client = Some(client);
                return;
            }
        }
        panic!("no answer after 20 streams");
    }
}
