// SPDX-License-Identifier: MIT OR Apache-2.0
//! Weights that the service holds once: used where they are equal, private again where a client writes.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod worker_harness;

use lighter_devices::metal::rpc::Op;
use worker_harness::{Client, Host, floats, result, vector};

const ELEMENTS: u32 = 32 << 10;

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    worker_harness::worker_child();
}

fn content() -> Vec<u8> {
    (0..ELEMENTS).flat_map(|i| (f32::from(u16::try_from(i % 1000).unwrap())).to_le_bytes()).collect()
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

fn loaded(host: &Host) -> (Client, u64, u64) {
    let mut client = host.client(8);
    let (handle, base) = client.buffer(1 << 20);
    client.set(&vector(1, handle, base, ELEMENTS), 0, &content());
    (client, handle, base)
}

fn read(client: &mut Client, handle: u64, base: u64) -> Vec<u8> {
    client.get(&vector(1, handle, base, ELEMENTS), 0, u64::from(ELEMENTS) * 4).unwrap()
}

#[test]
fn equal_uploads_are_held_once() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(false);
    let (mut first, handle, base) = loaded(&host);
    assert_eq!(read(&mut first, handle, base), content());
    let (mut second, handle, base) = loaded(&host);
    assert_eq!(read(&mut second, handle, base), content());
    let counters = host.counters();
    assert_eq!((counters.shared_bytes, counters.held_bytes), (2 * 4 * u64::from(ELEMENTS), 2 << 20));
    drop((first, second));
    host.stop();
}

#[test]
fn a_write_is_seen_by_its_writer_only() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(false);
    let (mut reader, handle, base) = loaded(&host);
    let (mut writer, ..) = loaded(&host);
    read(&mut writer, handle, base);
    assert_eq!(host.counters().shared_bytes, 8 * u64::from(ELEMENTS));
    writer.set(&vector(1, handle, base, ELEMENTS), 400, &floats(&[-5.0]));
    assert_eq!(read(&mut writer, handle, base)[400..404], floats(&[-5.0]));
    assert_eq!(read(&mut reader, handle, base), content());
    assert_eq!(host.counters().shared_bytes, 4 * u64::from(ELEMENTS));
}

#[test]
fn a_graph_writes_and_reads_what_is_its_clients() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(false);
    let (mut reader, handle, base) = loaded(&host);
    let (mut writer, ..) = loaded(&host);
    let weight = vector(1, handle, base, ELEMENTS);
    let sum = result(2, Op::Add, vector(2, handle, base + (512 << 10), ELEMENTS), &[1, 1]);
    for client in [&mut reader, &mut writer] {
        client.compute(1, &[2], &[weight, sum]);
        assert_eq!(client.get(&sum, 40, 4).unwrap(), floats(&[20.0]));
    }
    // In place on the weight, from a graph that is kept: the kept one sees it too.
    writer.compute(2, &[2], &[weight, result(2, Op::Add, weight_as(2, handle, base), &[1, 1])]);
    writer.recompute(1);
    assert_eq!(writer.get(&sum, 40, 4).unwrap(), floats(&[40.0]));
    assert_eq!(read(&mut reader, handle, base), content());
    reader.recompute(1);
    assert_eq!(reader.get(&sum, 40, 4).unwrap(), floats(&[20.0]));
}

fn weight_as(id: u64, handle: u64, base: u64) -> lighter_devices::metal::rpc::WireTensor {
    vector(id, handle, base, ELEMENTS)
}

#[test]
fn content_across_a_weights_end_stays_right() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(false);
    let (mut client, handle, base) = loaded(&host);
    let end = base + u64::from(ELEMENTS) * 4;
    // Half in the weight, half behind it.
    let across = vector(3, handle, end - 8, 4);
    client.set(&across, 0, &floats(&[1.0, 2.0, 3.0, 4.0]));
    assert_eq!(client.get(&across, 0, 16).unwrap(), floats(&[1.0, 2.0, 3.0, 4.0]));
    let mut want = content();
    let at = want.len() - 8;
    want[at..].copy_from_slice(&floats(&[1.0, 2.0]));
    assert_eq!(read(&mut client, handle, base), want);
    assert_eq!(host.counters().shared_bytes, 0);
}

#[test]
fn a_service_that_gives_other_content_is_not_believed() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(true);
    let (mut client, handle, base) = loaded(&host);
    assert_eq!(read(&mut client, handle, base), content());
    assert_eq!(host.counters().shared_bytes, 0);
}

#[test]
fn a_service_without_room_costs_nothing_but_memory() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    let (mut client, handle, base) = loaded(&host);
    assert_eq!(read(&mut client, handle, base), content());
    assert_eq!((host.asked(), host.counters().shared_bytes), (1, 0));
}

#[test]
fn a_hash_is_answered_from_what_was_uploaded() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(false);
    let (mut first, ..) = loaded(&host);
    first.add_up();
    let mut second = host.client(8);
    let (handle, base) = second.buffer(1 << 20);
    let question = |hash: u64| {
        let weight = vector(1, handle, base, ELEMENTS);
        [&weight.to_bytes()[..], &[0; 8], &hash.to_le_bytes()].concat()
    };
    assert_eq!(second.call(7, &question(1)).unwrap(), [0]);
    assert_eq!(second.call(7, &question(fnv(&content()))).unwrap(), [1]);
    assert_eq!(read(&mut second, handle, base), content());
}

#[test]
fn inputs_of_graphs_are_not_weights() {
    let Some(host) = Host::start(|config| config.share_weights = true) else { return };
    host.keep_weights(false);
    let mut client = host.client(8);
    let (handle, base) = client.buffer(1 << 20);
    let mut input = vector(1, handle, base, ELEMENTS);
    input.flags = 1;
    client.set(&input, 0, &content());
    // After the first graph nothing of the buffer is being loaded any more.
    let sum = result(2, Op::Add, vector(2, handle, base + (512 << 10), ELEMENTS), &[1, 1]);
    client.compute(1, &[2], &[input, sum]);
    client.set(&vector(1, handle, base, ELEMENTS), 0, &content());
    assert_eq!(read(&mut client, handle, base), content());
    assert_eq!(host.asked(), 0);
}
