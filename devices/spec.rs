// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the CDI specs of all devices have in common: the names, the mounts of the client folder, the hooks. Pure.
//!
//! Called by each device's edits, which add what is its own. The content stays within CDI 0.5.0, which every runtime in
//! use reads.

use std::path::Path;

use lighter_cdi::{ContainerEdits, Device, DeviceName, Hook, HookName, Mount, Spec};
use lighter_wire::Kind;

use crate::client::{BIN, CONTAINER_DIR};
use crate::host::{Engine, Host};

/// Seconds after which a runtime gives up on a hook. The hook's own waits are shorter; this is for a host that
/// stands still.
const HOOK_TIMEOUT_S: u32 = 10;

/// The spec: device `all`, and one for each engine under its stable name and its aliases. `None` without an engine.
pub(crate) fn spec(
    host: &Host,
    kind: Kind,
    engines: &[Engine],
    variables: &[(String, String)],
    mounts: Vec<Mount>,
) -> Option<Spec> {
    if engines.is_empty() {
        return None;
    }
    let name = format!("lighter.sh/{kind}");
    let mut names = vec![crate::ALL.to_owned()];
    for engine in engines {
        for name in [&engine.stable_name].into_iter().chain(&engine.aliases) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }
    let mut spec = Spec::new(name.parse().ok()?);
    let mut common = ContainerEdits::default();
    for (name, value) in variables {
        common = common.with_env(name, value);
    }
    for folder in [BIN, kind.as_str()] {
        common = common.with_mount(Mount::bind(
            text(&host.client_dir.join(folder)),
            format!("{CONTAINER_DIR}/{folder}"),
            &["ro", "nosuid", "nodev"],
        ));
    }
    for mount in mounts {
        common = common.with_mount(mount);
    }
    spec.container_edits = common;
    for device in names {
        let hooks = ContainerEdits::default()
            .with_hook(hook(host, HookName::CreateRuntime, "grant", &name, &device))
            .with_hook(hook(host, HookName::Poststop, "release", &name, &device));
        let device: DeviceName = device.parse().ok()?;
        spec.devices.push(Device::new(device, hooks));
    }
    Some(spec.with_lowest_version())
}

/// A call of our hook: `lighter-hook VERB --socket SOCKET lighter.sh/KIND=DEVICE`.
fn hook(host: &Host, when: HookName, verb: &str, kind: &str, device: &str) -> Hook {
    Hook::new(when, text(&host.hook))
        .with_args([
            "lighter-hook".to_owned(),
            verb.to_owned(),
            "--socket".to_owned(),
            text(&host.hook_socket),
            format!("{kind}={device}"),
        ])
        // Without any, a runtime hands on the container's variables, an image's LD_PRELOAD among them.
        .with_env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .with_timeout_s(HOOK_TIMEOUT_S)
}

pub(crate) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
