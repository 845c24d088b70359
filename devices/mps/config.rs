// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mps device's settings: the `[mps]` table of the configuration.
//!
//! Parsed once, strictly: an unknown key or a value out of range is an error that names the key. The service
//! process gets the same struct as JSON.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::settings::{self, Objection};

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mps.{key} = {value}: {reason}")]
pub struct MpsConfigError {
    /// The key in the `[mps]` table.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong and what is allowed.
    pub reason: &'static str,
}

/// Settings of the mps device. Every field has a default, so an empty table is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MpsConfig {
    /// The Python whose torch computes, used alone; `None` searches for one.
    pub torch_python: Option<PathBuf>,
    /// Folders in which that Python looks for torch before its own.
    pub torch_path: Vec<PathBuf>,
    /// Folder of the Python that `lighter setup mps` makes.
    pub engine_root: PathBuf,
    /// lighter's package for that Python; `None` is the one beside lighter's libraries for containers.
    pub host_package: Option<PathBuf>,
    /// What computes: `auto` (the best that torch has), or torch's name of a device (`cpu`, `cuda:0`).
    pub engine: String,
    /// Environment variables for torch and the drivers behind it (`CUDA_VISIBLE_DEVICES`).
    pub environment: BTreeMap<String, String>,
    /// Threads of torch in one worker; `None` is one for each processor.
    pub threads: Option<u16>,
    /// Most bytes of tensors that one stream may hold; `None` is half of the host's memory on the processor, and what
    /// the device has elsewhere.
    pub max_bytes_per_stream: Option<u64>,
    /// Most storages that one stream may hold.
    pub max_storages_per_stream: u32,
    /// Most different calls that one stream may define.
    pub max_signatures_per_stream: u32,
    /// Most streams of one container at a time; each is a process here.
    pub max_streams_per_container: u32,
    /// How long one Python may take to say what it has, in milliseconds.
    pub probe_limit_ms: u64,
    /// How long a worker may take to load torch and its device, in milliseconds.
    pub start_limit_ms: u64,
    /// Keep one worker ready for the next stream, from the first stream on.
    pub spare: bool,
    /// That worker ends when no stream has come for this many seconds.
    pub spare_idle_s: u64,
    /// Set `PIP_FIND_LINKS` in containers, so that pip finds the package without a network.
    pub pip_find_links: bool,
    /// A container whose workers crashed this often within `crash_window_s` is refused for `crash_pause_s`.
    pub crash_limit: u32,
    /// Seconds over which crashes are counted.
    pub crash_window_s: u64,
    /// Seconds for which a container is refused after too many crashes.
    pub crash_pause_s: u64,
    /// Folder in which is remembered what Pythons said.
    pub state_dir: PathBuf,
    /// Restrict workers (own user, no new sockets, files of the engine only). Off only to find out whether the
    /// restrictions are what a driver cannot bear.
    pub sandbox: bool,
}

impl Default for MpsConfig {
    fn default() -> Self {
        Self {
            torch_python: None,
            torch_path: Vec::new(),
            engine_root: PathBuf::from("/var/lib/lighter/engines/mps"),
            host_package: None,
            engine: AUTO.to_owned(),
            environment: BTreeMap::new(),
            threads: None,
            max_bytes_per_stream: None,
            max_storages_per_stream: 1 << 20,
            max_signatures_per_stream: 1 << 16,
            max_streams_per_container: 16,
            probe_limit_ms: 45_000,
            start_limit_ms: 60_000,
            spare: true,
            spare_idle_s: 300,
            pip_find_links: true,
            crash_limit: 3,
            crash_window_s: 60,
            crash_pause_s: 30,
            state_dir: PathBuf::from("/var/lib/lighter/mps"),
            sandbox: true,
        }
    }
}

/// The value of `engine` that leaves the choice to lighter.
const AUTO: &str = "auto";

impl MpsConfig {
    /// The engine that the user named; `None` leaves the choice to lighter.
    #[must_use]
    pub fn engine_name(&self) -> Option<&str> {
        (self.engine != AUTO).then_some(self.engine.as_str())
    }

    /// How long one Python may take to say what it has.
    #[must_use]
    pub fn probe_limit(&self) -> Duration {
        Duration::from_millis(self.probe_limit_ms)
    }

    /// How long a worker may take until it is ready.
    #[must_use]
    pub fn start_limit(&self) -> Duration {
        Duration::from_millis(self.start_limit_ms)
    }

