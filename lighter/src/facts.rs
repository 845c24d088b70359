// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which devices this build has and this configuration offers, and what the host looks like to them.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use lighter_devices::Device;
use lighter_devices::ane::Ane;
use lighter_devices::gpu::{Gpu, GpuConfig, layer_folder};
use lighter_devices::host::Host;
use lighter_devices::metal::Metal;
use lighter_devices::mps::{Mps, MpsConfig, client_files};
use lighter_wire::{Endpoint, Kind};

use crate::config::Config;
use crate::doctor::{Check, Finding};

/// The device as this build has it; `None` when it is not built in.
pub(crate) fn device(kind: Kind, config: &Config) -> Option<Box<dyn Device>> {
    match kind {
        Kind::Metal => Some(Box::new(Metal { config: config.metal.clone() })),
        Kind::Ane => Some(Box::new(Ane { config: config.ane.clone() })),
        Kind::Mps => Some(Box::new(Mps { config: mps_config(config) })),
        Kind::Gpu => Some(Box::new(Gpu { config: gpu_config(config) })),
    }
}

/// The devices that are built in and switched on.
pub(crate) fn offered(config: &Config) -> impl Iterator<Item = Box<dyn Device>> {
    Kind::ALL.into_iter().filter(|kind| config.devices.is_on(*kind)).filter_map(|kind| device(kind, config))
}

/// What the agent opens, by device that is offered.
pub(crate) fn endpoints(config: &Config) -> BTreeMap<Kind, Vec<Endpoint>> {
    offered(config).map(|device| (device.kind(), device.endpoints())).collect()
}

/// The host as the devices see it.
///
/// # Errors
/// When this program's or the hook's path cannot be told.
pub(crate) fn host(config: &Config) -> anyhow::Result<Host> {
    Ok(Host {
        program: std::env::current_exe().context("cannot tell the path of this program")?,
        hook: hook_path(config)?,
        hook_socket: config.daemon.hook_socket(),
        client_dir: config.daemon.client_dir.clone(),
        socket_dir: config.daemon.socket_dir(),
        plugin_dir: plugin_dir(config)?,
    })
}

/// The folder with lighter's parts for containers: the configured one, else the one of this program.
fn plugin_dir(config: &Config) -> anyhow::Result<PathBuf> {
    config.daemon.plugin_dir.clone().map_or_else(folder_of_this_program, Ok)
}

/// The mps device's settings, with the host's package named: the service does not know the folder that it lies in.
pub(crate) fn mps_config(config: &Config) -> MpsConfig {
    let mut mps = config.mps.clone();
    if mps.host_package.is_none() {
        // Where this program's path cannot be told, nothing of lighter starts.
        mps.host_package = plugin_dir(config).ok().map(|folder| client_files::host_package(&folder));
    }
    mps
}

/// The gpu device's settings, with the layer's folder named: the service does not know it.
pub(crate) fn gpu_config(config: &Config) -> GpuConfig {
    let mut gpu = config.gpu.clone();
    if gpu.layer_folder.is_none() {
        gpu.layer_folder = plugin_dir(config).ok().map(|folder| layer_folder(&folder));
    }
    gpu
}

fn folder_of_this_program() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("cannot tell the path of this program")?;
    Ok(program.parent().unwrap_or(Path::new("/")).to_owned())
}

/// The hook program: the configured one, else the one beside this program.
///
/// # Errors
/// When there is none, or it cannot be run by everybody.
pub(crate) fn hook_path(config: &Config) -> anyhow::Result<PathBuf> {
    let path = match &config.daemon.hook {
        Some(path) => path.clone(),
        None => folder_of_this_program()?.join("lighter-hook"),
    };
    if !path.is_absolute() {
        bail!("daemon.hook = {:?}: the path must be absolute", path.display().to_string());
    }
    let found = std::fs::metadata(&path).with_context(|| {
        format!("the hook {} is not there: install lighter-hook beside lighter", path.display())
    })?;
    if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
        bail!("the hook {} is no executable file: install lighter-hook beside lighter", path.display());
    }
    Ok(path)
}

/// The checks of `lighter doctor` that are not about one device.
pub(crate) fn host_checks(config: &Config) -> Vec<Check> {
    let mut checks = vec![
        check(
            "hook",
            hook_path(config).map(|path| path.display().to_string()),
            "install lighter-hook beside lighter",
        ),
        check(
            "spec directory",
            writable(&config.daemon.spec_dir),
            "make the directory, or name another with `lighter config set daemon.spec_dir PATH`",
        ),
    ];
    for socket in &config.engines.docker {
        checks.push(Check { name: "docker".to_owned(), finding: engine_finding(socket) });
    }
    checks
}

fn check(name: &str, result: anyhow::Result<String>, remedy: &str) -> Check {
    let finding = match result {
        Ok(detail) => Finding::Ok { detail },
        Err(error) => Finding::Broken { reason: format!("{error:#}"), remedy: remedy.to_owned() },
    };
    Check { name: name.to_owned(), finding }
}

fn writable(dir: &Path) -> anyhow::Result<String> {
    use rustix::fs::{Access, access};
    // A directory that is not there yet is made by the daemon, if it may.
    let existing = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    access(existing, Access::WRITE_OK)
        .with_context(|| format!("{} cannot be written", existing.display()))?;
    Ok(dir.display().to_string())
}

/// An engine that is not installed is no fault: other runtimes may be in use.
fn engine_finding(socket: &Path) -> Finding {
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => Finding::Ok { detail: format!("answers at {}", socket.display()) },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Finding::Ok { detail: format!("not there ({})", socket.display()) }
        }
        Err(error) => Finding::Broken {
            reason: format!("{} cannot be asked: {error}", socket.display()),
            remedy: "start Docker, or name its socket with `lighter config set engines.docker '[\"PATH\"]'`"
                .to_owned(),
        },
    }
}
