// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where things stand by default: the system's folders for root, the XDG folders for anybody else.

use std::env::var_os;
use std::path::PathBuf;

/// Default folders and files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Places {
    /// The configuration file.
    pub(crate) config_file: PathBuf,
    /// Sockets, grants, lock: gone at the next boot.
    pub(crate) state_dir: PathBuf,
    /// Where CDI specs are published.
    pub(crate) spec_dir: PathBuf,
    /// What containers get to see.
    pub(crate) client_dir: PathBuf,
    /// Engines that `lighter setup` fetched.
    pub(crate) engines_dir: PathBuf,
    /// What devices remember.
    pub(crate) data_dir: PathBuf,
    /// What may be thrown away.
    pub(crate) cache_dir: PathBuf,
    /// A detached daemon's log.
    pub(crate) log_file: PathBuf,
}

impl Places {
    /// Of the user who runs this process.
    pub(crate) fn of_this_user() -> Self {
        if rustix::process::geteuid().is_root() { Self::system() } else { Self::xdg() }
    }

    fn system() -> Self {
        Self {
            config_file: "/etc/lighter/config.toml".into(),
            state_dir: "/run/lighter".into(),
            spec_dir: "/var/run/cdi".into(),
            client_dir: "/var/lib/lighter/client".into(),
            engines_dir: "/var/lib/lighter/engines".into(),
            data_dir: "/var/lib/lighter".into(),
            cache_dir: "/var/cache/lighter".into(),
            log_file: "/var/log/lighter.log".into(),
        }
    }

    fn xdg() -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let home = PathBuf::from(var_os("HOME").unwrap_or_else(|| "/nonexistent".into()));
        let xdg = |variable: &str, fallback: PathBuf| {
            var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute()).unwrap_or(fallback)
        };
        let runtime = xdg("XDG_RUNTIME_DIR", format!("/run/user/{uid}").into());
        let data = xdg("XDG_DATA_HOME", home.join(".local/share")).join("lighter");
        let state = xdg("XDG_STATE_HOME", home.join(".local/state")).join("lighter");
        Self {
            config_file: xdg("XDG_CONFIG_HOME", home.join(".config")).join("lighter/config.toml"),
            state_dir: runtime.join("lighter"),
            spec_dir: runtime.join("cdi"),
            client_dir: data.join("client"),
            engines_dir: data.join("engines"),
            data_dir: data,
            cache_dir: xdg("XDG_CACHE_HOME", home.join(".cache")).join("lighter"),
            log_file: state.join("lighter.log"),
        }
    }
}
