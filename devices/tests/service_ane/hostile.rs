// SPDX-License-Identifier: MIT OR Apache-2.0
//! Containers that break the rules of a set-up. Each is refused with a reason or let go, and harms nobody.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use lighter_frames::{Message, Model, Refusal, Ring, Run, Transport, ring};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::client::{Client, Container, Running, SetUp, hello, model, receive, send, send_with};

const PROTO: &[u8] = b"a model of the test's own";

fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("model", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    assert_eq!(rustix::io::pwrite(&file, bytes, 0).unwrap(), bytes.len());
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn all_seals() -> SealFlags {
    SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW
}

/// What the service says at last before it closes the stream.
fn last_word(socket: &mut UnixStream) -> Option<(Refusal, String)> {
    let mut last = None;
    while let Some(message) = receive(socket) {
        if let Message::Refused(refused) = message {
            last = Some((refused.refusal, refused.text));
        }
    }
    last
}

/// A stream that has said Hello and which model, and was asked for the bytes.
fn wanted(service: &Running, model: &Model, transport: Transport) -> UnixStream {
    let mut socket = service.open("a");
    send(&mut socket, &hello("", transport));
    assert!(matches!(receive(&mut socket), Some(Message::HelloOk(_))));
    send(&mut socket, &Message::Model(model.clone()));
    assert!(matches!(receive(&mut socket), Some(Message::Want)));
    socket
}

#[test]
fn a_sealed_memory_file_is_taken() {
    let service = Running::start("cpu=cpu", |_| {});
    let (model, bytes) = model(PROTO);
    let mut socket = wanted(&service, &model, Transport::SharedMemory);
    send_with(&socket, &Message::Sending, &[memfd(&bytes, all_seals()).as_fd()]);
    assert!(matches!(receive(&mut socket), Some(Message::Loaded(loaded)) if loaded.hash == model.hash));
}

#[test]
fn files_that_can_change_lie_or_are_none_are_refused() {
    let service = Running::start("cpu=cpu", |_| {});
    let (model, bytes) = model(PROTO);
    let longer = [bytes.as_slice(), b"x"].concat();
    let mut other = bytes.clone();
    other[0] ^= 1;
    let cases: [(&str, OwnedFd, &str); 6] = [
        ("not sealed", memfd(&bytes, SealFlags::empty()), "not sealed"),
        ("not against writing", memfd(&bytes, SealFlags::SHRINK | SealFlags::GROW), "not sealed"),
        ("longer", memfd(&longer, all_seals()), "4097 bytes long and not 4096"),
        ("other bytes", memfd(&other, all_seals()), "do not have the hash"),
        ("a device", std::fs::File::open("/dev/zero").unwrap().into(), "no memory file"),
        ("a socket", UnixStream::pair().unwrap().0.into(), "no memory file"),
    ];
    for (what, file, text) in cases {
        let mut socket = wanted(&service, &model, Transport::SharedMemory);
        send_with(&socket, &Message::Sending, &[file.as_fd()]);
        let (refusal, said) = last_word(&mut socket).expect(what);
        assert_eq!(refusal, Refusal::Protocol, "{what}");
        assert!(said.contains(text), "{what}: {said}");
    }
    assert_eq!(service.report().containers["grant-a"].held_bytes, 0);
    Container::new(&service, "a", PROTO).run(4);
}

#[test]
fn descriptors_where_none_belong_are_refused() {
    let service = Running::start("cpu=cpu", |_| {});
    let (model, bytes) = model(PROTO);
    let file = memfd(&bytes, all_seals());
    let fd = file.as_fd();
    let mut socket = service.open("a");
    send_with(&socket, &hello("", Transport::SharedMemory), &[fd]);
    assert!(last_word(&mut socket).unwrap().1.contains("descriptors"));
    let mut socket = wanted(&service, &model, Transport::SharedMemory);
    send_with(&socket, &Message::Sending, &[fd, fd]);
    assert!(last_word(&mut socket).unwrap().1.contains("2 descriptors"));
    let mut socket = wanted(&service, &model, Transport::SharedMemory);
    send_with(&socket, &Message::Sending, &[fd; 8]);
    assert!(receive(&mut socket).is_none());
    let mut socket = wanted(&service, &model, Transport::Stream);
    send_with(&socket, &Message::Sending, &[fd]);
    assert!(last_word(&mut socket).unwrap().1.contains("descriptors"));
    let mut socket = wanted(&service, &model, Transport::SharedMemory);
    send(&mut socket, &Message::Sending);
    assert!(last_word(&mut socket).unwrap().1.contains("descriptors"));
    Container::new(&service, "a", PROTO).run(4);
}

#[test]
fn messages_out_of_order_are_refused() {
    let service = Running::start("cpu=cpu", |_| {});
    let first: [Message; 6] = [
        Message::Want,
        Message::Sending,
        Message::Model(model(PROTO).0),
        Message::Ring(Ring { bytes: ring::bytes_for(0).unwrap() }),
        Message::Run(Run { run: 1, data_offset: 0, inputs: Vec::new() }),
        Message::Bell,
    ];
    for message in first {
        let mut socket = service.open("a");
        send(&mut socket, &message);
        let (refusal, text) = last_word(&mut socket).unwrap();
        assert_eq!(refusal, Refusal::Protocol);
        assert!(text.contains("where Hello is due"), "{text}");
    }
    let mut socket = service.open("a");
    send(&mut socket, &hello("", Transport::Stream));
    send(&mut socket, &hello("", Transport::Stream));
    assert!(last_word(&mut socket).unwrap().1.contains("where Model is due"));
}

#[test]
fn bytes_that_are_no_frames_are_refused_or_let_go() {
    let service = Running::start("cpu=cpu", |_| {});
    let mut version = hello("", Transport::Stream).encode().unwrap();
    version[4] = 77;
    let mut units = hello("cpu", Transport::Stream).encode().unwrap();
    let at = units.len() - 1;
    units[at] = b'/';
    for (bytes, text) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "no frame"),
        (vec![0xff; 64], "no frame"),
        (version, "version 77"),
        (units, "names no units"),
    ] {
        let mut socket = service.open("a");
        socket.write_all(&bytes).unwrap();
        let (refusal, said) = last_word(&mut socket).unwrap();
        assert_eq!(refusal, Refusal::Protocol);
        assert!(said.contains(text), "{said}");
    }
    for cut in [1, 15, 17] {
        let mut socket = service.open("a");
        socket.write_all(&hello("", Transport::Stream).encode().unwrap()[..cut]).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    }
    Container::new(&service, "a", PROTO).run(4);
}

