// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames of the ane device as a container could send them: no bytes may make the parser panic or take memory that the
//! bytes do not carry, and what parses must be writable and parse to the same again.

#![no_main]

use lighter_frames::{MAX_RUN_BYTES, Message};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(message) = Message::decode_frame(bytes) else { return };
    if let Message::Run(run) = &message {
        assert!(run.data_bytes() <= MAX_RUN_BYTES);
    }
    let frame = message.encode().expect("what was read is under every cap");
    assert_eq!(Message::decode_frame(&frame), Ok(message));
});
