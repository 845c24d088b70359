// SPDX-License-Identifier: MIT OR Apache-2.0
//! Edits of an OCI runtime spec as a JSON value.
//!
//! As a value and not as a typed struct, so that a field that no type knows yet survives. Called by the
//! injection. Refuses a spec in which a part that must be edited has another shape than the OCI standard says.

use serde_json::{Map, Value, json};

use crate::spec::{Hook, IntelRdt, Mount};

/// A part of the OCI spec has another shape than the standard says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the OCI spec is malformed: {place} is not {expected}")]
pub struct ShapeError {
    place: String,
    expected: &'static str,
}

impl ShapeError {
    pub(crate) fn not_an_object() -> Self {
        Self { place: "the whole".to_owned(), expected: "an object" }
    }
}

type Result<T> = std::result::Result<T, ShapeError>;
type Object = Map<String, Value>;

/// A device as it enters the container.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) path: &'a str,
    pub(crate) node_type: &'static str,
    pub(crate) major: i64,
    pub(crate) minor: i64,
    pub(crate) file_mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
}

fn shape<T>(place: &str, expected: &'static str) -> Result<T> {
    Err(ShapeError { place: place.to_owned(), expected })
}

/// The object at `key`, made if absent or null.
fn object<'a>(parent: &'a mut Object, key: &str, place: &str) -> Result<&'a mut Object> {
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().map_or_else(|| shape(place, "an object"), Ok)
}

/// The list at `key`, made if absent or null.
fn list<'a>(parent: &'a mut Object, key: &str, place: &str) -> Result<&'a mut Vec<Value>> {
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Array(Vec::new());
    }
    value.as_array_mut().map_or_else(|| shape(place, "a list"), Ok)
}

/// The process, made with the fields that the standard requires.
fn process(spec: &mut Object) -> Result<&mut Object> {
    if spec.get("process").is_none_or(Value::is_null) {
        spec.insert("process".to_owned(), json!({ "cwd": "", "user": { "uid": 0, "gid": 0 } }));
    }
    object(spec, "process", "process")
}

/// A part that is only looked at: absent and null are the same.
fn look<'a>(parent: &'a Object, key: &str) -> Option<&'a Value> {
    parent.get(key).filter(|value| !value.is_null())
}

/// The user and group of the process where they are not root's.
pub(crate) fn process_owner(spec: &Object) -> Result<(Option<u32>, Option<u32>)> {
    let Some(user) = look(spec, "process").and_then(|process| process.get("user")) else {
        return Ok((None, None));
    };
    let id = |key: &str| match user.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(Some(id).filter(|id| *id > 0)),
            None => shape(&format!("process.user.{key}"), "a user or group id"),
        },
    };
    Ok((id("uid")?, id("gid")?))
}

/// True if the container gets its own user namespace, or joins one.
pub(crate) fn has_user_namespace(spec: &Object) -> bool {
    let namespaces = look(spec, "linux").and_then(|linux| linux.get("namespaces")).and_then(Value::as_array);
    namespaces.is_some_and(|list| list.iter().any(|namespace| namespace.get("type") == Some(&json!("user"))))
}

/// Sets variables: one that is there already is replaced where it stands (the last, if it is there twice).
pub(crate) fn set_env(spec: &mut Object, variables: &[String]) -> Result<()> {
    fn name(variable: &str) -> &str {
        variable.split_once('=').map_or(variable, |(name, _)| name)
    }
    if variables.is_empty() {
        return Ok(());
    }
    let env = list(process(spec)?, "env", "process.env")?;
    if !env.iter().all(Value::is_string) {
        return shape("process.env", "a list of texts");
    }
    for variable in variables {
        let same = |value: &&mut Value| value.as_str().is_some_and(|old| name(old) == name(variable));
        match env.iter_mut().rfind(same) {
            Some(old) => *old = json!(variable),
            None => env.push(json!(variable)),
        }
    }
    Ok(())
}

/// Adds a device in place of one of the same path.
pub(crate) fn set_device(spec: &mut Object, node: &Node<'_>) -> Result<()> {
    let mut device = json!({
        "path": node.path, "type": node.node_type, "major": node.major, "minor": node.minor,
    });
    for (key, value) in [("fileMode", node.file_mode), ("uid", node.uid), ("gid", node.gid)] {
        if let (Some(value), Some(device)) = (value, device.as_object_mut()) {
            device.insert(key.to_owned(), json!(value));
        }
    }
    let devices = list(object(spec, "linux", "linux")?, "devices", "linux.devices")?;
    let is_same = |old: &Value| old.get("path").and_then(Value::as_str).unwrap_or_default() == node.path;
    if let Some(index) = devices.iter().position(is_same) {
        devices.remove(index);
    }
    // A second one of the same path can only come from a spec that had it twice.
    match devices.iter_mut().find(|old| is_same(old)) {
        Some(old) => *old = device,
        None => devices.push(device),
    }
    Ok(())
}

/// Lets the container's control group use a device.
pub(crate) fn allow_device(spec: &mut Object, node: &Node<'_>, access: &str) -> Result<()> {
    let resources = object(object(spec, "linux", "linux")?, "resources", "linux.resources")?;
    let mut rule = json!({ "allow": true, "type": node.node_type, "major": node.major, "minor": node.minor });
    if let (false, Some(rule)) = (access.is_empty(), rule.as_object_mut()) {
        rule.insert("access".to_owned(), json!(access));
    }
    list(resources, "devices", "linux.resources.devices")?.push(rule);
    Ok(())
}

