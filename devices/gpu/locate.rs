// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where virglrenderer and its render server are on this host, and how processes with them are started. Looks at files only.
//!
//! In this order: the system's own, where it is new enough; the renderer root that `lighter setup gpu` made. virglrenderer
//! before 1.2 loads the GPU's driver before it forks, which NVIDIA's does not bear.

use std::path::{Path, PathBuf};

pub use crate::host::Missing;

use super::config::GpuConfig;
use crate::engine_root::{
    Loader, PLATFORM, driver_files, joined, library_folder, system_library_folders, vulkan_drivers,
};

/// The oldest library (1.x of its file's name) that is taken: that of virglrenderer 1.2.
const OLDEST_MINOR: u32 = 10;
const LIBRARY: &str = "libvirglrenderer.so.1";
const SERVER: &str = "virgl_render_server";
/// Drivers that are clients of a renderer themselves.
const CLIENT_DRIVERS: [&str; 2] = ["virtio", "gfxstream"];

/// virglrenderer on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renderer {
    /// The library.
    pub library: PathBuf,
    /// The render server.
    pub server: PathBuf,
    /// How to start a process that can load them; `None` is the ordinary way.
    pub loader: Option<Loader>,
    /// Variables that such a process needs.
    pub environment: Vec<(String, String)>,
    /// Folders that it must be able to read.
    pub folders: Vec<PathBuf>,
    /// What was passed over, and why, for a person.
    pub passed_over: Option<String>,
}

/// Finds virglrenderer. `system` is the folder that stands for `/` (for tests).
///
/// # Errors
/// When there is none that is new enough, with what to do.
pub fn locate(config: &GpuConfig, system: &Path) -> Result<Renderer, Missing> {
    let passed_over = match of_system(config, system) {
        Ok(renderer) => return Ok(renderer),
        Err(why) => why,
    };
    let root = &config.renderer_root;
    let library = library_folder(root).join(LIBRARY);
    let missing = |reason: String| {
        Missing {
        reason,
        remedy: "run `lighter setup gpu`, or install virglrenderer 1.2 or newer with its render server (Debian forky: \
                 libvirglrenderer1, virgl-server)"
            .to_owned(),
    }
    };
    if !library.is_file() {
        return Err(missing(format!("{passed_over}, and {} holds no renderer", root.display())));
    }
    let server = root.join("usr/libexec").join(SERVER);
    if !server.is_file() {
        return Err(missing(format!("the renderer in {} has no {SERVER}", root.display())));
    }
    let Some(loader) = Loader::of_root(root) else {
        return Err(missing(format!("the renderer in {} has no loader {}", root.display(), PLATFORM.1)));
    };
    let mut folders = crate::system::folders(system);
    folders.push(root.clone());
    let drivers = drivers(config, || vulkan_drivers(root, system));
    folders.extend(config.drivers.iter().filter_map(|file| file.parent()).map(Path::to_owned));
    let environment = environment(config, &drivers);
    Ok(Renderer {
        library,
        server,
        loader: Some(loader),
        environment,
        folders,
        passed_over: Some(passed_over),
    })
}

/// The system's own; else why it is not taken.
fn of_system(config: &GpuConfig, system: &Path) -> Result<Renderer, String> {
    let folders = system_library_folders(system);
    let library = folders.iter().map(|folder| folder.join(LIBRARY)).find(|library| library.is_file());
    let library = library.ok_or("this system has no virglrenderer")?;
    let version = minor(&library);
    if version.is_none_or(|minor| minor < OLDEST_MINOR) {
        return Err(format!(
            "this system's virglrenderer, {}, is older than 1.2 (its library is 1.{}, 1.{OLDEST_MINOR} is needed)",
            library.display(),
            version.map_or("?".to_owned(), |minor| minor.to_string())
        ));
    }
    let servers = ["usr/libexec", "usr/local/libexec", "usr/lib/virglrenderer", "usr/lib"];
    let server = servers.iter().map(|place| system.join(place).join(SERVER)).find(|server| server.is_file());
    let server = server.ok_or_else(|| {
        format!("this system's virglrenderer, {}, has no {SERVER} beside it", library.display())
    })?;
    let found = || {
        let places = ["etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d", "usr/share/vulkan/icd.d"];
        places.iter().flat_map(|place| driver_files(&system.join(place))).collect()
    };
    let drivers = drivers(config, found);
    let mut readable = crate::system::folders(system);
    readable.extend([library.parent(), server.parent()].into_iter().flatten().map(Path::to_owned));
    readable.extend(config.drivers.iter().filter_map(|file| file.parent()).map(Path::to_owned));
    let environment = environment(config, &drivers);
    Ok(Renderer { library, server, loader: None, environment, folders: readable, passed_over: None })
}

/// The second number of the library's file, `libvirglrenderer.so.1.11.0`.
fn minor(library: &Path) -> Option<u32> {
    let file = std::fs::canonicalize(library).ok()?;
    let name = file.file_name()?.to_str()?;
    name.strip_prefix(LIBRARY)?.strip_prefix('.')?.split('.').next()?.parse().ok()
}

