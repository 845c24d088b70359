// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter status`: what the daemon runs, and which containers use it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lighter_wire::ContainerReport;
use serde::{Deserialize, Serialize};

/// The daemon's account of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StatusReport {
    /// Its process.
    pub(crate) pid: u32,
    /// Its version.
    pub(crate) version: String,
    /// Seconds since it started.
    pub(crate) uptime_s: u64,
    /// The configuration that it read.
    pub(crate) config_file: PathBuf,
    /// Where it publishes specs.
    pub(crate) spec_dir: PathBuf,
    /// Its services, by device.
    pub(crate) services: BTreeMap<String, ServiceState>,
    /// The grants that live.
    pub(crate) grants: Vec<GrantLine>,
}

/// How one service process fares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub(crate) enum ServiceState {
    /// Up.
    Running {
        /// Its process.
        pid: u32,
        /// How often it was started again.
        restarts: u64,
    },
    /// Down, and started again after a pause.
    Restarting {
        /// Why it ended.
        reason: String,
    },
    /// Down for good: it ended too often.
    GivenUp {
        /// Why it ended the last time.
        reason: String,
    },
}

/// One grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GrantLine {
    /// The qualified device name.
    pub(crate) device: String,
    /// The engine's id of the container.
    pub(crate) container: String,
    /// The container's first process.
    pub(crate) pid: u32,
    /// What the container has used of the device; `None` when the service does not say.
    pub(crate) usage: Option<Usage>,
}

/// What a container has used of a device, since its grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Requests served.
    pub(crate) calls: u64,
    /// Requests that failed.
    pub(crate) errors: u64,
    /// Microseconds that the engine worked for it.
    pub(crate) engine_us: u64,
    /// Bytes that it holds in the engine.
    pub(crate) held_bytes: u64,
}

impl From<&ContainerReport> for Usage {
    fn from(report: &ContainerReport) -> Self {
        Self {
            calls: report.calls,
            errors: report.errors,
            engine_us: report.engine_us,
            held_bytes: report.held_bytes,
        }
    }
}

/// The report as text. Pure.
pub(crate) fn render(report: &StatusReport) -> String {
    let mut lines = vec![format!(
        "lighter {} is running: process {}, up {}, configuration {}, specs in {}",
        report.version,
        report.pid,
        duration(report.uptime_s),
        report.config_file.display(),
        report.spec_dir.display()
    )];
    for (device, state) in &report.services {
        let text = match state {
            ServiceState::Running { pid, restarts: 0 } => format!("running, process {pid}"),
            ServiceState::Running { pid, restarts } => {
                format!("running, process {pid}, restarted {restarts} times")
            }
            ServiceState::Restarting { reason } => format!("restarting: {reason}"),
            ServiceState::GivenUp { reason } => {
                format!("given up: {reason}; remedy: see the log, then `lighter restart`")
            }
        };
        lines.push(format!("service {device}: {text}"));
    }
    if report.grants.is_empty() {
        lines.push("no container holds a grant".to_owned());
    }
    for grant in &report.grants {
        let short: String = grant.container.chars().take(12).collect();
        let used = grant.usage.as_ref().map(used).unwrap_or_default();
        lines.push(format!("grant {}: container {short}, process {}{used}", grant.device, grant.pid));
    }
    lines.join("\n")
}

fn used(usage: &Usage) -> String {
    let (engine_ms, held_mib) = (usage.engine_us / 1000, usage.held_bytes >> 20);
    let failed = if usage.errors == 0 { String::new() } else { format!(" ({} failed)", usage.errors) };
    // Not every device measures it.
    let worked = if usage.engine_us == 0 { String::new() } else { format!(", {engine_ms} ms of the engine") };
    format!(", {} requests{failed}{worked}, {held_mib} MiB held", usage.calls)
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_given_up_service_comes_with_a_remedy() {
        let report = StatusReport {
            pid: 1,
            version: "0".into(),
            uptime_s: 3700,
            config_file: "/c".into(),
            spec_dir: "/s".into(),
            services: BTreeMap::from([(
                "metal".to_owned(),
                ServiceState::GivenUp { reason: "signal 9".into() },
            )]),
            grants: Vec::new(),
        };
        let text = render(&report);
        assert!(text.contains("up 1 h 1 min") && text.contains("signal 9; remedy:"), "{text}");
    }

    #[test]
    fn what_is_used_is_said_and_what_is_unknown_is_left_out() {
        let usage = Usage { calls: 7, errors: 2, engine_us: 1_500_000, held_bytes: 3 << 20 };
        assert_eq!(used(&usage), ", 7 requests (2 failed), 1500 ms of the engine, 3 MiB held");
        assert_eq!(used(&Usage { engine_us: 0, ..usage }), ", 7 requests (2 failed), 3 MiB held");
        let grant = GrantLine { device: "d".into(), container: "c".into(), pid: 4, usage: None };
        let report = StatusReport {
            pid: 1,
            version: "0".into(),
            uptime_s: 0,
            config_file: "/c".into(),
            spec_dir: "/s".into(),
            services: BTreeMap::new(),
            grants: vec![grant],
        };
        assert!(render(&report).ends_with("grant d: container c, process 4"));
    }
}