    /// How long the spare worker waits for a stream.
    #[must_use]
    pub fn spare_idle(&self) -> Duration {
        Duration::from_secs(self.spare_idle_s)
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn validate(&self) -> Result<(), MpsConfigError> {
        let bad = |key, value: String, reason| Err(MpsConfigError { key, value, reason });
        for (key, value) in [
            ("max_storages_per_stream", u64::from(self.max_storages_per_stream)),
            ("max_signatures_per_stream", u64::from(self.max_signatures_per_stream)),
            ("max_streams_per_container", u64::from(self.max_streams_per_container)),
            ("probe_limit_ms", self.probe_limit_ms),
            ("start_limit_ms", self.start_limit_ms),
            ("crash_limit", u64::from(self.crash_limit)),
        ] {
            if value == 0 {
                return bad(key, "0".to_owned(), "at least 1 is needed");
            }
        }
        if self.engine.trim().is_empty() {
            let reason = "name an engine as torch does (cpu, cuda:0, mps), or \"auto\"";
            return bad("engine", format!("{:?}", self.engine), reason);
        }
        if self.threads == Some(0) {
            let reason = "at least one thread is needed; leave it out for one a processor";
            return bad("threads", "0".to_owned(), reason);
        }
        let object = |key, objection: Result<(), Objection>| {
            objection.map_err(|(value, reason)| MpsConfigError { key, value, reason })
        };
        for (key, path) in [("engine_root", &self.engine_root), ("state_dir", &self.state_dir)] {
            object(key, settings::absolute(path))?;
        }
        for (key, path) in [("torch_python", &self.torch_python), ("host_package", &self.host_package)] {
            object(key, path.as_deref().map_or(Ok(()), settings::absolute))?;
        }
        for folder in &self.torch_path {
            object("torch_path", settings::absolute(folder))?;
        }
        object("environment", settings::variables(self.environment.keys()))?;
        // What Python itself reads is lighter's: `torch_path` is the way to more folders.
        if let Some(name) = self.environment.keys().find(|name| name.starts_with("PYTHON")) {
            return bad("environment", format!("{name:?}"), "Python's variables cannot be set here");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str) -> Result<MpsConfig, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn an_empty_table_is_the_default_and_valid() {
        let config = parse("{}").unwrap();
        assert_eq!(config, MpsConfig::default());
        config.validate().unwrap();
        assert_eq!(config.engine_name(), None);
    }

    #[test]
    fn an_unknown_key_is_named() {
        assert!(parse(r#"{"python": "/x"}"#).unwrap_err().to_string().contains("`python`"));
    }

    #[test]
    fn each_bad_value_is_refused_by_its_key() {
        for (json, key) in [
            (r#"{"threads": 0}"#, "threads"),
            (r#"{"engine": " "}"#, "engine"),
            (r#"{"max_storages_per_stream": 0}"#, "max_storages_per_stream"),
            (r#"{"max_signatures_per_stream": 0}"#, "max_signatures_per_stream"),
            (r#"{"max_streams_per_container": 0}"#, "max_streams_per_container"),
            (r#"{"probe_limit_ms": 0}"#, "probe_limit_ms"),
            (r#"{"start_limit_ms": 0}"#, "start_limit_ms"),
            (r#"{"crash_limit": 0}"#, "crash_limit"),
            (r#"{"torch_python": "python3"}"#, "torch_python"),
            (r#"{"torch_path": ["/x", "y"]}"#, "torch_path"),
            (r#"{"host_package": "x.pyz"}"#, "host_package"),
            (r#"{"engine_root": "x"}"#, "engine_root"),
            (r#"{"state_dir": "x"}"#, "state_dir"),
            (r#"{"environment": {"A=B": "1"}}"#, "environment"),
            (r#"{"environment": {"LD_PRELOAD": "/x"}}"#, "environment"),
            (r#"{"environment": {"PYTHONSTARTUP": "/x"}}"#, "environment"),
        ] {
            let error = parse(json).unwrap().validate().unwrap_err();
            assert_eq!(error.key, key, "{json}");
            assert!(error.to_string().starts_with(&format!("mps.{key} = ")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_service_gets_what_the_daemon_has(
            engine in "[a-z0-9]{1,12}", threads in proptest::option::of(1u16..),
            bytes in proptest::option::of(0u64..), spare: bool, sandbox: bool,
        ) {
            let config = MpsConfig {
                engine, threads, max_bytes_per_stream: bytes, spare, sandbox, ..MpsConfig::default()
            };
            config.validate().unwrap();
            prop_assert_eq!(parse(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        }
    }
}
