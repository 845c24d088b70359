// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane device's settings: the `[ane]` table of the configuration.
//!
//! Parsed once, strictly: an unknown key or a value out of range is an error that names the key. The service
//! process gets the same struct as JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::settings::{self, Objection};

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("ane.{key} = {value}: {reason}")]
pub struct AneConfigError {
    /// The key in the `[ane]` table.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong and what is allowed.
    pub reason: &'static str,
}

/// Settings of the ane device. Every field has a default, so an empty table is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AneConfig {
    /// ONNX Runtime's library by path, instead of all other places; `None` searches.
    pub library: Option<PathBuf>,
    /// Folder with the libraries that `lighter setup ane` fetches.
    pub engine_root: PathBuf,
    /// What may compute: `auto`, `cpu`, `gpu`, `npu`, or an engine by its name in `lighter devices`.
    pub units: Units,
    /// Environment variables for ONNX Runtime and the drivers behind it (`CUDA_VISIBLE_DEVICES`).
    pub environment: BTreeMap<String, String>,
    /// Threads of the processor's engine in one worker; `None` is one for each processor, at most 16.
    pub threads: Option<u16>,
    /// Most bytes of memory of one worker; `None` is half of the host's.
    pub max_bytes_per_worker: Option<u64>,
    /// Most bytes of models that one container may have loaded; `None` is half of the host's memory.
    pub max_model_bytes_per_container: Option<u64>,
    /// Most models that one container may have loaded.
    pub max_models_per_container: u32,
    /// Most connections of one container at a time.
    pub max_streams_per_container: u32,
    /// How long a container may take between two steps of setting a stream up, in milliseconds.
    pub setup_limit_ms: u64,
    /// How long a worker may take to load its library, in milliseconds.
    pub start_limit_ms: u64,
    /// How long an engine that is being tried may take to compile a model, in milliseconds.
    pub compile_limit_ms: u64,
    /// How long an engine may take for one run before it is taken for hanging, in milliseconds.
    pub run_limit_ms: u64,
    /// How often an engine that failed on a model is tried with it in all.
    pub attempts: u32,
    /// A worker without a stream ends after this many seconds and gives its memory back.
    pub idle_s: u64,
    /// A container whose workers crashed this often within `crash_window_s` is refused for `crash_pause_s`.
    pub crash_limit: u32,
    /// Seconds over which crashes are counted.
    pub crash_window_s: u64,
    /// Seconds for which a container is refused after too many crashes.
    pub crash_pause_s: u64,
    /// Folder of the journal of attempts.
    pub state_dir: PathBuf,
    /// Folder of compiled models.
    pub cache_dir: PathBuf,
    /// Most bytes of compiled models on disk; 0 is no such cache.
    pub cache_max_bytes: u64,
    /// Restrict workers (own user, no new sockets, files of the engine only). Off only to find out whether the
    /// restrictions are what a driver cannot bear.
    pub sandbox: bool,
}

impl Default for AneConfig {
    fn default() -> Self {
        Self {
            library: None,
            engine_root: PathBuf::from("/var/lib/lighter/engines/ane"),
            units: Units::Auto,
            environment: BTreeMap::new(),
            threads: None,
            max_bytes_per_worker: None,
            max_model_bytes_per_container: None,
            max_models_per_container: 256,
            max_streams_per_container: 512,
            setup_limit_ms: 10_000,
            start_limit_ms: 60_000,
            compile_limit_ms: 180_000,
            run_limit_ms: 60_000,
            attempts: 2,
            idle_s: 300,
            crash_limit: 3,
            crash_window_s: 60,
            crash_pause_s: 30,
            state_dir: PathBuf::from("/var/lib/lighter/ane"),
            cache_dir: PathBuf::from("/var/cache/lighter/ane"),
            cache_max_bytes: 4 << 30,
            sandbox: true,
        }
    }
}

/// What may compute a model: the value of `ane.units`, and of `LIGHTER_ANE_UNITS` in a container.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Units {
    /// Whatever is right and fastest.
    Auto,
    /// Engines of one class, wherever they answer rightly; the processor elsewhere.
    Only(Class),
    /// One engine by its name, wherever it answers rightly; the processor elsewhere.
    Engine(String),
}

/// What an engine computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// A neural processor.
    Npu,
    /// A graphics processor.
    Gpu,
    /// The processor.
    Cpu,
}

impl Class {
    /// `npu`, `gpu` or `cpu`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Npu => "npu",
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
        }
    }
}

/// A word that names no units.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no units: write auto, cpu, gpu, npu, or an engine as `lighter devices` lists it")]
pub struct UnknownUnits(pub String);

impl FromStr for Units {
    type Err = UnknownUnits;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Only(Class::Cpu)),
            "gpu" => Ok(Self::Only(Class::Gpu)),
            "npu" => Ok(Self::Only(Class::Npu)),
            name if !name.is_empty() && name.len() <= 64 && name.chars().all(is_name) => {
                Ok(Self::Engine(name.to_owned()))
            }
            _ => Err(UnknownUnits(text.chars().take(80).collect())),
        }
    }
}

impl TryFrom<String> for Units {
    type Error = UnknownUnits;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Only(class) => class.as_str(),
            Self::Engine(name) => name,
        })
    }
}

