// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gpu device's settings: the `[gpu]` table of the configuration.
//!
//! Parsed once, strictly: an unknown key or a value out of range is an error that names the key. The service
//! process gets the same struct as JSON.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::session::Limits;
use crate::settings::{self, Objection};

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("gpu.{key} = {value}: {reason}")]
pub struct GpuConfigError {
    /// The key in the `[gpu]` table.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong and what is allowed.
    pub reason: &'static str,
}

/// How a client's memory comes about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryMode {
    /// As the probe finds that the driver bears it.
    #[default]
    Auto,
    /// The driver's own, exported as dma-buf.
    Export,
    /// Shared memory that the driver imports.
    Hostmem,
}

/// Settings of the gpu device. Every field has a default, so an empty table is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GpuConfig {
    /// Folder of the renderer that `lighter setup gpu` makes.
    pub renderer_root: PathBuf,
    /// Folder with lighter's Vulkan layer; `None` is the one beside lighter's libraries for containers.
    pub layer_folder: Option<PathBuf>,
    /// Environment variables for the render server and its driver.
    pub environment: BTreeMap<String, String>,
    /// Vulkan drivers, in the place of those that are found; JSON files as the Vulkan loader reads them.
    pub drivers: Vec<PathBuf>,
    /// How a client's memory comes about.
    pub memory: MemoryMode,
    /// Offer drivers that compute on the processor, where there is no GPU.
    pub allow_processor: bool,
    /// Most Vulkan instances of one container at a time; each is three processes here.
    pub max_instances_per_container: u32,
    /// Most pieces of memory that one instance may have mapped.
    pub max_blobs_per_session: u32,
    /// Most bytes of memory that one instance may have mapped; `None` is half of the host's memory.
    pub max_bytes_per_session: Option<u64>,
    /// Longest request of the set-up, in bytes; commands of Vulkan go past it.
    pub max_request_bytes: u64,
    /// How long a renderer may take to start, in milliseconds.
    pub start_limit_ms: u64,
    /// A container whose renderers crashed this often within `crash_window_s` is refused for `crash_pause_s`.
    pub crash_limit: u32,
    /// Seconds over which crashes are counted.
    pub crash_window_s: u64,
    /// Seconds for which a container is refused after too many crashes.
    pub crash_pause_s: u64,
    /// Restrict sessions and render servers (own user, own namespaces, no new sockets, files of the renderer only). Off only
    /// to find out whether the restrictions are what a driver cannot bear.
    pub sandbox: bool,
}

impl Default for GpuConfig {
    fn default() -> Self {
        Self {
            renderer_root: PathBuf::from("/var/lib/lighter/engines/gpu"),
            layer_folder: None,
            environment: BTreeMap::new(),
            drivers: Vec::new(),
            memory: MemoryMode::Auto,
            allow_processor: true,
            max_instances_per_container: 16,
            max_blobs_per_session: 65_536,
            max_bytes_per_session: None,
            max_request_bytes: 4 << 20,
            start_limit_ms: 20_000,
            crash_limit: 5,
            crash_window_s: 60,
            crash_pause_s: 30,
            sandbox: true,
        }
    }
}

impl GpuConfig {
    /// How long a renderer may take to start.
    #[must_use]
    pub fn start_limit(&self) -> Duration {
        Duration::from_millis(self.start_limit_ms)
    }

