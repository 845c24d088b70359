// SPDX-License-Identifier: MIT OR Apache-2.0
//! What Docker's daemon answers about a container: HTTP, then JSON.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_agent::fuzzing::engine_answer(bytes));
