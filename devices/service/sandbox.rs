// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a worker may do: a worker has a container's bytes in it, and must be worth nothing to whoever takes it over.
//!
//! - a user of its own, so that no file, process or socket of the host or of another worker is its own;
//! - Landlock: reads the engine's files and what describes the machine, writes the GPU's device nodes, nothing else; no
//!   TCP, no signals to others;
//! - where the engine lies behind a folder that is closed to others, the capability to pass such folders
//!   (CAP_DAC_READ_SEARCH), which Landlock keeps to the engine's own files; without Landlock the worker is not started;
//! - seccomp: no new sockets at all, no debugging, no namespaces, no mounts, no io_uring;
//! - no core dumps, and for engines on the processor a limit of memory behind its own account.
//!
//! Where NVIDIA's device nodes are given out, its driver needs two exceptions or it does not start: it writes the names of
//! its threads below /proc (what else may be written there belongs to other users), and it listens on an abstract unix
//! socket. Connecting stays refused, and so do sockets of every other family.
//!
//! Prepared here, in the service; put on by [`super::spawn`] between fork and exec, so that a worker that does
//! not cooperate has it on as well. What the kernel cannot do is left out, and said in the log at the service's start.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use lighter_wire::Kind;
use rustix::process::{Gid, Resource, Rlimit, Uid};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// Users of workers: outside of what distributions, systemd and container engines hand out.
const FIRST_UID: u32 = 1_879_048_192;
const UIDS: u32 = 65_536;
/// Each device has its part of them: its service counts for itself.
const UIDS_PER_KIND: u32 = UIDS / 4;
/// What a worker may need besides its account: code, ggml's own structures, graphs, threads.
const SPARE_BYTES: u64 = 4 << 30;
/// Newest Landlock that the rules are written for; an older kernel takes the part that it knows.
const LANDLOCK: ABI = ABI::V6;

/// Why the restrictions could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Landlock refused the rules.
    #[error("rules for a worker's files could not be made")]
    Landlock(#[from] RulesetError),
    /// The filter could not be compiled.
    #[error("filter for a worker's system calls could not be made")]
    Seccomp(#[from] seccompiler::BackendError),
    /// The engine cannot be reached by a worker's user, and nothing would keep a worker that may pass to its engine.
    #[error(
        "the engine lies behind {}, which is closed to the users of workers, and this kernel has no Landlock: move the engine, \
         or open that folder to others (chmod o+x)", folder.display()
    )]
    Closed {
        /// The folder.
        folder: PathBuf,
    },
    /// No filter is known for this processor.
    #[error("no system call filter is known for this processor architecture")]
    Architecture,
}

/// Restrictions of one worker, ready to be put on.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) user: Option<User>,
    pub(crate) landlock: RulesetCreated,
    pub(crate) seccomp: BpfProgram,
    pub(crate) limits: Vec<(Resource, Rlimit)>,
    /// Whether it gets a network, an IPC and a host name of its own.
    pub(crate) apart: bool,
}

/// Who a worker is.
#[derive(Debug, Clone)]
pub(crate) struct User {
    pub(crate) uid: Uid,
    pub(crate) gid: Gid,
    /// Groups that may open the GPU's device nodes.
    pub(crate) groups: Vec<Gid>,
    /// Whether it passes folders that are closed to others, to reach the engine behind them.
    pub(crate) passes_closed: bool,
}

/// Whether workers can be given users of their own.
pub(crate) fn can_change_users() -> bool {
    let covers = |map: &str| {
        std::fs::read_to_string(map).is_ok_and(|text| {
            text.lines().any(|line| {
                let numbers: Vec<u64> =
                    line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
                let [first, _, count] = numbers.as_slice() else { return false };
                *first <= FIRST_UID.into() && first.saturating_add(*count) >= u64::from(FIRST_UID + UIDS)
            })
        })
    };
    rustix::process::geteuid().is_root() && covers("/proc/self/uid_map") && covers("/proc/self/gid_map")
}

