// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every message must hold to, through the public interface: back and forth, never a panic, hostile sizes refused.
#![allow(clippy::unwrap_used, reason = "tests")]

use lighter_frames::{
    Answer, Dim, Element, Failed, Failure, FrameError, Grow, HEADER_BYTES, Header, Hello, HelloOk, Kind,
    Loaded, MAX_BODY_BYTES, MAX_DIM, MAX_PORTS, MAX_RANK, MAX_RUN_BYTES, Message, Model, OrtVersion, Port,
    Refusal, Refused, Ring, Run, Tensor, Transport, ring,
};
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    "[^\u{0}]{0,40}"
}

fn element() -> impl Strategy<Value = Element> {
    prop::sample::select(Element::ALL)
}

fn tensor() -> impl Strategy<Value = Tensor> {
    (element(), prop::collection::vec(0..40_u64, 0..=5))
        .prop_map(|(element, dims)| Tensor::new(element, dims).unwrap())
}

fn port() -> impl Strategy<Value = Port> {
    let dim = prop_oneof![Just(Dim::Free), (0..=MAX_DIM).prop_map(Dim::Fixed)];
    let dims = prop::option::of(prop::collection::vec(dim, 0..=MAX_RANK));
    (text(), element(), dims).prop_map(|(name, element, dims)| Port { name, element, dims })
}

fn version() -> impl Strategy<Value = OrtVersion> {
    (1..9_u16, any::<u16>(), any::<u16>()).prop_map(|(major, minor, patch)| OrtVersion {
        major,
        minor,
        patch,
    })
}

fn transport() -> impl Strategy<Value = Transport> {
    prop::sample::select(vec![Transport::SharedMemory, Transport::Stream])
}

fn setup() -> impl Strategy<Value = Message> {
    let ports = || prop::collection::vec(port(), 0..6);
    prop_oneof![
        (version(), transport(), "[a-z,]{0,64}").prop_map(|(ort, transport, units)| Message::Hello(Hello {
            ort,
            transport,
            units
        })),
        (prop::option::of(version()), transport(), any::<[u64; 2]>()).prop_map(|(ort, transport, caps)| {
            let [max_model_bytes, max_run_bytes] = caps;
            Message::HelloOk(HelloOk { ort, transport, max_model_bytes, max_run_bytes })
        }),
        (any::<[u8; 32]>(), 1..1_u64 << 31, 0..=1_u64 << 38, ports(), ports(), text()).prop_map(
            |(hash, proto_bytes, weights_bytes, inputs, outputs, label)| {
                Message::Model(Model { hash, proto_bytes, weights_bytes, inputs, outputs, label })
            }
        ),
        any::<[u8; 32]>().prop_map(|hash| Message::Loaded(Loaded { hash })),
        text().prop_map(|text| Message::Refused(Refused { refusal: Refusal::Busy, text })),
        (0..=ring::MAX_DATA_BYTES)
            .prop_map(|bytes| Message::Ring(Ring { bytes: ring::bytes_for(bytes).unwrap() })),
        prop::sample::select(vec![Message::Have, Message::Want, Message::Sending, Message::Bell]),
    ]
}

fn running() -> impl Strategy<Value = Message> {
    let tensors = || prop::collection::vec(tensor(), 0..9);
    let offset = || (0..1_u64 << 30).prop_map(|blocks| blocks * 64);
    prop_oneof![
        (any::<u32>(), offset(), tensors()).prop_map(|(run, data_offset, inputs)| Message::Run(Run {
            run,
            data_offset,
            inputs
        })),
        (any::<u32>(), offset(), tensors()).prop_map(|(run, data_offset, outputs)| Message::Answer(Answer {
            run,
            data_offset,
            outputs
        })),
        (any::<u32>(), text()).prop_map(|(run, text)| Message::Failed(Failed {
            run,
            failure: Failure::Again,
            text
        })),
        (any::<u32>(), 0..=ring::MAX_DATA_BYTES)
            .prop_map(|(run, data_bytes)| Message::Grow(Grow { run, data_bytes })),
    ]
}

