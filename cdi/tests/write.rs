// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writing and removing spec files, as a producer does it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test states what must hold")]

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use lighter_cdi::{
    ContainerEdits, Device, DeviceNode, Hook, HookName, IntelRdt, Mount, Registry, Spec, Version, WriteError,
    Written, remove_spec, write_spec,
};

const NAME: &str = "acme.com-dev.json";

fn spec(value: &str) -> Spec {
    let edits = ContainerEdits::default().with_env("A", value);
    let mut spec = Spec::new("acme.com/dev".parse().unwrap());
    spec.devices.push(Device::new("all".parse().unwrap(), edits));
    spec.with_lowest_version()
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_new_file_is_readable_by_all_and_alone() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("run/cdi");
    assert_eq!(write_spec(&directory, NAME, &spec("1")).unwrap(), Written::Changed);
    assert_eq!(names(&directory), [NAME]);
    assert_eq!(fs::metadata(directory.join(NAME)).unwrap().permissions().mode() & 0o7777, 0o644);
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o7777, 0o755);
    let read: Spec = serde_json::from_slice(&fs::read(directory.join(NAME)).unwrap()).unwrap();
    assert_eq!(read, spec("1"));
}

#[test]
fn the_same_content_is_not_written_again() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join(NAME);
    write_spec(root.path(), NAME, &spec("1")).unwrap();
    let before = fs::metadata(&path).unwrap();
    assert_eq!(write_spec(root.path(), NAME, &spec("1")).unwrap(), Written::Unchanged);
    let after = fs::metadata(&path).unwrap();
    assert_eq!((before.ino(), before.mtime_nsec()), (after.ino(), after.mtime_nsec()));

    assert_eq!(write_spec(root.path(), NAME, &spec("2")).unwrap(), Written::Changed);
    assert_ne!(fs::metadata(&path).unwrap().ino(), before.ino(), "replaced, not truncated");
}

#[test]
fn a_file_that_others_cannot_read_is_put_right() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join(NAME);
    write_spec(root.path(), NAME, &spec("1")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(write_spec(root.path(), NAME, &spec("1")).unwrap(), Written::Changed);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
}

#[test]
fn a_link_is_replaced_and_its_target_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let target = root.path().join("precious");
    fs::write(&target, "x").unwrap();
    symlink(&target, root.path().join(NAME)).unwrap();
    write_spec(root.path(), NAME, &spec("1")).unwrap();
    assert_eq!(fs::read_to_string(&target).unwrap(), "x");
    assert!(fs::symlink_metadata(root.path().join(NAME)).unwrap().is_file());
}

#[test]
fn nothing_invalid_is_written() {
    let root = tempfile::tempdir().unwrap();
    let mut empty = spec("1");
    empty.devices.clear();
    let mut old = spec("1");
    old.container_edits.additional_gids.push(5);
    for bad in [empty, old] {
        assert!(matches!(write_spec(root.path(), NAME, &bad), Err(WriteError::Invalid { .. })));
    }
    for name in ["a.yaml", "a", ".json", "../a.json", "a/b.json", "a.JSON"] {
        assert!(
            matches!(write_spec(root.path(), name, &spec("1")), Err(WriteError::FileName { .. })),
            "{name}"
        );
    }
    assert!(names(root.path()).is_empty());
}

#[test]
fn a_failed_rename_leaves_nothing_behind() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join(NAME)).unwrap();
    let error = write_spec(root.path(), NAME, &spec("1")).unwrap_err();
    assert!(error.to_string().contains(NAME), "{error}");
    assert_eq!(names(root.path()), [NAME]);
}

#[test]
fn removing_says_whether_there_was_something() {
    let root = tempfile::tempdir().unwrap();
    write_spec(root.path(), NAME, &spec("1")).unwrap();
    assert!(remove_spec(root.path(), NAME).unwrap());
    assert!(!remove_spec(root.path(), NAME).unwrap());
    assert!(!remove_spec(&root.path().join("missing"), NAME).unwrap());
}

