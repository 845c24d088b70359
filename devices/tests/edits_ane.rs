// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ane device puts into a container, against golden files. `UPDATE_GOLDEN=1` writes them anew.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod goldens;

use std::path::Path;

use lighter_devices::Device;
use lighter_devices::ane::{Ane, AneConfig};
use lighter_devices::client::{ClientFile, Content};
use lighter_devices::host::{Engine, Host, Probe};

fn host(plugin_dir: &Path) -> Host {
    Host {
        program: "/usr/bin/lighter".into(),
        hook: "/usr/libexec/lighter/lighter-hook".into(),
        hook_socket: "/run/lighter/hook.sock".into(),
        client_dir: "/var/lib/lighter/client".into(),
        socket_dir: "/run/lighter".into(),
        plugin_dir: plugin_dir.to_owned(),
    }
}

fn engine(name: &str) -> Engine {
    Engine {
        name: name.into(),
        description: String::new(),
        version: "1.32.0".into(),
        memory_bytes: None,
        stable_name: name.into(),
        aliases: Vec::new(),
    }
}

fn ane() -> Ane {
    Ane { config: AneConfig::default() }
}

fn with_library() -> Vec<ClientFile> {
    vec![ClientFile {
        path: "ane/liblighter_ane_ep.so".into(),
        content: Content::CopyOf("/x".into()),
        executable: false,
    }]
}

fn check(golden: &str, engines: Vec<Engine>) {
    let spec = ane().spec(&host(Path::new("/x")), &Probe::Found(engines), &with_library()).unwrap();
    goldens::check(golden, &spec);
}

#[test]
fn a_host_with_a_processor_only() {
    check("ane-cpu.json", vec![engine("cpu")]);
}

#[test]
fn a_host_with_openvino() {
    check("ane-openvino.json", vec![engine("openvino-npu"), engine("openvino-cpu"), engine("cpu")]);
}

#[test]
fn no_engine_or_no_library_is_no_spec() {
    let missing = Probe::Missing { reason: "no library".into(), remedy: "get one".into() };
    let host = host(Path::new("/nonexistent"));
    assert_eq!(ane().spec(&host, &missing, &with_library()), None);
    assert_eq!(ane().spec(&host, &Probe::Found(vec![engine("cpu")]), &[]), None);
    let Probe::Missing { reason, remedy } = ane().probe(&host) else { panic!("is there") };
    assert!(reason.contains("/nonexistent/liblighter_ane_ep.so"), "{reason}");
    assert!(remedy.contains("daemon.plugin_dir"), "{remedy}");
}

#[test]
fn the_client_folder_repeats_what_the_spec_sets() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("liblighter_ane_ep.so"), "").unwrap();
    let (ane, host) = (ane(), host(folder.path()));
    let probe = Probe::Found(vec![engine("cpu")]);
    let files = ane.client_files(&host, &probe);
    let spec = ane.spec(&host, &probe, &files).unwrap();
    let env = files.iter().find(|file| file.path == Path::new("ane/env")).unwrap();
    let Content::Bytes(text) = &env.content else { panic!("{env:?}") };
    let lines: Vec<&str> = std::str::from_utf8(text).unwrap().lines().collect();
    assert_eq!(lines, spec.container_edits.env);
    let mounted: Vec<&str> =
        spec.container_edits.mounts.iter().map(|mount| mount.container_path.as_str()).collect();
    assert_eq!(mounted, ["/usr/lib/lighter/bin", "/usr/lib/lighter/ane", "/run/lighter/ane"]);
}