/// Moves a network interface into the container.
pub(crate) fn set_net_device(spec: &mut Object, host_name: &str, name: &str) -> Result<()> {
    let devices = object(object(spec, "linux", "linux")?, "netDevices", "linux.netDevices")?;
    devices.insert(host_name.to_owned(), json!({ "name": name }));
    Ok(())
}

/// Adds mounts, each in place of one with the same destination, and orders all of them by depth, so that
/// none is hidden by a later one above it.
pub(crate) fn set_mounts(spec: &mut Object, new: &[Mount]) -> Result<()> {
    if new.is_empty() {
        return Ok(());
    }
    let map_ids = has_user_namespace(spec);
    let mounts = list(spec, "mounts", "mounts")?;
    for mount in new {
        if let Some(index) = mounts.iter().position(|old| destination(old) == mount.container_path) {
            mounts.remove(index);
        }
        mounts.push(mount_value(mount, map_ids));
    }
    mounts.sort_by_key(|mount| depth(destination(mount)));
    Ok(())
}

fn destination(mount: &Value) -> &str {
    mount.get("destination").and_then(Value::as_str).unwrap_or_default()
}

fn mount_value(mount: &Mount, map_ids: bool) -> Value {
    let mut options = mount.options.clone();
    if map_ids {
        options.extend(id_map_option(mount).map(str::to_owned));
    }
    let mut value = json!({ "source": mount.host_path, "destination": mount.container_path });
    if let Some(value) = value.as_object_mut() {
        if !options.is_empty() {
            value.insert("options".to_owned(), json!(options));
        }
        if let Some(fs_type) = &mount.fs_type {
            value.insert("type".to_owned(), json!(fs_type));
        }
    }
    value
}

/// In a user namespace the files of a bind mount would belong to nobody without an id mapping.
fn id_map_option(mount: &Mount) -> Option<&'static str> {
    let mut option = (mount.fs_type.as_deref() == Some("bind")).then_some("idmap");
    for given in &mount.options {
        match given.as_str() {
            "idmap" | "ridmap" => return None,
            "bind" => option = Some("idmap"),
            "rbind" => option = Some("ridmap"),
            _ => {}
        }
    }
    option
}

/// Number of slashes in a path after `.`, `..` and doubled slashes are resolved by their text.
fn depth(path: &str) -> usize {
    let absolute = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => match parts.last() {
                Some(&last) if last != ".." => {
                    parts.pop();
                }
                // Above the root is the root; above a relative path is written as "..".
                _ if absolute => {}
                _ => parts.push(part),
            },
            _ => parts.push(part),
        }
    }
    if absolute { parts.len().max(1) } else { parts.len().saturating_sub(1) }
}

/// Appends a hook.
pub(crate) fn add_hook(spec: &mut Object, hook: &Hook) -> Result<()> {
    let name = hook.hook_name.as_str();
    let mut value = json!({ "path": hook.path });
    if let Some(value) = value.as_object_mut() {
        for (key, texts) in [("args", &hook.args), ("env", &hook.env)] {
            if !texts.is_empty() {
                value.insert(key.to_owned(), json!(texts));
            }
        }
        if let Some(timeout_s) = hook.timeout_s {
            value.insert("timeout".to_owned(), json!(timeout_s));
        }
    }
    list(object(spec, "hooks", "hooks")?, name, &format!("hooks.{name}"))?.push(value);
    Ok(())
}

/// Sets Intel RDT as a whole.
pub(crate) fn set_intel_rdt(spec: &mut Object, rdt: &IntelRdt) -> Result<()> {
    let mut value = Map::new();
    let texts = [
        ("closID", &rdt.clos_id),
        ("l3CacheSchema", &rdt.l3_cache_schema),
        ("memBwSchema", &rdt.mem_bw_schema),
    ];
    for (key, text) in texts {
        if !text.is_empty() {
            value.insert(key.to_owned(), json!(text));
        }
    }
    if let Some(schemata) = rdt.schemata.as_ref().filter(|schemata| !schemata.is_empty()) {
        value.insert("schemata".to_owned(), json!(schemata));
    }
    if rdt.enable_monitoring {
        value.insert("enableMonitoring".to_owned(), json!(true));
    }
    object(spec, "linux", "linux")?.insert("intelRdt".to_owned(), Value::Object(value));
    Ok(())
}

/// Lets the process join groups; root's group and groups that it has already are passed over.
pub(crate) fn join_groups(spec: &mut Object, groups: &[u32]) -> Result<()> {
    for group in groups.iter().filter(|group| **group != 0) {
        let user = object(process(spec)?, "user", "process.user")?;
        let joined = list(user, "additionalGids", "process.user.additionalGids")?;
        if !joined.contains(&json!(group)) {
            joined.push(json!(group));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_that_of_the_resolved_path() {
        for (path, slashes) in [
            ("/", 1),
            ("/a", 1),
            ("/a/", 1),
            ("/a/b", 2),
            ("//a//b/./c/..", 2),
            ("/../../a", 1),
            ("", 0),
            ("a", 0),
            ("a/b", 1),
            ("../a", 1),
            ("a/../..", 0),
            ("../../a", 2),
        ] {
            assert_eq!(depth(path), slashes, "{path}");
        }
    }

    #[test]
    fn a_malformed_part_is_named() {
        let mut spec = json!({ "process": { "env": [1] } });
        let error = set_env(spec.as_object_mut().unwrap(), &["A=1".to_owned()]).unwrap_err();
        assert_eq!(error.to_string(), "the OCI spec is malformed: process.env is not a list of texts");
    }
}
