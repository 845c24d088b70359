// SPDX-License-Identifier: MIT OR Apache-2.0
//! What hooks and the agent say to each other: what parses must come back the same.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_agent::fuzzing::hook_message(bytes));
