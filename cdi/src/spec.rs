// SPDX-License-Identifier: MIT OR Apache-2.0
//! The spec model of CDI 1.1.0: what a spec file says, as plain data.
//!
//! Producers build it with the constructors here and hand it to `write_spec`; readers get it from
//! `parse_bytes`. Unknown keys are refused at every depth. What serde alone cannot check (that a variable
//! contains `=`, that a device has an edit) is checked by [`Spec::validate`](crate::Spec::validate).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::names::{DeviceName, Kind, QualifiedName};
use crate::version::{self, Version};

/// One spec file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// The version that the file declares.
    pub cdi_version: Version,
    /// What its devices are.
    pub kind: Kind,
    /// Free notes about the file; they do not reach the container.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Edits made once for a container that gets any device of this file.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_unset")]
    pub container_edits: ContainerEdits,
    /// The devices; at least one.
    #[serde(default)]
    pub devices: Vec<Device>,
}

impl Spec {
    /// A spec without devices, of the oldest accepted version.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self {
            cdi_version: Version::OLDEST_ACCEPTED,
            kind,
            annotations: BTreeMap::new(),
            container_edits: ContainerEdits::default(),
            devices: Vec::new(),
        }
    }

    /// Declares the lowest version that the content needs. Call it last.
    #[must_use]
    pub fn with_lowest_version(mut self) -> Self {
        self.cdi_version = self.lowest_version();
        self
    }

    /// The lowest version whose readers understand all of the content.
    #[must_use]
    pub fn lowest_version(&self) -> Version {
        version::lowest(self)
    }

    /// The qualified names of the devices, in the file's order.
    pub fn qualified_names(&self) -> impl Iterator<Item = QualifiedName> {
        self.devices.iter().map(|device| self.kind.device(device.name.clone()))
    }
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Its name within the kind.
    pub name: DeviceName,
    /// Free notes about the device; they do not reach the container.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What the device adds to a container; never empty in a valid spec.
    #[serde(default)]
    pub container_edits: ContainerEdits,
}

impl Device {
    /// A device without annotations.
    #[must_use]
    pub fn new(name: DeviceName, container_edits: ContainerEdits) -> Self {
        Self { name, annotations: BTreeMap::new(), container_edits }
    }
}

/// What is added to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment variables, each `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces moved into the container (1.1.0).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Hooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Intel RDT (0.7.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups that the process joins (0.7.0). Group 0 is ignored at injection.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    /// True if nothing is edited.
    #[must_use]
    pub fn is_unset(&self) -> bool {
        *self == Self::default()
    }

    /// Adds a variable.
    #[must_use]
    pub fn with_env(mut self, name: &str, value: &str) -> Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// Adds a mount.
    #[must_use]
    pub fn with_mount(mut self, mount: Mount) -> Self {
        self.mounts.push(mount);
        self
    }

    /// Adds a hook.
    #[must_use]
    pub fn with_hook(mut self, hook: Hook) -> Self {
        self.hooks.push(hook);
        self
    }

    /// Adds a device node.
    #[must_use]
    pub fn with_device_node(mut self, node: DeviceNode) -> Self {
        self.device_nodes.push(node);
        self
    }
}

/// A device node. What is missing is taken from the host's node at injection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Path in the container.
    #[serde(default)]
    pub path: String,
    /// Path on the host, if it differs (0.5.0). Runtimes in a user namespace cannot honour it.
    #[serde(default, deserialize_with = "empty_as_none", skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Block, character, unbuffered character or pipe.
    #[serde(
        default,
        rename = "type",
        deserialize_with = "empty_as_none",
        skip_serializing_if = "Option::is_none"
    )]
    pub node_type: Option<NodeType>,
    /// Major number; 0 counts as missing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub major: i64,
    /// Minor number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub minor: i64,
    /// Permission bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Cgroup access: letters of `rwm`, or `none`; all three if missing.
    #[serde(default, deserialize_with = "empty_as_none", skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

impl DeviceNode {
    /// A node that is the host's node of the same path.
    #[must_use]
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }
}

