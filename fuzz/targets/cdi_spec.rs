// SPDX-License-Identifier: MIT OR Apache-2.0
//! CDI spec files of any vendor: what parses must be writable and parse to the same again.

#![no_main]

use lighter_cdi::parse_bytes;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(spec) = parse_bytes(bytes) {
        let text = serde_json::to_vec(&spec).expect("a spec is plain data");
        assert_eq!(parse_bytes(&text).ok(), Some(spec));
    }
});
