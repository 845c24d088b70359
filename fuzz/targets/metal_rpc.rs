// SPDX-License-Identifier: MIT OR Apache-2.0
//! ggml RPC frames as a container could send them: no bytes may make the parser panic or take memory that the
//! bytes do not carry.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_devices::metal::rpc::fuzz_entry(bytes));
