// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter setup`: fetches what the host needs for a device, and removes it again.
//!
//! ane: ONNX Runtime's libraries ([`ane`]). mps: a Python with PyTorch ([`mps`]).
//! gpu and metal: an engine root, a folder with Debian's virglrenderer or ggml and everything below it, for hosts whose own
//! libraries are missing or older. The fetching is Debian's tools' work, driven by the scripts that the tests use too.

mod ane;
mod mps;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};

use crate::config::Config;
use crate::output;

/// Arguments of `lighter setup`.
#[derive(Debug, Args)]
pub(crate) struct SetupArgs {
    /// The device
    device: SetupDevice,
    /// Add the Vulkan backend with Mesa's drivers (metal only)
    #[arg(long)]
    vulkan: bool,
    /// Add the build with OpenVINO, for Intel's processors, GPUs and NPUs (ane only)
    #[arg(long)]
    openvino: bool,
    /// Remove what an earlier setup fetched
    #[arg(long, conflicts_with_all = ["vulkan", "openvino"])]
    remove: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SetupDevice {
    /// virglrenderer and Mesa's drivers
    Gpu,
    /// ggml
    Metal,
    /// ONNX Runtime
    Ane,
    /// PyTorch
    Mps,
}

const SCRIPTS: [(&str, &str); 3] = [
    ("lib.sh", include_str!("../../tools/lib.sh")),
    ("debian-suite", include_str!("../../tools/debian-suite")),
    ("engine-root", include_str!("../../tools/engine-root")),
];

/// Runs `lighter setup`.
pub(crate) fn run(args: &SetupArgs, config: &Config) -> anyhow::Result<ExitCode> {
    match args.device {
        SetupDevice::Gpu | SetupDevice::Metal | SetupDevice::Mps if args.openvino => {
            bail!("--openvino is for `lighter setup ane`")
        }
        SetupDevice::Gpu | SetupDevice::Ane | SetupDevice::Mps if args.vulkan => {
            bail!("--vulkan is for `lighter setup metal`")
        }
        SetupDevice::Gpu => engine_root("gpu", &config.gpu.renderer_root, args.remove, config),
        SetupDevice::Metal => {
            let name = if args.vulkan { "metal-vulkan" } else { "metal" };
            engine_root(name, &config.metal.engine_root, args.remove, config)
        }
        SetupDevice::Ane => ane::run(args.openvino, args.remove, config),
        SetupDevice::Mps => mps::run(args.remove, config),
    }
}

/// Makes or removes a folder of Debian's packages.
fn engine_root(name: &str, root: &Path, remove: bool, config: &Config) -> anyhow::Result<ExitCode> {
    let scripts = unpack()?;
    let cache = config.metal.cache_dir.parent().unwrap_or(&config.metal.cache_dir).join("packages");
    std::fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let mut command = Command::new(scripts.path().join("engine-root"));
    let status = command
        .arg(if remove { "--remove" } else { name })
        .arg(root)
        .env("LIGHTER_CACHE", &cache)
        .status()
        .context("cannot run the script that makes engine roots (is bash installed?)")?;
    if remove {
        return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if !status.success() {
        bail!(
            "the engine root was not made ({status}); what was downloaded is kept, so run the command again"
        );
    }
    let device = name.split('-').next().unwrap_or(name);
    output::line(&format!(
        "{device}'s engine is in {}; `lighter restart` makes a running daemon use it",
        root.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn unpack() -> anyhow::Result<tempfile::TempDir> {
    let dir = tempfile::tempdir().context("cannot make a temporary folder")?;
    for (name, text) in SCRIPTS {
        let path = dir.path().join(name);
        let named = || format!("cannot write {}", path.display());
        let mut file = std::fs::File::create(&path).with_context(named)?;
        file.write_all(text.as_bytes()).with_context(named)?;
        file.set_permissions(std::fs::Permissions::from_mode(0o755)).with_context(named)?;
    }
    Ok(dir)
}