impl From<Units> for String {
    fn from(units: Units) -> Self {
        units.to_string()
    }
}

impl AneConfig {
    /// How long a worker may take until it is ready.
    #[must_use]
    pub fn start_limit(&self) -> Duration {
        Duration::from_millis(self.start_limit_ms)
    }

    /// How long a container may take between two steps of setting a stream up.
    #[must_use]
    pub fn setup_limit(&self) -> Duration {
        Duration::from_millis(self.setup_limit_ms)
    }

    /// How long a worker is kept without a stream.
    #[must_use]
    pub fn idle(&self) -> Duration {
        Duration::from_secs(self.idle_s)
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn validate(&self) -> Result<(), AneConfigError> {
        let bad = |key, value: String, reason| Err(AneConfigError { key, value, reason });
        for (key, value) in [
            ("max_models_per_container", u64::from(self.max_models_per_container)),
            ("max_streams_per_container", u64::from(self.max_streams_per_container)),
            ("setup_limit_ms", self.setup_limit_ms),
            ("start_limit_ms", self.start_limit_ms),
            ("compile_limit_ms", self.compile_limit_ms),
            ("run_limit_ms", self.run_limit_ms),
            ("attempts", u64::from(self.attempts)),
            ("crash_limit", u64::from(self.crash_limit)),
        ] {
            if value == 0 {
                return bad(key, "0".to_owned(), "at least 1 is needed");
            }
        }
        if self.threads == Some(0) {
            let reason = "at least one thread is needed; leave it out for one a processor, at most 16";
            return bad("threads", "0".to_owned(), reason);
        }
        let object = |key, objection: Result<(), Objection>| {
            objection.map_err(|(value, reason)| AneConfigError { key, value, reason })
        };
        object("engine_root", settings::absolute(&self.engine_root))?;
        object("state_dir", settings::absolute(&self.state_dir))?;
        object("cache_dir", settings::absolute(&self.cache_dir))?;
        if let Some(library) = &self.library {
            object("library", settings::absolute(library))?;
        }
        object("environment", settings::variables(self.environment.keys()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str) -> Result<AneConfig, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn an_empty_table_is_the_default_and_valid() {
        let config = parse("{}").unwrap();
        assert_eq!(config, AneConfig::default());
        config.validate().unwrap();
    }

    #[test]
    fn an_unknown_key_is_named() {
        assert!(parse(r#"{"unit": "cpu"}"#).unwrap_err().to_string().contains("`unit`"));
    }

    #[test]
    fn units_are_words() {
        for (text, units) in [
            ("auto", Units::Auto),
            ("cpu", Units::Only(Class::Cpu)),
            ("npu", Units::Only(Class::Npu)),
            ("openvino-gpu.1", Units::Engine("openvino-gpu.1".to_owned())),
        ] {
            assert_eq!(text.parse::<Units>().unwrap(), units);
            assert_eq!(units.to_string(), text);
        }
        assert_eq!("NPU".parse::<Units>().unwrap(), Units::Only(Class::Npu));
        for bad in ["", "a b", "../x", "é", &"x".repeat(65)] {
            assert!(bad.parse::<Units>().is_err(), "{bad:?}");
        }
        assert!(parse(r#"{"units": "a/b"}"#).unwrap_err().to_string().contains("\"a/b\" names no units"));
    }

    #[test]
    fn each_bad_value_is_refused_by_its_key() {
        for (json, key) in [
            (r#"{"threads": 0}"#, "threads"),
            (r#"{"attempts": 0}"#, "attempts"),
            (r#"{"max_models_per_container": 0}"#, "max_models_per_container"),
            (r#"{"max_streams_per_container": 0}"#, "max_streams_per_container"),
            (r#"{"setup_limit_ms": 0}"#, "setup_limit_ms"),
            (r#"{"start_limit_ms": 0}"#, "start_limit_ms"),
            (r#"{"compile_limit_ms": 0}"#, "compile_limit_ms"),
            (r#"{"run_limit_ms": 0}"#, "run_limit_ms"),
            (r#"{"crash_limit": 0}"#, "crash_limit"),
            (r#"{"library": "libonnxruntime.so"}"#, "library"),
            (r#"{"engine_root": "x"}"#, "engine_root"),
            (r#"{"state_dir": "x"}"#, "state_dir"),
            (r#"{"cache_dir": "x"}"#, "cache_dir"),
            (r#"{"environment": {"A=B": "1"}}"#, "environment"),
            (r#"{"environment": {"LD_PRELOAD": "/x"}}"#, "environment"),
        ] {
            let error = parse(json).unwrap().validate().unwrap_err();
            assert_eq!(error.key, key, "{json}");
            assert!(error.to_string().starts_with(&format!("ane.{key} = ")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_service_gets_what_the_daemon_has(
            units in "[a-z0-9]{1,12}", threads in proptest::option::of(1u16..),
            bytes in proptest::option::of(0u64..), sandbox: bool,
        ) {
            let units = units.parse().unwrap();
            let config = AneConfig {
                units, threads, max_bytes_per_worker: bytes, sandbox, ..AneConfig::default()
            };
            config.validate().unwrap();
            prop_assert_eq!(parse(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        }
    }
}
