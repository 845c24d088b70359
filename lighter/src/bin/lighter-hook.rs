// SPDX-License-Identifier: MIT OR Apache-2.0
//! The hook that container runtimes run for a container with a device of lighter; the CDI specification names it.
//!
//! `lighter-hook grant DEVICE` (createRuntime) asks the agent for a grant and opens the device's loopback endpoints in
//! the container's network namespace. When it cannot, the container does not start, and the one line that it writes to
//! stderr is what the user reads in the runtime's own message. `lighter-hook release DEVICE` (poststop) is a hint that
//! never fails. Both read the OCI state from stdin. It runs with every container: no threads, no runtime, one deadline.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use lighter_agent::hook_protocol::{
    DEFAULT_HOOK_SOCKET, FromAgent, HOOK_VERSION, MAX_MESSAGE_BYTES, MAX_STATE_BYTES, OciState, ToAgent,
};
use lighter_agent::{DeviceName, NsId, OpenError, enter_network, open_here};
use lighter_wire::{PacketError, recv_up_to, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Below the timeout that the CDI specification gives the runtime for this hook, so that this one's message is read.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// For so long a daemon that restarts is waited for.
const RESTART_TIME: Duration = Duration::from_secs(2);
const RETRY_AFTER: Duration = Duration::from_millis(20);

const USAGE: &str =
    "usage: lighter-hook grant|release [--socket PATH] [--timeout-ms N] lighter.sh/DEVICE=NAME";

fn main() -> ExitCode {
    let started = Instant::now();
    let order = match Order::parse(std::env::args().skip(1)) {
        Ok(order) => order,
        Err(cause) => {
            eprintln!("lighter-hook: {cause}; {USAGE}");
            return ExitCode::FAILURE;
        }
    };
    let deadline = Deadline(started.checked_add(order.timeout).unwrap_or(started));
    match order.action {
        Action::Grant => match grant(&order, &deadline) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                eprintln!("lighter-hook: {}: {failure}", order.device);
                ExitCode::FAILURE
            }
        },
        Action::Release => {
            // Nobody waits for it, and the container is gone whatever becomes of it.
            let _ = release(&order, &deadline);
            ExitCode::SUCCESS
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Action {
    Grant,
    Release,
}

/// What the arguments say.
struct Order {
    action: Action,
    socket: PathBuf,
    timeout: Duration,
    device: DeviceName,
}

impl Order {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let action = match args.next().as_deref() {
            Some("grant") => Action::Grant,
            Some("release") => Action::Release,
            Some(other) => return Err(format!("{other:?} is neither grant nor release")),
            None => return Err("there are no arguments".into()),
        };
        let (mut socket, mut timeout) = (PathBuf::from(DEFAULT_HOOK_SOCKET), DEFAULT_TIMEOUT);
        let mut device = None;
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--socket" => socket = args.next().ok_or("--socket has no path")?.into(),
                "--timeout-ms" => {
                    let number = args.next().and_then(|text| text.parse().ok());
                    timeout = Duration::from_millis(number.ok_or("--timeout-ms has no number")?);
                }
                name if device.is_none() => device = Some(name.parse().map_err(|error| format!("{error}"))?),
                other => return Err(format!("{other:?} is one argument too many")),
            }
        }
        Ok(Self { action, socket, timeout, device: device.ok_or("there is no device")? })
    }
}

/// When the hook gives up.
struct Deadline(Instant);

