// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random messages that are nearly right, against a real worker: each ends at most its own stream, and another
//! client goes on. `LIGHTER_FUZZ_MESSAGES` says how many (a long run takes a million), `LIGHTER_FUZZ_SEED` where
//! to begin; with `LIGHTER_FUZZ_TRACE` each graph is shown before it is sent.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod dice;
mod worker_harness;

use dice::Dice;
use lighter_devices::metal::rpc::{LATEST_OPS, Op, TENSOR_BYTES, WireTensor};
use worker_harness::{Client, Host, floats, number, tensor};

#[test]
#[ignore = "the worker's process, started by the tests"]
fn worker_child() {
    worker_harness::worker_child();
}

fn word(dice: &mut Dice) -> u32 {
    u32::try_from(dice.next() >> 32).unwrap()
}

const BUFFER_BYTES: u64 = 1 << 16;

/// A tensor that mostly fits into the buffer, with sizes that mostly fit each other.
fn some_tensor(dice: &mut Dice, id: u64, handle: u64, base: u64) -> WireTensor {
    let kind = dice.pick(&[0, 0, 0, 0, 0, 1, 1, 26, 26, 27, 30, 2, 8, 9, 15, 24, 43, 4]);
    let mut ne = std::array::from_fn(|_| dice.pick(&[1, 1, 1, 2, 4, 4, 8, 32]));
    if matches!(kind, 2 | 8) {
        ne[0] = 32;
    }
    let mut made = tensor(id, kind, ne, handle, base + dice.below(900) * 64);
    let (block, bytes) = match kind {
        1 | 25 | 30 => (1, 2),
        27 => (1, 8),
        24 => (1, 1),
        2 => (32, 18),
        8 => (32, 34),
        _ => (1, 4),
    };
    made.nb[0] = bytes;
    made.nb[1] = ne[0] / block * bytes;
    made.nb[2] = made.nb[1] * ne[1];
    made.nb[3] = made.nb[2] * ne[2];
    if dice.chance(6) {
        let (a, b) = (dice.pick(&[0, 1, 2, 3]), dice.pick(&[0, 1, 2, 3]));
        made.nb.swap(a, b);
        made.ne.swap(a, b);
    }
    if dice.chance(40) {
        made.ne[dice.pick(&[0, 1, 2, 3])] = dice.pick(&[0, u32::MAX, 1 << 31, 1 << 16]);
    }
    if dice.chance(40) {
        made.nb[dice.pick(&[0, 1, 2, 3])] = word(dice);
    }
    if dice.chance(60) {
        made.data = dice.next();
    }
    if dice.chance(80) {
        made.buffer = dice.below(4);
    }
    made
}

fn some_graph(dice: &mut Dice, handle: u64, base: u64) -> (Vec<u64>, Vec<WireTensor>) {
    let leaves = 1 + dice.below(5);
    let nodes = 1 + dice.below(4);
    let mut tensors: Vec<WireTensor> = (1..=leaves).map(|id| some_tensor(dice, id, handle, base)).collect();
    let mut order = Vec::new();
    for id in leaves + 1..=leaves + nodes {
        let mut node = some_tensor(dice, id, handle, base);
        if dice.chance(2) {
            // The sizes of an input, as most operations need.
            let like = dice.pick(&tensors);
            (node.kind, node.ne, node.nb) = (like.kind, like.ne, like.nb);
        }
        node.op = number(dice.pick(LATEST_OPS));
        if dice.chance(3) {
            node.op = number(dice.pick(&[Op::Add, Op::MulMat, Op::Cpy, Op::SoftMax, Op::Rope, Op::GetRows]));
        }
        node.flags = 16;
        let sources = dice.pick(&[1, 1, 2, 2, 2, 3, 3, 5, 6, 7]);
        for slot in 0..sources {
            node.src[slot] = 1 + dice.below(id - 1);
        }
        for param in &mut node.params {
            *param = match dice.below(8) {
                0 => i32::from_le_bytes(word(dice).to_le_bytes()),
                1 => 1.0_f32.to_bits().cast_signed(),
                2 => -1,
                3 | 4 => dice.pick(&[1, 2, 4, 8, 16]),
                _ => 0,
            };
        }
        if dice.chance(5) {
            node.view_src = 1 + dice.below(id - 1);
        }
        if dice.chance(30) {
            node.src[0] = dice.next();
        }
        order.push(id);
        tensors.push(node);
    }
    if dice.chance(20) {
        order.push(dice.below(12));
    }
    (order, tensors)
}

