// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a container gets: facts about the host and its engines in, a CDI spec out. Pure.
//!
//! `tests/golden/mps-*.json` show the result. The socket's directory is mounted, since a restarted daemon makes a new
//! socket. Nothing makes a program use the device unasked: no variable that loaders or interpreters read is set.
//! pip's variable only adds a place where it finds the package.

use lighter_cdi::{Mount, Spec};
use lighter_wire::{CONTAINER_SOCKETS, Endpoint, Kind, socket_directory};

use super::client_files;
use crate::client::{CONTAINER_DIR, ClientFile};
use crate::host::{Host, Probe};
use crate::spec::text;

/// Folder of the device below the client folder, on the host and in a container.
pub const FOLDER: &str = "mps";

/// The variables that name the socket and, where wanted, the wheels. A program finds the socket without the variable.
#[must_use]
pub fn variables(pip_find_links: bool) -> Vec<(String, String)> {
    let mut variables = vec![("LIGHTER_MPS".to_owned(), format!("unix:{}", Endpoint::Unix(Kind::Mps)))];
    if pip_find_links {
        let wheels = format!("{CONTAINER_DIR}/{FOLDER}/{}", client_files::WHEELS);
        variables.push(("PIP_FIND_LINKS".to_owned(), wheels));
    }
    variables
}

/// The spec: device `all`, and one for each engine under its name. `None` without an engine, and without the package
/// that a container needs.
#[must_use]
pub fn spec(host: &Host, pip_find_links: bool, probe: &Probe, files: &[ClientFile]) -> Option<Spec> {
    let Probe::Found(engines) = probe else { return None };
    let package = client_files::package_file();
    if files.iter().all(|file| file.path != package) {
        return None;
    }
    let sockets = Mount::bind(
        text(&socket_directory(&host.socket_dir, Kind::Mps)),
        format!("{CONTAINER_SOCKETS}/{}", Kind::Mps),
        &["ro", "nosuid", "nodev", "noexec"],
    );
    crate::spec::spec(host, Kind::Mps, engines, &variables(pip_find_links), vec![sockets])
}
