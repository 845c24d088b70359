// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes the CDI specs on disk match the devices that are offered, and lists what is published.

use std::path::PathBuf;

use anyhow::Context as _;
use lighter_wire::Kind;
use serde::Serialize;

use crate::config::Config;
use crate::facts;

/// A device name that containers can ask for.
#[derive(Debug, Serialize)]
pub(crate) struct Published {
    /// `lighter.sh/metal=all`.
    pub(crate) name: String,
    /// The spec file that defines it.
    pub(crate) path: PathBuf,
}

fn file_name(kind: Kind) -> String {
    format!("lighter.sh-{kind}.json")
}

/// Lays out the client folder, writes the spec of every device that has something to offer, and removes the
/// others'.
///
/// # Errors
/// When a file cannot be written or removed.
pub(crate) fn publish(config: &Config) -> anyhow::Result<()> {
    let host = facts::host(config)?;
    let dir = &config.daemon.spec_dir;
    std::fs::create_dir_all(dir)
        .with_context(|| format!("cannot make the spec directory {}", dir.display()))?;
    let mut files = Vec::new();
    let mut specs = Vec::new();
    for kind in Kind::ALL {
        let device = facts::device(kind, config).filter(|_| config.devices.is_on(kind));
        let spec = device.and_then(|device| {
            let probe = device.probe(&host);
            if let lighter_devices::host::Probe::Missing { reason, remedy } = &probe {
                tracing::warn!(device = %kind, %reason, %remedy, "the device has no engine and is not published");
            }
            let own = device.client_files(&host, &probe);
            let spec = device.spec(&host, &probe, &own);
            files.extend(own);
            spec
        });
        specs.push((kind, spec));
    }
    // A spec names files of the folder, so they come first.
    lighter_devices::client::lay_out(&host.client_dir, &files).context("cannot lay out the client folder")?;
    for (kind, spec) in specs {
        let name = file_name(kind);
        match spec {
            Some(spec) => {
                let written = lighter_cdi::write_spec(dir, &name, &spec)?;
                tracing::info!(device = %kind, path = %dir.join(&name).display(), ?written, "spec published");
            }
            None => {
                if lighter_cdi::remove_spec(dir, &name)? {
                    tracing::info!(device = %kind, path = %dir.join(&name).display(), "spec removed");
                }
            }
        }
    }
    Ok(())
}

/// The names in lighter's own specs.
///
/// # Errors
/// When a spec of ours is there and cannot be read.
pub(crate) fn published(config: &Config) -> anyhow::Result<Vec<Published>> {
    let mut names = Vec::new();
    for kind in Kind::ALL {
        let path = config.daemon.spec_dir.join(file_name(kind));
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let spec = lighter_cdi::parse_bytes(&bytes).with_context(|| {
            format!("{} is no valid spec; `lighter restart` writes it anew", path.display())
        })?;
        names.extend(
            spec.qualified_names().map(|name| Published { name: name.to_string(), path: path.clone() }),
        );
    }
    Ok(names)
}
