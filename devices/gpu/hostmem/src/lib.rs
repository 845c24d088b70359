// SPDX-License-Identifier: MIT OR Apache-2.0
//! `VK_LAYER_LIGHTER_hostmem`: a Vulkan layer in the gpu device's render server, between virglrenderer and the driver.
//!
//! A client maps the memory that it allocates, and for that the renderer asks the driver for a dma-buf. Drivers without one
//! that can be mapped (NVIDIA's on a server, lavapipe without /dev/udmabuf) would fail there. With this layer such
//! memory is ordinary shared memory, which the driver imports (`VK_EXT_external_memory_host`) and which is handed out in the
//! place of a dma-buf.
//!
//! ```text
//! virglrenderer: allocate, exportable as dma-buf ──► layer: a sealed memfd, mapped ──► driver: import this pointer
//! virglrenderer: give me the dma-buf             ──► layer: the memfd
//! ```
//!
//! It lives in system memory, so the layer is used only where the probe of the device says that it must be; and it can show
//! one GPU of several. What it is told stands in its environment, see [`settings`].

mod chain;
mod create;
mod device;
mod instance;
mod memory;
mod negotiate;
mod properties;
mod settings;
mod table;

pub use negotiate::vkNegotiateLoaderLayerInterfaceVersion;