/// A tensor without gaps at a random place.
fn dense(dice: &mut Dice, id: u64, kind: u32, ne: [u32; 4], handle: u64, base: u64) -> WireTensor {
    let (block, bytes) = match kind {
        1 | 30 => (1, 2),
        27 => (1, 8),
        2 => (32, 18),
        8 => (32, 34),
        _ => (1, 4),
    };
    let mut made = tensor(id, kind, ne, handle, base + dice.below(700) * 64);
    made.nb[0] = bytes;
    made.nb[1] = ne[0] / block * bytes;
    made.nb[2] = made.nb[1] * ne[1];
    made.nb[3] = made.nb[2] * ne[2];
    made
}

/// A type and sizes.
type Sizes = (u32, [u32; 4]);

/// An operation with inputs that fit it: the result's sizes, each input's, and parameters.
fn fitting(dice: &mut Dice) -> (Op, Sizes, Vec<Sizes>, Vec<i32>) {
    let float = |value: f32| value.to_bits().cast_signed();
    let n = dice.pick(&[1, 2, 4, 8, 32, 64]);
    let (m, k, h) = (dice.pick(&[1, 2, 3, 8]), dice.pick(&[1, 2, 5]), dice.pick(&[1, 2]));
    let (f, all) = (0, [n, m, k, h]);
    let store = dice.pick(&[0, 1, 30]);
    let blocks = dice.pick(&[0, 1, 2, 8, 30]);
    let wide = if matches!(blocks, 2 | 8) { 32 } else { n };
    match dice.below(22) {
        0 => (
            dice.pick(&[Op::Add, Op::Sub, Op::Mul, Op::Div]),
            (f, all),
            vec![(f, all), (f, [n, 1, k, 1])],
            vec![],
        ),
        1 => (dice.pick(&[Op::Sqr, Op::Sqrt, Op::Log, Op::Sin, Op::Cos]), (f, all), vec![(f, all)], vec![]),
        2 => {
            let unary = i32::try_from(dice.below(22)).unwrap();
            (Op::Unary, (f, all), vec![(f, all)], vec![unary, float(0.5), float(0.5), float(0.5), float(0.1)])
        }
        3 => (Op::MulMat, (f, [m, k, h, 1]), vec![(blocks, [wide, m, 1, 1]), (f, [wide, k, h, 1])], vec![]),
        4 => (Op::GetRows, (f, [wide, k, 1, 1]), vec![(blocks, [wide, m, 1, 1]), (26, [k, 1, 1, 1])], vec![]),
        5 => {
            let table = (store, [n, m, 1, 1]);
            (Op::SetRows, table, vec![(f, [n, k, 1, 1]), (27, [k, 1, 1, 1]), table], vec![])
        }
        6 => (
            Op::SoftMax,
            (f, all),
            vec![(f, all), (f, [n, m, 1, 1])],
            vec![float(0.5), float(dice.pick(&[0.0, 8.0]))],
        ),
        7 => {
            let turned = i32::try_from(n).unwrap() & !1;
            let all = [n.max(2), m, k, 1];
            let params =
                vec![0, turned.max(2), dice.pick(&[0, 2]), 0, 64, float(1e4), float(1.0), 0, float(1.0)];
            (Op::Rope, (f, all), vec![(f, all), (26, [k, 1, 1, 1])], params)
        }
        8 => (Op::Cpy, (store, all), vec![(f, all)], vec![]),
        9 => (Op::Concat, (f, [n, m + k, h, 1]), vec![(f, [n, m, h, 1]), (f, [n, k, h, 1])], vec![1]),
        10 => (dice.pick(&[Op::Norm, Op::RmsNorm, Op::L2Norm]), (f, all), vec![(f, all)], vec![float(1e-5)]),
        11 => {
            let (kv, q) = ((dice.pick(&[0, 1]), [n, k, 1, 1]), (f, [n, m, h, 1]));
            (Op::FlashAttnExt, (f, [n, h, m, 1]), vec![q, kv, kv, (1, [k, m, 1, 1])], vec![float(0.1)])
        }
        12 => (
            Op::Glu,
            (f, [n, m, 1, 1]),
            vec![(f, [2 * n, m, 1, 1])],
            vec![dice.pick(&[0, 1, 2, 3, 4, 5]), 0, float(1.7), float(7.0)],
        ),
        13 => (Op::Repeat, (f, [2 * n, m, 3 * k, h]), vec![(f, all)], vec![]),
        14 => (Op::Pad, (f, [n + 1, m + 2, k, h]), vec![(f, all)], vec![0, 1, 2]),
        15 => (dice.pick(&[Op::Argsort]), (26, all), vec![(f, all)], vec![dice.pick(&[0, 1])]),
        16 => {
            let (kernel, input) = ((1, [3, m, 4, 1]), (f, [n + 2, m, k, 1]));
            (Op::Im2col, (1, [3 * m, n, k, 1]), vec![kernel, input], vec![1, 0, 0, 0, 1, 0, 0])
        }
        17 => (Op::Scale, (f, all), vec![(f, all)], vec![float(2.0), float(1.0)]),
        18 => (dice.pick(&[Op::SumRows, Op::Mean]), (f, [1, m, k, h]), vec![(f, all)], vec![]),
        19 => (
            Op::MulMatId,
            (f, [m, 2, k, 1]),
            vec![(f, [n, m, 3, 1]), (f, [n, 1, k, 1]), (26, [2, k, 1, 1])],
            vec![],
        ),
        20 => (Op::Cont, (f, [m, n, k, h]), vec![(f, all)], vec![]),
        _ => (Op::TopK, (26, [1, m, k, h]), vec![(f, all)], vec![]),
    }
}

