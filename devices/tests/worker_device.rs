// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device whose memory is not the host's: transfers, graphs, and what the host computes for it.
//!
//! `LIGHTER_TEST_GGML_DEVICE` is ggml's name of it (`Vulkan0`), within the root of the other worker tests. Mesa's
//! lavapipe does where there is no GPU: `VK_DRIVER_FILES` names its description, and `GGML_VK_VISIBLE_DEVICES=0`
//! has ggml take it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod worker_harness;

use lighter_devices::metal::rpc::{Op, WireTensor};
use worker_harness::{Client, Host, floats, result, tensor, vector};

const BF16: u32 = 30;

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    worker_harness::worker_child();
}

fn host() -> Option<Host> {
    let Ok(device) = std::env::var("LIGHTER_TEST_GGML_DEVICE") else {
        eprintln!("NOT RUN: set LIGHTER_TEST_GGML_DEVICE to ggml's name of a device");
        return None;
    };
    Host::start(|config| {
        config.engine = device;
        config.share_weights = true;
    })
}

fn bytes_of(client: &mut Client, tensor: &WireTensor, bytes: u64) -> Vec<u8> {
    client.get(tensor, 0, bytes).expect("served")
}

#[test]
fn content_goes_there_and_back() {
    let Some(host) = host() else { return };
    let mut client = host.client(8);
    let (handle, base) = client.buffer(20 << 20);
    // More than one piece, so that pieces are put together.
    let large: Vec<u8> = (0..18 << 20).map(|i: u32| i.to_le_bytes()[0] ^ i.to_le_bytes()[2]).collect();
    let whole = vector(1, handle, base, u32::try_from(large.len() / 4).unwrap());
    client.set(&whole, 0, &large);
    assert!(bytes_of(&mut client, &whole, large.len() as u64) == large);
    let (a, b) = (vector(1, handle, base, 8), vector(2, handle, base + 4096, 8));
    client.set(&a, 0, &floats(&[6.0; 8]));
    assert_eq!(client.call(9, &[a.to_bytes(), b.to_bytes()].concat()).unwrap(), [1]);
    assert_eq!(bytes_of(&mut client, &b, 32), floats(&[6.0; 8]));
    let fill = [&a.to_bytes()[..], &8_u64.to_le_bytes(), &8_u64.to_le_bytes(), &[0]].concat();
    client.send(17, &fill);
    assert_eq!(client.get(&a, 8, 8).unwrap(), [0; 8]);
    client.send(5, &[&handle.to_le_bytes()[..], &[0]].concat());
    assert_eq!(bytes_of(&mut client, &b, 32), [0; 32]);
    assert_eq!((host.asked(), host.counters().shared_bytes), (0, 0), "nothing is shared on a device");
    drop(client);
    host.stop();
}

#[test]
fn graphs_are_computed_and_computed_again() {
    let Some(host) = host() else { return };
    for major in [3, 8] {
        let mut client = host.client(major);
        client.add_up();
        let (handle, base) = client.buffer(1 << 16);
        let a = vector(1, handle, base, 64);
        let double = result(2, Op::Add, vector(2, handle, base, 64), &[1, 1]);
        client.set(&a, 0, &floats(&[1.0; 64]));
        client.compute(9, &[2], &[a, double]);
        client.recompute(9);
        assert_eq!(client.get(&a, 0, 16).unwrap(), floats(&[4.0; 4]));
    }
}

#[test]
fn what_the_device_does_not_compute_the_host_does() {
    let Some(host) = host() else { return };
    let mut client = host.client(8);
    let (handle, base) = client.buffer(1 << 16);
    let half = |id: u64, at: u64| {
        let mut made = tensor(id, BF16, [64, 1, 1, 1], handle, base + at);
        made.nb = [2, 128, 128, 128];
        made
    };
    let a = vector(1, handle, base, 64);
    let double = result(2, Op::Add, vector(2, handle, base + 1024, 64), &[1, 1]);
    let narrow = result(3, Op::Cpy, half(3, 2048), &[2, 3]);
    // Sums of this type are no kernel of Vulkan's.
    let sum = result(4, Op::Add, half(4, 3072), &[3, 3]);
    let wide = result(5, Op::Cpy, vector(5, handle, base + 4096, 64), &[4, 5]);
    client.set(&a, 0, &floats(&[1.5; 64]));
    client.compute(3, &[2, 3, 4, 5], &[a, double, narrow, sum, wide]);
    assert_eq!(bytes_of(&mut client, &wide, 256), floats(&[6.0; 64]));
    client.set(&a, 0, &floats(&[2.0; 64]));
    client.recompute(3);
    assert_eq!(bytes_of(&mut client, &wide, 256), floats(&[8.0; 64]));
}

#[test]
fn a_view_that_lies_elsewhere_than_it_says_is_refused() {
    let Some(host) = host() else { return };
    let mut client = host.client(8);
    let (handle, base) = client.buffer(1 << 16);
    let a = vector(1, handle, base, 64);
    let view = WireTensor { view_src: 1, view_offset: 60_000, ..vector(2, handle, base + 16, 8) };
    let sum = result(3, Op::Add, vector(3, handle, base + 1024, 8), &[2, 2]);
    client.compute(1, &[3], &[a, view, sum]);
    let error = host.end_of(client.stream).expect("a reason");
    assert!(error.contains("does not lie where it looks"), "{error}");
    host.client(8).add_up();
}
