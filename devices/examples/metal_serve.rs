// SPDX-License-Identifier: MIT OR Apache-2.0
//! A metal worker without the service: listens on a port of the loopback and hands what it accepts to a worker
//! process of its own, for trying clients and measuring.
//!
//! usage: metal_serve PORT ENGINE BASE_LIBRARY REGISTRY_LIBRARY BACKENDS_DIR [--threads N] [--major N] [--share]
//!        [--small-pages]
//!
//! `--share` answers the worker's questions for weights from files under /dev/shm (or `--store DIR`). It prints
//! the counters when the worker ends and refuses nothing that the worker does not.

use std::collections::HashMap;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use lighter_devices::metal::control::{FromWorker, ToWorker, WeightKey, WorkerConfig};
use lighter_devices::metal::worker;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|first| first == "--worker") {
        let control = rustix::io::dup(rustix::stdio::stdin())?;
        return Ok(worker::run(control)?);
    }
    let [_, port, engine, base, registry, backends, options @ ..] = arguments.as_slice() else {
        return Err("usage: metal_serve PORT ENGINE BASE REGISTRY BACKENDS [options]".into());
    };
    let option = |name: &str| options.iter().position(|option| option == name);
    let number = |name: &str| option(name).and_then(|at| options.get(at + 1)?.parse().ok());
    let config = WorkerConfig {
        base_library: PathBuf::from(base),
        registry_library: PathBuf::from(registry),
        backends_dir: Some(PathBuf::from(backends)),
        engine: engine.clone(),
        threads: number("--threads"),
        max_bytes: 64 << 30,
        max_streams: 64,
        huge_pages: option("--small-pages").is_none(),
        share_weights: option("--share").is_some(),
    };
    let store = option("--store").and_then(|at| options.get(at + 1)).map_or("/dev/shm", String::as_str);
    let major = number("--major").and_then(|major| u8::try_from(major).ok());
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Through the loader that runs this program, which may be another system's.
    let this = std::env::args().next().unwrap_or_default();
    let mut child = match std::env::var_os("LOADER") {
        Some(loader) => {
            let mut command = Command::new(loader);
            command.arg("--library-path").arg(std::env::var_os("LOADER_PATH").unwrap_or_default()).arg(this);
            command
        }
        None => Command::new(std::env::current_exe()?),
    };
    let mut child = child.arg("--worker").stdin(Stdio::from(far)).spawn()?;
    let near = Arc::new(near);
    lighter_wire::send(near.as_fd(), &ToWorker::Configure(config), &[])?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port.parse::<u16>()?))?;
    let hand = Arc::clone(&near);
    std::thread::spawn(move || {
        for (stream, socket) in (1..).zip(listener.incoming().flatten()) {
            let message = ToWorker::Stream { stream, major };
            if lighter_wire::send(hand.as_fd(), &message, &[socket.as_fd()]).is_err() {
                return;
            }
        }
    });
    let ask = Arc::clone(&near);
    std::thread::spawn(move || {
        for seq in 1.. {
            std::thread::sleep(Duration::from_secs(5));
            if lighter_wire::send(ask.as_fd(), &ToWorker::Report { seq }, &[]).is_err() {
                return;
            }
        }
    });
    let mut shelf = Shelf { store: PathBuf::from(store), files: HashMap::new() };
    while let Some((message, mut files)) = lighter_wire::recv::<FromWorker>(near.as_fd())? {
        match message {
            FromWorker::Keep { seq, key, .. } => {
                let file = files.pop().and_then(|file| shelf.keep(&key, &file).ok());
                answer(&near, seq, file.as_ref())?;
            }
            FromWorker::Find { seq, .. } => answer(&near, seq, None)?,
            other => eprintln!("{other:?}"),
        }
    }
    eprintln!("worker ended: {}", child.wait()?);
    Ok(())
}

fn answer(socket: &OwnedFd, seq: u64, file: Option<&OwnedFd>) -> Result<(), Failure> {
    let message = ToWorker::Weight { seq, found: file.is_some() };
    let descriptors: Vec<_> = file.iter().map(AsFd::as_fd).collect();
    Ok(lighter_wire::send(socket.as_fd(), &message, &descriptors)?)
}

struct Shelf {
    store: PathBuf,
    files: HashMap<WeightKey, PathBuf>,
}

impl Shelf {
    fn keep(&mut self, key: &WeightKey, from: &OwnedFd) -> Result<OwnedFd, Failure> {
        let path = match self.files.get(key) {
            Some(path) => path.clone(),
            None => {
                let path = self.store.join(format!("metal-serve-{}-{}", std::process::id(), key.blake3));
                let mut source = std::fs::File::from(from.try_clone()?);
                std::io::Seek::rewind(&mut source)?;
                std::io::copy(&mut source, &mut std::fs::File::create(&path)?)?;
                self.files.insert(key.clone(), path.clone());
                path
            }
        };
        Ok(std::fs::File::open(path)?.into())
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        for path in self.files.values() {
            let _ = std::fs::remove_file(path);
        }
    }
}
