// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter doctor`: asks the daemon, which asks each service; without a daemon says so and what else is known.

use std::process::ExitCode;

use anyhow::bail;
use lighter_wire::Kind;

use crate::config::Config;
use crate::control::{self, ControlError, Reply, Request};
use crate::doctor::{self, DoctorReport, Evidence, Finding};
use crate::facts;
use crate::output;

/// Shown below the command's help.
pub(crate) const EXIT_CODES: &str = "Exit codes: 0 every device that is on is served; 1 something is broken or no \
daemon runs; 2 wrong usage; 3 nothing is broken, but a device that is on misses its host part.";

/// Runs `lighter doctor`.
pub(crate) fn run(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    let report = match control::ask(&config.daemon.control_socket(), &Request::Doctor) {
        Ok(Reply::Doctor(report)) => *report,
        Ok(Reply::Failed { reason }) => bail!("{reason}"),
        Ok(_) => bail!("the daemon gave an answer of another version: restart it with `lighter restart`"),
        Err(ControlError::NotRunning { path }) => without_daemon(config, &path),
        Err(error) => return Err(error.into()),
    };
    if json {
        output::json(&report)?;
    } else {
        output::line(&doctor::render(&report))?;
    }
    Ok(ExitCode::from(doctor::exit_code(&report)))
}

fn without_daemon(config: &Config, socket: &std::path::Path) -> DoctorReport {
    let devices = Kind::ALL
        .into_iter()
        .map(|kind| {
            let evidence = match facts::device(kind, config) {
                _ if !config.devices.is_on(kind) => Evidence::Off,
                None => Evidence::NotBuiltIn,
                Some(device) => match facts::host(config) {
                    Ok(host) => {
                        Evidence::Answered { engine: device.probe(&host).state(), troubles: Vec::new() }
                    }
                    Err(error) => Evidence::Silent { reason: format!("{error:#}") },
                },
            };
            doctor::judge(kind, evidence)
        })
        .collect();
    DoctorReport {
        daemon: Finding::Broken {
            reason: format!("not running (nobody listens at {})", socket.display()),
            remedy: "start it with `lighter start --detach`".to_owned(),
        },
        checks: facts::host_checks(config),
        devices,
    }
}
