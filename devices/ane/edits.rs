// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a container gets: facts about the host and its engines in, a CDI spec out. Pure.
//!
//! `tests/golden/ane-*.json` show the result. The socket's directory is mounted, since a restarted daemon makes a new
//! socket. Nothing makes a program use the device unasked: no variable that loaders or interpreters read is set.

use lighter_cdi::{Mount, Spec};
use lighter_wire::{CONTAINER_SOCKETS, Endpoint, Kind, socket_directory};

use super::client_files;
use crate::client::{CONTAINER_DIR, ClientFile};
use crate::host::{Host, Probe};
use crate::spec::text;

/// Folder of the device below the client folder, on the host and in a container.
pub const FOLDER: &str = "ane";

/// The variables that name the socket and the library; their values are what the library and its helpers assume where
/// there are no variables.
#[must_use]
pub fn variables() -> Vec<(String, String)> {
    let library = format!("{CONTAINER_DIR}/{}", client_files::library_path().display());
    vec![
        ("LIGHTER_ANE".to_owned(), Endpoint::Unix(Kind::Ane).to_string()),
        ("LIGHTER_ANE_EP".to_owned(), library),
    ]
}

/// The spec: device `all`, and one for each engine under its name. `None` without an engine, and without the library
/// that a container needs.
#[must_use]
pub fn spec(host: &Host, probe: &Probe, files: &[ClientFile]) -> Option<Spec> {
    let Probe::Found(engines) = probe else { return None };
    let library = client_files::library_path();
    if files.iter().all(|file| file.path != library) {
        return None;
    }
    let sockets = Mount::bind(
        text(&socket_directory(&host.socket_dir, Kind::Ane)),
        format!("{CONTAINER_SOCKETS}/{}", Kind::Ane),
        &["ro", "nosuid", "nodev", "noexec"],
    );
    crate::spec::spec(host, Kind::Ane, engines, &variables(), vec![sockets])
}
