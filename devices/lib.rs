// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a device is, and the devices themselves: one folder each, with the same files.

pub mod metal;
