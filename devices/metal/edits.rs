// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a container gets: facts about the host and its engines in, a CDI spec out. Pure.
//!
//! `tests/golden/metal-*.json` show the result.

use lighter_cdi::Spec;
use lighter_wire::{Endpoint, Kind};

use super::client_library;
use crate::client::{CONTAINER_DIR, ClientFile};
use crate::host::{Host, Probe};

/// Folder of the device below the client folder, on the host and in a container.
pub const FOLDER: &str = "metal";

/// The variables that name the endpoint (ours, and the one that llama.cpp's programs read), and the plug-in when
/// it is among the files.
#[must_use]
pub fn variables(endpoint: Endpoint, files: &[ClientFile]) -> Vec<(String, String)> {
    let mut variables: Vec<_> =
        ["LIGHTER_METAL", "LLAMA_ARG_RPC"].map(|name| (name.to_owned(), endpoint.to_string())).into();
    let plugin = client_library::plugin_path();
    if files.iter().any(|file| file.path == plugin) {
        variables.push(("GGML_BACKEND_PATH".to_owned(), format!("{CONTAINER_DIR}/{}", plugin.display())));
    }
    variables
}

/// The spec: device `all`, and one for each engine under its stable name and its aliases. `None` without an engine.
#[must_use]
pub fn spec(host: &Host, endpoint: Endpoint, probe: &Probe, files: &[ClientFile]) -> Option<Spec> {
    let Probe::Found(engines) = probe else { return None };
    crate::spec::spec(host, Kind::Metal, engines, &variables(endpoint, files), Vec::new())
}
