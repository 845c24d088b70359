// SPDX-License-Identifier: MIT OR Apache-2.0
//! What injection does beyond the golden cases: nothing is lost, nothing is half done, and device nodes are
//! filled in from a host that the test makes up.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test states what must hold")]

use std::fs;
use std::io;
use std::path::Path;

use lighter_cdi::{HostNode, HostNodes, InjectError, NodeType, RealNodes, Registry};
use serde_json::{Value, json};

const NAME: &str = "acme.com/dev=a";

/// A registry with one device of these edits.
fn registry(edits: &Value) -> Registry {
    let spec = json!({
        "cdiVersion": "1.1.0", "kind": "acme.com/dev", "devices": [{ "name": "a", "containerEdits": edits }],
    });
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a.json"), spec.to_string()).unwrap();
    let registry = Registry::scan(&[directory.path()]);
    assert_eq!(registry.devices().count(), 1, "{:?}", registry.errors().collect::<Vec<_>>());
    registry
}

/// A host with one block device of numbers 8 and 1.
struct OneDisk;

impl HostNodes for OneDisk {
    fn node(&self, path: &Path) -> io::Result<HostNode> {
        if path == Path::new("/dev/disk") {
            Ok(HostNode { node_type: NodeType::Block, major: 8, minor: 1, file_mode: 0o640 })
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }
}

fn device_of(node: &Value) -> Result<Value, InjectError> {
    let mut spec = json!({});
    registry(&json!({ "deviceNodes": [node] })).inject_with(&mut spec, &[NAME], &OneDisk)?;
    Ok(spec["linux"]["devices"][0].clone())
}

#[test]
fn fields_that_no_type_knows_survive() {
    let mut spec = json!({
        "ociVersion": "1.9.0", "futureTop": { "x": [1, null] }, "hostname": "h",
        "process": { "cwd": "/", "user": { "uid": 0, "gid": 0, "future": 1 }, "env": ["A=0"], "future": 2 },
        "linux": { "future": 3, "devices": [{ "path": "/dev/z", "type": "c", "major": 1, "minor": 1, "future": 4 }],
                   "resources": { "future": 5, "pids": { "limit": 18_446_744_073_709_551_615_u64 } } },
        "mounts": [{ "destination": "/z", "future": 6 }],
        "hooks": { "future": [7], "poststop": [{ "path": "/p", "future": 8 }] },
    });
    let edits = json!({
        "env": ["B=1"], "additionalGids": [5],
        "deviceNodes": [{ "path": "/dev/disk", "type": "b", "major": 8 }],
        "mounts": [{ "hostPath": "/h", "containerPath": "/a/b" }],
        "hooks": [{ "hookName": "poststop", "path": "/q" }],
    });
    let before = spec.clone();
    registry(&edits).inject(&mut spec, &[NAME]).unwrap();
    for (pointer, value) in [
        ("/futureTop", json!({ "x": [1, null] })),
        ("/process/user/future", json!(1)),
        ("/process/future", json!(2)),
        ("/linux/future", json!(3)),
        ("/linux/resources/future", json!(5)),
        ("/linux/resources/pids/limit", json!(18_446_744_073_709_551_615_u64)),
        ("/mounts/0/future", json!(6)),
        ("/hooks/future", json!([7])),
        ("/hooks/poststop/0/future", json!(8)),
    ] {
        assert_eq!(spec.pointer(pointer), Some(&value), "{pointer}");
    }
    assert_eq!(spec["linux"]["devices"][0], before["linux"]["devices"][0]);
    assert_eq!(spec["hooks"]["poststop"][1], json!({ "path": "/q" }));
}

#[test]
fn on_an_error_the_spec_is_as_it_was() {
    let edits = json!({ "env": ["B=1"], "deviceNodes": [{ "path": "/dev/gone" }] });
    let before = json!({ "process": { "env": ["A=0"] } });
    let mut spec = before.clone();
    let error = registry(&edits).inject_with(&mut spec, &[NAME], &OneDisk).unwrap_err();
    assert_eq!(error.to_string(), "cannot look at the host's device node /dev/gone");
    assert_eq!(spec, before);

    let registry = registry(&json!({ "env": ["B=1"] }));
    let error = registry.inject(&mut spec, &[NAME, "acme.com/dev=b", "x"]).unwrap_err();
    assert_eq!(error.to_string(), "no valid spec offers acme.com/dev=b, x");
    for malformed in [json!([]), json!(null), json!({ "process": 5 }), json!({ "process": { "env": [5] } })] {
        let mut spec = malformed.clone();
        assert!(matches!(registry.inject(&mut spec, &[NAME]), Err(InjectError::Shape(_))), "{malformed}");
        assert_eq!(spec, malformed);
    }
}

#[test]
fn a_node_is_completed_from_the_host() {
    let full = json!({ "path": "/dev/disk", "type": "b", "major": 8, "minor": 1, "fileMode": 0o640 });
    assert_eq!(device_of(&json!({ "path": "/dev/disk" })).unwrap(), full);
    assert_eq!(device_of(&json!({ "path": "/dev/disk", "type": "b", "minor": 9 })).unwrap(), full);
    let renamed = json!({ "path": "/dev/x", "type": "b", "major": 8, "minor": 1, "fileMode": 0o640 });
    assert_eq!(device_of(&json!({ "path": "/dev/x", "hostPath": "/dev/disk" })).unwrap(), renamed);
    // Described well enough: only the mode is taken, and nothing if there is no such node.
    let own = json!({ "path": "/dev/disk", "type": "c", "major": 5, "minor": 6, "fileMode": 0o640 });
    assert_eq!(device_of(&json!({ "path": "/dev/disk", "type": "c", "major": 5, "minor": 6 })).unwrap(), own);
    let absent = json!({ "path": "/dev/gone", "type": "p", "major": 0, "minor": 0 });
    assert_eq!(device_of(&json!({ "path": "/dev/gone", "type": "p" })).unwrap(), absent);
    let mismatch = device_of(&json!({ "path": "/dev/disk", "type": "c" })).unwrap_err();
    assert_eq!(mismatch.to_string(), "the host's device node /dev/disk has type b, the spec says c");
}

#[test]
fn the_real_host_is_looked_at_without_following_links() {
    let null = RealNodes.node(Path::new("/dev/null")).unwrap();
    assert_eq!((null.node_type, null.major, null.minor), (NodeType::Character, 1, 3));
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("null");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    assert!(RealNodes.node(&link).unwrap_err().to_string().contains("link"));
    assert!(RealNodes.node(directory.path()).is_err());
}

#[test]
fn a_typed_spec_takes_every_edit() {
    let edits = json!({
        "env": ["B=1"], "additionalGids": [5],
        "deviceNodes": [{ "path": "/dev/null" }, { "path": "/dev/u", "type": "u", "major": 9 }],
        "netDevices": [{ "hostInterfaceName": "e0", "name": "n0" }],
        "mounts": [{ "hostPath": "/h", "containerPath": "/a/b", "options": ["ro"], "type": "bind" }],
        "hooks": [{ "hookName": "createRuntime", "path": "/q", "args": ["q"], "env": ["E=1"], "timeout": 3 }],
        "intelRdt": { "closID": "x", "schemata": ["L3:0=f"], "enableMonitoring": true },
    });
    let registry = registry(&edits);
    let mut typed = oci_spec::runtime::Spec::default();
    let mut value = serde_json::to_value(&typed).unwrap();
    registry.inject(&mut value, &[NAME]).unwrap();
    registry.inject_typed(&mut typed, &[NAME]).unwrap();
    assert_eq!(serde_json::from_value::<oci_spec::runtime::Spec>(value).unwrap(), typed);
    let hooks = typed.hooks().as_ref().unwrap().create_runtime().as_ref().unwrap();
    assert_eq!(hooks[0].timeout(), Some(3));
    // Also from nothing at all, where the process is made.
    let mut bare: oci_spec::runtime::Spec = serde_json::from_value(json!({ "ociVersion": "1.2.0" })).unwrap();
    registry.inject_typed(&mut bare, &[NAME]).unwrap();
    assert_eq!(bare.process().as_ref().unwrap().env().as_ref().unwrap(), &["B=1".to_owned()]);
}
