// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every protocol major against a real worker: answers, acknowledgements, numbers of operations by age.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod worker_harness;

use lighter_devices::metal::rpc::{Major, Op, WireTensor, candidates};
use worker_harness::{Client, Host, floats, result, tensor, vector};

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    worker_harness::worker_child();
}

fn acknowledged(client: &mut Client, command: u8, body: &[u8]) {
    client.send(command, body);
    if client.major < 6 {
        assert_eq!(client.answer(), Some(vec![]), "command {command} of major {}", client.major);
    }
}

#[test]
fn all_majors_at_once_on_one_worker() {
    let Some(host) = Host::start(|_| {}) else { return };
    let mut clients: Vec<Client> = (2..=8).map(|major| host.client(major)).collect();
    for client in &mut clients {
        every_command(client);
    }
    for client in &mut clients {
        client.add_up();
    }
    drop(clients);
    host.stop();
}

fn every_command(client: &mut Client) {
    let device = client.device();
    let alignment = client.call(1, &device).unwrap();
    assert!(u64::from_le_bytes(alignment.try_into().unwrap()).is_power_of_two());
    assert_eq!(client.call(2, &device).unwrap().len(), 8);
    let memory = client.call(11, &device).unwrap();
    let total = u64::from_le_bytes(memory[8..].try_into().unwrap());
    assert_eq!(total, 256 << 20, "the container's share, not the host's memory");
    if client.major >= 3 {
        assert_eq!(client.call(15, &[]).unwrap(), 1_u32.to_le_bytes());
    }
    let (handle, base) = client.buffer(1 << 16);
    acknowledged(client, 5, &[&handle.to_le_bytes()[..], &[0xff]].concat());
    let a = vector(1, handle, base, 8);
    assert_eq!(client.get(&a, 0, 4).unwrap(), [0xff; 4]);
    acknowledged(client, 12, &a.to_bytes());
    let mut size = client.device();
    size.extend(a.to_bytes());
    assert_eq!(client.call(13, &size).unwrap(), 32_u64.to_le_bytes());
    client.set(&a, 8, &floats(&[4.0]));
    let b = vector(2, handle, base + 4096, 8);
    assert_eq!(client.call(9, &[a.to_bytes(), b.to_bytes()].concat()).unwrap(), [1]);
    assert_eq!(client.get(&b, 8, 4).unwrap(), floats(&[4.0]));
    if client.major >= 5 {
        let mut fill = a.to_bytes().to_vec();
        fill.extend(4_u64.to_le_bytes());
        fill.extend(4_u64.to_le_bytes());
        fill.push(1);
        acknowledged(client, 17, &fill);
        assert_eq!(client.get(&a, 4, 4).unwrap(), [1; 4]);
    }
    let mut hash = a.to_bytes().to_vec();
    hash.extend([0; 16]);
    assert_eq!(client.call(7, &hash).unwrap(), [0]);
    acknowledged(client, 4, &handle.to_le_bytes());
}

#[test]
fn graphs_are_computed_again_by_name() {
    let Some(host) = Host::start(|_| {}) else { return };
    for major in [3, 5, 8] {
        let mut client = host.client(major);
        let (handle, base) = client.buffer(4096);
        let a = vector(1, handle, base, 4);
        // In place: each computation doubles.
        let double = result(2, Op::Add, vector(2, handle, base, 4), &[1, 1]);
        client.set(&a, 0, &floats(&[1.0; 4]));
        client.compute(9, &[2], &[a, double]);
        client.recompute(9);
        client.recompute(9);
        assert_eq!(client.get(&a, 0, 16).unwrap(), floats(&[8.0; 4]), "major {major}");
        // Gone with its buffer.
        client.send(4, &handle.to_le_bytes());
        if major < 6 {
            client.answer();
        }
        client.recompute(9);
        let error = host.end_of(client.stream).expect("a reason");
        assert!(error.contains("is not kept"), "{error}");
    }
}

