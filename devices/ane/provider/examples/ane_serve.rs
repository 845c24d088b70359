// SPDX-License-Identifier: MIT OR Apache-2.0
//! The real ane service and its workers behind a unix socket, without the daemon and its gate: for trying the plug-in
//! against the host as it is, and for measuring.
//!
//! usage: ane_serve SOCKET LIBONNXRUNTIME FOLDER
//!
//! Every connection counts as the same container's. FOLDER keeps cache and journal. Each line on standard input is
//! answered by a line with the service's report as JSON; the end of standard input ends it.
#![allow(clippy::print_stdout, reason = "a program")]

use std::ffi::OsString;
use std::io::BufRead;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lighter_devices::ane::service::run_with;
use lighter_devices::ane::{AneConfig, probe, worker};
use lighter_devices::service::{ServiceLink, WorkerProgram};
use lighter_wire::{GrantId, Owner, StreamOffer};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

const PATIENCE: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [hidden, _] if hidden == "worker" => Ok(worker::run(std::io::stdin().as_fd().try_clone_to_owned()?)?),
        [hidden, _] if hidden == "probe" => Ok(probe::answer()?),
        [socket, library, folder] => serve(Path::new(socket), library.into(), Path::new(folder)),
        _ => Err("usage: ane_serve SOCKET LIBONNXRUNTIME FOLDER".into()),
    }
}

fn serve(socket: &Path, library: PathBuf, folder: &Path) -> Result<(), Failure> {
    let config = AneConfig {
        library: Some(library),
        cache_dir: folder.join("cache"),
        state_dir: folder.join("state"),
        ..AneConfig::default()
    };
    config.validate()?;
    let program = WorkerProgram::new(&std::env::current_exe()?, ["worker", "ane"].map(Into::into).into())?;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let service = std::thread::spawn(move || run_with(theirs, config, program));
    let link = Arc::new(ServiceLink::connect(ours, PATIENCE)?);
    // What an earlier run has left.
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let taking = Arc::clone(&link);
    std::thread::spawn(move || take(&listener, &taking));
    for line in std::io::stdin().lock().lines() {
        line?;
        println!("{}", serde_json::to_string(&link.report(PATIENCE)?)?);
    }
    drop(link);
    drop(service);
    Ok(())
}

/// Hands every connection to the service.
fn take(listener: &UnixListener, link: &ServiceLink) {
    for (stream, peer) in (1..).zip(listener.incoming().map_while(Result::ok)) {
        let offer = StreamOffer {
            stream,
            grant: GrantId("try".to_owned()),
            container: "try".to_owned(),
            owner: Owner("try".to_owned()),
            device: "all".to_owned(),
            peer_pid: None,
            groups: Vec::new(),
        };
        if let Err(error) = link.hand_over(&offer, peer.into()) {
            eprintln!("ane_serve: {error}");
            return;
        }
    }
}
