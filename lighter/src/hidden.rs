// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subcommands with which lighter starts parts of itself as processes of their own.

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use lighter_devices::ane::AneConfig;
use lighter_devices::gpu::GpuConfig;
use lighter_devices::metal::MetalConfig;
use lighter_devices::mps::MpsConfig;
use lighter_wire::Kind;

use crate::config::Config;
use crate::facts;

/// Not for people: what the daemon and its services start.
#[derive(Debug, Subcommand)]
#[command(hide = true)]
pub(crate) enum Hidden {
    /// Serve a device to the daemon at standard input
    #[command(hide = true)]
    Service {
        /// The device
        kind: Kind,
        /// Its settings, as JSON
        #[arg(long)]
        settings: String,
    },
    /// Compute for one container; the service is at standard input
    #[command(hide = true)]
    Worker {
        /// The device
        kind: Kind,
    },
    /// Look for a device's engines and print them as JSON
    #[command(hide = true)]
    Probe {
        /// The device
        kind: Kind,
    },
}

/// Runs a part.
pub(crate) fn run(command: &Hidden) -> anyhow::Result<ExitCode> {
    match command {
        Hidden::Service { kind, settings } => {
            let config = with_settings(*kind, settings)?;
            let device = facts::device(*kind, &config).with_context(|| format!("{kind} is not built in"))?;
            device
                .serve(take_stdin()?)
                .map_err(|error| anyhow::anyhow!(error))
                .context("the service failed")?;
        }
        Hidden::Worker { kind: Kind::Metal } => {
            lighter_devices::metal::worker::run(take_stdin()?).context("the worker failed")?;
        }
        Hidden::Worker { kind: Kind::Ane } => {
            lighter_devices::ane::worker::run(take_stdin()?).context("the worker failed")?;
        }
        Hidden::Worker { kind: Kind::Gpu } => {
            lighter_devices::gpu::worker::run(&take_stdin()?).context("the session ended")?;
        }
        Hidden::Probe { kind: Kind::Gpu } => {
            lighter_devices::gpu::probe::answer().context("the probe failed")?;
        }
        Hidden::Probe { kind: Kind::Ane } => {
            lighter_devices::ane::probe::answer().context("the probe failed")?;
        }
        Hidden::Probe { kind: Kind::Metal } => {
            lighter_devices::metal::probe::answer().context("the probe failed")?;
        }
        Hidden::Worker { kind } | Hidden::Probe { kind } => bail!("{kind} has no such part"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The settings of a service as its command line gets them.
///
/// # Errors
/// When the device is not built in.
pub(crate) fn settings_of(kind: Kind, config: &Config) -> anyhow::Result<String> {
    match kind {
        Kind::Metal => serde_json::to_string(&config.metal).context("cannot write the settings as JSON"),
        Kind::Ane => serde_json::to_string(&config.ane).context("cannot write the settings as JSON"),
        Kind::Mps => {
            serde_json::to_string(&facts::mps_config(config)).context("cannot write the settings as JSON")
        }
        Kind::Gpu => {
            serde_json::to_string(&facts::gpu_config(config)).context("cannot write the settings as JSON")
        }
    }
}

fn with_settings(kind: Kind, settings: &str) -> anyhow::Result<Config> {
    let mut config = Config::default();
    match kind {
        Kind::Metal => {
            config.metal =
                serde_json::from_str::<MetalConfig>(settings).context("the settings are not valid")?;
        }
        Kind::Ane => {
            config.ane = serde_json::from_str::<AneConfig>(settings).context("the settings are not valid")?;
        }
        Kind::Mps => {
            config.mps = serde_json::from_str::<MpsConfig>(settings).context("the settings are not valid")?;
        }
        Kind::Gpu => {
            config.gpu = serde_json::from_str::<GpuConfig>(settings).context("the settings are not valid")?;
        }
    }
    Ok(config)
}

/// The control socket, which the parent gave as standard input.
fn take_stdin() -> anyhow::Result<OwnedFd> {
    std::io::stdin().as_fd().try_clone_to_owned().context("standard input cannot be used as control socket")
}
