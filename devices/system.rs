// SPDX-License-Identifier: MIT OR Apache-2.0
//! What services ask the host itself: its memory and processors, and where it keeps what programs load, which says
//! what a worker may read.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Memory of the host.
pub(crate) fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit.max(1));
    #[allow(clippy::useless_conversion, reason = "the type of totalram differs between architectures")]
    u64::from(info.totalram).saturating_mul(unit)
}

/// Processors that this process may use. More threads than that wait for each other at every step.
pub(crate) fn processors() -> Option<u16> {
    std::thread::available_parallelism().ok().and_then(|count| u16::try_from(count.get()).ok())
}

/// Lets this process, and workers after it, have as many descriptors as it may; returns how many that are.
pub(crate) fn raise_descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let got = if setrlimit(Resource::Nofile, most).is_ok() { limit.maximum } else { limit.current };
    got.and_then(|got| usize::try_from(got).ok()).unwrap_or(usize::MAX)
}

/// What any process that loads system libraries and drivers reads, of the system below this folder.
pub(crate) fn folders(system: &Path) -> Vec<PathBuf> {
    let places = [
        "usr/lib",
        "usr/lib64",
        "usr/local/lib",
        "lib",
        "lib64",
        "usr/local/cuda",
        "opt/rocm",
        "etc/ld.so.cache",
        "etc/ld.so.preload",
        "etc/vulkan",
        "usr/share/vulkan",
        "usr/share/nvidia",
        "usr/share/drirc.d",
        "usr/share/libdrm",
        "etc/OpenCL",
        "etc/localtime",
        "usr/share/zoneinfo",
    ];
    // Drivers lie wherever the loader is told to look for them.
    places.iter().map(|place| system.join(place)).chain(loader_folders(system)).collect()
}

/// Folders that the system's loader is configured with.
pub(crate) fn loader_folders(system: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(system.join("etc/ld.so.conf.d")) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .flat_map(|text| {
            text.lines()
                .map(|line| line.split('#').next().unwrap_or_default().trim().to_owned())
                .filter(|line| line.starts_with('/'))
                .collect::<Vec<_>>()
        })
        .map(|line| system.join(line.trim_start_matches('/')))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_the_loader_is_told_of_are_among_them() {
        let system = tempfile::tempdir().unwrap();
        let conf = system.path().join("etc/ld.so.conf.d");
        std::fs::create_dir_all(&conf).unwrap();
        std::fs::write(conf.join("driver.conf"), "# the driver\n/opt/driver/lib64 # here\nrelative\n")
            .unwrap();
        let found = folders(system.path());
        assert!(found.contains(&system.path().join("opt/driver/lib64")), "{found:?}");
        assert!(found.contains(&system.path().join("usr/lib")), "{found:?}");
        assert!(!found.iter().any(|place| place.ends_with("relative")), "{found:?}");
    }
}
