// SPDX-License-Identifier: MIT OR Apache-2.0
//! ggml's RPC client for images that have none: the host's own, and lighter's plug-in that loads it.
//!
//! Both go into the device's folder, the client under a name with ggml's version, because a client fits a ggml of
//! its own version only; the plug-in (`plugin/`) looks for the one that fits the program's. Where the host has no
//! such client or lighter's plug-in is not installed, neither is laid out and programs with a client of their own
//! are served all the same.

use std::path::{Path, PathBuf};

use super::config::MetalConfig;
use super::edits::FOLDER;
use super::locate::locate;
use crate::client::{ClientFile, Content};
use crate::host::{Host, Probe};

/// The plug-in's file, in `Host::plugin_dir` and in the device's folder.
const PLUGIN: &str = "libggml-lighter.so";
/// ggml's RPC client among its plug-ins.
const CLIENT: &str = "libggml-rpc.so";

/// The plug-in below the client folder.
#[must_use]
pub fn plugin_path() -> PathBuf {
    Path::new(FOLDER).join(PLUGIN)
}

/// The plug-in and the client, or nothing.
#[must_use]
pub fn files(host: &Host, config: &MetalConfig, probe: &Probe) -> Vec<ClientFile> {
    let Some(engine) = probe.best() else { return Vec::new() };
    let backends = locate(config, Path::new("/")).ok().and_then(|files| files.libraries.backends_dir);
    let client = backends.map(|folder| folder.join(CLIENT)).filter(|path| path.is_file());
    let plugin = host.plugin_dir.join(PLUGIN);
    match client {
        Some(client) if plugin.is_file() => pair(&engine.version, plugin, client),
        Some(_) => {
            tracing::info!(plugin = %plugin.display(), "not there: images without ggml's RPC client are not served");
            Vec::new()
        }
        None => {
            tracing::info!(
                "the host's ggml has no {CLIENT}: images without an RPC client of their own are not served"
            );
            Vec::new()
        }
    }
}

fn pair(version: &str, plugin: PathBuf, client: PathBuf) -> Vec<ClientFile> {
    let is_version = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | '_');
    if version.is_empty() || !version.chars().all(is_version) {
        return Vec::new();
    }
    let file = |path, from| ClientFile { path, content: Content::CopyOf(from), executable: false };
    vec![
        file(plugin_path(), plugin),
        file(Path::new(FOLDER).join(format!("libggml-rpc-{version}.so")), client),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::host::Engine;
    use crate::metal::config::Libraries;

    fn probe(version: &str) -> Probe {
        Probe::Found(vec![Engine {
            name: "CPU".into(),
            description: String::new(),
            version: version.into(),
            memory_bytes: None,
            stable_name: "cpu".into(),
            aliases: Vec::new(),
        }])
    }

    #[test]
    fn both_are_laid_out_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["libggml-base.so.0", "libggml.so.0"] {
            fs::write(at(name), "").unwrap();
        }
        let libraries = Libraries {
            base: at("libggml-base.so.0"),
            registry: at("libggml.so.0"),
            backends_dir: Some(folder.path().to_owned()),
        };
        let config = MetalConfig { libraries: Some(libraries), ..MetalConfig::default() };
        let host = Host {
            program: "/p".into(),
            hook: "/h".into(),
            hook_socket: "/s".into(),
            client_dir: "/c".into(),
            socket_dir: "/r".into(),
            plugin_dir: folder.path().to_owned(),
        };
        let paths = |version: &str| -> Vec<PathBuf> {
            files(&host, &config, &probe(version)).into_iter().map(|file| file.path).collect()
        };
        assert!(paths("0.27.0").is_empty());
        fs::write(at(CLIENT), "").unwrap();
        assert!(paths("0.27.0").is_empty(), "without the plug-in");
        fs::write(at(PLUGIN), "").unwrap();
        let expected = ["metal/libggml-lighter.so", "metal/libggml-rpc-0.27.0.so"].map(PathBuf::from);
        assert_eq!(paths("0.27.0"), expected);
        assert!(paths("../x").is_empty(), "a version that is none");
        let missing = Probe::Missing { reason: String::new(), remedy: String::new() };
        assert!(files(&host, &config, &missing).is_empty());
    }
}
