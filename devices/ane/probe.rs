// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines ONNX Runtime has on this host, or why none.
//!
//! ONNX Runtime and the drivers behind it are not loaded here: a short-lived child (`lighter probe ane`, which calls
//! [`answer`]) loads one library, asks it for its providers and those for their devices, and ends. A driver that
//! crashes or hangs costs that child and is reported as a reason.

mod enumerate;
mod rank;

pub(crate) use self::rank::is_meant;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::{AneConfig, Class, Units};
use super::control::Provider;
use super::locate::{Library, locate};
use crate::ask::AnswerError;
use crate::host::Probe;

/// Longest that a library and its drivers may take to list the devices.
const LIMIT: Duration = Duration::from_secs(20);

/// What the child is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// libonnxruntime.
    pub library: PathBuf,
}

/// What the child says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// The library was loaded.
    Devices {
        /// Its version.
        version: String,
        /// What can compute with it.
        devices: Vec<Found>,
    },
    /// It could not be.
    Failed {
        /// Why.
        reason: String,
    },
}

/// One thing that can compute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// By which provider.
    pub provider: Provider,
    /// The provider's own name for the device (`GPU.1`); empty where it has none.
    pub device: String,
    /// What it is, for a person; may be empty.
    pub description: String,
}

/// An engine that computes models, and how a worker is told to use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AneEngine {
    /// Its name in `lighter devices`, the journal and the log: `cpu`, `openvino-npu`.
    pub name: String,
    /// What it is, for a person.
    pub description: String,
    /// On what it computes.
    pub class: Class,
    /// Its provider.
    pub provider: Provider,
    /// The provider's options.
    pub options: BTreeMap<String, String>,
    /// The library that has the provider.
    pub library: Library,
    /// Version of the library.
    pub version: String,
}

/// The child: reads the question from standard input, loads the library, writes the answer to standard output.
///
/// # Errors
/// When there is no question, or nobody to answer to. That the library cannot be loaded is an answer.
pub fn answer() -> Result<(), AnswerError> {
    crate::ask::answer(|question: Question| match enumerate::devices(&question.library) {
        Ok((version, devices)) => Answer::Devices { version, devices },
        Err(reason) => Answer::Failed { reason },
    })
}

/// Looks for ONNX Runtime and asks children for its engines.
#[must_use]
pub fn probe(program: &Path, config: &AneConfig) -> Probe {
    as_probe(&engines(program, config), &config.units)
}

/// The engines that may be used, best first, the processor among them and last; or what is missing.
///
/// # Errors
/// When there is no library or none that works.
pub fn engines(program: &Path, config: &AneConfig) -> Result<Vec<AneEngine>, Missing> {
    let libraries = locate(config, Path::new("/"))?;
    let mut answers = Vec::new();
    let mut reasons = Vec::new();
    for library in libraries {
        match ask(program, config, &library) {
            Ok(Answer::Devices { version, devices }) => answers.push((library, version, devices)),
            Ok(Answer::Failed { reason }) | Err(reason) => {
                reasons.push(format!("{} cannot be used: {reason}", library.path.display()));
            }
        }
    }
    let engines = rank::engines(answers);
    if engines.iter().any(|engine| engine.provider == Provider::Cpu) {
        for reason in reasons {
            tracing::warn!(reason, "a library of ONNX Runtime is left out");
        }
        return Ok(engines);
    }
    Err(Missing {
        reason: reasons.into_iter().next().unwrap_or_else(|| "no library has the CPU provider".to_owned()),
        remedy: "check that the library fits this host, or run `lighter setup ane` again".to_owned(),
    })
}

/// What is missing.
pub type Missing = super::locate::Missing;

/// The engines as the rest of lighter sees them.
#[must_use]
pub fn as_probe(engines: &Result<Vec<AneEngine>, Missing>, units: &Units) -> Probe {
    match engines {
        Ok(engines) => rank::offered(engines, units),
        Err(missing) => Probe::Missing { reason: missing.reason.clone(), remedy: missing.remedy.clone() },
    }
}

fn ask(program: &Path, config: &AneConfig, library: &Library) -> Result<Answer, String> {
    let mut command = command_for(program, config);
    command.args(["probe", "ane"]);
    crate::ask::ask(command, &Question { library: library.path.clone() }, LIMIT)
}

/// The command that starts `program` as a process with a library, in a clean environment.
#[must_use]
pub fn command_for(program: &Path, config: &AneConfig) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(&config.environment);
    command
}
