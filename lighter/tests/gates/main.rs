// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates: real Docker, real containers, the real daemon. `make test` prepares what they need and runs them;
//! the ignored ones are the long ones of `make gates`.

mod bad_input;
mod engines;
mod harm;
mod lifecycle;
mod m12;
mod network;
mod soak;
mod support;
