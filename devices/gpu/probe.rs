// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which GPUs a renderer on this host can serve, and how a client's memory must come about on each; or why none.
//!
//! No driver is loaded here: a short-lived child (`lighter probe gpu`, which calls [`answer`]) loads the Vulkan loader and
//! the drivers, lists the devices, and *tries* on each which memory can be mapped by somebody else. A driver that
//! crashes or hangs costs that child and is reported as a reason.

mod enumerate;
mod rank;
mod trial;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::GpuConfig;
use super::locate::{Renderer, locate};
use crate::ask::AnswerError;
use crate::engine_root;
use crate::host::{Missing, Probe};
use crate::text::with_causes;

pub use rank::{Gpu, Mode};

/// Longest that drivers may take to start and to be tried. The first start of a large one takes seconds.
const LIMIT: Duration = Duration::from_secs(30);

/// What a driver is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClass {
    /// A GPU with memory of its own.
    Discrete,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A GPU that another machine gives us.
    Virtual,
    /// The processor.
    Cpu,
    /// Something else.
    Other,
}

/// One device as its driver shows it, and what came of trying its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VulkanDevice {
    /// Its name.
    pub name: String,
    /// What it is.
    pub class: DeviceClass,
    /// 32 hexadecimal digits, the same after every start.
    pub uuid: String,
    /// Its address on the host (`0000:03:00.0`), where the driver says it.
    pub address: Option<String>,
    /// The driver's name and version, for a person.
    pub driver: String,
    /// Vulkan's version, major and minor.
    pub api: (u32, u32),
    /// Bytes of its own memory; `None` where it has none.
    pub memory_bytes: Option<u64>,
    /// What the renderer needs and the driver lacks.
    pub lacks: Vec<String>,
    /// Memory types that a client wants to map, by bit.
    pub visible_types: u32,
    /// Those of them whose memory the driver exports so that it can be mapped.
    pub export_types: u32,
    /// Those whose memory can be shared memory of ours.
    pub import_types: u32,
    /// What went wrong with the others, for a person.
    pub troubles: Vec<String>,
}

/// What the child says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// Vulkan was loaded.
    Devices {
        /// Its devices, in its order.
        devices: Vec<VulkanDevice>,
    },
    /// It could not be.
    Failed {
        /// Why.
        reason: String,
    },
}

/// The child: tries the drivers that its environment names, writes the answer to standard output.
///
/// # Errors
/// When there is no question, or nobody to answer to. That Vulkan cannot be loaded is an answer.
pub fn answer() -> Result<(), AnswerError> {
    crate::ask::answer(|(): ()| match enumerate::devices() {
        Ok(devices) => Answer::Devices { devices },
        Err(error) => Answer::Failed { reason: with_causes(&error) },
    })
}

/// Looks for a renderer and asks a child for the GPUs. `program` is lighter itself.
#[must_use]
pub fn probe(program: &Path, config: &GpuConfig) -> Probe {
    match locate(config, Path::new("/")) {
        Ok(renderer) => as_probe(&gpus(program, config, &renderer)),
        Err(missing) => missing.into(),
    }
}

/// The folder with lighter's layer.
///
/// # Errors
/// When the layer is not there, with what to do.
pub(super) fn check_layer(config: &GpuConfig) -> Result<PathBuf, Missing> {
    let folder = config.layer_folder.clone().unwrap_or_default();
    let layer = folder.join(super::LAYER);
    if layer.is_file() {
        return Ok(folder);
    }
    Err(Missing {
        reason: format!("lighter's Vulkan layer, {}, is not there", layer.display()),
        remedy: "install the folder gpu of lighter's release beside lighter, or name the folder that it lies in with \
                 `lighter config set daemon.plugin_dir PATH`"
            .to_owned(),
    })
}

/// The GPUs that a renderer can serve, best first; never empty.
///
/// # Errors
/// When there is none, with what to do.
pub fn gpus(program: &Path, config: &GpuConfig, renderer: &Renderer) -> Result<Vec<Gpu>, Missing> {
    let broken = |reason: String| {
        Missing {
        reason,
        remedy: "check that a Vulkan driver for this host's GPU is installed (`vulkaninfo --summary` shows it); for NVIDIA's on \
                 a server libglvnd, libEGL, libX11 and libXext too"
            .to_owned(),
    }
    };
    let mut command = engine_root::command(program, renderer.loader.as_ref(), &renderer.environment);
    command.args(["probe", "gpu"]);
    match crate::ask::ask(command, &(), LIMIT) {
        Ok(Answer::Devices { devices }) => {
            let mut gpus = rank::choose(config, &devices)?;
            for gpu in &mut gpus {
                gpu.engine.description = describe(gpu.mode, renderer);
            }
            Ok(gpus)
        }
        Ok(Answer::Failed { reason }) => Err(broken(format!("Vulkan cannot be loaded: {reason}"))),
        Err(reason) => Err(broken(format!("Vulkan's devices cannot be listed: {reason}"))),
    }
}

/// What a person should know of how a GPU is served.
fn describe(mode: Mode, renderer: &Renderer) -> String {
    let memory = match mode {
        Mode::Export => "the driver's own memory",
        Mode::Hostmem { .. } => "shared memory, which the driver imports",
    };
    match (&renderer.loader, &renderer.passed_over) {
        (Some(_), Some(why)) => {
            format!("{memory}; the renderer that lighter setup gpu made: {why}")
        }
        _ => format!("{memory}; this system's renderer, {}", renderer.library.display()),
    }
}

/// The same for whoever does not care how memory comes about.
#[must_use]
pub fn as_probe(gpus: &Result<Vec<Gpu>, Missing>) -> Probe {
    match gpus {
        Ok(gpus) => Probe::Found(gpus.iter().map(|gpu| gpu.engine.clone()).collect()),
        Err(missing) => missing.clone().into(),
    }
}
