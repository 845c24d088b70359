// SPDX-License-Identifier: MIT OR Apache-2.0
//! The grants on disk, one file each, so that a daemon that starts again takes them over; and the lock that keeps a second
//! daemon away.
//!
//! The directory is root's own and lives in memory (`/run`). Files are still parsed as if they were not: capped,
//! versioned, one broken file is set aside and hides no other.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lighter_wire::GrantId;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::device::DeviceName;
use crate::grants::Init;
use crate::proc::read_capped;

const STATE_VERSION: u32 = 1;
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Why the state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another daemon has it.
    #[error(
        "{dir} is in use by the lighter daemon with pid {pid}; stop that one, or give this one another state directory"
    )]
    InUse {
        /// The state directory.
        dir: PathBuf,
        /// The holder's pid, or what could not be told of it.
        pid: String,
    },
    /// The file system refused.
    #[error("{path}: cannot {what}")]
    Io {
        /// What was touched.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// One grant as it is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedGrant {
    version: u32,
    boot: String,
    pub(crate) grant: GrantId,
    pub(crate) container: String,
    pub(crate) device: DeviceName,
    pub(crate) caller_uid: u32,
    pub(crate) init: Init,
    pub(crate) record: SavedRecord,
}

/// What is known of the engine's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum SavedRecord {
    /// Nothing yet.
    Open,
    /// It confirmed the request.
    Confirmed { project: Option<String> },
    /// None is wanted.
    Trusted,
}

/// The locked state directory.
#[derive(Debug)]
pub(crate) struct State {
    grants: PathBuf,
    boot: String,
    /// Holds the lock for as long as the agent lives.
    lock: File,
}

impl Drop for State {
    fn drop(&mut self) {
        // A child that is just being started holds a copy of the descriptor until it runs its own program.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

impl State {
    /// Takes the directory for this process, making it where it is missing.
    pub(crate) fn open(dir: &Path) -> Result<Self, StateError> {
        let grants = dir.join("grants");
        make_dir(dir, 0o755)?;
        make_dir(&grants, 0o700)?;
        let lock = take_lock(dir)?;
        let boot_id = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = read_capped(boot_id, 100).map_err(at(boot_id, "read which boot this is"))?;
        let boot = String::from_utf8_lossy(&boot).trim().to_owned();
        Ok(Self { grants, boot, lock })
    }

    pub(crate) fn describe(
        &self,
        grant: &GrantId,
        container: &str,
        device: &DeviceName,
        caller_uid: u32,
        init: &Init,
        record: SavedRecord,
    ) -> SavedGrant {
        SavedGrant {
            version: STATE_VERSION,
            boot: self.boot.clone(),
            grant: grant.clone(),
            container: container.to_owned(),
            device: device.clone(),
            caller_uid,
            init: init.clone(),
            record,
        }
    }

    fn file(&self, grant: &GrantId) -> PathBuf {
        self.grants.join(format!("{grant}.json"))
    }

    /// Writes one grant, whole or not at all.
    pub(crate) fn save(&self, saved: &SavedGrant) -> Result<(), StateError> {
        let path = self.file(&saved.grant);
        let part = path.with_extension("part");
        let write = || -> io::Result<()> {
            let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
            file.write_all(&serde_json::to_vec(saved)?)?;
            // Not synced: it has to outlive this process, and after a crash of the machine no container lives.
            fs::rename(&part, &path)
        };
        write().map_err(|source| {
            let _ = fs::remove_file(&part);
            StateError::Io { path, what: "write the grant", source }
        })
    }

    /// Forgets one grant.
    pub(crate) fn remove(&self, grant: &GrantId) -> Result<(), StateError> {
        let path = self.file(grant);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(at(&path, "remove the grant")(error))
            }
            _ => Ok(()),
        }
    }

