// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where ggml is on this host, and how a process that loads it must be started. Looks at files only.
//!
//! In this order: the libraries that the configuration names, the engine root that `lighter setup metal` made,
//! the system's own libraries.

use std::path::{Path, PathBuf};

pub use crate::host::Missing;

use super::config::{Libraries, MetalConfig};
use crate::engine_root::{Loader, PLATFORM, joined, library_folder, system_library_folders, vulkan_drivers};

/// ggml on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFiles {
    /// The libraries to load.
    pub libraries: Libraries,
    /// How to start a process that can load them; `None` is the ordinary way.
    pub loader: Option<Loader>,
    /// Variables that the process needs.
    pub environment: Vec<(String, String)>,
    /// Folders that it must be able to read.
    pub folders: Vec<PathBuf>,
}

/// Finds ggml. `system` is the folder that stands for `/` (for tests).
///
/// # Errors
/// When ggml is nowhere, with what to do.
pub fn locate(config: &MetalConfig, system: &Path) -> Result<EngineFiles, Missing> {
    if let Some(libraries) = &config.libraries {
        return configured(libraries, config, system);
    }
    if let Some(files) = engine_root(&config.engine_root, config, system)? {
        return Ok(files);
    }
    if let Some(files) = system_libraries(config, system) {
        return Ok(files);
    }
    Err(Missing {
        reason: format!(
            "ggml (libggml.so.0, libggml-base.so.0) is neither in {} nor in the system's library folders",
            config.engine_root.display()
        ),
        remedy: "run `lighter setup metal`, or install your distribution's ggml (Debian: libggml0)"
            .to_owned(),
    })
}

fn configured(libraries: &Libraries, config: &MetalConfig, system: &Path) -> Result<EngineFiles, Missing> {
    let named = [("base", Some(&libraries.base)), ("registry", Some(&libraries.registry))];
    let backends = [("backends_dir", libraries.backends_dir.as_ref())];
    for (key, path) in named.into_iter().chain(backends) {
        if let Some(path) = path.filter(|path| !path.exists()) {
            return Err(Missing {
                reason: format!(
                    "metal.libraries.{key} = {:?}: there is no such file",
                    path.display().to_string()
                ),
                remedy: "correct the setting, or remove metal.libraries to have lighter search".to_owned(),
            });
        }
    }
    let mut folders = crate::system::folders(system);
    let parents = [libraries.base.parent(), libraries.registry.parent(), libraries.backends_dir.as_deref()];
    folders.extend(parents.into_iter().flatten().map(Path::to_owned));
    Ok(EngineFiles { libraries: libraries.clone(), loader: None, environment: environment(config), folders })
}

fn engine_root(root: &Path, config: &MetalConfig, system: &Path) -> Result<Option<EngineFiles>, Missing> {
    let Some(libraries) = libraries_in(&library_folder(root)) else {
        return Ok(None);
    };
    let Some(loader) = Loader::of_root(root) else {
        return Err(Missing {
            reason: format!("engine root {} has ggml but no loader {}", root.display(), PLATFORM.1),
            remedy: "run `lighter setup metal` again".to_owned(),
        });
    };
    let mut environment = environment(config);
    let drivers = vulkan_drivers(root, system);
    if !drivers.is_empty() {
        environment.push(("VK_DRIVER_FILES".to_owned(), joined(&drivers)));
    }
    let mut folders = crate::system::folders(system);
    folders.push(root.to_owned());
    Ok(Some(EngineFiles { libraries, loader: Some(loader), environment, folders }))
}

fn system_libraries(config: &MetalConfig, system: &Path) -> Option<EngineFiles> {
    let folders = system_library_folders(system);
    let libraries = folders.into_iter().find_map(|folder| libraries_in(&folder))?;
    let mut folders = crate::system::folders(system);
    folders.extend(libraries.base.parent().map(Path::to_owned));
    Some(EngineFiles { libraries, loader: None, environment: environment(config), folders })
}

