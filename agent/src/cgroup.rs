// SPDX-License-Identifier: MIT OR Apache-2.0
//! Control groups: where a process lives, and which of its groups is the container's own.
//!
//! `/proc/PID/cgroup` names one path per hierarchy (one on a v2 system, a dozen on a v1 or hybrid one). A group
//! identifies a container only when nobody else is in it: a session's or a runtime's group would let strangers in,
//! and `/` holds everybody. Called at grant time ([`choose`]) and by the gate ([`CgroupId::holds`]).

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::proc::{self, read_capped};

const MAX_CGROUP_FILE_BYTES: u64 = 256 << 10;
const MAX_MEMBERS_BYTES: u64 = 1 << 20;

/// All groups of one process, hierarchy and path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroups(Vec<(String, String)>);

/// Why a cgroup file was not taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CgroupError {
    /// A line that has not three parts.
    #[error("line {line:?} is not of the form number:controllers:/path")]
    Line {
        /// The line, shortened.
        line: String,
    },
    /// A path that leads out of the reader's own view.
    #[error("path {path:?} lies outside of the agent's own cgroup namespace; run the agent in the host's")]
    Outside {
        /// The path, shortened.
        path: String,
    },
}

impl Cgroups {
    /// Parses the text of `/proc/PID/cgroup`.
    ///
    /// # Errors
    /// When a line has another form, or a path cannot be compared with others.
    pub fn parse(text: &str) -> Result<Self, CgroupError> {
        let short = |text: &str| text.chars().take(200).collect::<String>();
        let mut groups: Vec<(String, String)> = Vec::new();
        for line in text.lines() {
            let bad = || CgroupError::Line { line: short(line) };
            let mut parts = line.splitn(3, ':');
            let (Some(number), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
            else {
                return Err(bad());
            };
            if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) || !path.starts_with('/') {
                return Err(bad());
            }
            if path.split('/').any(|part| part == "..") {
                return Err(CgroupError::Outside { path: short(path) });
            }
            // A hierarchy has one group of a process: a second would make it unclear which one counts.
            if groups.iter().any(|(known, _)| known == controllers) {
                return Err(bad());
            }
            groups.push((controllers.to_owned(), path.to_owned()));
        }
        Ok(Self(groups))
    }

    /// The groups of a process.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let text = read_capped(&PathBuf::from(format!("/proc/{pid}/cgroup")), MAX_CGROUP_FILE_BYTES)?;
        Self::parse(&String::from_utf8_lossy(&text)).map_err(io::Error::other)
    }

    fn path(&self, hierarchy: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == hierarchy).map(|(_, path)| path.as_str())
    }

    /// Whether the process lives in or below `path` in any hierarchy.
    #[must_use]
    pub fn any_below(&self, path: &str) -> bool {
        path != "/" && self.0.iter().any(|(_, own)| is_below(own, path))
    }
}

/// One group that only one container's processes live in. Never `/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CgroupId {
    hierarchy: String,
    path: String,
}

impl CgroupId {
    /// Whether the process with these groups lives in it or below.
    #[must_use]
    pub fn holds(&self, peer: &Cgroups) -> bool {
        self.path != "/" && peer.path(&self.hierarchy).is_some_and(|path| is_below(path, &self.path))
    }

    /// How deep it lies; the outermost of nested containers has the smallest depth.
    #[must_use]
    pub fn depth(&self) -> usize {
        depth(&self.path)
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }
}

fn depth(path: &str) -> usize {
    path.split('/').filter(|part| !part.is_empty()).count()
}

fn is_below(path: &str, top: &str) -> bool {
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || top.ends_with('/'))
}

/// The candidates for a container's own group, most specific first: every path of the init but `/` and
/// those in which one of the `strangers` (the agent itself, the runtime that calls the hook) lives.
#[must_use]
pub(crate) fn candidates(init: &Cgroups, strangers: &[&Cgroups]) -> Vec<CgroupId> {
    let mut own: Vec<CgroupId> = init
        .0
        .iter()
        .map(|(hierarchy, path)| CgroupId { hierarchy: hierarchy.clone(), path: path.clone() })
        .filter(|id| id.path != "/" && !strangers.iter().any(|stranger| id.holds(stranger)))
        .collect();
    // A stable sort: at the same depth the kernel's order stands, with the v2 hierarchy before all.
    own.sort_by_key(|id| (std::cmp::Reverse(id.depth()), !id.hierarchy.is_empty()));
    own
}

