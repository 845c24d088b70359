// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a container gets: facts about the host and its engines in, a CDI spec out. Pure.
//!
//! `tests/golden/gpu-*.json` show the result. The socket's directory is mounted, since a restarted daemon makes a new
//! socket. No device node, no KFD, no library of the host.

use lighter_cdi::{Mount, Spec};
use lighter_wire::{CONTAINER_SOCKETS, Endpoint, Kind, socket_directory};

use crate::host::{Host, Probe};
use crate::spec::text;

/// Folder of the device below the client folder, on the host and in a container.
pub const FOLDER: &str = "gpu";
/// The longest path that Mesa copies whole: it does not look at the length.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The variables of Mesa's driver. `mem_budget` lets programs ask how much memory is free.
#[must_use]
pub fn variables() -> Vec<(String, String)> {
    let socket = Endpoint::Unix(Kind::Gpu).to_string();
    debug_assert!(socket.len() <= MAX_SOCKET_PATH_BYTES, "{socket}");
    vec![("VN_DEBUG".to_owned(), "vtest,mem_budget".to_owned()), ("VTEST_SOCKET_NAME".to_owned(), socket)]
}

/// The spec: device `all`, and one for each GPU under its stable name and its aliases. `None` without one.
#[must_use]
pub fn spec(host: &Host, probe: &Probe) -> Option<Spec> {
    let Probe::Found(engines) = probe else { return None };
    let sockets = Mount::bind(
        text(&socket_directory(&host.socket_dir, Kind::Gpu)),
        format!("{CONTAINER_SOCKETS}/{}", Kind::Gpu),
        &["ro", "nosuid", "nodev", "noexec"],
    );
    crate::spec::spec(host, Kind::Gpu, engines, &variables(), vec![sockets])
}