/// What one worker must be able to do.
#[derive(Debug)]
pub(crate) struct Needs<'a> {
    /// The device that it serves.
    pub(crate) kind: Kind,
    /// Its program.
    pub(crate) program: &'a File,
    /// Folders and files that it reads: the engine's.
    pub(crate) folders: &'a [PathBuf],
    /// A folder that it fills.
    pub(crate) own_folder: Option<&'a Path>,
    /// Whether its engine needs no device node.
    pub(crate) on_processor: bool,
    /// Most bytes that containers' data takes in it.
    pub(crate) max_bytes: u64,
    /// Whether it is a render server: in namespaces of its own, and with processes of its own, to which it speaks by
    /// pairs of sockets.
    pub(crate) apart: bool,
}

/// Restrictions for a worker.
pub(crate) fn prepare(needs: &Needs<'_>) -> Result<Sandbox, SandboxError> {
    let nodes = (!needs.on_processor).then(|| device_nodes(needs.kind));
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let mut limits = vec![(Resource::Core, none)];
    if needs.on_processor {
        // GPU drivers map far more than they use, so there the worker's own account must do.
        let most = Some(needs.max_bytes.saturating_add(SPARE_BYTES));
        limits.push((Resource::Data, Rlimit { current: most, maximum: most }));
    }
    let closed =
        needs.folders.iter().map(PathBuf::as_path).chain(needs.own_folder).find_map(closed_on_the_way);
    if let Some(closed) = &closed
        && can_change_users()
        && !landlock_is_there()
    {
        return Err(SandboxError::Closed { folder: closed.clone() });
    }
    let user = || next_user(needs.kind, nodes.as_deref().unwrap_or_default(), closed.is_some());
    Ok(Sandbox {
        user: can_change_users().then(user),
        landlock: landlock_rules(needs.program, needs.folders, needs.own_folder, nodes.as_deref())?,
        seccomp: filter(nodes.as_deref().is_some_and(has_nvidia), needs.apart)?,
        limits,
        // Only root makes namespaces without a user's.
        apart: needs.apart && can_change_users(),
    })
}

/// The first folder on the way to a place that others may not pass: a home, say.
pub(crate) fn closed_on_the_way(place: &Path) -> Option<PathBuf> {
    let place = std::fs::canonicalize(place).ok()?;
    let is_closed = |folder: &&Path| {
        std::fs::metadata(folder).is_ok_and(|found| found.is_dir() && found.mode() & 0o001 == 0)
    };
    place.ancestors().filter(is_closed).last().map(Path::to_owned)
}

fn next_user(kind: Kind, nodes: &[PathBuf], passes_closed: bool) -> User {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let part = Kind::ALL.into_iter().zip(0..).find(|(one, _)| *one == kind).map_or(0, |(_, part)| part);
    let id = FIRST_UID + part * UIDS_PER_KIND + NEXT.fetch_add(1, Ordering::Relaxed) % UIDS_PER_KIND;
    let mut groups: Vec<u32> =
        nodes.iter().filter_map(|node| std::fs::metadata(node).ok()).map(|found| found.gid()).collect();
    groups.sort_unstable();
    groups.dedup();
    // Root's group opens more than GPUs.
    groups.retain(|group| *group != 0);
    User {
        uid: Uid::from_raw(id),
        gid: Gid::from_raw(id),
        groups: groups.into_iter().map(Gid::from_raw).collect(),
        passes_closed,
    }
}

/// Whether NVIDIA's driver is among those that a worker gets.
fn has_nvidia(nodes: &[PathBuf]) -> bool {
    nodes.iter().any(|node| node.starts_with("/dev") && node.to_string_lossy().contains("nvidia"))
}

