// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which Python of this host has torch, and what torch can compute on; or why none.
//!
//! torch is not loaded here: a short-lived child, the Python in question with lighter's package, imports torch, lists its
//! devices and ends. The child is restricted: it reads, and writes nothing but its answer. A torch that is broken or
//! hangs costs that child and is reported as a reason. What a Python has said is remembered until it changes
//! ([`memory`]), because importing torch takes seconds.

mod memory;
mod rank;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lighter_wire::Kind;
use serde::{Deserialize, Serialize};

use self::memory::Memory;
pub(super) use self::memory::{Seen, look};
use super::config::MpsConfig;
use super::locate::{Missing, candidates, remedy};
use crate::host::Probe;
use crate::service::{WorkerProgram, sandbox, spawn};
use crate::text::{cut, with_causes};

/// Longest that all Pythons together may take, where one alone may not take longer.
const LIMIT: Duration = Duration::from_secs(70);
/// Most folders that are taken from an answer.
const MAX_FOLDERS: usize = 256;

/// A Python with torch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Torch {
    /// The interpreter.
    pub executable: PathBuf,
    /// torch's version.
    pub version: String,
    /// Python's version.
    pub python: String,
    /// What torch can compute on, as it names it.
    pub devices: Vec<TorchDevice>,
    /// Folders and files that a process with torch must be able to read.
    pub folders: Vec<PathBuf>,
}

/// One thing that torch can compute on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TorchDevice {
    /// `cpu`, `cuda:0`, `mps`, `xpu:0`.
    pub name: String,
    /// What it is, for a person.
    #[serde(default)]
    pub description: String,
}

/// What the child says.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Answer {
    /// torch was loaded.
    Torch {
        torch: String,
        python: String,
        executable: PathBuf,
        devices: Vec<TorchDevice>,
        #[serde(default)]
        paths: Vec<PathBuf>,
        #[serde(default)]
        libraries: Vec<PathBuf>,
    },
    /// It could not be.
    Missing {
        #[allow(dead_code, reason = "tells this answer from the other")]
        missing: String,
        reason: String,
    },
}

/// Looks for torch, and for what it can compute on.
#[must_use]
pub fn probe(config: &MpsConfig) -> Probe {
    as_probe(&torch(config), config)
}

/// The same as the rest of lighter sees it.
#[must_use]
pub fn as_probe(torch: &Result<Torch, Missing>, config: &MpsConfig) -> Probe {
    match torch {
        Ok(torch) => rank::choose(config.engine_name(), torch),
        Err(missing) => Probe::Missing { reason: missing.reason.clone(), remedy: missing.remedy.clone() },
    }
}

/// The first Python that has torch.
///
/// # Errors
/// When none has, with what to do.
pub fn torch(config: &MpsConfig) -> Result<Torch, Missing> {
    let pythons = candidates(config, std::env::var_os("PATH").as_deref(), Path::new("/"))?;
    let memory = Memory::new(config);
    let deadline = Instant::now() + LIMIT.max(config.probe_limit());
    let mut reasons = Vec::new();
    for python in &pythons {
        if let Some(torch) = memory.recall(python) {
            return Ok(torch);
        }
        let limit = config.probe_limit().min(deadline.saturating_duration_since(Instant::now()));
        match ask(python, config, limit) {
            Ok(torch) => {
                memory.keep(python, &torch);
                return Ok(torch);
            }
            Err(reason) => reasons.push(format!("{}: {reason}", python.display())),
        }
    }
    let reason = match &config.torch_python {
        Some(_) => format!("mps.torch_python cannot be used: {}", reasons.join("; ")),
        None => format!("no Python of this host has a torch that works: {}", reasons.join("; ")),
    };
    Err(Missing { reason, remedy: remedy().to_owned() })
}

fn ask(python: &Path, config: &MpsConfig, limit: Duration) -> Result<Torch, String> {
    let program = program(python, config, "probe").map_err(|error| with_causes(&error))?;
    let mut command = command_for(&program, python, config);
    command.args(program.args());
    let sandbox = if config.sandbox {
        let folders = asked_folders(python, config);
        let prepared = sandbox::prepare(&sandbox::Needs {
            kind: Kind::Mps,
            program: program.file(),
            folders: &folders,
            own_folder: None,
            on_processor: false,
            max_bytes: 0,
            apart: false,
        });
        Some(prepared.map_err(|error| with_causes(&error))?)
    } else {
        None
    };
    spawn::restrict(&mut command, &program, sandbox);
    match crate::ask::ask(command, &(), limit)? {
        Answer::Torch { torch, python, executable, devices, paths, libraries } => {
            let folders = folders(&executable, config, paths.into_iter().chain(libraries));
            if !executable.is_absolute() {
                return Err("its path is not known".to_owned());
            }
            Ok(Torch { executable, version: cut(&torch), python: cut(&python), devices, folders })
        }
        Answer::Missing { reason, .. } => Err(cut(&reason)),
    }
}

