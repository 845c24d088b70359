// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metal device's settings: the `[metal]` table of the configuration.
//!
//! Parsed once, strictly: an unknown key or a value out of range is an error that names the key. The service
//! process gets the same struct as JSON.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::settings::{self, Objection};

/// Protocol majors of ggml's RPC that the worker speaks.
pub const PROTOCOL_MAJORS: std::ops::RangeInclusive<u8> = 2..=8;

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("metal.{key} = {value}: {reason}")]
pub struct MetalConfigError {
    /// The key in the `[metal]` table.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong and what is allowed.
    pub reason: &'static str,
}

/// Settings of the metal device. Every field has a default, so an empty table is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetalConfig {
    /// TCP port at 127.0.0.1 in the container.
    pub port: u16,
    /// What computes: `auto` (the best that the host has), or ggml's name of a device (`CPU`, `CUDA0`, `Vulkan0`).
    pub engine: String,
    /// Folder with ggml and what it needs, as `lighter setup metal` makes it.
    pub engine_root: PathBuf,
    /// ggml's libraries by path, before all other places; `None` searches.
    pub libraries: Option<Libraries>,
    /// Environment variables for ggml and its drivers (`GGML_VK_VISIBLE_DEVICES`, `CUDA_VISIBLE_DEVICES`).
    pub environment: BTreeMap<String, String>,
    /// Threads of the CPU backend in one container's worker; `None` is one for each processor.
    pub threads: Option<u16>,
    /// Major of ggml's RPC protocol for every client, instead of looking at the client's own ggml.
    pub protocol: Option<u8>,
    /// Most bytes of engine memory that one container may hold; `None` is the memory of the engine.
    pub max_bytes_per_container: Option<u64>,
    /// Most connections of one container at a time.
    pub max_streams_per_container: u32,
    /// How long a worker may take to load the engine, in milliseconds.
    pub start_limit_ms: u64,
    /// A worker without a stream ends after this many seconds and gives its memory back.
    pub idle_s: u64,
    /// A container whose worker crashed this often within `crash_window_s` is refused for `crash_pause_s`.
    pub crash_limit: u32,
    /// Seconds over which crashes are counted.
    pub crash_window_s: u64,
    /// Seconds for which a container is refused after too many crashes.
    pub crash_pause_s: u64,
    /// Back big buffers with huge pages.
    pub huge_pages: bool,
    /// Hold identical weights of several containers once.
    pub share_weights: bool,
    /// Most bytes of shared weights at one time; more are held by each container for itself. `None` is three
    /// quarters of the host's memory.
    pub max_shared_bytes: Option<u64>,
    /// Folder of the disk cache of weights.
    pub cache_dir: PathBuf,
    /// Most bytes of the disk cache; 0 is no disk cache.
    pub cache_max_bytes: u64,
    /// Restrict workers (own user, no new sockets, files of the engine only). Off only to find out whether the
    /// restrictions are what a driver cannot bear.
    pub sandbox: bool,
}

/// Where ggml's libraries are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Libraries {
    /// `libggml-base.so.0`.
    pub base: PathBuf,
    /// `libggml.so.0`.
    pub registry: PathBuf,
    /// Folder of ggml's backend plug-ins; `None` leaves the search to ggml.
    pub backends_dir: Option<PathBuf>,
}

impl Default for MetalConfig {
    fn default() -> Self {
        Self {
            port: 50052,
            engine: AUTO.to_owned(),
            engine_root: PathBuf::from("/var/lib/lighter/engines/metal"),
            libraries: None,
            environment: BTreeMap::new(),
            threads: None,
            protocol: None,
            max_bytes_per_container: None,
            max_streams_per_container: 64,
            start_limit_ms: 60_000,
            idle_s: 300,
            crash_limit: 3,
            crash_window_s: 60,
            crash_pause_s: 30,
            huge_pages: true,
            share_weights: true,
            max_shared_bytes: None,
            cache_dir: PathBuf::from("/var/cache/lighter/ggml"),
            cache_max_bytes: 0,
            sandbox: true,
        }
    }
}

/// The value of `engine` that leaves the choice to lighter.
const AUTO: &str = "auto";

impl MetalConfig {
    /// The engine that the user named; `None` leaves the choice to lighter.
    #[must_use]
    pub fn engine_name(&self) -> Option<&str> {
        (self.engine != AUTO).then_some(self.engine.as_str())
    }

