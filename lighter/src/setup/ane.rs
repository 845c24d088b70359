// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter setup ane`: ONNX Runtime's libraries from its own packages on PyPI, by checksum.
//!
//! pip does the fetching, from whatever index it is configured for; a file with another checksum is refused by it. Of a
//! package only the libraries and the licence are kept. A folder appears in one step, so an interrupted run leaves
//! the old state, and what was downloaded is kept for the next one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, bail};

use crate::config::Config;
use crate::output;

/// A package, and the folder below the engine root that it becomes.
struct Package {
    name: &'static str,
    version: &'static str,
    folder: &'static str,
    /// Checksum and platform for each processor.
    wheels: &'static [Wheel],
}

struct Wheel {
    arch: &'static str,
    platform: &'static str,
    sha256: &'static str,
}

const PLAIN: Package = Package {
    name: "onnxruntime",
    version: "1.32.0",
    folder: "onnxruntime",
    wheels: &[
        Wheel {
            arch: "x86_64",
            platform: "manylinux_2_28_x86_64",
            sha256: "5a34fc4dfeb5a7b4a74c95dcba1e773d722abda720b474edf1b0c419dc6d163d",
        },
        Wheel {
            arch: "aarch64",
            platform: "manylinux_2_28_aarch64",
            sha256: "2303372a85299b6757b0e11e1cbf13e410ddf7e10c37f4b37e99d1c90e7daf7c",
        },
    ],
};

const OPENVINO: Package = Package {
    name: "onnxruntime-openvino",
    version: "1.24.1",
    folder: "openvino",
    wheels: &[Wheel {
        arch: "x86_64",
        platform: "manylinux_2_28_x86_64",
        sha256: "3007c803634cc69c6d52af1dea7ce729d9bb62b9a11070fd2f959119199007a8",
    }],
};

/// The Python whose wheels are taken; nothing of Python's is kept of them.
const PYTHON: [&str; 6] = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"];

/// Runs it.
pub(super) fn run(openvino: bool, remove: bool, config: &Config) -> anyhow::Result<ExitCode> {
    let root = &config.ane.engine_root;
    if remove {
        match fs::remove_dir_all(root) {
            Ok(()) => output::line(&format!("removed: {}", root.display()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                output::line(&format!("nothing to remove: {} is not there", root.display()))?;
            }
            Err(error) => return Err(error).with_context(|| format!("cannot remove {}", root.display())),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let cache = config.ane.cache_dir.parent().unwrap_or(&config.ane.cache_dir).join("packages");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let packages: &[Package] = if openvino { &[PLAIN, OPENVINO] } else { &[PLAIN] };
    for package in packages {
        install(package, &cache, root)?;
    }
    output::line("`lighter restart` makes a running daemon use it")?;
    Ok(ExitCode::SUCCESS)
}

fn install(package: &Package, cache: &Path, root: &Path) -> anyhow::Result<()> {
    let target = root.join(package.folder);
    let mark = target.join("VERSION");
    if fs::read_to_string(&mark).is_ok_and(|found| found.trim() == package.version) {
        output::line(&format!("{} {} is there: {}", package.name, package.version, target.display()))?;
        return Ok(());
    }
    let wheel = download(package, cache)?;
    let work = tempfile::tempdir_in(cache).context("cannot make a temporary folder")?;
    unpack(&wheel, work.path())?;
    fs::create_dir_all(root).with_context(|| format!("cannot make {}", root.display()))?;
    let new = root.join(format!(".{}.new", package.folder));
    let _ = fs::remove_dir_all(&new);
    keep_libraries(&work.path().join("onnxruntime"), &new)?;
    fs::write(new.join("VERSION"), package.version).context("cannot write the version")?;
    let old = root.join(format!(".{}.old", package.folder));
    let _ = fs::remove_dir_all(&old);
    if target.exists() {
        // Workers that run keep what they have open.
        fs::rename(&target, &old).with_context(|| format!("cannot move {}", target.display()))?;
    }
    fs::rename(&new, &target).with_context(|| format!("cannot make {}", target.display()))?;
    let _ = fs::remove_dir_all(&old);
    output::line(&format!("{} {} is in {}", package.name, package.version, target.display()))
}

fn download(package: &Package, cache: &Path) -> anyhow::Result<PathBuf> {
    let Some(wheel) = package.wheels.iter().find(|wheel| wheel.arch == std::env::consts::ARCH) else {
        bail!(
            "{} has no package for {}: name a library of your own with `lighter config set ane.library PATH`",
            package.name,
            std::env::consts::ARCH
        );
    };
    let mut pip = pip()?;
    let requirement = tempfile::NamedTempFile::new_in(cache).context("cannot write the requirement")?;
    let line = format!("{}=={} --hash=sha256:{}\n", package.name, package.version, wheel.sha256);
    fs::write(requirement.path(), line).context("cannot write the requirement")?;
    let status = pip
        .args([
            "download",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
        ])
        .args(PYTHON)
        .args(["--platform", wheel.platform, "--dest"])
        .arg(cache)
        .arg("--requirement")
        .arg(requirement.path())
        .stdin(Stdio::null())
        .status()
        .context("cannot run pip")?;
    if !status.success() {
        bail!(
            "pip could not fetch {} {} ({status}): see its words above; run the command again when the index can be \
             reached, or name a library of your own with `lighter config set ane.library PATH`",
            package.name,
            package.version
        );
    }
    let start = format!("{}-{}-", package.name.replace('-', "_"), package.version);
    let entries = fs::read_dir(cache).with_context(|| format!("cannot read {}", cache.display()))?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                name.starts_with(&start) && name.ends_with(&format!("{}.whl", wheel.platform))
            })
        })
        .with_context(|| format!("pip left no {start}*.whl in {}", cache.display()))
}

/// A pip that runs.
fn pip() -> anyhow::Result<Command> {
    let pips: [&[&str]; 3] = [&["python3", "-m", "pip"], &["pip3"], &["pip"]];
    for words in pips {
        let [program, args @ ..] = words else { continue };
        let mut command = Command::new(program);
        command.args(args);
        let works = Command::new(program)
            .args(args)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if works {
            return Ok(command);
        }
    }
    bail!(
        "pip is not there, which fetches the packages: install it (Debian: apt install python3-pip), or get \
         libonnxruntime.so.1.* yourself and name it with `lighter config set ane.library PATH`"
    )
}

/// A wheel is a zip file, which the Python that pip belongs to can read.
fn unpack(wheel: &Path, into: &Path) -> anyhow::Result<()> {
    let status = Command::new("python3")
        .args(["-m", "zipfile", "-e"])
        .args([wheel, into])
        .stdin(Stdio::null())
        .status()
        .context("cannot run python3 to unpack the package")?;
    if !status.success() {
        bail!("{} cannot be unpacked ({status}): remove it and run the command again", wheel.display());
    }
    Ok(())
}

/// ONNX Runtime's libraries and its licence, without what is Python's.
fn keep_libraries(from: &Path, to: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    let mut libraries = 0;
    for folder in [from.join("capi"), from.to_owned()] {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_library = name.starts_with("lib") && name.contains(".so");
            if is_library || matches!(name.as_str(), "LICENSE" | "ThirdPartyNotices.txt") {
                let target = to.join(&name);
                fs::copy(entry.path(), &target)
                    .with_context(|| format!("cannot write {}", target.display()))?;
                // Workers of other users load it.
                fs::set_permissions(&target, fs::Permissions::from_mode(0o644))?;
                libraries += usize::from(is_library);
            }
        }
    }
    if libraries == 0 {
        bail!("the package has no libraries in {}", from.display());
    }
    Ok(())
}