/// What the child that asks may read. Where all lies open: what everybody may read. Else it passes folders that are closed to
/// others, and sees no more behind them than the Python, its environment, torch and lighter's package.
fn asked_folders(python: &Path, config: &MpsConfig) -> Vec<PathBuf> {
    let real = std::fs::canonicalize(python).unwrap_or_else(|_| python.to_owned());
    let mut needed = vec![python.to_owned(), real.clone(), host_package(config).to_owned()];
    needed.extend(config.torch_path.iter().cloned());
    // `bin` is in the Python's folder, or in that of its environment.
    needed.extend([python, &real].into_iter().filter_map(|path| path.ancestors().nth(2)).map(Path::to_owned));
    needed.retain(|path| !is_too_wide(path));
    if needed.iter().any(|path| sandbox::closed_on_the_way(path).is_some()) {
        needed.extend(crate::system::folders(Path::new("/")));
    } else {
        needed.push(PathBuf::from("/"));
    }
    needed
}

/// What a worker reads: what its Python named, lighter's package, and what every program reads.
fn folders(executable: &Path, config: &MpsConfig, named: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let own = [executable.to_owned(), host_package(config).to_owned()];
    let mut folders: Vec<PathBuf> = named
        .filter(|path| path.is_absolute() && !is_too_wide(path))
        .take(MAX_FOLDERS)
        .chain(config.torch_path.iter().cloned())
        .chain(own)
        .chain(crate::system::folders(Path::new("/")))
        .collect();
    folders.sort();
    folders.dedup();
    folders
}

/// Folders with more in them than a Python: a system's Python names `/usr` as where it lies. What it reads of those it
/// names besides.
fn is_too_wide(path: &Path) -> bool {
    path.components().count() <= 2 || path == Path::new("/usr/local")
}

/// lighter's package for the host's Python.
fn host_package(config: &MpsConfig) -> &Path {
    config.host_package.as_deref().unwrap_or(Path::new("/usr/local/bin/mps/lighter-mps-host.pyz"))
}

/// A Python with lighter's package, doing one of its parts.
pub(super) fn program(
    python: &Path,
    config: &MpsConfig,
    part: &str,
) -> Result<WorkerProgram, crate::service::SpawnError> {
    // Isolated: no variable and no folder of a user's is read. Nothing is written beside the package.
    let mut args: Vec<OsString> =
        vec!["-I".into(), "-B".into(), host_package(config).into(), OsString::from(part)];
    for folder in &config.torch_path {
        args.extend(["--path".into(), folder.into()]);
    }
    WorkerProgram::new(python, args)
}

/// The command that starts a Python, in a clean environment. By the open file, under the name by which it knows what
/// belongs to it.
pub(super) fn command_for(program: &WorkerProgram, python: &Path, config: &MpsConfig) -> Command {
    let mut command = Command::new(program.inherited_path());
    command
        .arg0(python)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("LANG", "C.UTF-8")
        .env("HOME", "/nonexistent")
        .envs(&config.environment);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_form_that_the_child_knows() {
        let text = r#"{"torch":"2.15.0","python":"3.11.7","executable":"/x/python3","devices":
            [{"name":"cpu","description":"a processor"}],"paths":["/x/lib"],"libraries":["/x/libgomp.so"]}"#;
        assert!(matches!(serde_json::from_str(text), Ok(Answer::Torch { .. })));
        let text = r#"{"missing":"torch","reason":"No module named 'torch'"}"#;
        assert!(matches!(serde_json::from_str(text), Ok(Answer::Missing { .. })));
        assert!(serde_json::from_str::<Answer>("{}").is_err());
    }

    #[test]
    fn behind_a_closed_folder_no_more_is_seen_than_what_is_asked_about() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let torch = dir.path().join("home/torch");
        std::fs::create_dir_all(&torch).unwrap();
        let set = |mode| {
            let home = dir.path().join("home");
            std::fs::set_permissions(home, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let config = MpsConfig { torch_path: vec![torch.clone()], ..MpsConfig::default() };
        let python = Path::new("/usr/bin/python3");
        set(0o755);
        assert!(asked_folders(python, &config).contains(&PathBuf::from("/")));
        set(0o700);
        let closed = asked_folders(python, &config);
        for wide in ["/", "/usr", "/etc"] {
            assert!(!closed.contains(&PathBuf::from(wide)), "{wide}");
        }
        for needed in [torch, python.to_owned(), "/usr/lib".into()] {
            assert!(closed.contains(&needed), "{needed:?}");
        }
    }

    #[test]
    fn a_worker_does_not_get_to_read_whole_systems() {
        let config = MpsConfig { host_package: Some("/l/host.pyz".into()), ..MpsConfig::default() };
        let named = ["/", "/usr", "/usr/local", "/root", "relative", "/usr/lib/python3", "/opt/conda"];
        let found = folders(Path::new("/usr/bin/python3"), &config, named.map(PathBuf::from).into_iter());
        for wide in ["/", "/usr", "/usr/local", "/root", "relative"] {
            assert!(!found.contains(&PathBuf::from(wide)), "{wide}");
        }
        for needed in ["/usr/lib/python3", "/opt/conda", "/l/host.pyz", "/usr/bin/python3", "/usr/lib"] {
            assert!(found.contains(&PathBuf::from(needed)), "{needed}");
        }
    }
}
