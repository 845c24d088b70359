// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines ggml finds on this host, or why none.
//!
//! ggml and the drivers behind it are not loaded here: a short-lived child (`lighter probe metal`, which calls
//! [`answer`]) loads them, lists ggml's devices and ends. A driver that crashes or hangs costs that child and
//! is reported as a reason.

mod enumerate;
mod rank;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::config::{Libraries, MetalConfig};
use super::locate::{EngineFiles, locate};
use crate::host::Probe;

/// Longest that ggml and its drivers may take to list the devices.
const LIMIT: Duration = Duration::from_secs(10);
/// More than this is no list of devices.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// One device as ggml lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GgmlDevice {
    /// `CPU`, `Vulkan0`.
    pub name: String,
    /// What it is.
    pub description: String,
    /// What kind of device ggml takes it for.
    pub class: GgmlClass,
    /// Its memory; `None` where ggml says 0.
    pub memory_bytes: Option<u64>,
    /// Its address on the host (`0000:03:00.0`), where the backend knows it.
    pub address: Option<String>,
}

/// ggml's kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GgmlClass {
    /// The processor.
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// Works beside the CPU backend on its memory (BLAS, AMX); no engine by itself.
    Accelerator,
}

/// What the child says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// ggml was loaded.
    Devices {
        /// ggml's version.
        version: String,
        /// Its devices, in its order.
        devices: Vec<GgmlDevice>,
    },
    /// It could not be.
    Failed {
        /// Why.
        reason: String,
    },
}

/// Why the child could not answer at all.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No question on its standard input.
    #[error("standard input holds no question of lighter's; this command is for lighter itself")]
    Question(#[source] serde_json::Error),
    /// The answer could not be written.
    #[error("the answer could not be written")]
    Write(#[source] std::io::Error),
}

/// The child: reads the question from standard input, loads ggml, writes the answer to standard output.
///
/// # Errors
/// When there is no question, or nobody to answer to. That ggml cannot be loaded is an answer.
pub fn answer() -> Result<(), ProbeError> {
    let libraries: Libraries = serde_json::from_reader(std::io::stdin().lock().take(MAX_ANSWER_BYTES))
        .map_err(ProbeError::Question)?;
    // Drivers may print; what they print must not land in the answer.
    let real_stdout = rustix::io::fcntl_dupfd_cloexec(std::io::stdout().as_fd(), 3)
        .map_err(|errno| ProbeError::Write(errno.into()))?;
    rustix::stdio::dup2_stdout(std::io::stderr()).map_err(|errno| ProbeError::Write(errno.into()))?;
    let answer = match enumerate::devices(&libraries) {
        Ok((version, devices)) => Answer::Devices { version, devices },
        Err(error) => Answer::Failed { reason: with_causes(&error) },
    };
    let text = serde_json::to_vec(&answer).unwrap_or_default();
    File::from(real_stdout).write_all(&text).map_err(ProbeError::Write)
}

/// Looks for ggml and asks a child for its devices.
#[must_use]
pub fn probe(program: &Path, config: &MetalConfig) -> Probe {
    match locate(config, Path::new("/")) {
        Ok(files) => probe_files(program, config, &files),
        Err(missing) => Probe::Missing { reason: missing.reason, remedy: missing.remedy },
    }
}

/// The same for a ggml that has been found.
#[must_use]
pub fn probe_files(program: &Path, config: &MetalConfig, files: &EngineFiles) -> Probe {
    let broken = |reason: String| Probe::Missing {
        reason,
        remedy: format!(
            "check that {} and the drivers it loads fit this host, or run `lighter setup metal` again",
            files.libraries.registry.display()
        ),
    };
    match ask(program, files) {
        Ok(Answer::Devices { version, devices }) => rank::choose(config.engine_name(), &version, &devices),
        Ok(Answer::Failed { reason }) => broken(format!("ggml cannot be loaded: {reason}")),
        Err(reason) => broken(format!("ggml's devices cannot be listed: {reason}")),
    }
}

/// The command that starts `program` so that it can load these libraries, in a clean environment.
#[must_use]
pub fn command_for(program: &Path, files: &EngineFiles) -> Command {
    let mut command = match &files.loader {
        Some(loader) => {
            let mut command = Command::new(&loader.program);
            command.arg("--library-path").arg(&loader.library_path).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.env_clear().envs(files.environment.iter().map(|(name, value)| (name, value)));
    command
}

fn ask(program: &Path, files: &EngineFiles) -> Result<Answer, String> {
    let question = serde_json::to_vec(&files.libraries).map_err(|error| error.to_string())?;
    let mut child = command_for(program, files)
        .args(["probe", "metal"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{} cannot be started: {error}", program.display()))?;
    // The question is smaller than a pipe's buffer, so this does not wait; dropping it ends the child's input.
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(&question);
    }
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let read = read_both(stdout.as_ref(), stderr.as_ref(), Instant::now() + LIMIT);
    if read.is_none() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    let Some((answer, noise)) = read else {
        return Err(format!("no answer within {} s", LIMIT.as_secs()));
    };
    serde_json::from_slice(&answer).map_err(|_| {
        let noise = String::from_utf8_lossy(&noise);
        let last = noise
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("nothing on its standard error");
        format!("the probe ended with {status}: {}", last.chars().take(300).collect::<String>())
    })
}

/// Both pipes to their ends; `None` when the deadline comes first or too much comes.
fn read_both(
    stdout: Option<&std::process::ChildStdout>,
    stderr: Option<&std::process::ChildStderr>,
    deadline: Instant,
) -> Option<(Vec<u8>, Vec<u8>)> {
    let pipes = [stdout?.as_fd(), stderr?.as_fd()];
    let mut texts = [Vec::new(), Vec::new()];
    let mut open = [true, true];
    let mut buffer = [0; 8192];
    while open.contains(&true) {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok()?;
        let mut polls: Vec<(usize, PollFd<'_>)> = pipes
            .iter()
            .zip(open)
            .enumerate()
            .filter(|(_, (_, is_open))| *is_open)
            .map(|(index, (pipe, _))| (index, PollFd::new(pipe, PollFlags::IN)))
            .collect();
        let mut only: Vec<PollFd<'_>> = polls.iter().map(|(_, poll)| poll.clone()).collect();
        match poll(&mut only, Some(&left)) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return None,
        }
        for ((index, _), polled) in polls.drain(..).zip(only) {
            if polled.revents().is_empty() {
                continue;
            }
            let (pipe, text, is_open) = (pipes.get(index)?, texts.get_mut(index)?, open.get_mut(index)?);
            let got = rustix::io::read(pipe, &mut buffer).unwrap_or(0);
            *is_open = got > 0;
            // The end of the noise is worth as little as its middle once there is this much.
            if (text.len() as u64) < MAX_ANSWER_BYTES {
                text.extend_from_slice(buffer.get(..got)?);
            }
        }
    }
    let [answer, noise] = texts;
    Some((answer, noise))
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
