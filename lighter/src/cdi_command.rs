// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter cdi`: shows which CDI devices the host offers, and what they would do to a container.
//!
//! Works on any vendor's spec files, with or without a running daemon. `list` reports broken files and still
//! succeeds, as an engine would still offer the rest; `inject` writes either a complete OCI spec or nothing.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::{Args, Subcommand};
use lighter_cdi::{DEFAULT_DIRECTORIES, InjectError, Registry};
use serde::Serialize;
use serde_json::Value;

use crate::output;

/// Subcommands of `lighter cdi`.
#[derive(Debug, Subcommand)]
pub(crate) enum CdiCommand {
    /// List the devices that CDI spec files offer, and the files that have errors
    List {
        #[command(flatten)]
        directories: Directories,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print an OCI runtime spec as it is after devices are added to it
    Inject {
        #[command(flatten)]
        directories: Directories,
        /// The OCI runtime spec, `config.json` of a bundle; `-` is standard input
        #[arg(long, value_name = "FILE")]
        spec: PathBuf,
        /// Qualified device names, as `lighter.sh/metal=all`
        #[arg(required = true, value_name = "DEVICE")]
        devices: Vec<String>,
    },
}

/// Where spec files are looked for.
#[derive(Debug, Args)]
pub(crate) struct Directories {
    /// A directory with spec files; lowest priority first. Without it: /etc/cdi and /var/run/cdi
    #[arg(long = "spec-dir", value_name = "DIR")]
    spec_dir: Vec<PathBuf>,
}

impl Directories {
    fn scan(&self) -> Registry {
        if self.spec_dir.is_empty() {
            Registry::scan(&DEFAULT_DIRECTORIES)
        } else {
            Registry::scan(&self.spec_dir)
        }
    }

    fn describe(&self) -> String {
        let given = self.spec_dir.iter().map(|directory| directory.display().to_string());
        if self.spec_dir.is_empty() {
            DEFAULT_DIRECTORIES.join(", ")
        } else {
            given.collect::<Vec<_>>().join(", ")
        }
    }
}

/// Runs `lighter cdi`.
pub(crate) fn run(command: &CdiCommand) -> anyhow::Result<ExitCode> {
    match command {
        CdiCommand::List { directories, json } => list(&directories.scan(), *json)?,
        CdiCommand::Inject { directories, spec, devices } => inject(directories, spec, devices)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The answer of `list --json`. Scripts rely on its form.
#[derive(Serialize)]
struct Listing {
    devices: Vec<Listed>,
    errors: Vec<Broken>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    path: String,
}

#[derive(Serialize)]
struct Broken {
    path: String,
    error: String,
}

fn list(registry: &Registry, json: bool) -> anyhow::Result<()> {
    let listing = Listing {
        devices: registry
            .devices()
            .map(|offer| Listed { name: offer.name.to_owned(), path: offer.path.display().to_string() })
            .collect(),
        errors: registry
            .errors()
            .map(|(path, error)| Broken { path: path.display().to_string(), error: error.to_string() })
            .collect(),
    };
    if json {
        return output::json(&listing);
    }
    let width = listing.devices.iter().map(|device| device.name.chars().count()).max().unwrap_or_default();
    for device in &listing.devices {
        output::line(&format!("{:width$}  {}", device.name, device.path))?;
    }
    for shadowed in registry.shadowed() {
        let (path, by) = (shadowed.path.display(), shadowed.by.display());
        eprintln!("lighter: {}: its {} is hidden by the one in {by}", path, shadowed.name);
    }
    for broken in &listing.errors {
        eprintln!("lighter: {}: {}", broken.path, broken.error);
    }
    Ok(())
}

fn inject(directories: &Directories, spec_path: &Path, devices: &[String]) -> anyhow::Result<()> {
    let mut spec = read_spec(spec_path)?;
    let registry = directories.scan();
    registry.inject(&mut spec, devices).map_err(|error| match error {
        InjectError::Unresolved(names) => unresolved(&names, directories, &registry),
        other => anyhow!(other).context("cannot inject the devices"),
    })?;
    output::json(&spec)
}

/// Says which names are missing, and whether a broken file may be the cause.
fn unresolved(names: &[String], directories: &Directories, registry: &Registry) -> anyhow::Error {
    let places = directories.describe();
    let hint = match registry.errors().next() {
        None => "`lighter cdi list` shows what there is",
        Some(_) => "a spec file with errors may be the cause, `lighter cdi list` shows them",
    };
    // Names come from outside: quoted, so that none of them can break the line.
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    anyhow!("no valid spec in {places} offers {}: {hint}", names.join(", "))
}

fn read_spec(path: &Path) -> anyhow::Result<Value> {
    let mut bytes = Vec::new();
    let name = if path.as_os_str() == "-" {
        std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
        "standard input".to_owned()
    } else {
        bytes =
            std::fs::read(path).with_context(|| format!("cannot read the OCI spec {}", path.display()))?;
        path.display().to_string()
    };
    serde_json::from_slice(&bytes).with_context(|| format!("{name} is not an OCI spec in JSON"))
}
