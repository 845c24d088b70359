// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts a stream's processes to its container: they join the container's control groups for memory and processor time, so that
//! the container's own limits hold for what they do for it.
//!
//! In the old hierarchies only these two are joined. The unified one has one group for everything, the filter of device nodes
//! with it: a render server that has yet to open a GPU's node would be refused there, so it joins only where it needs none.

use std::path::{Path, PathBuf};

/// What becomes of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    /// It joins these groups.
    Join(Vec<PathBuf>),
    /// It stays out, for this reason.
    StayOut(&'static str),
}

/// Decides by the folders of the container's groups. `needs_nodes`: whether the process opens device nodes.
pub(super) fn plan(groups: &[PathBuf], needs_nodes: bool) -> Plan {
    if groups.is_empty() {
        return Plan::StayOut("the container has no control groups of its own for memory and processor time");
    }
    if needs_nodes && groups.iter().any(|group| is_unified(group)) {
        return Plan::StayOut("the container's control group would refuse it the GPU's device nodes");
    }
    Plan::Join(groups.to_vec())
}

/// Whether a folder is a group of the unified hierarchy.
fn is_unified(group: &Path) -> bool {
    group.join("cgroup.controllers").exists()
}

/// Has a process join groups.
pub(super) fn join(groups: &[PathBuf], pid: u32) -> Result<(), String> {
    for group in groups {
        std::fs::write(group.join("cgroup.procs"), pid.to_string()).map_err(|error| {
            format!("it cannot be counted to its container: control group {}: {error}", group.display())
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unified_group_is_joined_only_without_device_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let group = vec![dir.path().to_owned()];
        assert_eq!(plan(&group, true), Plan::Join(group.clone()));
        std::fs::write(dir.path().join("cgroup.controllers"), "memory").unwrap();
        assert!(matches!(plan(&group, true), Plan::StayOut(why) if why.contains("device nodes")));
        assert_eq!(plan(&group, false), Plan::Join(group));
        assert!(matches!(plan(&[], false), Plan::StayOut(_)));
    }

    #[test]
    fn joining_writes_the_process_and_a_group_that_is_gone_is_named() {
        let dir = tempfile::tempdir().unwrap();
        join(&[dir.path().to_owned()], 7).unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("cgroup.procs")).unwrap(), "7");
        let error = join(&[dir.path().join("gone")], 7).unwrap_err();
        assert!(error.contains("gone"), "{error}");
    }
}
