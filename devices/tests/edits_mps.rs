// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the mps device puts into a container, against golden files. `UPDATE_GOLDEN=1` writes them anew.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod goldens;

use std::path::{Path, PathBuf};

use lighter_devices::Device;
use lighter_devices::client::{ClientFile, Content};
use lighter_devices::host::{Engine, Host, Probe};
use lighter_devices::mps::{Mps, MpsConfig};

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

fn engine(name: &str, aliases: &[&str]) -> Engine {
    Engine {
        name: name.into(),
        description: String::new(),
        version: "2.15.0".into(),
        memory_bytes: None,
        stable_name: name.replace(':', "-"),
        aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
    }
}

fn mps(pip_find_links: bool) -> Mps {
    Mps { config: MpsConfig { pip_find_links, ..MpsConfig::default() } }
}

fn with_package() -> Vec<ClientFile> {
    vec![ClientFile {
        path: "mps/python/lighter_mps/__init__.py".into(),
        content: Content::CopyOf("/x".into()),
        executable: false,
    }]
}

fn check(golden: &str, pip_find_links: bool, engines: Vec<Engine>) {
    let host = host(Path::new("/x"));
    let spec = mps(pip_find_links).spec(&host, &Probe::Found(engines), &with_package()).unwrap();
    goldens::check(golden, &spec);
}

#[test]
fn a_host_with_a_processor_only() {
    check("mps-cpu.json", true, vec![engine("cpu", &[])]);
}

#[test]
fn a_host_with_gpus_without_pips_variable() {
    check(
        "mps-cuda.json",
        false,
        vec![engine("cuda:0", &["cuda"]), engine("cuda:1", &[]), engine("cpu", &[])],
    );
}

#[test]
fn no_engine_or_no_package_is_no_spec() {
    let mps = mps(true);
    let missing = Probe::Missing { reason: "no torch".into(), remedy: "get one".into() };
    let host = host(Path::new("/nonexistent"));
    assert_eq!(mps.spec(&host, &missing, &with_package()), None);
    assert_eq!(mps.spec(&host, &Probe::Found(vec![engine("cpu", &[])]), &[]), None);
    let Probe::Missing { reason, remedy } = mps.probe(&host) else { panic!("is there") };
    assert!(reason.contains("/nonexistent/mps/python/lighter_mps/__init__.py"), "{reason}");
    assert!(remedy.contains("daemon.plugin_dir"), "{remedy}");
}

#[test]
fn the_client_folder_has_the_package_and_repeats_what_the_spec_sets() {
    let folder = tempfile::tempdir().unwrap();
    for file in [
        "python/lighter_mps/__init__.py",
        "python/lighter_mps/__pycache__/link.cpython-311.pyc",
        "python/lighter_mps/surface/mps.py",
        "python/lighter_mps_wire/values.py",
        "wheels/lighter_mps-0.1.0-py3-none-any.whl",
        "lighter-mps-host.pyz",
    ] {
        let path = folder.path().join("mps").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }
    let (mps, host) = (mps(true), host(folder.path()));
    let probe = Probe::Found(vec![engine("cpu", &[])]);
    let files = mps.client_files(&host, &probe);
    let mut paths: Vec<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
    paths.sort();
    let expected = [
        "mps/env",
        "mps/python/lighter_mps/__init__.py",
        "mps/python/lighter_mps/surface/mps.py",
        "mps/python/lighter_mps_wire/values.py",
        "mps/wheels/lighter_mps-0.1.0-py3-none-any.whl",
    ];
    assert_eq!(paths, expected.map(PathBuf::from));
    let spec = mps.spec(&host, &probe, &files).unwrap();
    let env = files.iter().find(|file| file.path == Path::new("mps/env")).unwrap();
    let Content::Bytes(text) = &env.content else { panic!("{env:?}") };
    let lines: Vec<&str> = std::str::from_utf8(text).unwrap().lines().collect();
    assert_eq!(lines, spec.container_edits.env);
    let mounted: Vec<&str> =
        spec.container_edits.mounts.iter().map(|mount| mount.container_path.as_str()).collect();
    assert_eq!(mounted, ["/usr/lib/lighter/bin", "/usr/lib/lighter/mps", "/run/lighter/mps"]);
}
