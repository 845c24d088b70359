// SPDX-License-Identifier: MIT OR Apache-2.0
//! ane: ONNX models of a container's own ONNX Runtime, computed by the host's best engine for each model.
//!
//! A container gets a plug-in for its ONNX Runtime and a unix socket. The service keeps, for each container, one
//! worker process an engine; only workers load ONNX Runtime, so that whatever a container's models do to it ends
//! with that container. The processor answers at once; another engine answers once it has been seen to give the
//! same results, and to be faster.

pub mod config;
pub mod control;
pub mod journal;
pub mod locate;
pub mod ort;
pub mod readings;
pub mod worker;
