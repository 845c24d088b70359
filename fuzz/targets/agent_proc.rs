// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel writes about processes, control groups and mounts.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_agent::fuzzing::process_text(bytes));