/// The square root of 9 by the unary-like SQRT and then SILU's neighbour EXP: numbers that moved between ages.
fn by_age(host: &Host, major: u8, since: &str, flags: i32) {
    let era = candidates(Major::new(major).unwrap()).iter().find(|era| era.since == since).unwrap();
    let number = |op: Op| u32::try_from(era.ops().iter().position(|other| *other == op).unwrap()).unwrap();
    let unary = |name: &str| (0..).find(|n| era.unary(*n) == Some(name)).unwrap();
    let mut client = host.client(major);
    let (handle, base) = client.buffer(4096);
    let a = vector(1, handle, base, 4);
    client.set(&a, 0, &floats(&[9.0; 4]));
    let node = |id: u64, op: Op, from: u64| {
        let shape = vector(id, handle, base + 512 * id, 4);
        WireTensor { op: number(op), flags, use_count: 0, ..result(id, op, shape, &[from]) }
    };
    let root = node(2, Op::Sqrt, 1);
    let mut trick = node(3, Op::Unary, 2);
    trick.params[0] = unary("GELU_ERF");
    let mut gate = node(4, Op::Glu, 3);
    gate.params[0] = 0;
    gate.ne[0] = 2;
    (gate.nb[1], gate.nb[2], gate.nb[3]) = (8, 8, 8);
    client.compute(1, &[2, 3, 4], &[a, root, trick, gate]);
    assert_eq!(client.get(&root, 0, 16).expect("served"), floats(&[3.0; 4]), "{major} {since}");
    let close = |bytes: &[u8], want: f32| {
        let value = f32::from_le_bytes(bytes[..4].try_into().unwrap());
        assert!((value - want).abs() < 0.01, "{major} {since}: {value} is not {want}");
    };
    // gelu(3) = 2.996; reglu multiplies the two halves, 2.996 * 2.996.
    close(&client.get(&trick, 0, 16).unwrap(), 2.996);
    close(&client.get(&gate, 0, 8).unwrap(), 8.976);
}

#[test]
fn numbers_are_read_by_the_clients_age() {
    let Some(host) = Host::start(|_| {}) else { return };
    for major in 2..=8 {
        for era in candidates(Major::new(major).unwrap()) {
            // Before 0.9.6 nobody marks nodes as to be computed.
            let unmarked = matches!(era.since, "0.9.1" | "0.9.5");
            by_age(&host, major, era.since, if unmarked { 0 } else { 16 });
        }
    }
}

#[test]
fn without_a_hint_the_hello_tells_old_from_new() {
    let Some(host) = Host::start(|_| {}) else { return };
    host.client_hinted(3, None).add_up();
    host.client_hinted(8, None).add_up();
}

#[test]
fn quotas_hold_for_the_container_as_a_whole() {
    let Some(host) = Host::start(|config| (config.max_bytes, config.max_streams) = (1 << 20, 2)) else {
        return;
    };
    let (mut first, mut second) = (host.client(8), host.client(8));
    let (_, _) = first.buffer(700 << 10);
    let mut body = second.device();
    body.extend((700_u64 << 10).to_le_bytes());
    assert_eq!(second.call(0, &body).unwrap(), [0; 16], "no memory left is an answer, not an end");
    let third = host.connect(Some(8));
    let error = host.end_of(third.stream).expect("a reason");
    assert!(error.contains("more than 2 streams"), "{error}");
    let left = first.stream;
    drop(first);
    assert_eq!(host.end_of(left), None);
    second.buffer(700 << 10);
    assert_eq!(host.counters().held_bytes, 700 << 10);
}

#[test]
fn sixteen_clients_compute_at_the_same_time() {
    let Some(host) = Host::start(|_| {}) else { return };
    let clients: Vec<Client> = (0..16).map(|i| host.client(if i % 2 == 0 { 8 } else { 3 })).collect();
    let threads: Vec<_> = clients
        .into_iter()
        .map(|mut client| std::thread::spawn(move || (0..20).for_each(|_| client.add_up())))
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let counters = host.counters();
    assert_eq!((counters.graphs, counters.held_bytes, counters.errors), (320, 0, 0));
    host.stop();
}

#[test]
fn strided_rows_arrive_where_they_belong() {
    let Some(host) = Host::start(|_| {}) else { return };
    let mut client = host.client(8);
    let (handle, base) = client.buffer(4096);
    let table = tensor(1, 0, [4, 4, 1, 1], handle, base);
    client.set(&table, 0, &[0; 64]);
    // Two rows of 8 bytes, 32 apart, from byte 16.
    let numbers = [16_u64, 8, 2, 32].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    let head = [&table.to_bytes()[..], &numbers].concat();
    client.send(18, &[&head[..], &floats(&[1.0, 2.0, 3.0, 4.0])].concat());
    let all = client.get(&table, 0, 64).unwrap();
    assert_eq!((&all[16..24], &all[48..56]), (&floats(&[1.0, 2.0])[..], &floats(&[3.0, 4.0])[..]));
    assert_eq!(client.call(19, &head).unwrap(), floats(&[1.0, 2.0, 3.0, 4.0]));
    let beyond = [16_u64, 8, 3, 32].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    assert_eq!(client.call(19, &[&table.to_bytes()[..], &beyond].concat()), None);
}
