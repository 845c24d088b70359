// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runtimes and earlier daemons leave for the agent: OCI state, bundle, saved grant.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lighter_agent::fuzzing::document(bytes));
