// SPDX-License-Identifier: MIT OR Apache-2.0
//! A worker that misbehaves as its clients ask it to, for the tests of the metal service. It has no ggml.
//!
//! The variable `START` says how it starts; `real` makes it an ordinary worker. The first line of a stream says what it
//! does with the stream. `service SETTINGS` makes it a service whose workers it is itself.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::exit,
    reason = "a test program"
)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lighter_devices::metal::control::{FromWorker, ToWorker, WeightKey, WorkerConfig, WorkerCounters};
use lighter_wire::{recv, send};
use rustix::fs::{MemfdFlags, memfd_create};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let start = std::env::var("START").unwrap_or_default();
    if let [first, settings] = args.as_slice()
        && first == "service"
    {
        let control = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        lighter_devices::metal::service::run(control, serde_json::from_str(settings).unwrap()).unwrap();
        return;
    }
    if start == "real" {
        if args == ["probe", "metal"] {
            lighter_devices::metal::probe::answer().unwrap();
        } else {
            let control = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            lighter_devices::metal::worker::run(control).unwrap();
        }
        return;
    }
    if args == ["probe", "metal"] {
        println!(
            r#"{{"devices":{{"version":"9.9.9","devices":[{{"name":"CPU","description":"bad worker","class":"cpu","memory_bytes":1000000000,"address":null}}]}}}}"#
        );
        return;
    }
    let control = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let Some((ToWorker::Configure(config), _)) = recv::<ToWorker>(&control).unwrap() else {
        panic!("no configuration")
    };
    match start.as_str() {
        "never" => std::thread::sleep(Duration::from_secs(600)),
        "abort" => std::process::abort(),
        "failed" => {
            say(&control, &FromWorker::Failed { reason: "no such engine".to_owned() });
            return;
        }
        "rubbish" => {
            rustix::io::write(&control, b"{\"fine\":1}").unwrap();
            std::thread::sleep(Duration::from_secs(600));
        }
        _ => {}
    }
    say(&control, &FromWorker::Ready { engine: config.engine.clone(), version: "9.9.9".to_owned() });
    let mut calls = 0;
    while let Some((message, mut descriptors)) = recv::<ToWorker>(&control).unwrap() {
        match message {
            ToWorker::Stream { stream, major } => {
                calls += 1;
                serve(&control, &config, stream, major, UnixStream::from(descriptors.pop().unwrap()));
            }
            ToWorker::Report { seq } => {
                let counters = WorkerCounters { calls, held_bytes: 77, ..WorkerCounters::default() };
                say(&control, &FromWorker::Report { seq, counters });
            }
            ToWorker::Configure(_) | ToWorker::Weight { .. } => panic!("not expected"),
        }
    }
}

fn say(control: &OwnedFd, message: &FromWorker) {
    send(control, message, &[]).unwrap();
}

fn serve(control: &OwnedFd, config: &WorkerConfig, stream: u64, major: Option<u8>, mut socket: UnixStream) {
    let mut line = String::new();
    BufReader::new(&socket).read_line(&mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let ended = |error: Option<&str>| {
        say(control, &FromWorker::Ended { stream, error: error.map(str::to_owned) });
    };
    match words.as_slice() {
        ["hello"] => {
            writeln!(socket, "{} {:?} {}", config.engine, major, std::process::id()).unwrap();
            ended(None);
        }
        ["stay"] => {
            writeln!(socket, "{}", std::process::id()).unwrap();
            // The socket stays open, and the stream with it.
            std::mem::forget(socket);
        }
        ["complain"] => ended(Some("tensor of \u{1b}[31m0 bytes")),
        ["assert"] => {
            eprintln!("ggml.c:1234: GGML_ASSERT(a == b) failed");
            std::process::abort();
        }
        ["close"] => {
            // The end of the control socket without the end of the process.
            let null = File::open("/dev/null").unwrap();
            rustix::stdio::dup2_stdin(&null).unwrap();
            socket.write_all(b"closed\n").unwrap();
            std::process::exit(0);
        }
        ["shout"] => {
            for number in 0..20_000 {
                eprintln!("line {number} {}", "x".repeat(2000));
            }
            socket.write_all(b"shouted\n").unwrap();
            ended(None);
        }
        ["sandbox"] => {
            writeln!(socket, "{}", try_out()).unwrap();
            ended(None);
        }
        ["keep", len] => {
            let bytes = vec![5; len.parse().unwrap()];
            let key =
                WeightKey { len: bytes.len() as u64, blake3: blake3::hash(&bytes).to_hex().to_string() };
            writeln!(socket, "{}", keep(control, &key, &bytes)).unwrap();
            // Holds on to it until it ends.
            ended(None);
        }
        ["lie", len] => {
            let bytes = vec![5; len.parse().unwrap()];
            let key = WeightKey { len: bytes.len() as u64, blake3: "00".repeat(32) };
            writeln!(socket, "{}", keep(control, &key, &bytes)).unwrap();
            ended(None);
        }
        ["find", len] => {
            send(control, &FromWorker::Find { seq: 9, len: len.parse().unwrap(), fnv: 33 }, &[]).unwrap();
            writeln!(socket, "{}", weight(control)).unwrap();
            ended(None);
        }
        other => panic!("unknown command {other:?}"),
    }
}

fn keep(control: &OwnedFd, key: &WeightKey, bytes: &[u8]) -> String {
    let file = memfd_create("upload", MemfdFlags::CLOEXEC).unwrap();
    File::from(file.try_clone().unwrap()).write_all(bytes).unwrap();
    send(control, &FromWorker::Keep { seq: 9, key: key.clone(), fnv: 33 }, &[file.as_fd()]).unwrap();
    weight(control)
}

/// The service's answer: what the descriptor holds, and whether it can be written.
fn weight(control: &OwnedFd) -> String {
    let Some((ToWorker::Weight { seq: 9, found }, mut descriptors)) = recv::<ToWorker>(control).unwrap()
    else {
        panic!("no answer")
    };
    if !found {
        return "none".to_owned();
    }
    let file = descriptors.pop().unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let again = std::fs::OpenOptions::new().write(true).open(path);
    let is_written = again.is_ok_and(|file| std::os::unix::fs::FileExt::write_at(&file, b"x", 0).is_ok());
    let is_changed = rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o666)).is_ok();
    let mut bytes = Vec::new();
    File::from(file.try_clone().unwrap()).read_to_end(&mut bytes).unwrap();
    std::mem::forget(file);
    let hash = blake3::hash(&bytes).to_hex();
    format!("{} {} written={is_written} chmod={is_changed}", bytes.len(), &hash[..8])
}

/// What a worker that somebody has taken over would try; names those that work.
fn try_out() -> String {
    let attempts: [(&str, bool); 10] = [
        (
            "socket",
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
                .is_ok(),
        ),
        ("unix", UnixStream::pair().is_ok()),
        ("passwd", File::open("/etc/passwd").is_ok()),
        ("list", std::fs::read_dir("/").is_ok()),
        ("create", File::create("/tmp/lighter-bad-worker").is_ok()),
        ("parent", File::open(format!("/proc/{}/environ", std::os::unix::process::parent_id())).is_ok()),
        ("processes", File::open("/proc/1/cmdline").is_ok()),
        ("root", rustix::process::geteuid().is_root()),
        ("chroot", rustix::process::chroot("/").is_ok()),
        ("core", rustix::process::getrlimit(rustix::process::Resource::Core).current != Some(0)),
    ];
    let worked: Vec<&str> = attempts.iter().filter(|(_, worked)| *worked).map(|(name, _)| *name).collect();
    format!("worked: {}", worked.join(","))
}