/// Where the hierarchies are mounted, to ask who lives in a group.
#[derive(Debug, Clone, Default)]
pub(crate) struct CgroupMounts(Vec<(String, PathBuf)>);

impl CgroupMounts {
    /// Reads the mounts that this process sees.
    pub(crate) fn read() -> io::Result<Self> {
        let text = read_capped(Path::new("/proc/self/mountinfo"), 16 << 20)?;
        Ok(Self::parse(&String::from_utf8_lossy(&text)))
    }

    /// Takes the cgroup mounts out of a mountinfo text; mounts of a part of a hierarchy are passed over.
    #[must_use]
    pub(crate) fn parse(mountinfo: &str) -> Self {
        let mut mounts = Vec::new();
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let mut left = left.split(' ').skip(3);
            let (Some("/"), Some(point)) = (left.next(), left.next()) else { continue };
            let mut right = right.split(' ');
            match (right.next(), right.nth(1)) {
                (Some("cgroup2"), _) => mounts.push((String::new(), PathBuf::from(point))),
                (Some("cgroup"), Some(options)) => {
                    mounts.push((options.to_owned(), PathBuf::from(point)));
                }
                _ => {}
            }
        }
        Self(mounts)
    }

    fn directory(&self, id: &CgroupId) -> Option<PathBuf> {
        let mounted = |options: &str| {
            if id.hierarchy.is_empty() || options.is_empty() {
                return id.hierarchy == options;
            }
            id.hierarchy.split(',').all(|name| options.split(',').any(|option| option == name))
        };
        let (_, point) = self.0.iter().find(|(options, _)| mounted(options))?;
        Some(point.join(id.path.trim_start_matches('/')))
    }

    /// The folders of a process's groups in which memory and processor time are counted: the unified hierarchy's where it
    /// counts, else those of the old ones. None of them is `/`.
    pub(crate) fn accounts(&self, groups: &Cgroups) -> Vec<PathBuf> {
        let counts = |hierarchy: &str, controllers: &[&str]| {
            hierarchy.split(',').any(|name| controllers.contains(&name))
        };
        let folders = |controllers: &[&str]| -> Vec<PathBuf> {
            let of =
                groups.0.iter().filter(|(hierarchy, path)| path != "/" && counts(hierarchy, controllers));
            of.map(|(hierarchy, path)| CgroupId { hierarchy: hierarchy.clone(), path: path.clone() })
                .filter_map(|id| self.directory(&id))
                .collect()
        };
        // On a hybrid system the unified hierarchy counts nothing.
        let old = folders(&["memory", "cpu", "cpuacct"]);
        if old.is_empty() { folders(&[""]) } else { old }
    }

    /// Whether every process in the group is the init or shares its mount namespace.
    fn is_own(&self, id: &CgroupId, init: u32) -> bool {
        let Some(directory) = self.directory(id) else { return false };
        let Ok(text) = read_capped(&directory.join("cgroup.procs"), MAX_MEMBERS_BYTES) else { return false };
        let Ok(mount) = proc::ns_id(init, "mnt") else { return false };
        String::from_utf8_lossy(&text).lines().all(|line| match line.parse::<u32>() {
            // A process that has gone or is a zombie holds no socket; one of another pid namespace shows as 0.
            Ok(pid) => pid != 0 && (pid == init || proc::ns_id(pid, "mnt").is_ok_and(|ns| ns == mount)),
            Err(_) => false,
        })
    }
}

