// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines ggml finds on this host, or why none.
//!
//! ggml and the drivers behind it are not loaded here: a short-lived child (`lighter probe metal`, which calls
//! [`answer`]) loads them, lists ggml's devices and ends. A driver that crashes or hangs costs that child and
//! is reported as a reason.

mod enumerate;
mod rank;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::{Libraries, MetalConfig};
use super::locate::{EngineFiles, locate};
use crate::ask::AnswerError;
use crate::engine_root;
use crate::host::Probe;
use crate::text::with_causes;

/// Longest that ggml and its drivers may take to list the devices.
const LIMIT: Duration = Duration::from_secs(10);

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

/// The child: reads the question from standard input, loads ggml, writes the answer to standard output.
///
/// # Errors
/// When there is no question, or nobody to answer to. That ggml cannot be loaded is an answer.
pub fn answer() -> Result<(), AnswerError> {
    crate::ask::answer(|libraries: Libraries| match enumerate::devices(&libraries) {
        Ok((version, devices)) => Answer::Devices { version, devices },
        Err(error) => Answer::Failed { reason: with_causes(&error) },
    })
}

/// Looks for ggml and asks a child for its devices.
#[must_use]
pub fn probe(program: &Path, config: &MetalConfig) -> Probe {
    match locate(config, Path::new("/")) {
        Ok(files) => probe_files(program, config, &files),
        Err(missing) => missing.into(),
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
    engine_root::command(program, files.loader.as_ref(), &files.environment)
}

fn ask(program: &Path, files: &EngineFiles) -> Result<Answer, String> {
    let mut command = command_for(program, files);
    command.args(["probe", "metal"]);
    crate::ask::ask(command, &files.libraries, LIMIT)
}
