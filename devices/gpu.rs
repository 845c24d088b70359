// SPDX-License-Identifier: MIT OR Apache-2.0
//! gpu: Vulkan of a container's own Mesa (Venus), computed and drawn by the host's GPU.
//!
//! A container gets a unix socket and Mesa's variables for it; no device node, no driver of the host. Each Vulkan instance
//! has a session (a process with virglrenderer and no GPU driver) and a render server (a process with the GPU's driver).

pub mod control;
pub mod session;
pub mod virgl;
pub mod vtest;
pub mod worker;
