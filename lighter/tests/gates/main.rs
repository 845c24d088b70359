// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates: real Docker, real containers, the real daemon. `make test` prepares what they need and runs them;
//! the ignored ones are the long ones of `make gates`.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::print_stdout)] // a gate fails by panicking

mod ane;
mod ane_auto;
mod ane_choice;
mod ane_nodes;
mod ane_recovery;
mod ane_setup;
mod ane_situations;
mod ane_suites;
mod bad_input;
mod engines;
mod gpu;
mod gpu_death;
mod gpu_soak;
mod harm;
mod lifecycle;
mod m10;
mod m11;
mod m12;
mod m9;
mod mps;
mod mps_suites;
mod network;
mod old_clients;
mod root_setup;
mod soak;
mod support;
mod vulkan;
mod whisper;