    /// How much one instance may have, on a host with so much memory.
    #[must_use]
    pub fn limits(&self, host_bytes: u64) -> Limits {
        Limits {
            max_contexts: 1,
            max_blobs: self.max_blobs_per_session,
            max_blob_bytes: self.max_bytes_per_session.unwrap_or(host_bytes / 2),
            max_request_bytes: self.max_request_bytes,
        }
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn validate(&self) -> Result<(), GpuConfigError> {
        let bad = |key, value: String, reason| Err(GpuConfigError { key, value, reason });
        for (key, value) in [
            ("max_instances_per_container", u64::from(self.max_instances_per_container)),
            ("max_blobs_per_session", u64::from(self.max_blobs_per_session)),
            ("max_bytes_per_session", self.max_bytes_per_session.unwrap_or(1)),
            ("start_limit_ms", self.start_limit_ms),
            ("crash_limit", u64::from(self.crash_limit)),
        ] {
            if value == 0 {
                return bad(key, "0".to_owned(), "at least 1 is needed");
            }
        }
        if self.max_request_bytes < MIN_REQUEST_BYTES {
            let reason = "at least 4096 is needed, or Mesa's driver cannot begin";
            return bad("max_request_bytes", self.max_request_bytes.to_string(), reason);
        }
        let object = |key, objection: Result<(), Objection>| {
            objection.map_err(|(value, reason)| GpuConfigError { key, value, reason })
        };
        object("renderer_root", settings::absolute(&self.renderer_root))?;
        object("layer_folder", self.layer_folder.as_deref().map_or(Ok(()), settings::absolute))?;
        for driver in &self.drivers {
            object("drivers", settings::absolute(driver))?;
        }
        object("environment", settings::variables(self.environment.keys()))?;
        // These say which memory and which GPU a container gets.
        let is_ours = |name: &&String| OURS.contains(&name.as_str()) || name.starts_with("LIGHTER_");
        if let Some(name) = self.environment.keys().find(is_ours) {
            return bad("environment", format!("{name:?}"), "lighter sets this itself");
        }
        Ok(())
    }
}

/// Shorter ones would refuse what every client begins with.
const MIN_REQUEST_BYTES: u64 = 4096;
/// Variables of the Vulkan loader and of virglrenderer that lighter sets, or that would break every client.
const OURS: &[&str] =
    &["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_LAYER_PATH", "VK_INSTANCE_LAYERS", "VKR_DEBUG"];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str) -> Result<GpuConfig, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn an_empty_table_is_the_default_and_valid() {
        let config = parse("{}").unwrap();
        assert_eq!(config, GpuConfig::default());
        config.validate().unwrap();
        assert_eq!(config.limits(10).max_blob_bytes, 5);
    }

    #[test]
    fn an_unknown_key_is_named() {
        assert!(parse(r#"{"driver": "/x"}"#).unwrap_err().to_string().contains("`driver`"));
        assert!(parse(r#"{"memory": "vram"}"#).unwrap_err().to_string().contains("`vram`"));
    }

    #[test]
    fn each_bad_value_is_refused_by_its_key() {
        for (json, key) in [
            (r#"{"max_instances_per_container": 0}"#, "max_instances_per_container"),
            (r#"{"max_blobs_per_session": 0}"#, "max_blobs_per_session"),
            (r#"{"max_bytes_per_session": 0}"#, "max_bytes_per_session"),
            (r#"{"max_request_bytes": 100}"#, "max_request_bytes"),
            (r#"{"start_limit_ms": 0}"#, "start_limit_ms"),
            (r#"{"crash_limit": 0}"#, "crash_limit"),
            (r#"{"renderer_root": "x"}"#, "renderer_root"),
            (r#"{"layer_folder": "x"}"#, "layer_folder"),
            (r#"{"drivers": ["/x.json", "y.json"]}"#, "drivers"),
            (r#"{"environment": {"LD_PRELOAD": "/x"}}"#, "environment"),
            (r#"{"environment": {"VKR_DEBUG": "all"}}"#, "environment"),
            (r#"{"environment": {"LIGHTER_GPU_HOSTMEM": "0"}}"#, "environment"),
        ] {
            let error = parse(json).unwrap().validate().unwrap_err();
            assert_eq!(error.key, key, "{json}");
            assert!(error.to_string().starts_with(&format!("gpu.{key} = ")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_service_gets_what_the_daemon_has(
            instances in 1u32.., bytes in proptest::option::of(1u64..), sandbox: bool, allow_processor: bool,
        ) {
            let config = GpuConfig {
                max_instances_per_container: instances, max_bytes_per_session: bytes, sandbox, allow_processor,
                ..GpuConfig::default()
            };
            config.validate().unwrap();
            prop_assert_eq!(parse(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        }
    }
}