    /// Reads what an earlier daemon left. Files of another boot and half-written ones are removed, broken ones set aside.
    pub(crate) fn load(&self) -> Result<Vec<SavedGrant>, StateError> {
        let mut all = Vec::new();
        let entries = fs::read_dir(&self.grants).map_err(at(&self.grants, "list the grants"))?;
        for entry in entries {
            let path = entry.map_err(at(&self.grants, "list the grants"))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => {}
                Some("part") => {
                    let _ = fs::remove_file(&path);
                    continue;
                }
                _ => continue,
            }
            match self.read(&path) {
                Ok(Some(saved)) => all.push(saved),
                Ok(None) => {
                    let _ = fs::remove_file(&path);
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "grant file is broken and set aside");
                    let _ = fs::rename(&path, path.with_extension("broken"));
                }
            }
        }
        all.sort_by(|a: &SavedGrant, b| a.grant.cmp(&b.grant));
        Ok(all)
    }

    fn read(&self, path: &Path) -> io::Result<Option<SavedGrant>> {
        let saved = parse(&read_capped(path, MAX_FILE_BYTES)?)?;
        if path.file_stem().and_then(|stem| stem.to_str()) != Some(saved.grant.0.as_str()) {
            return Err(io::Error::other(format!("the file holds another grant, {}", saved.grant)));
        }
        Ok(Some(saved).filter(|saved| saved.boot == self.boot))
    }
}

pub(crate) fn parse(bytes: &[u8]) -> io::Result<SavedGrant> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(bytes)?;
    if version != STATE_VERSION {
        return Err(io::Error::other(format!(
            "the file has version {version}, this daemon reads {STATE_VERSION}"
        )));
    }
    Ok(serde_json::from_slice(bytes)?)
}

fn at(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { path, what, source }
}

fn make_dir(path: &Path, mode: u32) -> Result<(), StateError> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(at(path, "make the directory"))
}

fn take_lock(dir: &Path) -> Result<File, StateError> {
    let path = dir.join("agent.lock");
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .open(&path)
        .map_err(at(&path, "open the lock"))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            let _ = (&mut file).take(20).read_to_string(&mut pid);
            let pid = if pid.trim().is_empty() { "unknown".to_owned() } else { pid.trim().to_owned() };
            return Err(StateError::InUse { dir: dir.into(), pid });
        }
        Err(errno) => return Err(at(&path, "take the lock")(errno.into())),
    }
    let note = (|| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    })();
    note.map_err(at(&path, "write the lock"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ns::NsId;

    fn saved(state: &State, id: &str) -> SavedGrant {
        let init = Init {
            pid: 7,
            start_time: 8,
            net_ns: NsId::fake(1),
            pid_ns: NsId::fake(2),
            mount_ns: NsId::fake(3),
            own_mounts: true,
            cgroup: None,
            groups: Vec::new(),
        };
        let device = "lighter.sh/metal=all".parse().unwrap();
        state.describe(&GrantId(id.into()), "c", &device, 0, &init, SavedRecord::Open)
    }

    #[test]
    fn a_second_daemon_is_refused_by_the_pid_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = State::open(dir.path()).unwrap();
        let error = State::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        State::open(dir.path()).unwrap();
    }

    #[test]
    fn grants_come_back_and_broken_files_hide_none() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(dir.path()).unwrap();
        let (a, b) = (saved(&state, "metal-1"), saved(&state, "metal-2"));
        state.save(&a).unwrap();
        state.save(&b).unwrap();
        let grants = dir.path().join("grants");
        fs::write(grants.join("metal-0.json"), "{").unwrap();
        fs::write(grants.join("metal-3.part"), "{").unwrap();
        fs::copy(grants.join("metal-1.json"), grants.join("metal-4.json")).unwrap();
        let newer = fs::read_to_string(grants.join("metal-1.json")).unwrap();
        fs::write(grants.join("metal-5.json"), newer.replace("\"version\":1", "\"version\":2")).unwrap();
        fs::write(grants.join("metal-6.json"), vec![b' '; 65 << 10]).unwrap();
        let mut other_boot = saved(&state, "metal-7");
        other_boot.boot = "x".into();
        state.save(&other_boot).unwrap();
        assert_eq!(state.load().unwrap(), vec![a.clone(), b]);
        state.remove(&a.grant).unwrap();
        state.remove(&a.grant).unwrap();
        let mut left: Vec<String> = fs::read_dir(&grants)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let expected =
            ["metal-0.broken", "metal-2.json", "metal-4.broken", "metal-5.broken", "metal-6.broken"];
        assert_eq!(left, expected);
    }

    proptest! {
        #[test]
        fn no_file_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
