// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter setup mps`: a Python environment of lighter's own with PyTorch in it.
//!
//! Python's venv and pip do the work, from whatever index pip is configured for, and show their own progress. The
//! environment counts from the moment that its mark is written, so an interrupted run leaves nothing in use, and the
//! next one goes on with what is there.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, bail};
use lighter_devices::mps::locate::SETUP_MARK;
use rustix::fs::Mode;

use crate::config::Config;
use crate::output;

/// What pip is asked for; older ones lack what the device needs.
const REQUIREMENT: &str = "torch>=2.6";

/// Runs it.
pub(super) fn run(remove: bool, config: &Config) -> anyhow::Result<ExitCode> {
    let root = &config.mps.engine_root;
    if remove {
        return remove_all(root);
    }
    let mark = root.join(SETUP_MARK);
    if let Ok(version) = fs::read_to_string(&mark) {
        output::line(&format!(
            "torch {} is there: {}; for a newer one run `lighter setup mps --remove` first",
            version.trim(),
            root.display()
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    // Workers are other users and read what is written here.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    make_environment(root)?;
    output::line(
        "fetching PyTorch with pip; on Linux PyPI's is the build with CUDA's libraries, some gigabytes. For a smaller one \
         give pip another index (PIP_INDEX_URL), or use a Python that has torch with `lighter config --torch-python PATH`",
    )?;
    let python = root.join("bin/python3");
    let status = Command::new(&python)
        .args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", REQUIREMENT])
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot run pip with {}", python.display()))?;
    if !status.success() {
        bail!(
            "pip could not install {REQUIREMENT} ({status}): see its words above; run the command again when the index \
             can be reached, or name a Python that has torch with `lighter config --torch-python PATH`"
        );
    }
    let version = version_of_torch(&python)?;
    fs::write(&mark, &version).with_context(|| format!("cannot write {}", mark.display()))?;
    output::line(&format!(
        "torch {version} is in {}; `lighter restart` makes a running daemon use it",
        root.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn remove_all(root: &Path) -> anyhow::Result<ExitCode> {
    match fs::remove_dir_all(root) {
        Ok(()) => output::line(&format!("removed: {}", root.display()))?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            output::line(&format!("nothing to remove: {} is not there", root.display()))?;
        }
        Err(error) => return Err(error).with_context(|| format!("cannot remove {}", root.display())),
    }
    Ok(ExitCode::SUCCESS)
}

fn make_environment(root: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(root).with_context(|| format!("cannot make {}", root.display()))?;
    let status =
        Command::new("python3").args(["-m", "venv"]).arg(root).stdin(Stdio::null()).status().context(
            "cannot run python3, which makes the environment: install it (Debian: apt install python3-venv)",
        )?;
    if !status.success() {
        bail!(
            "python3 could not make an environment in {} ({status}): see its words above (Debian: apt install \
             python3-venv), or name a Python that has torch with `lighter config --torch-python PATH`",
            root.display()
        );
    }
    Ok(())
}

fn version_of_torch(python: &Path) -> anyhow::Result<String> {
    let output = Command::new(python)
        .args(["-I", "-B", "-c", "import torch; print(torch.__version__)"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || version.is_empty() {
        bail!(
            "torch was installed and cannot be imported ({}): see Python's words above; `lighter setup mps --remove` \
             removes it again",
            output.status
        );
    }
    Ok(version)
}