    /// How long a worker may take until it is ready.
    #[must_use]
    pub fn start_limit(&self) -> Duration {
        Duration::from_millis(self.start_limit_ms)
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
    pub fn validate(&self) -> Result<(), MetalConfigError> {
        let bad = |key, value: String, reason| Err(MetalConfigError { key, value, reason });
        if self.port == 0 {
            return bad("port", "0".to_owned(), "a port between 1 and 65535 is needed");
        }
        if self.engine.trim().is_empty() {
            let reason = "name an engine as `lighter devices` lists it, or \"auto\"";
            return bad("engine", format!("{:?}", self.engine), reason);
        }
        if let Some(major) = self.protocol
            && !PROTOCOL_MAJORS.contains(&major)
        {
            return bad("protocol", major.to_string(), "the majors 2 to 8 of ggml's RPC are known");
        }
        if self.threads == Some(0) {
            return bad(
                "threads",
                "0".to_owned(),
                "at least one thread is needed; leave it out for one a processor",
            );
        }
        if self.max_streams_per_container == 0 {
            return bad("max_streams_per_container", "0".to_owned(), "at least one stream is needed");
        }
        if self.start_limit_ms == 0 {
            return bad("start_limit_ms", "0".to_owned(), "loading an engine takes time: give milliseconds");
        }
        if self.crash_limit == 0 {
            return bad("crash_limit", "0".to_owned(), "at least one crash must be allowed");
        }
        let object = |key, objection: Result<(), Objection>| {
            objection.map_err(|(value, reason)| MetalConfigError { key, value, reason })
        };
        object("engine_root", settings::absolute(&self.engine_root))?;
        object("cache_dir", settings::absolute(&self.cache_dir))?;
        if let Some(libraries) = &self.libraries {
            for path in [&libraries.base, &libraries.registry].into_iter().chain(&libraries.backends_dir) {
                object("libraries", settings::absolute(path))?;
            }
        }
        object("environment", settings::variables(self.environment.keys()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str) -> Result<MetalConfig, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn an_empty_table_is_the_default_and_valid() {
        let config = parse("{}").unwrap();
        assert_eq!(config, MetalConfig::default());
        config.validate().unwrap();
        assert_eq!(config.engine_name(), None);
    }

    #[test]
    fn an_unknown_key_is_named() {
        assert!(parse(r#"{"prot": 8}"#).unwrap_err().to_string().contains("`prot`"));
        assert!(parse(r#"{"libraries": {"base": "/a", "registry": "/b", "x": 1}}"#).is_err());
    }

    #[test]
    fn each_bad_value_is_refused_by_its_key() {
        for (json, key) in [
            (r#"{"port": 0}"#, "port"),
            (r#"{"engine": " "}"#, "engine"),
            (r#"{"protocol": 9}"#, "protocol"),
            (r#"{"protocol": 1}"#, "protocol"),
            (r#"{"threads": 0}"#, "threads"),
            (r#"{"max_streams_per_container": 0}"#, "max_streams_per_container"),
            (r#"{"start_limit_ms": 0}"#, "start_limit_ms"),
            (r#"{"crash_limit": 0}"#, "crash_limit"),
            (r#"{"engine_root": "engines"}"#, "engine_root"),
            (r#"{"cache_dir": "x"}"#, "cache_dir"),
            (
                r#"{"libraries": {"base": "libggml-base.so", "registry": "/b", "backends_dir": null}}"#,
                "libraries",
            ),
            (r#"{"environment": {"A=B": "1"}}"#, "environment"),
            (r#"{"environment": {"LD_PRELOAD": "/x"}}"#, "environment"),
        ] {
            let error = parse(json).unwrap().validate().unwrap_err();
            assert_eq!(error.key, key, "{json}");
            assert!(error.to_string().starts_with(&format!("metal.{key} = ")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_service_gets_what_the_daemon_has(
            port in 1u16.., engine in "[A-Za-z0-9]{1,12}", threads in proptest::option::of(1u16..),
            bytes in proptest::option::of(0u64..), sandbox: bool,
        ) {
            let config = MetalConfig {
                port, engine, threads, max_bytes_per_container: bytes, sandbox, ..MetalConfig::default()
            };
            config.validate().unwrap();
            prop_assert_eq!(parse(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        }
    }
}
