// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter doctor`: each device on and by which engine, off, missing its host part, not built in, or broken.
//!
//! The verdicts are pure; the daemon gathers the facts by asking each service. Exit codes: 0 when every device
//! that is on is served, 1 when something of lighter's own is broken (also when no daemon runs), 3 when nothing
//! is broken but a device that is on misses its host part. 2 is left to wrong usage.

use lighter_wire::{EngineState, Kind};
use serde::{Deserialize, Serialize};

/// Everything that `lighter doctor` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct DoctorReport {
    /// Whether a daemon answered.
    pub(crate) daemon: Finding,
    /// What does not belong to one device.
    pub(crate) checks: Vec<Check>,
    /// One entry a device, all four.
    pub(crate) devices: Vec<DeviceFinding>,
}

/// A named check that is not about one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Check {
    /// What was looked at.
    pub(crate) name: String,
    /// What was found.
    #[serde(flatten)]
    pub(crate) finding: Finding,
}

/// Good, or bad with a way out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub(crate) enum Finding {
    /// As it should be.
    Ok {
        /// What was seen.
        detail: String,
    },
    /// Not as it should be.
    Broken {
        /// What was seen.
        reason: String,
        /// What the user can do.
        remedy: String,
    },
}

/// One device's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceFinding {
    /// `lighter.sh/metal`.
    pub(crate) device: String,
    /// The state.
    #[serde(flatten)]
    pub(crate) state: DeviceState,
    /// What went wrong lately, oldest first; bounded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) troubles: Vec<String>,
}

/// The states that a device can be in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub(crate) enum DeviceState {
    /// On, and served.
    On {
        /// The engine that computes.
        engine: String,
        /// Version of the library that drives it.
        version: String,
    },
    /// Switched off in the configuration.
    Off {
        /// How to switch it on.
        remedy: String,
    },
    /// On, but the host lacks what serves it.
    Missing {
        /// What is missing.
        reason: String,
        /// How to get it.
        remedy: String,
    },
    /// This build has no part for it.
    NotBuiltIn {
        /// What to do.
        remedy: String,
    },
    /// On and its host part is there, but it does not answer as it should.
    Broken {
        /// What was seen.
        reason: String,
        /// What to do.
        remedy: String,
    },
}

/// What was found out about one device before the verdict.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Evidence {
    /// No part for it in this build.
    NotBuiltIn,
    /// Switched off.
    Off,
    /// Its service answered.
    Answered {
        /// Its engine.
        engine: EngineState,
        /// Its troubles.
        troubles: Vec<String>,
    },
    /// Its service did not.
    Silent {
        /// Why.
        reason: String,
    },
}

/// The verdict on one device. Pure.
pub(crate) fn judge(kind: Kind, evidence: Evidence) -> DeviceFinding {
    let mut found_troubles = Vec::new();
    let state = match evidence {
        Evidence::NotBuiltIn => DeviceState::NotBuiltIn {
            remedy: format!("use a release of lighter whose notes list {kind} for this host"),
        },
        Evidence::Off => {
            DeviceState::Off { remedy: format!("switch it on with `lighter config --{kind} on`") }
        }
        Evidence::Answered { engine, troubles } => {
            found_troubles = troubles;
            match engine {
                EngineState::Available { name, version } => DeviceState::On { engine: name, version },
                EngineState::Missing { reason, remedy } => DeviceState::Missing { reason, remedy },
            }
        }
        Evidence::Silent { reason } => DeviceState::Broken {
            reason,
            remedy: "read the daemon's log, then try `lighter restart`".to_owned(),
        },
    };
    DeviceFinding { device: format!("lighter.sh/{kind}"), state, troubles: found_troubles }
}

