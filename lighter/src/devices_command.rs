// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter devices`: the names that a container can ask for, as the published specs have them.

use std::process::ExitCode;

use serde::Serialize;

use crate::config::Config;
use crate::output;
use crate::publish;

#[derive(Debug, Serialize)]
struct Listing {
    devices: Vec<publish::Published>,
}

/// Runs `lighter devices`.
pub(crate) fn run(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    let devices = publish::published(config)?;
    if json {
        output::json(&Listing { devices })?;
    } else if devices.is_empty() {
        output::line("no device is published; `lighter doctor` says why")?;
    } else {
        for device in devices {
            output::line(&format!("{:<32} {}", device.name, device.path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
