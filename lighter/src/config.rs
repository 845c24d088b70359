// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration file: what it may hold, where it stands, and its defaults.
//!
//! The system's daemon reads `/etc/lighter/config.toml`, a user's own daemon the XDG file, and `--config` names
//! any other. A file that is not there means the defaults; a key that nobody knows is an error.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lighter_devices::ane::AneConfig;
use lighter_devices::gpu::GpuConfig;
use lighter_devices::metal::MetalConfig;
use lighter_devices::mps::MpsConfig;
use lighter_wire::Kind;
use serde::{Deserialize, Serialize};

use crate::places::Places;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file is there and cannot be read.
    #[error("configuration {path} cannot be read", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is no valid configuration.
    #[error("configuration {path} is not valid: {reason}", path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        reason: String,
    },
}

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Which devices are offered at all.
    pub(crate) devices: Switches,
    /// Where the daemon keeps and publishes things.
    pub(crate) daemon: DaemonConfig,
    /// The container engines whose records are asked.
    pub(crate) engines: EnginesConfig,
    /// The gpu device.
    pub(crate) gpu: GpuConfig,
    /// The metal device.
    pub(crate) metal: MetalConfig,
    /// The ane device.
    pub(crate) ane: AneConfig,
    /// The mps device.
    pub(crate) mps: MpsConfig,
}

/// On or off, a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Switches {
    /// Vulkan.
    pub(crate) gpu: bool,
    /// ggml.
    pub(crate) metal: bool,
    /// ONNX.
    pub(crate) ane: bool,
    /// PyTorch.
    pub(crate) mps: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Self { gpu: true, metal: true, ane: true, mps: true }
    }
}

impl Switches {
    /// Whether the device is switched on.
    pub(crate) fn is_on(&self, kind: Kind) -> bool {
        match kind {
            Kind::Gpu => self.gpu,
            Kind::Metal => self.metal,
            Kind::Ane => self.ane,
            Kind::Mps => self.mps,
        }
    }
}

/// Folders and programs of the daemon. The defaults follow [`Places`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DaemonConfig {
    /// Sockets, grants and the lock.
    pub(crate) state_dir: PathBuf,
    /// Where CDI specs are published.
    pub(crate) spec_dir: PathBuf,
    /// Mounted into containers, read-only.
    pub(crate) client_dir: PathBuf,
    /// The hook program that container runtimes start; by default the one beside `lighter`.
    pub(crate) hook: Option<PathBuf>,
    /// Folder with lighter's libraries for containers (`libggml-lighter.so`); by default the one of `lighter`.
    pub(crate) plugin_dir: Option<PathBuf>,
    /// Log file of a detached daemon.
    pub(crate) log_file: PathBuf,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        let places = Places::of_this_user();
        Self {
            state_dir: places.state_dir,
            spec_dir: places.spec_dir,
            client_dir: places.client_dir,
            hook: None,
            plugin_dir: None,
            log_file: places.log_file,
        }
    }
}

impl DaemonConfig {
    /// Where the hook reaches the agent.
    pub(crate) fn hook_socket(&self) -> PathBuf {
        self.state_dir.join("hook.sock")
    }

    /// Folder below which devices' unix endpoints are, a directory each; such a directory is mounted into containers.
    pub(crate) fn socket_dir(&self) -> PathBuf {
        self.state_dir.clone()
    }

    /// Where `lighter` reaches its daemon.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.state_dir.join("control.sock")
    }
}

/// Container engines on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EnginesConfig {
    /// Docker's API sockets, asked in this order.
    pub(crate) docker: Vec<PathBuf>,
    /// How long the engine has to answer, in milliseconds.
    pub(crate) answer_ms: u64,
    /// Users whose processes are let in on a grant without an engine's record, for runtimes that keep none.
    pub(crate) trusted_uids: Vec<u32>,
    /// Control groups, as `/my.slice`, below which no engine's record is asked for.
    pub(crate) trusted_cgroups: Vec<String>,
    /// Users besides root whose hooks may ask for grants, for containers in user namespaces of their own.
    pub(crate) hook_uids: Vec<u32>,
}

impl Default for EnginesConfig {
    fn default() -> Self {
        Self {
            docker: vec![PathBuf::from("/run/docker.sock")],
            answer_ms: 3000,
            trusted_uids: Vec::new(),
            trusted_cgroups: Vec::new(),
            hook_uids: Vec::new(),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        let places = Places::of_this_user();
        Self {
            devices: Switches::default(),
            daemon: DaemonConfig::default(),
            engines: EnginesConfig::default(),
            gpu: GpuConfig { renderer_root: places.engines_dir.join("gpu"), ..GpuConfig::default() },
            metal: MetalConfig {
                engine_root: places.engines_dir.join("metal"),
                cache_dir: places.cache_dir.join("ggml"),
                ..MetalConfig::default()
            },
            ane: AneConfig {
                engine_root: places.engines_dir.join("ane"),
                state_dir: places.data_dir.join("ane"),
                cache_dir: places.cache_dir.join("ane"),
                ..AneConfig::default()
            },
            mps: MpsConfig {
                engine_root: places.engines_dir.join("mps"),
                state_dir: places.data_dir.join("mps"),
                ..MpsConfig::default()
            },
        }
    }
}

impl Config {
    /// Reads `path`; a file that does not exist is an empty one.
    ///
    /// # Errors
    /// When the file cannot be read, is no TOML, or holds a key or value that is not allowed.
    pub(crate) fn load(path: &Path) -> Result<Self, ConfigError> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(ConfigError::Read { path: path.to_owned(), source }),
        }
    }

    /// Parses the text of the file at `path`, which is only named in errors.
    ///
    /// # Errors
    /// When the text is no TOML, or holds a key or value that is not allowed.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let invalid = |reason: String| ConfigError::Invalid { path: path.to_owned(), reason };
        let config: Self =
            toml::from_str(text).map_err(|error| invalid(error.to_string().trim().to_owned()))?;
        config.gpu.validate().map_err(|error| invalid(error.to_string()))?;
        config.metal.validate().map_err(|error| invalid(error.to_string()))?;
        config.ane.validate().map_err(|error| invalid(error.to_string()))?;
        config.mps.validate().map_err(|error| invalid(error.to_string()))?;
        for dir in [&config.daemon.state_dir, &config.daemon.spec_dir, &config.daemon.client_dir] {
            if !dir.is_absolute() {
                return Err(invalid(format!("daemon directory {} must be absolute", dir.display())));
            }
        }
        Ok(config)
    }

    /// Every key with its effective value, dotted, in the file's own notation.
    pub(crate) fn flatten(&self) -> BTreeMap<String, String> {
        let mut flat = BTreeMap::new();
        if let Ok(toml::Value::Table(table)) = toml::Value::try_from(self) {
            flatten_into("", &table, &mut flat);
        }
        flat
    }
}

fn flatten_into(prefix: &str, table: &toml::Table, flat: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(inner) => flatten_into(&name, inner, flat),
            other => {
                flat.insert(name, other.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_survive_a_round_trip() {
        let config = Config::default();
        let text = toml::to_string(&config).unwrap();
        assert_eq!(Config::parse(&text, Path::new("x")).unwrap(), config);
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        let error =
            Config::parse("[devices]\ngpuu = true\n", Path::new("/etc/x.toml")).unwrap_err().to_string();
        assert!(error.contains("gpuu") && error.contains("/etc/x.toml"), "{error}");
    }

    #[test]
    fn flat_keys_have_dots() {
        let flat = Config::default().flatten();
        assert_eq!(flat.get("devices.metal").map(String::as_str), Some("true"));
    }
}
