// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whatever of the gpu device dies, the program in the container sees an error soon, and the next one works.
//!
//! Within two seconds where Mesa waits for a fence or an answer on the socket. Where it waits in memory that it shares with the
//! renderer, it looks for signs of life after some four seconds and then more seldom, which nobody else can shorten.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::gpu::{CHECK, GPU, SID, TRIXIE, attempt, check, container, daemon};
use crate::support::{Daemon, Engine, children, eventually, run, stdout_of, text_of};

/// Docker takes a part of it to take the container down.
const SOON: Duration = Duration::from_secs(2);
/// Mesa's looks become rarer.
const MESA_LOOKS: Duration = Duration::from_secs(20);

/// Processes of the gpu service: sessions, then render servers and theirs.
fn find(daemon: &Daemon, what: &str) -> u32 {
    eventually(what, || {
        let mut below = vec![daemon.pid()];
        let mut index = 0;
        while let Some(pid) = below.get(index).copied() {
            below.extend(children(pid));
            index += 1;
        }
        let is_wanted = |pid: &u32| {
            let text = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).replace('\0', " ");
            let is_server = text.contains("--socket-fd");
            match what {
                "the service" => text.contains("service gpu"),
                "the session" => text.contains("worker gpu"),
                "the render server" => is_server && !children(*pid).is_empty(),
                _ => is_server && children(*pid).is_empty() && parent_is_server(*pid),
            }
        };
        below.into_iter().find(is_wanted)
    })
}

fn parent_is_server(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let parent =
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)).unwrap_or_default().to_owned();
    let text = std::fs::read(format!("/proc/{parent}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&text).contains("--socket-fd")
}

fn dies(engine: &Engine, daemon: &Daemon, image: &str, doing: &str, what: &str) {
    let limit = if doing == "wait" { SOON } else { MESA_LOOKS };
    let command = container(engine, &["--device", GPU, "--init"], image, &[CHECK, doing]);
    let mut program = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = find(daemon, what);
    // In the middle of its work.
    std::thread::sleep(Duration::from_millis(300));
    assert!(program.try_wait().unwrap().is_none(), "the program ended by itself\n{}", daemon.log());
    let killed = Instant::now();
    stdout_of(Command::new("kill").args(["-KILL", &pid.to_string()]));
    let ended =
        eventually(&format!("the program ends when {what} is killed"), || program.try_wait().unwrap());
    let after = killed.elapsed();
    let output = program.wait_with_output().unwrap();
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!ended.success(), "{says}");
    assert!(after < limit, "{what}: {after:?}");
    println!(
        "gpu: {image}, {doing}: {what} killed: {ended} after {} ms: {}",
        after.as_millis(),
        says.trim().lines().last().unwrap_or_default()
    );
}

#[test]
fn whatever_dies_is_an_error_soon_and_the_next_program_works() {
    let engine = Engine::take();
    let daemon = daemon(&engine, "crash_limit = 100\n");
    // Debian 13's Mesa waits for fences in shared memory.
    for (image, doing) in [(SID, "wait"), (SID, "hold"), (TRIXIE, "hold")] {
        for what in ["the session", "the render server", "the process with the GPU's driver", "the service"] {
            dies(&engine, &daemon, image, doing, what);
            let says = eventually("the next program works", || {
                let (works, says) = attempt(&engine, &["--device", GPU], image);
                works.then_some(says)
            });
            assert!(says.contains("wrong values: 0"), "{says}");
        }
    }
}

#[test]
fn memory_on_the_device_is_the_containers_and_ends_at_its_limit() {
    let engine = Engine::take();
    let daemon = daemon(&engine, "");
    let bytes = (768_u64 << 20).to_string();
    let takes = |options: &[&str]| {
        let options: Vec<&str> = ["--device", GPU, "--init"].iter().chain(options).copied().collect();
        let output = run(container(&engine, &options, SID, &[CHECK, "allocate", &bytes]));
        (output.status.success(), format!("{} {}", text_of(&output), output.status))
    };
    let (fits, says) = takes(&[]);
    assert!(fits, "{says}\n{}", daemon.log());
    let other = engine.sleeper(&[]);
    let (fits, says) = takes(&["--memory", "384m", "--memory-swap", "384m"]);
    assert!(!fits, "the container's limit did not hold: {says}");
    println!("gpu: 768 MiB in a container of 384 MiB: {}", says.trim().lines().last().unwrap_or_default());
    assert!(check(&engine, SID).contains("wrong values: 0"), "{}", daemon.log());
    assert_eq!(other.exec(&["echo", "alive"]).trim(), "alive");
}

#[test]
fn a_killed_daemon_is_an_error_soon_and_works_again_after_its_start() {
    let engine = Engine::take();
    let mut daemon = daemon(&engine, "");
    let command = container(&engine, &["--device", GPU, "--init"], SID, &[CHECK, "wait"]);
    let mut program = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    find(&daemon, "the process with the GPU's driver");
    // In the middle of its work.
    std::thread::sleep(Duration::from_millis(500));
    let killed = Instant::now();
    daemon.kill();
    let ended = eventually("the program ends with the daemon", || program.try_wait().unwrap());
    assert!(!ended.success());
    assert!(killed.elapsed() < SOON, "{:?}", killed.elapsed());
    daemon.launch();
    assert!(check(&engine, SID).contains("wrong values: 0"));
}
