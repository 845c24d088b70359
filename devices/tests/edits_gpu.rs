// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the gpu device puts into a container, against golden files. `UPDATE_GOLDEN=1` writes them anew.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod goldens;

use std::path::Path;

use lighter_devices::Device;
use lighter_devices::client::Content;
use lighter_devices::gpu::{Gpu, GpuConfig};
use lighter_devices::host::{Engine, Host, Probe};

fn host() -> Host {
    Host {
        program: "/usr/bin/lighter".into(),
        hook: "/usr/libexec/lighter/lighter-hook".into(),
        hook_socket: "/run/lighter/hook.sock".into(),
        client_dir: "/var/lib/lighter/client".into(),
        socket_dir: "/run/lighter".into(),
        plugin_dir: "/usr/lib/lighter".into(),
    }
}

fn engine(name: &str, stable_name: &str, aliases: &[&str]) -> Engine {
    Engine {
        name: name.into(),
        description: String::new(),
        version: "driver 1".into(),
        memory_bytes: None,
        stable_name: stable_name.into(),
        aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
    }
}

fn gpu() -> Gpu {
    Gpu { config: GpuConfig { layer_folder: Some("/nonexistent".into()), ..GpuConfig::default() } }
}

fn check(golden: &str, engines: Vec<Engine>) {
    let (device, probe) = (gpu(), Probe::Found(engines));
    let spec = device.spec(&host(), &probe, &[]).unwrap();
    goldens::check(golden, &spec);
    let files = device.client_files(&host(), &probe);
    let env = files.iter().find(|file| file.path == Path::new("gpu/env")).unwrap();
    let Content::Bytes(text) = &env.content else { panic!("{env:?}") };
    let lines: Vec<&str> = std::str::from_utf8(text).unwrap().lines().collect();
    assert_eq!(lines, spec.container_edits.env, "what docker exec gets");
}

#[test]
fn a_host_with_a_processor_only() {
    check("gpu-cpu.json", vec![engine("llvmpipe", "cpu", &["0"])]);
}

#[test]
fn a_host_with_two_gpus_gives_names_and_no_device_node() {
    check(
        "gpu-cards.json",
        vec![engine("A card", "0000-03-00.0", &["0"]), engine("An iGPU", "0000-00-02.0", &["1"])],
    );
}

#[test]
fn the_socket_is_one_that_mesa_can_copy() {
    let spec = gpu().spec(&host(), &Probe::Found(vec![engine("llvmpipe", "cpu", &[])]), &[]).unwrap();
    let socket =
        spec.container_edits.env.iter().find_map(|line| line.strip_prefix("VTEST_SOCKET_NAME=")).unwrap();
    assert!(socket.starts_with('/') && socket.len() < 108, "{socket}");
}

#[test]
fn no_engine_is_no_spec_and_a_missing_layer_has_a_remedy() {
    let missing = Probe::Missing { reason: "no driver".into(), remedy: "get one".into() };
    assert_eq!(gpu().spec(&host(), &missing, &[]), None);
    let Probe::Missing { reason, remedy } = gpu().probe(&host()) else { panic!("is there") };
    assert!(reason.contains("/nonexistent/VkLayer_lighter_hostmem.json"), "{reason}");
    assert!(remedy.contains("daemon.plugin_dir"), "{remedy}");
}