/// Device nodes of GPUs, and of neural processors where models run.
fn device_nodes(kind: Kind) -> Vec<PathBuf> {
    let starts = |folder: &str, starts: &[&str]| -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        let is_wanted = |path: &PathBuf| {
            path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                starts.iter().any(|start| name.starts_with(start))
            })
        };
        entries.flatten().map(|entry| entry.path()).filter(is_wanted).collect()
    };
    let mut nodes = starts("/dev/dri", &["renderD"]);
    if kind == Kind::Ane {
        nodes.extend(starts("/dev/accel", &["accel"]));
    }
    nodes.extend(starts("/dev", &["nvidia", "kfd", "dxg"]));
    nodes
}

fn landlock_rules(
    program: &File,
    folders: &[PathBuf],
    own_folder: Option<&Path>,
    nodes: Option<&[PathBuf]>,
) -> Result<RulesetCreated, SandboxError> {
    let all = AccessFs::from_all(LANDLOCK);
    let read = AccessFs::from_read(LANDLOCK);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .add_rule(PathBeneath::new(program, AccessFs::ReadFile | AccessFs::Execute))?;
    // ggml, the loader and the drivers look at the machine there. GPU drivers look at themselves, too, which leaves
    // what /proc tells everybody of other processes open to them.
    let processor = ["/sys/devices/system", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm"];
    let gpu = ["/sys", "/proc"];
    let system: &[&str] = if nodes.is_none() { &processor } else { &gpu };
    for folder in folders.iter().cloned().chain(system.iter().map(PathBuf::from)) {
        // A folder that is not there needs no rule.
        if let Ok(folder) = PathFd::new(folder) {
            let access = if is_folder(&folder) { read } else { AccessFs::ReadFile.into() };
            rules = rules.add_rule(PathBeneath::new(folder, access))?;
        }
    }
    if let Some(folder) = own_folder
        && let Ok(folder) = PathFd::new(folder)
    {
        let contents = AccessFs::RemoveDir | AccessFs::RemoveFile | AccessFs::MakeDir | AccessFs::MakeReg;
        let files = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::ReadDir;
        rules = rules.add_rule(PathBeneath::new(folder, files | contents | AccessFs::Refer))?;
    }
    if nodes.is_some_and(has_nvidia)
        && let Ok(folder) = PathFd::new("/proc")
    {
        rules = rules.add_rule(PathBeneath::new(folder, read | AccessFs::WriteFile | AccessFs::Truncate))?;
    }
    let plain = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"].map(PathBuf::from);
    for node in plain.iter().chain(nodes.unwrap_or_default()) {
        if let Ok(node) = PathFd::new(node) {
            let access = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
            let access = if is_folder(&node) { access | AccessFs::ReadDir } else { access };
            rules = rules.add_rule(PathBeneath::new(node, access))?;
        }
    }
    Ok(rules)
}

/// `/dev/nvidia-caps` and the like.
fn is_folder(node: &PathFd) -> bool {
    rustix::fs::fstat(node).is_ok_and(|found| rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir())
}

/// Refused with EPERM; everything else that the worker's user may do is allowed.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_mount_setattr,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_open_by_handle_at,
];

/// What NVIDIA's driver needs of the above: a listening socket of the host's own processes.
const NVIDIA: &[libc::c_long] = &[libc::SYS_bind, libc::SYS_listen];

fn filter(nvidia: bool, pairs: bool) -> Result<BpfProgram, SandboxError> {
    let architecture: TargetArch =
        std::env::consts::ARCH.try_into().map_err(|_| SandboxError::Architecture)?;
    let mut rules: BTreeMap<i64, _> = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    if pairs {
        // A pair leads nowhere else.
        rules.remove(&libc::SYS_socketpair);
    }
    if nvidia {
        rules.retain(|call, _| !NVIDIA.contains(call));
        let family = u64::from(libc::AF_UNIX.unsigned_abs());
        let other = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family)?;
        rules.insert(libc::SYS_socket, vec![SeccompRule::new(vec![other])?]);
    }
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, refuse, architecture)?.try_into()?)
}

