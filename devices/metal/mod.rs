// SPDX-License-Identifier: MIT OR Apache-2.0
//! metal: ggml's layers of a container's llama.cpp or whisper.cpp, computed by the host's ggml.
//!
//! A container gets a ggml RPC server at 127.0.0.1:50052 in its own network namespace. The service keeps one
//! worker process per container; only the worker loads ggml, so that whatever a container's messages do to
//! ggml ends with that container.

pub mod control;
pub mod ggml;
pub mod rpc;
pub mod service;
pub mod worker;
