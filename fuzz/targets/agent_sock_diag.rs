// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel answers about sockets, as far as the gate reads it.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_agent::fuzzing::sock_diag(bytes));