/// The container's own group, if it has one that can be shown to be its own.
pub(crate) fn choose(
    mounts: &CgroupMounts,
    init_pid: u32,
    init: &Cgroups,
    strangers: &[&Cgroups],
) -> Option<CgroupId> {
    let mut own = candidates(init, strangers);
    own.dedup_by(|a, b| a.path == b.path);
    own.into_iter().take(3).find(|id| mounts.is_own(id, init_pid))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V2: &str = "0::/system.slice/docker-0f3c.scope\n";
    const HYBRID: &str = "9:name=systemd:/docker/0f3c\n4:memory:/outer/docker/0f3c\n1:cpu,cpuacct:/\n0::/\n";

    fn groups(text: &str) -> Cgroups {
        Cgroups::parse(text).unwrap()
    }

    #[test]
    fn the_deepest_group_without_strangers_identifies() {
        let host = groups("9:name=systemd:/\n4:memory:/outer\n1:cpu,cpuacct:/\n0::/\n");
        let own = candidates(&groups(HYBRID), &[&host]);
        assert_eq!(own[0], CgroupId { hierarchy: "memory".into(), path: "/outer/docker/0f3c".into() });
        assert_eq!(own.len(), 2);
    }

    #[test]
    fn a_group_that_the_runtime_is_in_does_not_identify() {
        let session = groups("0::/user.slice/session-1.scope\n");
        assert!(candidates(&session, &[&session]).is_empty());
        assert!(candidates(&groups("0::/\n4:memory:/\n"), &[]).is_empty());
    }

    #[test]
    fn below_is_by_whole_names() {
        let id = candidates(&groups(V2), &[])[0].clone();
        assert!(id.holds(&groups("0::/system.slice/docker-0f3c.scope/inner\n")));
        assert!(id.holds(&groups(V2)));
        assert!(!id.holds(&groups("0::/system.slice/docker-0f3c.scope2\n")));
        assert!(!id.holds(&groups("0::/system.slice\n")));
        assert!(!id.holds(&groups("4:memory:/system.slice/docker-0f3c.scope\n")));
    }

    #[test]
    fn a_path_with_colons_is_kept_and_bad_lines_are_named() {
        assert_eq!(groups("0::/a:b/c\n").path(""), Some("/a:b/c"));
        assert!(matches!(Cgroups::parse("0:/x"), Err(CgroupError::Line { .. })));
        assert!(matches!(Cgroups::parse("0::x"), Err(CgroupError::Line { .. })));
        assert!(matches!(Cgroups::parse("0::/a\n0::/b"), Err(CgroupError::Line { .. })));
        assert!(matches!(Cgroups::parse("0::/../x"), Err(CgroupError::Outside { .. })));
    }

    #[test]
    fn the_directory_of_a_group_is_found_for_both_versions() {
        let mounts = CgroupMounts::parse(
            "30 1 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             31 1 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:3 - cgroup cgroup rw,cpu,cpuacct\n\
             32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
             33 1 0:29 /part /elsewhere rw - cgroup2 cgroup2 rw\n",
        );
        let at = |hierarchy: &str| {
            mounts.directory(&CgroupId { hierarchy: hierarchy.into(), path: "/d/x".into() })
        };
        assert_eq!(at(""), Some("/sys/fs/cgroup/unified/d/x".into()));
        assert_eq!(at("memory"), Some("/sys/fs/cgroup/memory/d/x".into()));
        assert_eq!(at("cpu,cpuacct"), Some("/sys/fs/cgroup/cpu,cpuacct/d/x".into()));
        assert_eq!(at("pids"), None);
    }

    #[test]
    fn accounts_are_the_groups_that_count_and_never_the_root() {
        let old = "30 1 0:26 / /cg/memory rw - cgroup c rw,memory\n31 1 0:27 / /cg/cpu rw - cgroup c rw,cpu,cpuacct\n\
                   32 1 0:28 / /cg/unified rw - cgroup2 c rw\n33 1 0:29 / /cg/pids rw - cgroup c rw,pids\n";
        let of = |mounts: &str, own: &str| CgroupMounts::parse(mounts).accounts(&groups(own));
        let own = "4:memory:/d/x\n3:pids:/d/x\n1:cpu,cpuacct:/d/x\n0::/d/x\n";
        assert_eq!(of(old, own), ["/cg/memory/d/x", "/cg/cpu/d/x"].map(PathBuf::from));
        assert_eq!(of(old, "4:memory:/d/x\n1:cpu,cpuacct:/\n0::/d/x\n"), [PathBuf::from("/cg/memory/d/x")]);
        let unified = "32 1 0:28 / /cg rw - cgroup2 c rw\n";
        assert_eq!(of(unified, "0::/d/x\n"), [PathBuf::from("/cg/d/x")]);
        assert!(of(unified, "0::/\n").is_empty());
    }

    proptest! {
        #[test]
        fn no_text_panics_and_no_candidate_is_the_root(text in "([0-9]{0,2}:[a-z=,]{0,6}:/?[a-z/.:]{0,12}\n?){0,4}") {
            let _ = CgroupMounts::parse(&text);
            if let Ok(groups) = Cgroups::parse(&text) {
                for id in candidates(&groups, &[]) {
                    prop_assert!(id.path() != "/" && id.holds(&groups));
                }
            }
        }

        #[test]
        fn no_bytes_panic(text in ".{0,100}") {
            let _ = Cgroups::parse(&text);
            let _ = CgroupMounts::parse(&text);
        }
    }
}