impl Deadline {
    /// What is left; never nothing, which a socket would take for "no limit".
    fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

/// Why the container does not start; one line.
enum Failure {
    NoState(io::Error),
    BadState(serde_json::Error),
    NoInit(io::Error),
    NoAgent { socket: PathBuf, source: io::Error },
    Agent { socket: PathBuf, source: PacketError },
    Silent { socket: PathBuf },
    Hung { socket: PathBuf },
    Namespace(io::Error),
    Refused { cause: String, remedy: String },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const START: &str = "start it with `lighter start`, or start the container without the device";
        const LOG: &str = "see the daemon's log, or start the container without the device";
        match self {
            Self::NoState(error) => {
                write!(
                    f,
                    "the runtime gave no container state on stdin: {error}; hooks are run by runtimes only"
                )
            }
            Self::BadState(error) => {
                write!(
                    f,
                    "the runtime's container state cannot be read: {error}; report it with the runtime's name"
                )
            }
            Self::NoInit(error) => {
                write!(f, "the container's init process cannot be opened: {error}; start it again")
            }
            Self::NoAgent { socket, source } => {
                write!(f, "no lighter daemon answers at {}: {source}; {START}", socket.display())
            }
            Self::Agent { socket, source: PacketError::Socket(source) } => {
                write!(f, "the lighter daemon at {} went away: {source}; {LOG}", socket.display())
            }
            Self::Agent { socket, source } => {
                write!(
                    f,
                    "the lighter daemon at {} answers something else: {source}; {LOG}",
                    socket.display()
                )
            }
            Self::Silent { socket } => {
                write!(f, "the lighter daemon at {} closed the connection; {LOG}", socket.display())
            }
            Self::Hung { socket } => {
                write!(f, "the lighter daemon at {} does not answer in time; {LOG}", socket.display())
            }
            Self::Namespace(error) => {
                write!(f, "the container's network namespace cannot be entered: {error}; {LOG}")
            }
            Self::Refused { cause, remedy } => write!(f, "{cause}; {remedy}"),
        }
    }
}

fn grant(order: &Order, deadline: &Deadline) -> Result<(), Failure> {
    let state = read_state(deadline)?;
    let (pid, pidfd) = open_init(&state)?;
    let namespace = File::open(format!("/proc/{pid}/ns/net")).map_err(Failure::NoInit)?;
    match ask(order, deadline, state.clone(), &pidfd, &namespace) {
        // A daemon that restarts drops the hooks it had; asking twice for one grant is harmless.
        Err(Failure::Silent { .. } | Failure::Agent { source: PacketError::Socket(_), .. })
            if !deadline.is_over() =>
        {
            ask(order, deadline, state, &pidfd, &namespace)
        }
        done => done,
    }
}

fn ask(
    order: &Order,
    deadline: &Deadline,
    state: OciState,
    pidfd: &OwnedFd,
    namespace: &File,
) -> Result<(), Failure> {
    let agent = Agent::connect(&order.socket, deadline, true)?;
    let request = ToAgent::Grant {
        version: HOOK_VERSION,
        id: state.id,
        bundle: state.bundle,
        device: order.device.clone(),
    };
    agent.send(&request, &[pidfd.as_fd(), namespace.as_fd()])?;
    let mut answer = agent.recv()?;
    if let FromAgent::Open { ports } = &answer {
        open(&agent, namespace, ports)?;
        answer = agent.recv()?;
    }
    match answer {
        FromAgent::Granted { .. } => Ok(()),
        FromAgent::Refused { cause, remedy } => Err(Failure::Refused { cause, remedy }),
        FromAgent::Open { .. } => Err(Failure::Silent { socket: order.socket.clone() }),
    }
}

fn release(order: &Order, deadline: &Deadline) -> Result<(), Failure> {
    let state = read_state(deadline)?;
    let agent = Agent::connect(&order.socket, deadline, false)?;
    agent.send(&ToAgent::Release { version: HOOK_VERSION, id: state.id, device: order.device.clone() }, &[])
}

/// Opens what the agent asked for, inside, and sends it.
fn open(agent: &Agent<'_>, namespace: &File, ports: &[u16]) -> Result<(), Failure> {
    enter(namespace).map_err(Failure::Namespace)?;
    match open_here(ports) {
        Ok(opened) => {
            let mut sockets: Vec<BorrowedFd<'_>> = vec![opened.sock_diag.as_fd()];
            sockets.extend(opened.listeners.iter().map(OwnedFd::as_fd));
            agent.send(&ToAgent::Opened, &sockets)
        }
        Err(OpenError::Port { port, errno, sock_diag }) => {
            let failed = ToAgent::OpenFailed { port, errno: errno.raw_os_error() };
            agent.send(&failed, &[sock_diag.as_fd()])
        }
        Err(OpenError::SockDiag(error)) => Err(Failure::Namespace(error)),
    }
}

