// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injection: what requested devices do to an OCI runtime spec.
//!
//! The edits of each file concerned come once, before the first of its devices, then the edits of each
//! device in the order of the request. All or nothing: on any error the OCI spec is as it was.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::host::{HostNodes, RealNodes};
use crate::oci::{self, Node, ShapeError};
use crate::registry::Registry;
use crate::spec::{ContainerEdits, DeviceNode, NodeType};

/// Cgroup access of a device whose spec does not say.
const DEFAULT_ACCESS: &str = "rwm";

/// Why nothing was injected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InjectError {
    /// Nobody offers these names.
    #[error("no valid spec offers {}", .0.join(", "))]
    Unresolved(Vec<String>),
    /// The OCI spec is not what the standard says.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The device node is not fully described and the host's cannot be looked at.
    #[error("cannot look at the host's device node {path}")]
    Node {
        /// The path on the host.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The device node is of another type than the spec says.
    #[error("the host's device node {path} has type {found}, the spec says {expected}")]
    NodeType {
        /// The path on the host.
        path: PathBuf,
        /// What it is.
        found: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A typed OCI spec could not be taken apart or put together.
    #[error("the OCI spec cannot be converted")]
    Convert(#[source] serde_json::Error),
}

impl Registry {
    /// Injects devices into an OCI spec given as JSON. Fields that this crate does not know stay.
    ///
    /// # Errors
    /// A name that nobody offers, a device node that the host lacks, or a malformed OCI spec.
    pub fn inject<N: AsRef<str>>(&self, spec: &mut Value, names: &[N]) -> Result<(), InjectError> {
        self.inject_with(spec, names, &RealNodes)
    }

    /// As [`Registry::inject`], for a typed OCI spec.
    ///
    /// # Errors
    /// As [`Registry::inject`].
    pub fn inject_typed<N: AsRef<str>>(
        &self,
        spec: &mut oci_spec::runtime::Spec,
        names: &[N],
    ) -> Result<(), InjectError> {
        let mut value = serde_json::to_value(&*spec).map_err(InjectError::Convert)?;
        self.inject(&mut value, names)?;
        *spec = serde_json::from_value(value).map_err(InjectError::Convert)?;
        Ok(())
    }

    /// As [`Registry::inject`], with the host's device nodes looked up by `nodes`.
    ///
    /// # Errors
    /// As [`Registry::inject`].
    pub fn inject_with<N: AsRef<str>>(
        &self,
        spec: &mut Value,
        names: &[N],
        nodes: &dyn HostNodes,
    ) -> Result<(), InjectError> {
        let edits = self.collect(names)?;
        let mut edited = match spec {
            Value::Object(object) => object.clone(),
            _ => return Err(ShapeError::not_an_object().into()),
        };
        apply(&mut edited, &edits, nodes)?;
        *spec = Value::Object(edited);
        Ok(())
    }

    /// The edits that the names stand for, in order.
    fn collect<N: AsRef<str>>(&self, names: &[N]) -> Result<ContainerEdits, InjectError> {
        let mut edits = ContainerEdits::default();
        let mut unresolved = Vec::new();
        let mut files = Vec::new();
        for name in names {
            let Some(offer) = self.device(name.as_ref()) else {
                unresolved.push(name.as_ref().to_owned());
                continue;
            };
            if !files.contains(&offer.file) {
                files.push(offer.file);
                append(&mut edits, &offer.spec.container_edits);
            }
            append(&mut edits, &offer.device.container_edits);
        }
        if unresolved.is_empty() { Ok(edits) } else { Err(InjectError::Unresolved(unresolved)) }
    }
}

fn append(to: &mut ContainerEdits, from: &ContainerEdits) {
    to.env.extend_from_slice(&from.env);
    to.device_nodes.extend_from_slice(&from.device_nodes);
    to.net_devices.extend_from_slice(&from.net_devices);
    to.hooks.extend_from_slice(&from.hooks);
    to.mounts.extend_from_slice(&from.mounts);
    to.additional_gids.extend_from_slice(&from.additional_gids);
    // A container is in one class of service only: the last one asked for.
    if from.intel_rdt.is_some() {
        to.intel_rdt.clone_from(&from.intel_rdt);
    }
}

fn apply(
    spec: &mut Map<String, Value>,
    edits: &ContainerEdits,
    nodes: &dyn HostNodes,
) -> Result<(), InjectError> {
    oci::set_env(spec, &edits.env)?;
    let (uid, gid) = oci::process_owner(spec)?;
    for wanted in &edits.device_nodes {
        let mut node = complete(wanted, nodes)?;
        node.uid = node.uid.or(uid);
        node.gid = node.gid.or(gid);
        oci::set_device(spec, &node)?;
        if ["b", "c"].contains(&node.node_type) {
            let access = match wanted.permissions.as_deref() {
                None => DEFAULT_ACCESS,
                Some("none") => "",
                Some(letters) => letters,
            };
            oci::allow_device(spec, &node, access)?;
        }
    }
    for device in &edits.net_devices {
        oci::set_net_device(spec, &device.host_interface_name, &device.name)?;
    }
    oci::set_mounts(spec, &edits.mounts)?;
    for hook in &edits.hooks {
        oci::add_hook(spec, hook)?;
    }
    if let Some(rdt) = &edits.intel_rdt {
        oci::set_intel_rdt(spec, rdt)?;
    }
    oci::join_groups(spec, &edits.additional_gids)?;
    Ok(())
}

/// Fills in from the host what the spec leaves open.
fn complete<'a>(wanted: &'a DeviceNode, nodes: &dyn HostNodes) -> Result<Node<'a>, InjectError> {
    let host_path = Path::new(wanted.host_path.as_ref().unwrap_or(&wanted.path));
    let mut node = Node {
        path: &wanted.path,
        node_type: wanted.node_type.map_or("", NodeType::as_str),
        major: wanted.major,
        minor: wanted.minor,
        file_mode: wanted.file_mode,
        uid: wanted.uid,
        gid: wanted.gid,
    };
    // Described well enough to do without the host's node, which may not exist yet.
    let described = match wanted.node_type {
        Some(NodeType::Fifo) => true,
        Some(_) => wanted.major != 0,
        None => false,
    };
    let found = match nodes.node(host_path) {
        Ok(found) => found,
        Err(_) if described => return Ok(node),
        Err(source) => return Err(InjectError::Node { path: host_path.to_owned(), source }),
    };
    // Rootless runtimes make bind mounts of device nodes and still want the mode.
    node.file_mode = node.file_mode.or(Some(found.file_mode));
    if described {
        return Ok(node);
    }
    let expected = wanted.node_type.unwrap_or(found.node_type);
    if expected != found.node_type {
        return Err(InjectError::NodeType {
            path: host_path.to_owned(),
            found: found.node_type.as_str(),
            expected: expected.as_str(),
        });
    }
    node.node_type = expected.as_str();
    if expected != NodeType::Fifo && node.major == 0 {
        node.major = found.major.into();
        node.minor = found.minor.into();
    }
    Ok(node)
}
