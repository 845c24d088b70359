// SPDX-License-Identifier: MIT OR Apache-2.0
//! What devices need to know of the host, and what a probe found on it.
//!
//! Plain data: who looks at the host is the device's probe, who decides is its edits.

use std::path::PathBuf;

use lighter_wire::EngineState;
use serde::{Deserialize, Serialize};

/// Places of this installation that end up in CDI specs or start child processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The `lighter` program, for children with a hidden subcommand.
    pub program: PathBuf,
    /// The hook program that container runtimes start; absolute.
    pub hook: PathBuf,
    /// Where the hook reaches the agent.
    pub hook_socket: PathBuf,
    /// The folder that is laid out by [`crate::client::lay_out`] and mounted into containers.
    pub client_dir: PathBuf,
    /// Folder below which devices' unix endpoints are, a directory each; such a directory is mounted into containers.
    pub socket_dir: PathBuf,
    /// The folder with lighter's own libraries for containers; they may be missing.
    pub plugin_dir: PathBuf,
}

/// What a device's probe found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// Engines that can serve the device, best first; never empty.
    Found(Vec<Engine>),
    /// None, and what to do about it.
    Missing {
        /// Why.
        reason: String,
        /// What the user can do.
        remedy: String,
    },
}

/// What a device needs is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Why.
    pub reason: String,
    /// What the user can do.
    pub remedy: String,
}

impl From<Missing> for Probe {
    fn from(missing: Missing) -> Self {
        Self::Missing { reason: missing.reason, remedy: missing.remedy }
    }
}

/// One engine of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// What its library calls it: `CPU`, `Vulkan0`.
    pub name: String,
    /// What it is, for a person.
    pub description: String,
    /// Version of the library that drives it.
    pub version: String,
    /// Its memory; `None` where the library does not say.
    pub memory_bytes: Option<u64>,
    /// Name of its CDI device: the same after every reboot.
    pub stable_name: String,
    /// Other names of its CDI device that depend on the order of discovery.
    pub aliases: Vec<String>,
}

impl Engine {
    /// Name and description, once where they are the same.
    #[must_use]
    pub fn label(&self) -> String {
        if self.description.is_empty() || self.description == self.name {
            self.name.clone()
        } else {
            format!("{} ({})", self.name, self.description)
        }
    }

    /// Whether a CDI device name means this engine.
    #[must_use]
    pub fn is_called(&self, device: &str) -> bool {
        self.stable_name == device || self.aliases.iter().any(|alias| alias == device)
    }
}

impl Probe {
    /// The engine that serves the CDI device `all`.
    #[must_use]
    pub fn best(&self) -> Option<&Engine> {
        match self {
            Self::Found(engines) => engines.first(),
            Self::Missing { .. } => None,
        }
    }

    /// The engine that a CDI device name stands for.
    #[must_use]
    pub fn named(&self, device: &str) -> Option<&Engine> {
        match self {
            Self::Found(engines) if device == crate::ALL => engines.first(),
            Self::Found(engines) => engines.iter().find(|engine| engine.is_called(device)),
            Self::Missing { .. } => None,
        }
    }

    /// The same as a service says it.
    #[must_use]
    pub fn state(&self) -> EngineState {
        match self {
            Self::Found(engines) => match engines.first() {
                Some(engine) => {
                    EngineState::Available { name: engine.label(), version: engine.version.clone() }
                }
                None => EngineState::Missing {
                    reason: "no engine was found".to_owned(),
                    remedy: "see `lighter doctor`".to_owned(),
                },
            },
            Self::Missing { reason, remedy } => {
                EngineState::Missing { reason: reason.clone(), remedy: remedy.clone() }
            }
        }
    }
}