/// With host networking the hook is there already, and a user's hook could not enter it anyway.
fn enter(namespace: &File) -> io::Result<()> {
    if NsId::of(namespace)? == NsId::of(File::open("/proc/self/ns/net")?)? {
        return Ok(());
    }
    enter_network(namespace.as_fd())
}

fn read_state(deadline: &Deadline) -> Result<OciState, Failure> {
    let stdin = rustix::stdio::stdin();
    let mut bytes = Vec::with_capacity(16 << 10);
    let mut part = [0; 16 << 10];
    loop {
        let wait = Timespec::try_from(deadline.left())
            .map_err(|_| Failure::NoState(io::ErrorKind::InvalidInput.into()))?;
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Some(&wait)) {
            Ok(0) => return Err(Failure::NoState(io::ErrorKind::TimedOut.into())),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(Failure::NoState(errno.into())),
        }
        match rustix::io::read(stdin, &mut part) {
            Ok(0) => break,
            Ok(got) => bytes.extend_from_slice(part.get(..got).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Failure::NoState(errno.into())),
        }
        if bytes.len() > MAX_STATE_BYTES {
            return Err(Failure::NoState(io::ErrorKind::FileTooLarge.into()));
        }
    }
    if bytes.is_empty() {
        return Err(Failure::NoState(io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_slice(&bytes).map_err(Failure::BadState)
}

fn open_init(state: &OciState) -> Result<(i32, OwnedFd), Failure> {
    let pid = state
        .pid
        .and_then(|pid| i32::try_from(pid).ok())
        .and_then(Pid::from_raw)
        .ok_or_else(|| Failure::NoInit(io::Error::other("the state names no process")))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| Failure::NoInit(errno.into()))?;
    Ok((pid.as_raw_nonzero().get(), pidfd))
}

/// The connection to the agent.
struct Agent<'a> {
    connection: OwnedFd,
    path: &'a Path,
    deadline: &'a Deadline,
}

impl<'a> Agent<'a> {
    fn connect(path: &'a Path, deadline: &'a Deadline, patient: bool) -> Result<Self, Failure> {
        let failed = |errno: Errno| Failure::NoAgent { socket: path.into(), source: errno.into() };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let give_up = Instant::now().checked_add(RESTART_TIME).unwrap_or_else(Instant::now);
        loop {
            let connection =
                socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                    .map_err(failed)?;
            // Also bounds the connect itself, which waits while the agent's queue is full.
            set_socket_timeout(&connection, Timeout::Send, Some(deadline.left())).map_err(failed)?;
            match connect(&connection, &address) {
                Ok(()) => return Ok(Self { connection, path, deadline }),
                // The socket of a daemon that restarts stays in its place and refuses until the next one listens.
                Err(Errno::CONNREFUSED) if patient && Instant::now() < give_up && !deadline.is_over() => {
                    std::thread::sleep(RETRY_AFTER);
                }
                Err(Errno::INTR) if !deadline.is_over() => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    fn send(&self, message: &ToAgent, descriptors: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        self.limit(Timeout::Send)?;
        send(&self.connection, message, descriptors).map_err(|error| self.failed(error))
    }

    fn recv(&self) -> Result<FromAgent, Failure> {
        self.limit(Timeout::Recv)?;
        match recv_up_to(&self.connection, MAX_MESSAGE_BYTES) {
            Ok(Some((message, _))) => Ok(message),
            Ok(None) => Err(Failure::Silent { socket: self.path.into() }),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn limit(&self, which: Timeout) -> Result<(), Failure> {
        set_socket_timeout(&self.connection, which, Some(self.deadline.left()))
            .map_err(|errno| self.failed(errno.into()))
    }

    fn failed(&self, source: PacketError) -> Failure {
        match source {
            PacketError::Socket(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Failure::Hung { socket: self.path.into() }
            }
            source => Failure::Agent { socket: self.path.into(), source },
        }
    }
}
