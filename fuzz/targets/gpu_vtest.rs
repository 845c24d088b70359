// SPDX-License-Identifier: MIT OR Apache-2.0
//! The vtest stream as a container could send it: no bytes may make the parser or the timelines panic or take memory that the
//! bytes do not carry.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_devices::gpu::vtest::fuzz_entry(bytes));