/// What this kernel gives, for the log.
pub(crate) fn describe() -> String {
    let users =
        if can_change_users() { "own user for each worker" } else { "workers run as the daemon's user" };
    let landlock = if landlock_is_there() { "Landlock" } else { "no Landlock in this kernel" };
    format!("{users}, {landlock}, seccomp")
}

fn landlock_is_there() -> bool {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .and_then(Ruleset::create)
        .is_ok()
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket};

    use super::*;

    /// Runs `what` in a thread of its own: both kinds of restriction hold for the thread that puts them on.
    fn in_thread<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(what).join().expect("the thread panicked")
    }

    fn abstract_name(what: &str) -> SocketAddrUnix {
        SocketAddrUnix::new_abstract_name(format!("lighter-{what}-{}", std::process::id()).as_bytes())
            .unwrap()
    }

    #[test]
    fn a_worker_makes_no_socket() {
        in_thread(|| {
            seccompiler::apply_filter(&filter(false, false).unwrap()).unwrap();
            for family in [AddressFamily::UNIX, AddressFamily::INET, AddressFamily::NETLINK] {
                assert_eq!(socket(family, SocketType::DGRAM, None).unwrap_err(), Errno::PERM, "{family:?}");
            }
        });
    }

    #[test]
    fn a_render_server_makes_pairs_and_no_other_socket() {
        in_thread(|| {
            seccompiler::apply_filter(&filter(false, true).unwrap()).unwrap();
            let pair = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                rustix::net::SocketFlags::CLOEXEC,
                None,
            );
            assert!(pair.is_ok());
            assert_eq!(socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap_err(), Errno::PERM);
        });
    }

    #[test]
    fn nvidias_driver_listens_on_the_host_and_connects_nowhere() {
        in_thread(|| {
            seccompiler::apply_filter(&filter(true, false).unwrap()).unwrap();
            let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            bind(&listener, &abstract_name("listens")).unwrap();
            listen(&listener, 1).unwrap();
            let client = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            assert_eq!(connect(&client, &abstract_name("listens")).unwrap_err(), Errno::PERM);
            for family in [AddressFamily::INET, AddressFamily::INET6, AddressFamily::NETLINK] {
                assert_eq!(socket(family, SocketType::DGRAM, None).unwrap_err(), Errno::PERM, "{family:?}");
            }
        });
    }

    #[test]
    fn the_outermost_closed_folder_on_the_way_is_named() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let (outer, inner) = (dir.path().join("outer"), dir.path().join("outer/inner"));
        std::fs::create_dir_all(&inner).unwrap();
        set(dir.path(), 0o755);
        assert_eq!(closed_on_the_way(&inner), None);
        set(&inner, 0o700);
        let real = std::fs::canonicalize(&outer).unwrap();
        assert_eq!(closed_on_the_way(&inner), Some(real.join("inner")));
        set(&outer, 0o750);
        assert_eq!(closed_on_the_way(&inner), Some(real));
        assert_eq!(closed_on_the_way(Path::new("/nowhere")), None);
    }

    #[test]
    fn only_nvidias_driver_names_its_threads() {
        if !landlock_is_there() {
            eprintln!("SKIPPED: this kernel has no Landlock");
            return;
        }
        let name_thread = |nodes: &'static [&'static str]| {
            in_thread(move || {
                let nodes: Vec<_> = nodes.iter().map(PathBuf::from).collect();
                let program = File::open("/proc/self/exe").unwrap();
                landlock_rules(&program, &[], None, Some(&nodes)).unwrap().restrict_self().unwrap();
                assert!(std::fs::read("/etc/hostname").is_err(), "the rules are not on");
                std::fs::write("/proc/thread-self/comm", "named").map_err(|error| error.kind())
            })
        };
        assert_eq!(name_thread(&["/dev/nvidiactl"]), Ok(()));
        assert_eq!(name_thread(&["/dev/dri/renderD128"]), Err(std::io::ErrorKind::PermissionDenied));
    }
}
