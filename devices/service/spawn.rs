// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts one worker process: its control socket as descriptor 0, restricted before its first instruction, and
//! gone at the latest with the thread that started it.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use lighter_wire::Kind;
use rustix::io::FdFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, UnshareFlags, configure_capability_in_ambient_set,
    set_capabilities, set_capabilities_secure_bits, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use super::sandbox::{Sandbox, User};

/// A worker that takes no message for this long hangs.
const SEND_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);
/// How much sooner than the daemon a worker is killed when memory runs out.
const OOM_SCORE: &str = "500";

/// The namespaces of a process that is kept apart.
const APART: UnshareFlags = UnshareFlags::NEWNET.union(UnshareFlags::NEWIPC).union(UnshareFlags::NEWUTS);

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The program is not there.
    #[error("worker program {} cannot be opened", path.display())]
    Program {
        /// The program.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// No socket for it.
    #[error("control socket of a worker could not be made")]
    Socket(#[source] std::io::Error),
    /// The process could not be started.
    #[error("worker process could not be started")]
    Start(#[source] std::io::Error),
    /// Its restrictions could not be prepared.
    #[error("worker could not be restricted")]
    Sandbox(#[from] super::sandbox::SandboxError),
}

/// The program that is started as worker. Held open: an upgrade that replaces the file does not break a running
/// service, and a worker's user need not be able to reach its folder.
#[derive(Debug)]
pub struct WorkerProgram {
    file: File,
    args: Vec<OsString>,
}

impl WorkerProgram {
    /// This program itself, with the hidden subcommand for a device.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn own(kind: Kind) -> Result<Self, SpawnError> {
        Self::new(Path::new("/proc/self/exe"), ["worker", kind.as_str()].map(OsString::from).into())
    }

    /// Another program.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn new(path: &Path, args: Vec<OsString>) -> Result<Self, SpawnError> {
        let file =
            File::open(path).map_err(|source| SpawnError::Program { path: path.to_owned(), source })?;
        Ok(Self { file, args })
    }

    /// What it is started with.
    pub(crate) fn args(&self) -> &[OsString] {
        &self.args
    }

    /// The open program.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// A path that opens the program in a child which inherits the descriptor.
    pub(crate) fn inherited_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// A path that opens the program in a process of this user.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }
}

/// A started worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) child: Child,
    pub(crate) pidfd: OwnedFd,
    pub(crate) control: OwnedFd,
}

/// Starts a worker. `command` starts the program by [`WorkerProgram::inherited_path`], in a clean environment. The
/// calling thread must outlive the worker: the kernel kills it with that thread.
pub(crate) fn spawn(
    program: &WorkerProgram,
    mut command: Command,
    sandbox: Option<Sandbox>,
) -> Result<Worker, SpawnError> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|errno| SpawnError::Socket(errno.into()))?;
    set_socket_timeout(&ours, Timeout::Send, Some(SEND_LIMIT))
        .map_err(|errno| SpawnError::Socket(errno.into()))?;
    command
        .args(&program.args)
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0);
    restrict(&mut command, program, sandbox);
    let mut child = command.spawn().map_err(SpawnError::Start)?;
    let pid = Pid::from_child(&child);
    let pidfd = match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(errno) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(SpawnError::Start(errno.into()));
        }
    };
    // Worth a try only: where it is not allowed, the worker is as likely a victim as any process.
    let _ = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), OOM_SCORE);
    Ok(Worker { child, pidfd, control: ours })
}

/// Has the program of a command start restricted, and end at the latest with the thread that starts it. For others than
/// workers too.
pub(crate) fn restrict(command: &mut Command, program: &WorkerProgram, sandbox: Option<Sandbox>) {
    let parent = getpid();
    let mut sandbox = sandbox;
    // SAFETY: a borrow of the program's descriptor, which its callers keep open until the command has been started.
    let program = unsafe { rustix::fd::BorrowedFd::borrow_raw(program.file.as_raw_fd()) };
    let steps = move || -> std::io::Result<()> {
        // The loader opens the program again by this descriptor after the exec.
        rustix::io::fcntl_setfd(program, FdFlags::empty())?;
        if let Some(sandbox) = &sandbox {
            for (resource, limit) in &sandbox.limits {
                rustix::process::setrlimit(*resource, *limit)?;
            }
            if sandbox.apart {
                // Before the change of the user, which loses the right to it.
                // SAFETY: nothing that this process shares with its parent is unshared, such as descriptors.
                unsafe { rustix::thread::unshare_unsafe(APART) }?;
            }
            if let Some(user) = &sandbox.user {
                become_user(user)?;
            }
        }
        // After the change of the user, which clears it.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(parent) {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
        set_no_new_privs(true)?;
        if let Some(Sandbox { user, landlock, seccomp, limits, apart: _ }) = sandbox.take() {
            let refused = || std::io::Error::from_raw_os_error(libc::EPERM);
            landlock.restrict_self().map_err(|_| refused())?;
            seccompiler::apply_filter(&seccomp).map_err(|_| refused())?;
            // Nothing is freed between fork and exec: another thread may have held the allocator's lock.
            std::mem::forget((user, seccomp, limits));
        }
        Ok(())
    };
    // SAFETY: the steps only make system calls; whatever they would free or allocate was allocated before the fork.
    unsafe { command.pre_exec(steps) };
}

fn become_user(user: &User) -> rustix::io::Result<()> {
    set_thread_groups(&user.groups)?;
    set_thread_res_gid(user.gid, user.gid, user.gid)?;
    if !user.passes_closed {
        return set_thread_res_uid(user.uid, user.uid, user.uid);
    }
    let kept = CapabilitySet::DAC_READ_SEARCH;
    // Else the change of the user takes all capabilities, and so does each access(2) of the new user, by which loaders look
    // whether a file is there. Kept over the exec, which takes those capabilities that are not ambient.
    set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP)?;
    set_thread_res_uid(user.uid, user.uid, user.uid)?;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: kept })?;
    configure_capability_in_ambient_set(kept, true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::sandbox::{Needs, can_change_users, prepare};
    use super::*;

    #[test]
    fn a_worker_passes_a_closed_folder_to_its_engine_also_when_it_asks_by_access() {
        if !can_change_users() {
            eprintln!("SKIPPED: only root gives workers users of their own");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let (engine, other) = (dir.path().join("engine"), dir.path().join("other"));
        for folder in [&engine, &other] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("library"), "").unwrap();
        }
        let run = |program: &str, args: &[&Path]| {
            let program = WorkerProgram::new(Path::new(program), Vec::new()).unwrap();
            let system = ["/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache"].map(PathBuf::from);
            let folders: Vec<PathBuf> = system.into_iter().chain([engine.clone()]).collect();
            let sandbox = prepare(&Needs {
                kind: Kind::Gpu,
                program: program.file(),
                folders: &folders,
                own_folder: None,
                on_processor: true,
                max_bytes: 1 << 20,
                apart: false,
            });
            let mut command = Command::new(program.inherited_path());
            command.args(args).env_clear().stderr(Stdio::null());
            restrict(&mut command, &program, Some(sandbox.unwrap()));
            command.status().unwrap().code()
        };
        // By access(2), as the Vulkan loader asks.
        assert_eq!(run("/usr/bin/test", &[Path::new("-r"), &engine.join("library")]), Some(0));
        assert_eq!(run("/usr/bin/test", &[Path::new("-r"), &engine.join("none")]), Some(1));
        assert_eq!(run("/usr/bin/cat", &[&engine.join("library")]), Some(0));
        assert_eq!(run("/usr/bin/cat", &[&other.join("library")]), Some(1), "not the engine's");
    }
}