proptest! {
    #[test]
    fn every_message_comes_back(message in prop_oneof![setup(), running()]) {
        let frame = message.encode().unwrap();
        prop_assert_eq!(Message::decode_frame(&frame).unwrap(), message);
    }

    #[test]
    fn a_frame_that_is_cut_or_goes_on_is_refused(message in prop_oneof![setup(), running()], at in any::<prop::sample::Index>()) {
        let frame = message.encode().unwrap();
        let cut = at.index(frame.len());
        prop_assert!(Message::decode_frame(&frame[..cut]).is_err());
        let (header, body) = frame.split_first_chunk::<HEADER_BYTES>().unwrap();
        let header = Header::decode(header).unwrap();
        let mut longer = body.to_vec();
        longer.push(0);
        let header = Header { body_bytes: header.body_bytes + 1, ..header };
        prop_assert!(Message::decode(header, &longer).is_err());
    }

    #[test]
    fn changed_bytes_are_refused_or_are_a_message_that_comes_back(
        message in prop_oneof![setup(), running()],
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut frame = message.encode().unwrap();
        for (at, byte) in changes {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        if let Ok(message) = Message::decode_frame(&frame) {
            prop_assert_eq!(Message::decode_frame(&message.encode().unwrap()), Ok(message));
        }
    }

    #[test]
    fn any_bytes_are_taken_without_a_panic(kind in 0..20_u16, body in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut frame = Header { kind: Kind::Bell, body_bytes: u32::try_from(body.len()).unwrap() }.encode().to_vec();
        frame[6..8].copy_from_slice(&kind.to_le_bytes());
        frame.extend_from_slice(&body);
        let _ = Message::decode_frame(&frame);
    }

    #[test]
    fn sizes_never_pass_the_cap(element in element(), dims in prop::collection::vec(any::<u64>(), 0..20)) {
        if let Ok(tensor) = Tensor::new(element, dims) {
            prop_assert!(tensor.bytes() <= MAX_RUN_BYTES);
        }
    }
}

/// A Run frame with one u8 tensor of these dimensions, written by hand.
fn run_with(dims: &[u64], count: u16) -> Vec<u8> {
    let mut body = 1_u32.to_le_bytes().to_vec();
    body.extend_from_slice(&0_u64.to_le_bytes());
    body.extend_from_slice(&count.to_le_bytes());
    for _ in 0..count.min(3) {
        body.push(2);
        body.push(u8::try_from(dims.len()).unwrap());
        for dim in dims {
            body.extend_from_slice(&dim.to_le_bytes());
        }
    }
    let mut frame =
        Header { kind: Kind::Run, body_bytes: u32::try_from(body.len()).unwrap() }.encode().to_vec();
    frame.extend_from_slice(&body);
    frame
}

#[test]
fn hostile_sizes_are_refused_by_name() {
    let refused = |dims: &[u64], count| Message::decode_frame(&run_with(dims, count)).unwrap_err();
    assert!(Message::decode_frame(&run_with(&[7], 1)).is_ok(), "the frame itself is right");
    for dim in [1 << 63, u64::MAX, (1 << 63) - 1, MAX_DIM + 1] {
        assert!(
            matches!(refused(&[dim], 1), FrameError::Value { field: "dimension", value, .. } if value == dim)
        );
    }
    assert!(matches!(refused(&[1 << 32, 1 << 32], 1), FrameError::Size { field: "tensor", .. }));
    assert!(matches!(refused(&[MAX_RUN_BYTES], 2), FrameError::Size { field: "tensors", .. }));
    assert!(matches!(refused(&[1; 17], 1), FrameError::Value { field: "rank", value: 17, .. }));
    assert!(matches!(refused(&[1], u16::MAX), FrameError::Value { field: "tensors", .. }));
    assert!(matches!(refused(&[], 1024), FrameError::Short { field: "tensors", .. }));
}

#[test]
fn texts_of_errors_name_field_and_value() {
    let error = Message::decode_frame(&run_with(&[1 << 63], 1)).unwrap_err();
    assert_eq!(error.to_string(), "dimension is 9223372036854775808, allowed is 0 to 2^40");
}

#[test]
fn too_much_is_not_written() {
    let port = Port { name: "x".repeat(1024), element: Element::F32, dims: None };
    let model = |inputs: Vec<Port>| {
        let hash = [0; 32];
        Message::Model(Model {
            hash,
            proto_bytes: 1,
            weights_bytes: 0,
            inputs,
            outputs: vec![],
            label: String::new(),
        })
    };
    assert!(model(vec![port.clone(); 100]).encode().is_ok());
    assert!(matches!(model(vec![port; 1000]).encode(), Err(FrameError::Body { kind: Kind::Model, .. })));
    let short = Port { name: String::new(), element: Element::F32, dims: None };
    assert!(matches!(
        model(vec![short; MAX_PORTS + 1]).encode(),
        Err(FrameError::Value { field: "inputs", value: 1025, .. })
    ));
    let nul = Port { name: "a\0b".into(), element: Element::F32, dims: None };
    assert_eq!(model(vec![nul]).encode(), Err(FrameError::Text { field: "name" }));
    let tensor = Tensor::new(Element::U8, vec![1; MAX_RANK]).unwrap();
    let run = Message::Run(Run { run: 1, data_offset: 0, inputs: vec![tensor; MAX_PORTS] });
    assert!(run.encode().unwrap().len() <= MAX_BODY_BYTES, "the largest run fits a frame");
}

#[test]
fn a_long_reason_is_cut_between_characters() {
    let text = "é".repeat(1000);
    let frame = Message::Failed(Failed { run: 1, failure: Failure::Model, text }).encode().unwrap();
    let Message::Failed(failed) = Message::decode_frame(&frame).unwrap() else { panic!("another message") };
    assert_eq!(failed.text, "é".repeat(512));
}

/// The bytes of version 1. A change here is a change of the protocol: raise the version.
#[test]
fn the_bytes_of_this_version() {
    let inputs = vec![Tensor::new(Element::F16, vec![2, 3]).unwrap()];
    let frame = Message::Run(Run { run: 7, data_offset: 64, inputs }).encode().unwrap();
    let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "4c74416e01000a002000000000000000\
         0700000040000000000000000100\
         0a02\
         02000000000000000300000000000000"
    );
}