/// A session that has nothing for the host greets all the same.
#[test]
fn a_greeting_with_nothing_after_it_is_no_error() {
    let service = Running::start("cpu=cpu", |config| config.setup_limit_ms = 200);
    let mut stays = service.open("a");
    for socket in [&mut service.open("a"), &mut stays] {
        send(socket, &hello("", Transport::Stream));
        assert!(matches!(receive(socket), Some(Message::HelloOk(_))));
    }
    assert_eq!(last_word(&mut stays), None);
    Container::new(&service, "a", PROTO).run(4);
    let account = &service.report().containers["grant-a"];
    assert_eq!((account.calls, account.errors), (1, 0), "{:?}", account.last_error);
}

#[test]
fn a_model_over_the_limit_is_refused_before_a_byte_of_it() {
    let service = Running::start("cpu=cpu", |config| config.max_model_bytes_per_container = Some(10_000));
    let (mut model, _) = model(PROTO);
    model.weights_bytes = lighter_frames::MAX_WEIGHTS_BYTES;
    let mut socket = service.open("a");
    send(&mut socket, &hello("", Transport::Stream));
    let Some(Message::HelloOk(ok)) = receive(&mut socket) else { panic!("no greeting") };
    assert_eq!(ok.max_model_bytes, 10_000);
    send(&mut socket, &Message::Model(model));
    let (refusal, text) = last_word(&mut socket).unwrap();
    assert_eq!(refusal, Refusal::Model);
    assert!(text.contains("ane.max_model_bytes_per_container"), "{text}");
}

#[test]
fn a_model_is_found_only_by_the_container_that_sent_it() {
    let service = Running::start("cpu=cpu", |_| {});
    Container::new(&service, "a", PROTO).run(4);
    let (model, _) = model(PROTO);
    for (container, has) in [("a", true), ("b", false)] {
        let mut socket = service.open(container);
        send(&mut socket, &hello("", Transport::Stream));
        receive(&mut socket);
        send(&mut socket, &Message::Model(model.clone()));
        assert_eq!(matches!(receive(&mut socket), Some(Message::Have)), has, "{container}");
    }
}

#[test]
fn a_set_up_after_the_set_up_ends_the_stream_alone() {
    let service = Running::start("cpu=cpu", |_| {});
    let mut container = Container::new(&service, "a", PROTO);
    container.run(4);
    let SetUp::Done(_) = Client::set_up(service.open("a"), PROTO, "") else { panic!("refused") };
    container.run(4);
    assert_eq!(container.reconnects, 1);
}

#[test]
fn a_flood_of_half_open_streams_is_bounded_and_leaves_others_alone() {
    let service = Running::start("cpu=cpu", |_| {});
    let flood: Vec<UnixStream> = (0..300).map(|_| service.open("flood")).collect();
    Container::new(&service, "other", PROTO).run(4);
    let refused = service.report().containers["grant-flood"].errors;
    assert!(refused >= 200, "{refused}");
    drop(flood);
}