fn drivers(config: &GpuConfig, found: impl FnOnce() -> Vec<PathBuf>) -> Vec<PathBuf> {
    if !config.drivers.is_empty() {
        return config.drivers.clone();
    }
    let mut drivers = found();
    drivers.retain(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        !CLIENT_DRIVERS.iter().any(|client| name.starts_with(client))
    });
    drivers
}

/// Variables for the render server and for the probe.
fn environment(config: &GpuConfig, drivers: &[PathBuf]) -> Vec<(String, String)> {
    let mut variables: Vec<(String, String)> =
        config.environment.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    let mut set = |name: &str, value: String| {
        if !config.environment.contains_key(name) {
            variables.push((name.to_owned(), value));
        }
    };
    set("VK_DRIVER_FILES", joined(drivers));
    // Compiled shaders of one container must not come to another.
    set("MESA_SHADER_CACHE_DISABLE", "true".to_owned());
    set("__GL_SHADER_DISK_CACHE", "0".to_owned());
    // Nobody's home: drivers would look for files in it.
    set("HOME", "/nonexistent".to_owned());
    variables
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn put_library(folder: &Path, version: &str) {
        touch(&folder.join(format!("{LIBRARY}.{version}")));
        let _ = fs::remove_file(folder.join(LIBRARY));
        symlink(format!("{LIBRARY}.{version}"), folder.join(LIBRARY)).unwrap();
    }

    fn variable<'a>(renderer: &'a Renderer, name: &str) -> &'a str {
        renderer.environment.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value.as_str())
    }

    #[test]
    fn a_new_system_comes_first_an_old_one_gives_way_to_the_root_and_nothing_has_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let (triplet, loader) = PLATFORM;
        let (system, root) = (dir.path().join("system"), dir.path().join("root"));
        let config = GpuConfig { renderer_root: root.clone(), ..GpuConfig::default() };
        let missing = locate(&config, &system).unwrap_err();
        assert!(
            missing.reason.contains("no virglrenderer") && missing.remedy.contains("lighter setup gpu"),
            "{missing:?}"
        );

        let libraries = system.join("usr/lib").join(triplet);
        put_library(&libraries, "9.0");
        touch(&system.join("usr/libexec").join(SERVER));
        let missing = locate(&config, &system).unwrap_err();
        assert!(missing.reason.contains("older than 1.2"), "{missing:?}");

        put_library(&root.join("usr/lib").join(triplet), "11.0");
        assert!(locate(&config, &system).unwrap_err().reason.contains(SERVER));
        touch(&root.join("usr/libexec").join(SERVER));
        assert!(locate(&config, &system).unwrap_err().reason.contains("no loader"));
        touch(&root.join("lib64").join(loader));
        for name in ["lvp_icd", "virtio_icd", "gfxstream_vk_icd"] {
            touch(&root.join(format!("usr/share/vulkan/icd.d/{name}.json")));
        }
        touch(&system.join("usr/share/vulkan/icd.d/nvidia_icd.json"));
        let renderer = locate(&config, &system).unwrap();
        assert!(renderer.library.starts_with(&root) && renderer.loader.is_some());
        assert!(renderer.passed_over.as_deref().unwrap().contains("older than 1.2"));
        let drivers = variable(&renderer, "VK_DRIVER_FILES");
        assert!(drivers.contains("lvp_icd") && drivers.contains("nvidia_icd"), "{drivers}");
        assert!(!drivers.contains("virtio") && !drivers.contains("gfxstream"), "{drivers}");

        put_library(&libraries, "10.0");
        touch(&system.join("usr/share/vulkan/icd.d/radeon_icd.json"));
        let renderer = locate(&config, &system).unwrap();
        assert_eq!((renderer.loader.as_ref(), renderer.passed_over.as_ref()), (None, None));
        assert!(variable(&renderer, "VK_DRIVER_FILES").contains("radeon_icd"));
        fs::remove_file(system.join("usr/libexec").join(SERVER)).unwrap();
        assert!(locate(&config, &system).unwrap().passed_over.unwrap().contains(SERVER));
    }

    #[test]
    fn settings_come_before_what_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (triplet, _) = PLATFORM;
        put_library(&dir.path().join("usr/lib").join(triplet), "11.0");
        touch(&dir.path().join("usr/libexec").join(SERVER));
        let config = GpuConfig {
            drivers: vec!["/my/driver.json".into()],
            environment: [("MESA_SHADER_CACHE_DISABLE".to_owned(), "false".to_owned())].into(),
            ..GpuConfig::default()
        };
        let renderer = locate(&config, dir.path()).unwrap();
        assert_eq!(variable(&renderer, "VK_DRIVER_FILES"), "/my/driver.json");
        assert_eq!(variable(&renderer, "MESA_SHADER_CACHE_DISABLE"), "false");
        assert!(renderer.folders.contains(&PathBuf::from("/my")));
    }
}
