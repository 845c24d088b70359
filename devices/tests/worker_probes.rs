// SPDX-License-Identifier: MIT OR Apache-2.0
//! The malformed messages that take upstream's server down, against a real worker with a real ggml: each ends
//! at most the stream that sent it, and another client goes on.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod worker_harness;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use lighter_devices::metal::rpc::{Op, WireTensor};
use worker_harness::{Client, Host, floats, number, result, tensor, vector};

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    worker_harness::worker_child();
}

/// Sends something bad on a fresh stream while another is open; that stream ends with a reason, the other goes on.
fn refused(major: u8, reason: &str, bad: impl FnOnce(&mut Client)) {
    let Some(host) = Host::start(|_| {}) else { return };
    let mut bystander = host.client(8);
    bystander.add_up();
    let mut client = host.client(major);
    bad(&mut client);
    let error = host.end_of(client.stream).expect("a reason");
    assert!(error.contains(reason), "{error}");
    assert_eq!(client.answer(), None);
    bystander.add_up();
    host.client(8).add_up();
    drop((bystander, client));
    host.stop();
}

/// Sends a bad graph, made by `make` from a buffer's handle and base.
fn refused_graph(reason: &str, make: impl FnOnce(u64, u64) -> (Vec<u64>, Vec<WireTensor>)) {
    refused(8, reason, |client| {
        let (handle, base) = client.buffer(1 << 20);
        let (nodes, tensors) = make(handle, base);
        client.compute(1, &nodes, &tensors);
        client.get(&vector(1, handle, base, 4), 0, 16);
    });
}

#[test]
fn a_frame_of_2_to_63_bytes() {
    refused(8, "body of 9223372036854775808 bytes", |client| {
        let mut frame = vec![10];
        frame.extend((1_u64 << 63).to_le_bytes());
        client.raw(&frame);
    });
}

#[test]
fn a_node_without_id() {
    refused_graph("node 0x0 is not among the tensors", |handle, base| {
        (vec![0], vec![vector(1, handle, base, 4)])
    });
}

#[test]
fn a_product_without_factors() {
    refused_graph("MUL_MAT has no input 0", |handle, base| {
        (vec![1], vec![result(1, Op::MulMat, vector(1, handle, base, 4), &[])])
    });
}

#[test]
fn an_operation_that_does_not_exist() {
    refused_graph("operation 9999 does not exist", |handle, base| {
        let tensor = WireTensor { op: 9999, ..result(1, Op::Add, vector(1, handle, base, 4), &[]) };
        (vec![1], vec![tensor])
    });
}

#[test]
fn an_operation_that_calls_an_address() {
    refused_graph("CUSTOM is not served", |handle, base| {
        let mut tensor = result(2, Op::Custom, vector(2, handle, base, 4), &[1]);
        tensor.params[0] = 0x10;
        (vec![2], vec![vector(1, handle, base, 4), tensor])
    });
}

#[test]
fn a_sum_of_sizes_that_do_not_fit() {
    refused_graph("ADD: the second input repeats to the first", |handle, base| {
        let (a, b) = (vector(1, handle, base, 8), vector(2, handle, base + 512, 5));
        (vec![3], vec![a, b, result(3, Op::Add, vector(3, handle, base + 1024, 8), &[1, 2])])
    });
}

#[test]
fn a_row_that_does_not_exist() {
    refused(8, "GET_ROWS: row 1073741824 of 4 does not exist", |client| {
        let (handle, base) = client.buffer(1 << 20);
        let table = tensor(1, 0, [8, 4, 1, 1], handle, base);
        let rows = tensor(2, 26, [1, 1, 1, 1], handle, base + 4096);
        client.set(&rows, 0, &(1_i32 << 30).to_le_bytes());
        let out = result(3, Op::GetRows, vector(3, handle, base + 8192, 8), &[1, 2]);
        client.compute(1, &[3], &[table, rows, out]);
        client.get(&out, 0, 32);
    });
}

#[test]
fn a_row_that_stops_existing_between_computations() {
    refused(8, "SET_ROWS: row -1 of 4 does not exist", |client| {
        let (handle, base) = client.buffer(1 << 20);
        let table = tensor(1, 0, [8, 4, 1, 1], handle, base);
        let (rows, new) =
            (tensor(2, 26, [1, 1, 1, 1], handle, base + 4096), vector(3, handle, base + 8192, 8));
        client.set(&rows, 0, &2_i32.to_le_bytes());
        client.set(&new, 0, &floats(&[2.5; 8]));
        let mut out = result(4, Op::SetRows, WireTensor { id: 4, view_src: 1, ..table }, &[3, 2, 1]);
        out.view_offset = 0;
        client.compute(5, &[4], &[table, rows, new, out]);
        assert_eq!(client.get(&table, 64, 32).unwrap(), floats(&[2.5; 8]));
        client.set(&rows, 0, &(-1_i32).to_le_bytes());
        client.recompute(5);
        client.get(&table, 0, 32);
    });
}

#[test]
fn sizes_whose_product_wraps() {
    refused(8, "are too large", |client| {
        let (handle, base) = client.buffer(1 << 20);
        let mut tensor = tensor(1, 0, [1 << 20, 1, 1, 1], handle, base);
        (tensor.ne, tensor.nb) = ([1 << 30, 1 << 30, 1 << 30, 1 << 30], [u32::MAX; 4]);
        client.set(&tensor, 0, &[0; 16]);
    });
}

#[test]
fn more_nodes_than_there_are_bytes() {
    refused(8, "does not fit its", |client| {
        let mut body = client.device();
        body.extend(1_u64.to_le_bytes());
        body.extend(u32::MAX.to_le_bytes());
        body.extend([0; 64]);
        client.send(10, &body);
    });
}

