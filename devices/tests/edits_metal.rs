// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the metal device puts into a container, against golden files. `UPDATE_GOLDEN=1` writes them anew.
#![allow(clippy::unwrap_used, reason = "tests")]

mod goldens;

use std::path::Path;

use lighter_devices::Device;
use lighter_devices::client::{ClientFile, Content};
use lighter_devices::host::{Engine, Host, Probe};
use lighter_devices::metal::{Metal, MetalConfig};

fn host() -> Host {
    Host {
        program: "/usr/bin/lighter".into(),
        hook: "/usr/libexec/lighter/lighter-hook".into(),
        hook_socket: "/run/lighter/hook.sock".into(),
        client_dir: "/var/lib/lighter/client".into(),
        socket_dir: "/run/lighter".into(),
        plugin_dir: "/nonexistent".into(),
    }
}

fn engine(name: &str, stable_name: &str, aliases: &[&str]) -> Engine {
    Engine {
        name: name.into(),
        description: String::new(),
        version: "0.27.0".into(),
        memory_bytes: None,
        stable_name: stable_name.into(),
        aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
    }
}

fn metal(port: u16) -> Metal {
    Metal { config: MetalConfig { port, ..MetalConfig::default() } }
}

/// The files of a host that has ggml's RPC client.
fn with_plugin() -> Vec<ClientFile> {
    ["metal/libggml-lighter.so", "metal/libggml-rpc-0.27.0.so"]
        .map(|path| ClientFile {
            path: path.into(),
            content: Content::CopyOf("/x".into()),
            executable: false,
        })
        .into()
}

fn check(golden: &str, metal: &Metal, engines: Vec<Engine>, files: &[ClientFile]) {
    let spec = metal.spec(&host(), &Probe::Found(engines), files).unwrap();
    goldens::check(golden, &spec);
}

#[test]
fn a_host_with_a_processor_only() {
    check("metal-cpu.json", &metal(50052), vec![engine("CPU", "cpu", &[])], &[]);
}

#[test]
fn a_host_with_a_gpu_another_port_and_the_plug_in() {
    let engines = vec![engine("CUDA0", "0000-01-00.0", &["cuda0", "vulkan0"]), engine("CPU", "cpu", &[])];
    check("metal-gpu.json", &metal(50099), engines, &with_plugin());
}

#[test]
fn no_engine_is_no_spec() {
    let missing = Probe::Missing { reason: "no ggml".into(), remedy: "install it".into() };
    assert_eq!(metal(50052).spec(&host(), &missing, &[]), None);
}

#[test]
fn the_client_folder_repeats_what_the_spec_sets() {
    let metal = metal(50099);
    let probe = Probe::Found(vec![engine("CPU", "cpu", &[])]);
    let files = metal.client_files(&host(), &probe);
    let spec = metal.spec(&host(), &probe, &files).unwrap();
    let env = files.iter().find(|file| file.path == Path::new("metal/env")).unwrap();
    let Content::Bytes(text) = &env.content else { panic!("{env:?}") };
    let lines: Vec<&str> = std::str::from_utf8(text).unwrap().lines().collect();
    assert_eq!(lines, spec.container_edits.env);
}