#[test]
fn the_lowest_version_follows_the_content() {
    let lowest = |change: fn(&mut Spec)| {
        let mut spec = spec("1");
        change(&mut spec);
        spec.lowest_version()
    };
    assert_eq!(lowest(|_| ()), Version::V0_3_0);
    assert_eq!(
        lowest(|spec| {
            let mount = Mount::bind("/h", "/c", &["ro"]);
            spec.container_edits.mounts.push(Mount { fs_type: Some("bind".into()), ..mount });
        }),
        Version::V0_4_0
    );
    assert_eq!(lowest(|spec| spec.devices[0].name = "0".parse().unwrap()), Version::V0_5_0);
    assert_eq!(
        lowest(|spec| {
            let node = DeviceNode { host_path: Some("/dev/x".into()), ..DeviceNode::new("/dev/y") };
            spec.devices[0].container_edits.device_nodes.push(node);
        }),
        Version::V0_5_0
    );
    assert_eq!(lowest(|spec| spec.kind = "acme.com/d.v".parse().unwrap()), Version::V0_6_0);
    assert_eq!(
        lowest(|spec| drop(spec.devices[0].annotations.insert("k".into(), "v".into()))),
        Version::V0_6_0
    );
    assert_eq!(lowest(|spec| spec.container_edits.additional_gids.push(0)), Version::V0_7_0);
    assert_eq!(lowest(|spec| spec.container_edits.intel_rdt = Some(IntelRdt::default())), Version::V0_7_0);
    assert_eq!(
        lowest(|spec| {
            let rdt = IntelRdt { schemata: Some(Vec::new()), ..IntelRdt::default() };
            spec.devices[0].container_edits.intel_rdt = Some(rdt);
        }),
        Version::V1_1_0
    );
}

#[test]
fn a_full_producer_spec_has_the_keys_of_the_standard() {
    let hook = Hook::new(HookName::CreateRuntime, "/usr/lib/acme/hook")
        .with_args(["hook", "grant", "acme.com/dev=all"])
        .with_env("PATH", "/bin")
        .with_timeout_s(5);
    let edits = ContainerEdits::default()
        .with_env("ACME", "1")
        .with_mount(Mount::bind("/run/acme", "/run/acme", &["ro"]))
        .with_hook(hook)
        .with_device_node(DeviceNode::new("/dev/acme0"));
    let mut spec = Spec::new("acme.com/dev".parse().unwrap());
    spec.devices.push(Device::new("all".parse().unwrap(), edits));
    let expected = serde_json::json!({
        "cdiVersion": "0.3.0",
        "kind": "acme.com/dev",
        "devices": [{ "name": "all", "containerEdits": {
            "env": ["ACME=1"],
            "deviceNodes": [{ "path": "/dev/acme0" }],
            "hooks": [{
                "hookName": "createRuntime", "path": "/usr/lib/acme/hook",
                "args": ["hook", "grant", "acme.com/dev=all"], "env": ["PATH=/bin"], "timeout": 5,
            }],
            "mounts": [{ "hostPath": "/run/acme", "containerPath": "/run/acme", "options": ["rbind", "ro"] }],
        } }],
    });
    assert_eq!(serde_json::to_value(spec.with_lowest_version()).unwrap(), expected);
}

#[test]
fn a_reader_never_sees_half_a_file() {
    let root = tempfile::tempdir().unwrap();
    let long = |round: u32| spec(&format!("{round}").repeat(50_000));
    write_spec(root.path(), NAME, &long(0)).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..30 {
                assert_eq!(write_spec(root.path(), NAME, &long(round)).unwrap(), Written::Changed);
            }
            done.store(true, std::sync::atomic::Ordering::Release);
        });
        while !done.load(std::sync::atomic::Ordering::Acquire) {
            let registry = Registry::scan(&[root.path()]);
            assert_eq!(registry.devices().count(), 1, "{:?}", registry.errors().collect::<Vec<_>>());
        }
    });
}
