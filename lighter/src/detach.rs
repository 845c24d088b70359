// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter start --detach`: starts the daemon in a session of its own and returns once it answers.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::config::Config;
use crate::control::{self, ControlError, Reply, Request};

/// Longest wait for the daemon's first answer; it probes engines before it serves.
const READY_LIMIT: Duration = Duration::from_secs(90);

/// Starts the daemon with the configuration at `config_file` and waits until it answers; returns its pid.
///
/// # Errors
/// When it cannot be started or ends before it answers; the text holds the end of its log.
pub(crate) fn start(config_file: &Path, config: &Config) -> anyhow::Result<u32> {
    if let Ok(Reply::Status(status)) = control::ask(&config.daemon.control_socket(), &Request::Status) {
        bail!("a daemon is already running there: process {}; stop it with `lighter stop`", status.pid);
    }
    let log_file = &config.daemon.log_file;
    if let Some(dir) = log_file.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o640)
        .open(log_file)
        .with_context(|| format!("cannot open the log file {}", log_file.display()))?;
    let program = std::env::current_exe().context("cannot tell the path of this program")?;
    let mut command = Command::new(&program);
    command
        .arg("--config")
        .arg(config_file)
        .args(["start", "--own-session"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::from(log))
        .current_dir("/");
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the daemon")? {
            bail!("the daemon ended with {status} before it was ready\n{}", last_lines(log_file));
        }
        match control::ask(&config.daemon.control_socket(), &Request::Status) {
            Ok(Reply::Status(status)) if status.pid == child.id() => return Ok(status.pid),
            Ok(_) | Err(ControlError::NotRunning { .. } | ControlError::Ended { .. }) => {}
            Err(error) => return Err(error).context("the daemon started, but does not answer"),
        }
        if Instant::now() > deadline {
            bail!("the daemon gave no sign within {} s\n{}", READY_LIMIT.as_secs(), last_lines(log_file));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn last_lines(log_file: &Path) -> String {
    let text = std::fs::read(log_file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines.get(lines.len().saturating_sub(5)..).unwrap_or_default().join("\n");
    format!("last lines of {}:\n{tail}", log_file.display())
}