/// The exit code that the report stands for. Pure.
pub(crate) fn exit_code(report: &DoctorReport) -> u8 {
    let broken = |finding: &Finding| matches!(finding, Finding::Broken { .. });
    let any = |test: fn(&DeviceState) -> bool| report.devices.iter().any(|device| test(&device.state));
    if broken(&report.daemon)
        || report.checks.iter().any(|check| broken(&check.finding))
        || any(|state| matches!(state, DeviceState::Broken { .. }))
    {
        1
    } else if any(|state| matches!(state, DeviceState::Missing { .. })) {
        3
    } else {
        0
    }
}

/// The report as text, one line a finding and one a remedy. Pure.
pub(crate) fn render(report: &DoctorReport) -> String {
    let mut lines = Vec::new();
    let mut finding = |name: &str, finding: &Finding| match finding {
        Finding::Ok { detail } => lines.push(format!("{name:<18} ok: {detail}")),
        Finding::Broken { reason, remedy } => {
            lines.push(format!("{name:<18} BROKEN: {reason}"));
            lines.push(format!("{:<18} remedy: {remedy}", ""));
        }
    };
    finding("daemon", &report.daemon);
    for check in &report.checks {
        finding(&check.name, &check.finding);
    }
    for device in &report.devices {
        let (text, remedy) = match &device.state {
            DeviceState::On { engine, version } => (format!("on: {engine}, version {version}"), None),
            DeviceState::Off { remedy } => ("off in the configuration".to_owned(), Some(remedy)),
            DeviceState::Missing { reason, remedy } => {
                (format!("MISSING its host part: {reason}"), Some(remedy))
            }
            DeviceState::NotBuiltIn { remedy } => ("not built in".to_owned(), Some(remedy)),
            DeviceState::Broken { reason, remedy } => (format!("BROKEN: {reason}"), Some(remedy)),
        };
        lines.push(format!("{:<18} {text}", device.device));
        if let Some(remedy) = remedy {
            lines.push(format!("{:<18} remedy: {remedy}", ""));
        }
        for trouble in &device.troubles {
            lines.push(format!("{:<18} lately: {trouble}", ""));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(device: DeviceState) -> DoctorReport {
        DoctorReport {
            daemon: Finding::Ok { detail: "process 1".into() },
            checks: Vec::new(),
            devices: vec![DeviceFinding {
                device: "lighter.sh/metal".into(),
                state: device,
                troubles: Vec::new(),
            }],
        }
    }

    fn every_bad_state() -> Vec<DeviceState> {
        let missing =
            EngineState::Missing { reason: "no libggml".into(), remedy: "lighter setup metal".into() };
        [
            Evidence::Off,
            Evidence::NotBuiltIn,
            Evidence::Silent { reason: "no answer".into() },
            Evidence::Answered { engine: missing, troubles: Vec::new() },
        ]
        .map(|evidence| judge(Kind::Metal, evidence).state)
        .into()
    }

    #[test]
    fn every_state_but_on_shows_a_remedy() {
        for state in every_bad_state() {
            let text = render(&report(state.clone()));
            assert!(text.contains("remedy: "), "{state:?}: {text}");
        }
    }

    #[test]
    fn exit_codes_are_as_documented() {
        let codes: Vec<u8> = every_bad_state().into_iter().map(|state| exit_code(&report(state))).collect();
        assert_eq!(codes, [0, 0, 1, 3]);
        let on = DeviceState::On { engine: "CPU".into(), version: "1".into() };
        assert_eq!(exit_code(&report(on.clone())), 0);
        let mut dead = report(on);
        dead.daemon = Finding::Broken { reason: "not running".into(), remedy: "lighter start".into() };
        assert_eq!(exit_code(&dead), 1);
    }

    #[test]
    fn the_json_has_one_word_for_the_state() {
        let value = serde_json::to_value(judge(Kind::Gpu, Evidence::NotBuiltIn)).unwrap();
        assert_eq!(value.get("state").unwrap(), "not-built-in");
        assert_eq!(value.get("device").unwrap(), "lighter.sh/gpu");
    }
}
