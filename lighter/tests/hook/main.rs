// SPDX-License-Identifier: MIT OR Apache-2.0
//! The real hook and the agent over real namespaces: who gets a grant, who gets a stream, when both end, and what a user
//! reads when not. Docker's part of the same is in the gates.

mod containers;
mod grants;
mod life;
mod mounted;
mod streams;
mod unix;