/// One node of a graph whose inputs fit, in which then perhaps one thing is wrong.
fn fitting_graph(dice: &mut Dice, handle: u64, base: u64) -> (Vec<u64>, Vec<WireTensor>) {
    let (op, (kind, ne), inputs, params) = fitting(dice);
    let mut tensors = Vec::new();
    for (id, (kind, ne)) in (1..).zip(inputs) {
        tensors.push(dense(dice, id, kind, ne, handle, base));
    }
    let last = tensors.len() as u64 + 1;
    let mut node = dense(dice, last, kind, ne, handle, base);
    (node.op, node.flags, node.use_count) = (number(op), 16, 1);
    for (slot, id) in (1..last).enumerate() {
        node.src[slot] = id;
    }
    node.params[..params.len()].copy_from_slice(&params);
    if matches!(op, Op::MulMatId) {
        // Numbers of experts are not looked at before; unlike rows they come from the graph itself.
        node.op = number(Op::MulMat);
        node.src[2] = 0;
        tensors.truncate(2);
    }
    tensors.push(node);
    if dice.chance(6) {
        let at = usize::try_from(dice.below(tensors.len() as u64)).unwrap();
        let wrong = &mut tensors[at];
        match dice.below(6) {
            0 => wrong.ne[dice.pick(&[0, 1, 2, 3])] = dice.pick(&[0, 1, 2, 3, 5, 64]),
            1 => wrong.nb[dice.pick(&[0, 1, 2, 3])] = dice.pick(&[0, 1, 2, 4, 8, 256, 4096]),
            2 => wrong.kind = dice.pick(&[0, 1, 2, 6, 8, 20, 26, 27, 30, 39]),
            3 => {
                wrong.params[dice.pick(&[0, 1, 2, 3, 4, 5, 6, 8, 11, 15])] =
                    dice.pick(&[-1, 0, 1, 3, 100, i32::MAX])
            }
            4 => wrong.src.swap(0, dice.pick(&[1, 2, 9])),
            _ => wrong.data += dice.pick(&[1, 2, 4]),
        }
    }
    (vec![last], tensors)
}

fn body_of(dice: &mut Dice, client: &Client, command: u8, handle: u64, base: u64) -> Vec<u8> {
    let one = some_tensor(dice, 1, handle, base).to_bytes().to_vec();
    let numbers = |dice: &mut Dice, count: usize| -> Vec<u8> {
        (0..count).flat_map(|_| dice.below(256).to_le_bytes()).collect()
    };
    let device = client.device();
    match command {
        0 => [device, dice.pick(&[0, 64, 4096, 1 << 40, u64::MAX]).to_le_bytes().to_vec()].concat(),
        1 | 2 | 11 => device,
        3 | 4 => dice.below(6).to_le_bytes().to_vec(),
        5 => [handle.to_le_bytes().to_vec(), vec![dice.pick(&[0, 1, 255])]].concat(),
        6 => {
            let flag = if client.major >= 7 { vec![1] } else { vec![] };
            let bytes = usize::try_from(dice.below(512)).unwrap();
            [one, flag, numbers(dice, 1), vec![dice.pick(&[0, 1, 255]); bytes]].concat()
        }
        7 | 8 => [one, numbers(dice, 2)].concat(),
        9 => [one, some_tensor(dice, 2, handle, base).to_bytes().to_vec()].concat(),
        12 => one,
        13 => {
            let sources: Vec<u8> =
                (0..10).flat_map(|id| some_tensor(dice, id, handle, base).to_bytes()).collect();
            [device, one, sources].concat()
        }
        16 => [device, dice.below(3).to_le_bytes().to_vec()].concat(),
        17 => [one, numbers(dice, 2), vec![7]].concat(),
        18 => [one, numbers(dice, 4), vec![0; 64]].concat(),
        19 => [one, numbers(dice, 4)].concat(),
        _ => vec![0; usize::try_from(dice.below(2 * TENSOR_BYTES as u64)).unwrap()],
    }
}

