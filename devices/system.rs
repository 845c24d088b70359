// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a Linux host keeps what programs load: system libraries, drivers, and what these read.
//!
//! Used by devices whose workers load an engine of the host, to say which folders such a worker may read.

use std::path::{Path, PathBuf};

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