#[test]
fn an_address_outside_its_buffer() {
    for address in [0x1000, u64::MAX - 8, 1] {
        refused_graph("are not within buffer", |handle, base| {
            let (a, b) = (vector(1, handle, base, 8), vector(2, handle, address, 8));
            (vec![3], vec![a, b, result(3, Op::Add, vector(3, handle, base + 1024, 8), &[1, 2])])
        });
    }
}

#[test]
fn a_buffer_of_another_client() {
    let Some(host) = Host::start(|_| {}) else { return };
    let (mut owner, mut other) = (host.client(8), host.client(8));
    let (handle, base) = owner.buffer(4096);
    owner.set(&vector(1, handle, base, 8), 0, &floats(&[42.0; 8]));
    let got = other.get(&vector(1, handle, base, 8), 0, 32);
    assert_eq!(got, None);
    assert_eq!(owner.get(&vector(1, handle, base, 8), 0, 32).unwrap(), floats(&[42.0; 8]));
}

#[test]
fn a_chain_200_000_deep_is_served() {
    let Some(host) = Host::start(|config| config.max_bytes = 1 << 30) else { return };
    let mut client = host.client(8);
    let (handle, base) = client.buffer(4096);
    let mut tensors = vec![vector(1, handle, base, 4)];
    let mut nodes = Vec::new();
    for id in 2..200_002 {
        // Each scales the one before in place, by one.
        let mut next = result(id, Op::Scale, vector(id, handle, base, 4), &[id - 1]);
        next.params[0] = 1.0_f32.to_bits().cast_signed();
        tensors.push(next);
        nodes.push(id);
    }
    client.set(&tensors[0], 0, &floats(&[3.0; 4]));
    client.compute(1, &nodes, &tensors);
    assert_eq!(client.get(&tensors[0], 0, 16).expect("served"), floats(&[3.0; 4]));
    // Not listed for computing, the same chain is a leaf.
    client.compute(2, &[200_001], &tensors);
    assert_eq!(client.get(&tensors[0], 0, 16).expect("served"), floats(&[3.0; 4]));
}

#[test]
fn addresses_are_not_the_hosts() {
    let Some(host) = Host::start(|_| {}) else { return };
    let mut client = host.client(8);
    let (handle, base) = client.buffer(1 << 20);
    let (second, next) = client.buffer(1 << 20);
    assert_eq!((handle, second), (1, 2));
    assert!(base >= 1 << 48 && next > base, "{base:#x}: no pointer of a process is there");
    let (_, other) = host.client(8).buffer(1 << 20);
    assert_eq!(other, base, "another client sees the same addresses, so they say nothing of the process");
}

#[test]
fn a_second_client_does_not_wait_for_the_first() {
    let Some(host) = Host::start(|_| {}) else { return };
    let mut first = host.client(8);
    first.raw(&[6, 255]);
    host.client(8).add_up();
    host.client(3).add_up_of_old_numbers();
}

trait OldNumbers {
    fn add_up_of_old_numbers(&mut self);
}

impl OldNumbers for Client {
    /// ADD has the same number in every ggml.
    fn add_up_of_old_numbers(&mut self) {
        assert_eq!(number(Op::Add), 2);
        self.add_up();
    }
}

#[test]
fn joining_servers_is_refused_without_dialling() {
    let Some(host) = Host::start(|_| {}) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut client = host.client(8);
    let mut body = vec![0; 8];
    body.extend(listener.local_addr().unwrap().to_string().bytes());
    assert_eq!(client.call(20, &body), Some(vec![0]));
    client.add_up();
    assert!(listener.accept().is_err(), "the worker dialled where the client said");
}

#[test]
fn a_reset_in_the_middle_of_an_upload() {
    let Some(host) = Host::start(|_| {}) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let stream = host.hand(far.as_fd(), Some(5));
    drop(far);
    near.write_all(&[&[14, 24][..], &[0; 31]].concat()).unwrap();
    near.write_all(&[&[0, 12][..], &[0; 11], &(64_u64 << 20).to_le_bytes()].concat()).unwrap();
    let upload = vector(1, 1, 1 << 48, 8 << 20);
    near.write_all(
        &[&[6][..], &(304_u64 + (32 << 20)).to_le_bytes(), &upload.to_bytes(), &[7; 100_000]].concat(),
    )
    .unwrap();
    rustix::net::sockopt::set_socket_linger(&near, Some(std::time::Duration::ZERO)).unwrap();
    drop(near);
    let error = host.end_of(stream).expect("a reason");
    assert!(error.contains("connection broke"), "{error}");
    let counters = host.counters();
    assert_eq!((counters.held_bytes, counters.streams_open), (0, 0));
    host.client(8).add_up();
}

#[test]
fn the_first_command_must_be_a_hello() {
    refused_hello("not a hello", &[10, 0, 0, 0, 0, 0, 0, 0, 0], None);
}

#[test]
fn an_unknown_major_is_told_the_fix() {
    let mut hello = vec![14];
    hello.extend(24_u64.to_le_bytes());
    hello.extend([0; 24]);
    refused_hello("protocol 9, this server 2 to 8: update lighter", &hello, Some(9));
}

fn refused_hello(reason: &str, bytes: &[u8], hint: Option<u8>) {
    let Some(host) = Host::start(|_| {}) else { return };
    let mut client = host.connect(hint);
    client.raw(bytes);
    let error = host.end_of(client.stream).expect("a reason");
    assert!(error.contains(reason), "{error}");
}
