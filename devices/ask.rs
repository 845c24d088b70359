// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asks a short-lived child one question: its standard input gets it, its standard output answers, both as JSON.
//! [`ask`] is the parent's side, [`answer`] the child's.
//!
//! For probes, whose drivers may crash, hang or print. What the child wrote to its standard error is told when there is
//! no answer.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// More than this is no answer.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// Why the child could not answer at all.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// No question on its standard input.
    #[error("standard input holds no question of lighter's; this command is for lighter itself")]
    Question(#[source] serde_json::Error),
    /// The answer could not be written.
    #[error("the answer could not be written")]
    Write(#[source] std::io::Error),
}

/// The child: reads the question from standard input, finds the answer, writes it to standard output.
pub(crate) fn answer<Q: DeserializeOwned, A: Serialize>(
    find: impl FnOnce(Q) -> A,
) -> Result<(), AnswerError> {
    let question = serde_json::from_reader(std::io::stdin().lock().take(MAX_ANSWER_BYTES))
        .map_err(AnswerError::Question)?;
    // Drivers may print; what they print must not land in the answer.
    let real_stdout = rustix::io::fcntl_dupfd_cloexec(std::io::stdout().as_fd(), 3)
        .map_err(|errno| AnswerError::Write(errno.into()))?;
    rustix::stdio::dup2_stdout(std::io::stderr()).map_err(|errno| AnswerError::Write(errno.into()))?;
    let text = serde_json::to_vec(&find(question)).unwrap_or_default();
    File::from(real_stdout).write_all(&text).map_err(AnswerError::Write)
}

/// Starts the command, asks and waits for its end, at most for the limit; else why there is no answer.
pub(crate) fn ask<A: DeserializeOwned>(
    mut command: Command,
    question: &impl Serialize,
    limit: Duration,
) -> Result<A, String> {
    let question = serde_json::to_vec(question).map_err(|error| error.to_string())?;
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{} cannot be started: {error}", command.get_program().display()))?;
    // The question is smaller than a pipe's buffer, so this does not wait; dropping it ends the child's input.
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(&question);
    }
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let read = read_both(stdout.as_ref(), stderr.as_ref(), Instant::now() + limit);
    if read.is_none() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    let Some((answer, noise)) = read else {
        return Err(format!("no answer within {} s", limit.as_secs()));
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