/// The type of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum NodeType {
    /// `b`
    Block,
    /// `c`
    Character,
    /// `u`
    Unbuffered,
    /// `p`
    Fifo,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Source on the host.
    #[serde(default)]
    pub host_path: String,
    /// Destination in the container.
    #[serde(default)]
    pub container_path: String,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system type (0.4.0).
    #[serde(
        default,
        rename = "type",
        deserialize_with = "empty_as_none",
        skip_serializing_if = "Option::is_none"
    )]
    pub fs_type: Option<String>,
}

impl Mount {
    /// A recursive bind mount, in the form that needs no version above 0.3.0 (no `type`).
    #[must_use]
    pub fn bind(host_path: impl Into<String>, container_path: impl Into<String>, options: &[&str]) -> Self {
        let options = std::iter::once(&"rbind").chain(options).map(|&option| option.to_owned()).collect();
        Self { host_path: host_path.into(), container_path: container_path.into(), options, fs_type: None }
    }
}

/// A hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When it runs.
    pub hook_name: HookName,
    /// The program on the host.
    #[serde(default)]
    pub path: String,
    /// Its arguments, the first being its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment. With none, runtimes pass on the container's, the image's `LD_PRELOAD` included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds until the runtime gives up on it.
    #[serde(default, rename = "timeout", skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<i64>,
}

impl Hook {
    /// A hook without arguments, environment or timeout.
    #[must_use]
    pub fn new(hook_name: HookName, path: impl Into<String>) -> Self {
        Self { hook_name, path: path.into(), args: Vec::new(), env: Vec::new(), timeout_s: None }
    }

    /// Sets the arguments, the program's own name first.
    #[must_use]
    pub fn with_args(mut self, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// Adds a variable.
    #[must_use]
    pub fn with_env(mut self, name: &str, value: &str) -> Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// Sets the timeout.
    #[must_use]
    pub fn with_timeout_s(mut self, timeout_s: u32) -> Self {
        self.timeout_s = Some(timeout_s.into());
        self
    }
}

/// When a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum HookName {
    /// `prestart`: deprecated in OCI, accepted by every reader.
    Prestart,
    /// `createRuntime`: in the runtime's namespaces, before the container's root is entered.
    CreateRuntime,
    /// `createContainer`: in the container's namespaces, before its root is entered.
    CreateContainer,
    /// `startContainer`: inside the container.
    StartContainer,
    /// `poststart`
    Poststart,
    /// `poststop`
    Poststop,
}

/// Intel Resource Director Technology.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IntelRdt {
    /// Class of service.
    #[serde(default, rename = "closID", skip_serializing_if = "String::is_empty")]
    pub clos_id: String,
    /// L3 cache schema.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub l3_cache_schema: String,
    /// Memory bandwidth schema.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mem_bw_schema: String,
    /// Schemata lines (1.1.0). An empty list differs from none: it needs 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schemata: Option<Vec<String>>,
    /// Monitoring (1.1.0).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enable_monitoring: bool,
}

/// A network interface that moves into the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetDevice {
    /// Its name on the host.
    #[serde(default)]
    pub host_interface_name: String,
    /// Its name in the container.
    #[serde(default)]
    pub name: String,
}

/// Declares the texts of an enum once, for both directions.
macro_rules! texts {
    ($name:ident, $what:literal, { $($text:literal => $variant:ident),+ $(,)? }) => {
        impl $name {
            /// The text as it stands in a file.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                match text.as_str() {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(format!("invalid {} {text:?}, known are {}", $what, [$($text),+].join(", "))),
                }
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.as_str().to_owned()
            }
        }
    };
}

texts!(NodeType, "device node type", { "b" => Block, "c" => Character, "u" => Unbuffered, "p" => Fifo });
texts!(HookName, "hook name", {
    "prestart" => Prestart,
    "createRuntime" => CreateRuntime,
    "createContainer" => CreateContainer,
    "startContainer" => StartContainer,
    "poststart" => Poststart,
    "poststop" => Poststop,
});

/// Readers do not tell an empty text from a missing one here.
fn empty_as_none<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<String>,
    T::Error: std::fmt::Display,
{
    let text = Option::<String>::deserialize(deserializer)?.filter(|text| !text.is_empty());
    text.map(T::try_from).transpose().map_err(serde::de::Error::custom)
}

/// By reference because serde calls it so.
fn is_zero(number: &i64) -> bool {
    *number == 0
}