/// ggml in one folder, when all of it is there.
fn libraries_in(folder: &Path) -> Option<Libraries> {
    let find = |names: [&str; 2]| names.map(|name| folder.join(name)).into_iter().find(|path| path.is_file());
    let base = find(["libggml-base.so.0", "libggml-base.so"])?;
    let registry = find(["libggml.so.0", "libggml.so"])?;
    let backends = ["ggml/backends0", "ggml/backends", "ggml"].map(|name| folder.join(name));
    Some(Libraries { base, registry, backends_dir: backends.into_iter().find(|path| path.is_dir()) })
}

fn environment(config: &MetalConfig) -> Vec<(String, String)> {
    config.environment.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn put_ggml(folder: &Path) {
        touch(&folder.join("libggml.so.0"));
        touch(&folder.join("libggml-base.so.0"));
        touch(&folder.join("ggml/backends0/libggml-cpu.so"));
    }

    fn config(root: &Path) -> MetalConfig {
        MetalConfig { engine_root: root.to_owned(), ..MetalConfig::default() }
    }

    #[test]
    fn nothing_there_is_missing_with_a_remedy() {
        let system = tempfile::tempdir().unwrap();
        let missing = locate(&config(&system.path().join("engine")), system.path()).unwrap_err();
        assert!(missing.reason.contains("libggml.so.0"), "{missing:?}");
        assert!(missing.remedy.contains("lighter setup metal"), "{missing:?}");
    }

    #[test]
    fn the_engine_root_comes_before_the_system_and_brings_its_loader_and_drivers() {
        let system = tempfile::tempdir().unwrap();
        let (triplet, loader) = PLATFORM;
        put_ggml(&system.path().join("usr/lib").join(triplet));
        let root = system.path().join("engine");
        let plain = locate(&config(&root), system.path()).unwrap();
        assert_eq!(plain.loader, None);
        assert!(plain.libraries.backends_dir.unwrap().ends_with("ggml/backends0"));

        put_ggml(&root.join("usr/lib").join(triplet));
        assert!(locate(&config(&root), system.path()).unwrap_err().reason.contains("no loader"));
        touch(&root.join("lib64").join(loader));
        touch(&root.join("usr/share/vulkan/icd.d/lvp.json"));
        touch(&system.path().join("usr/share/vulkan/icd.d/radeon.json"));
        touch(&system.path().join("usr/share/vulkan/icd.d/nvidia_icd.json"));
        let files = locate(&config(&root), system.path()).unwrap();
        assert!(files.libraries.base.starts_with(&root));
        assert_eq!(files.loader.unwrap().program, root.join("lib64").join(loader));
        let [(name, drivers)] = files.environment.as_slice() else { panic!("{:?}", files.environment) };
        assert_eq!(name, "VK_DRIVER_FILES");
        assert!(drivers.contains("lvp.json") && drivers.contains("nvidia_icd.json"), "{drivers}");
        assert!(!drivers.contains("radeon"), "{drivers}");
    }

    #[test]
    fn configured_libraries_come_first_and_a_wrong_path_is_named() {
        let system = tempfile::tempdir().unwrap();
        let folder = system.path().join("my");
        put_ggml(&folder);
        let mut config = config(&system.path().join("engine"));
        let libraries = Libraries {
            base: folder.join("libggml-base.so.0"),
            registry: folder.join("libggml.so.0"),
            backends_dir: None,
        };
        config.libraries = Some(libraries.clone());
        assert_eq!(locate(&config, system.path()).unwrap().libraries, libraries);
        config.libraries = Some(Libraries { registry: folder.join("none.so"), ..libraries });
        assert!(locate(&config, system.path()).unwrap_err().reason.contains("metal.libraries.registry"));
    }

    #[test]
    fn a_folder_of_the_loaders_configuration_is_searched() {
        let system = tempfile::tempdir().unwrap();
        put_ggml(&system.path().join("opt/ggml"));
        touch(&system.path().join("etc/ld.so.conf.d/ggml.conf"));
        fs::write(system.path().join("etc/ld.so.conf.d/ggml.conf"), "# ours\n/opt/ggml # here\n").unwrap();
        let files = locate(&config(&system.path().join("engine")), system.path()).unwrap();
        assert_eq!(files.libraries.registry, system.path().join("opt/ggml/libggml.so.0"));
        assert!(files.folders.contains(&system.path().join("opt/ggml")), "a worker may read it");
    }
}