/// A tensor whose bytes are those of its sizes, so that all can be set.
fn is_plain(tensor: &WireTensor) -> bool {
    let mut bytes = if tensor.kind == 27 { 8_u64 } else { 4 };
    let dense = tensor.ne.iter().zip(tensor.nb).all(|(ne, nb)| {
        let fits = u64::from(nb) == bytes;
        bytes = bytes.saturating_mul(u64::from(*ne));
        fits
    });
    dense && tensor.ne[3] == 1 && (1..4097).contains(&bytes)
}

/// Sends messages until the worker ends the stream or enough were sent; says how many.
fn rampage(host: &Host, dice: &mut Dice, most: u64) -> u64 {
    let mut client = host.client(dice.pick(&[8, 8, 8, 7, 5, 3]));
    let (handle, base) = client.buffer(BUFFER_BYTES);
    // Rubbish as numbers, but none that is not a number.
    let rubbish: Vec<u8> = (0..BUFFER_BYTES).map(|_| dice.pick(&[0, 0, 0, 1, 63, 128, 100])).collect();
    let whole =
        WireTensor { nb: [1, 1 << 16, 1 << 16, 1 << 16], ..tensor(1, 24, [1 << 16, 1, 1, 1], handle, base) };
    client.set(&whole, 0, &rubbish);
    let tracing = std::env::var_os("LIGHTER_FUZZ_TRACE").is_some();
    for sent in 0..most {
        // Mostly graphs; the others mostly with bodies that are accepted, so that streams live for a while.
        let command = match dice.below(40) {
            0 => dice.pick(&[0, 3, 4, 7, 16, 20, 99]),
            1..=8 => dice.pick(&[1, 5, 6, 8, 9, 12, 13, 17, 18, 19]),
            _ => 10,
        };
        if command == 10 {
            let make = if dice.chance(20) { some_graph } else { fitting_graph };
            let (nodes, tensors) = make(dice, handle, base);
            for rows in tensors.iter().filter(|t| matches!(t.kind, 26 | 27) && t.op == 0 && is_plain(t)) {
                client.set(rows, 0, &vec![0; usize::try_from(rows.nb[3].min(4096)).unwrap()]);
            }
            let mut body = client.graph_body(dice.below(3), &nodes, &tensors);
            if dice.chance(30) {
                let at = usize::try_from(dice.below(body.len() as u64)).unwrap();
                body[at] ^= u8::try_from(1 + dice.below(255)).unwrap();
            }
            // ggml sorts with the standard library, whose order of not-a-numbers is none: what that does to it is
            // in the data, and ends with the worker.
            if tensors.iter().any(|t| t.op == number(Op::Argsort) || t.op == number(Op::TopK)) {
                client.set(&whole, 0, &rubbish);
            }
            if tracing {
                for t in &tensors {
                    let op = LATEST_OPS[usize::try_from(t.op).unwrap()].name();
                    eprintln!(
                        "{} {op} kind {} ne {:?} nb {:?} {:?} at {:#x}",
                        t.id,
                        t.kind,
                        t.ne,
                        t.nb,
                        t.params,
                        t.data.wrapping_sub(base)
                    );
                }
            }
            client.send(10, &body);
        } else {
            let body = body_of(dice, &client, command, handle, base);
            if tracing {
                eprintln!("command {command}: {:?}", body.get(..48));
            }
            client.send(command, &body);
        }
        // Whatever else was answered, this is: or the stream has ended.
        client.send(3, &handle.to_le_bytes());
        loop {
            match client.answer() {
                None => return sent + 1,
                Some(answer) if answer == base.to_le_bytes() => break,
                Some(_) => {}
            }
        }
    }
    most
}

#[test]
fn nearly_right_messages_harm_nobody_else() {
    let messages =
        std::env::var("LIGHTER_FUZZ_MESSAGES").ok().and_then(|n| n.parse().ok()).unwrap_or(3000_u64);
    let seed = std::env::var("LIGHTER_FUZZ_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1_u64);
    let Some(host) = Host::start(|_| {}) else { return };
    let mut bystander = host.client(8);
    let (handle, base) = bystander.buffer(4096);
    let mine = tensor(1, 0, [8, 1, 1, 1], handle, base);
    bystander.set(&mine, 0, &floats(&[7.0; 8]));
    let (mut sent, mut round) = (0, seed);
    while sent < messages {
        if round % 1000 == 0 || std::env::var_os("LIGHTER_FUZZ_TRACE").is_some() {
            eprintln!("seed {round}: {sent} messages so far");
        }
        sent += rampage(&host, &mut Dice(round), (messages - sent).min(200));
        round += 1;
        bystander.add_up();
        assert_eq!(bystander.get(&mine, 0, 32).expect("served"), floats(&[7.0; 8]), "seed {}", round - 1);
    }
    drop(bystander);
    let counters = host.counters();
    assert!(counters.graphs > 0, "some graphs were computed");
    eprintln!("{sent} messages: {} graphs computed, {} streams refused", counters.graphs, counters.errors);
}
