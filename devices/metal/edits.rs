// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a container gets: facts about the host and its engines in, a CDI spec out. Pure.
//!
//! `tests/golden/metal-*.json` show the result. The content stays within CDI 0.5.0, which every runtime in use
//! reads.

use std::path::Path;

use lighter_cdi::{ContainerEdits, Device, DeviceName, Hook, HookName, Kind, Mount, Spec};
use lighter_wire::Endpoint;

use super::client_library;
use crate::client::{BIN, CONTAINER_DIR, ClientFile};
use crate::host::{Host, Probe};

/// Vendor and class of the device's CDI kind.
const KIND: &str = "lighter.sh/metal";
/// Folder of the device below the client folder, on the host and in a container.
pub const FOLDER: &str = "metal";
/// Seconds after which a runtime gives up on a hook. The hook's own waits are shorter; this is for a host that
/// stands still.
const HOOK_TIMEOUT_S: u32 = 10;

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
    let kind: Kind = KIND.parse().ok()?;
    let mut names = vec![crate::ALL.to_owned()];
    for engine in engines {
        for name in [&engine.stable_name].into_iter().chain(&engine.aliases) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }
    let mut spec = Spec::new(kind);
    let mut common = ContainerEdits::default();
    for (name, value) in variables(endpoint, files) {
        common = common.with_env(&name, &value);
    }
    for folder in [BIN, FOLDER] {
        common = common.with_mount(Mount::bind(
            text(&host.client_dir.join(folder)),
            format!("{CONTAINER_DIR}/{folder}"),
            &["ro", "nosuid", "nodev"],
        ));
    }
    spec.container_edits = common;
    for name in names {
        let hooks = ContainerEdits::default()
            .with_hook(hook(host, HookName::CreateRuntime, "grant", &name))
            .with_hook(hook(host, HookName::Poststop, "release", &name));
        let name: DeviceName = name.parse().ok()?;
        spec.devices.push(Device::new(name, hooks));
    }
    Some(spec.with_lowest_version())
}

/// A call of our hook: `lighter-hook VERB --socket SOCKET lighter.sh/metal=DEVICE`.
fn hook(host: &Host, when: HookName, verb: &str, device: &str) -> Hook {
    Hook::new(when, text(&host.hook))
        .with_args([
            "lighter-hook".to_owned(),
            verb.to_owned(),
            "--socket".to_owned(),
            text(&host.hook_socket),
            format!("{KIND}={device}"),
        ])
        // Without any, a runtime hands on the container's variables, an image's LD_PRELOAD among them.
        .with_env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .with_timeout_s(HOOK_TIMEOUT_S)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
