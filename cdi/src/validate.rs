// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a spec must fulfil beyond its shape. Called by the parser on every file that is read and by the
//! writer on every spec that is written, so an invalid spec neither enters nor leaves.

use std::collections::HashSet;

use crate::spec::{ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec};
use crate::version::Version;

/// Longest class of service: it becomes one file name in the kernel's resctrl tree.
const MAX_CLOS_ID_BYTES: usize = 4096;

/// Why a spec is not valid. `place` says where, in the words of the file: `devices[0].containerEdits.env[1]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValidateError {
    /// The declared version is one that no reader accepts, or older than the content.
    #[error("cdiVersion {declared} is too low: the content needs at least {lowest}")]
    VersionTooLow {
        /// What the file says.
        declared: Version,
        /// What it needs.
        lowest: Version,
    },
    /// A spec without devices.
    #[error("devices: there is none")]
    NoDevices,
    /// Two devices of one name.
    #[error("{place}: the device name {name:?} appears twice")]
    DuplicateDevice {
        /// Where.
        place: String,
        /// Which.
        name: String,
    },
    /// A device that edits nothing itself; the edits of the spec as a whole do not count.
    #[error("{place}: device {name:?} has no edit of its own")]
    EmptyDevice {
        /// Where.
        place: String,
        /// Which.
        name: String,
    },
    /// A value that is not allowed.
    #[error("{place}: {reason}")]
    Value {
        /// Where.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Spec {
    /// Checks everything that the shape alone does not.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), ValidateError> {
        let lowest = self.lowest_version();
        if self.cdi_version < lowest {
            return Err(ValidateError::VersionTooLow { declared: self.cdi_version, lowest });
        }
        edits(&self.container_edits, "containerEdits")?;
        let mut seen = HashSet::new();
        for (index, device) in self.devices.iter().enumerate() {
            let place = format!("devices[{index}]");
            if device.container_edits.is_unset() {
                return Err(ValidateError::EmptyDevice { place, name: device.name.to_string() });
            }
            edits(&device.container_edits, &format!("{place}.containerEdits"))?;
            if !seen.insert(device.name.as_str()) {
                return Err(ValidateError::DuplicateDevice { place, name: device.name.to_string() });
            }
        }
        if seen.is_empty() { Err(ValidateError::NoDevices) } else { Ok(()) }
    }
}

fn edits(edits: &ContainerEdits, place: &str) -> Result<(), ValidateError> {
    variables(&edits.env, &format!("{place}.env"))?;
    each(&edits.device_nodes, &format!("{place}.deviceNodes"), device_node)?;
    each(&edits.hooks, &format!("{place}.hooks"), hook)?;
    each(&edits.mounts, &format!("{place}.mounts"), mount)?;
    if let Some(rdt) = &edits.intel_rdt {
        intel_rdt(rdt, &format!("{place}.intelRdt"))?;
    }
    net_devices(&edits.net_devices, &format!("{place}.netDevices"))
}

fn each<T>(
    items: &[T],
    place: &str,
    check: fn(&T, &str) -> Result<(), ValidateError>,
) -> Result<(), ValidateError> {
    items.iter().enumerate().try_for_each(|(index, item)| check(item, &format!("{place}[{index}]")))
}

fn variables(env: &[String], place: &str) -> Result<(), ValidateError> {
    for (index, variable) in env.iter().enumerate() {
        if variable.find('=').is_none_or(|at| at == 0) {
            return refuse(
                format!("{place}[{index}]"),
                format!("{variable:?} is not of the form NAME=value"),
            );
        }
    }
    Ok(())
}

fn device_node(node: &DeviceNode, place: &str) -> Result<(), ValidateError> {
    if node.path.is_empty() {
        return refuse(format!("{place}.path"), "it is empty".to_owned());
    }
    match node.permissions.as_deref() {
        None | Some("none") => Ok(()),
        Some(letters) if letters.chars().all(|c| "rwm".contains(c)) => Ok(()),
        Some(other) => refuse(
            format!("{place}.permissions"),
            format!("{other:?} for {:?} is neither made of the letters r, w and m nor \"none\"", node.path),
        ),
    }
}

fn hook(hook: &Hook, place: &str) -> Result<(), ValidateError> {
    if hook.path.is_empty() {
        return refuse(format!("{place}.path"), "it is empty".to_owned());
    }
    variables(&hook.env, &format!("{place}.env"))
}

fn mount(mount: &Mount, place: &str) -> Result<(), ValidateError> {
    for (key, path) in [("hostPath", &mount.host_path), ("containerPath", &mount.container_path)] {
        if path.is_empty() {
            return refuse(format!("{place}.{key}"), "it is empty".to_owned());
        }
    }
    Ok(())
}

fn intel_rdt(rdt: &IntelRdt, place: &str) -> Result<(), ValidateError> {
    let id = rdt.clos_id.as_str();
    // "/" alone names the root class; anything else must be a file name.
    let file_name = id.len() < MAX_CLOS_ID_BYTES && id != "." && id != ".." && !id.contains(['/', '\n']);
    if id == "/" || file_name {
        return Ok(());
    }
    let shown: String = id.chars().take(64).collect();
    refuse(format!("{place}.closID"), format!("{shown:?} is neither a file name nor \"/\""))
}

fn net_devices(devices: &[NetDevice], place: &str) -> Result<(), ValidateError> {
    let mut hosts = HashSet::new();
    let mut names = HashSet::new();
    for (index, device) in devices.iter().enumerate() {
        let fields = [
            ("hostInterfaceName", device.host_interface_name.as_str(), &mut hosts),
            ("name", device.name.as_str(), &mut names),
        ];
        for (key, value, seen) in fields {
            let place = format!("{place}[{index}].{key}");
            if value.is_empty() {
                return refuse(place, "it is empty".to_owned());
            }
            if !seen.insert(value) {
                return refuse(place, format!("{value:?} appears twice"));
            }
        }
    }
    Ok(())
}

fn refuse(place: String, reason: String) -> Result<(), ValidateError> {
    Err(ValidateError::Value { place, reason })
}
