// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts a stream's render server and session: their restrictions, the session's first message.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Instant;

use lighter_wire::Kind;

use super::super::config::GpuConfig;
use super::super::control::{SessionConfig, ToSession};
use super::engines::{Choice, Found, Start};
use super::groups::{self, Plan};
use super::live::Live;
use crate::engine_root;
use crate::service::process::Process;
use crate::service::sandbox::{self, Sandbox};
use crate::service::{WorkerProgram, spawn};
use crate::system;
use crate::text::with_causes;

/// What virglrenderer and drivers write when they give up.
const TELLING: &[&str] = &["rror", "ailed", "ssert", "fatal", "Fatal", "panicked", "Out of memory"];
/// The layer's name for the Vulkan loader.
const LAYER: &str = "VK_LAYER_LIGHTER_hostmem";

/// Starts both and counts them to their container, whose control groups these are. The calling thread must outlive them.
pub(super) fn start(
    config: &GpuConfig,
    found: &Found,
    choice: &Choice,
    container_groups: &[PathBuf],
) -> Result<Live, String> {
    let Some(start) = &found.start else { return Err("there is no renderer".to_owned()) };
    let limits = config.limits(system::memory_bytes());
    let prepare = |program: &WorkerProgram, is_server: bool| -> Result<Option<Sandbox>, String> {
        if !config.sandbox {
            return Ok(None);
        }
        let mut folders = start.renderer.folders.clone();
        folders.push(start.layers.clone());
        let prepared = sandbox::prepare(&sandbox::Needs {
            kind: Kind::Gpu,
            program: program.file(),
            folders: &folders,
            own_folder: None,
            // The session has no driver in it.
            on_processor: choice.on_processor || !is_server,
            max_bytes: limits.max_blob_bytes,
            apart: is_server,
        });
        prepared.map(Some).map_err(|error| format!("it cannot be restricted: {}", with_causes(&error)))
    };
    let mut environment = start.renderer.environment.clone();
    if choice.layer {
        environment.extend(choice.variables.iter().cloned());
        environment.push(("VK_ADD_LAYER_PATH".to_owned(), start.layers.display().to_string()));
        environment.push(("VK_INSTANCE_LAYERS".to_owned(), LAYER.to_owned()));
    }
    let run = |start: &Start, program: &WorkerProgram, environment: &[(String, String)], is_server| {
        let command =
            engine_root::command(&program.inherited_path(), start.renderer.loader.as_ref(), environment);
        let sandbox = prepare(program, is_server)?;
        let worker = spawn::spawn(program, command, sandbox).map_err(|error| with_causes(&error))?;
        let process = Process::new(worker, TELLING);
        match groups::plan(container_groups, is_server && !choice.on_processor) {
            Plan::Join(folders) => groups::join(&folders, process.pid())?,
            Plan::StayOut(reason) => {
                tracing::warn!(
                    reason,
                    pid = process.pid(),
                    "a renderer's memory is not counted to its container"
                );
            }
        }
        Ok::<_, String>(process)
    };
    let server = run(start, &start.server, &environment, true)?;
    let session = run(start, &start.session, &[], false)?;
    let live = Live::new(session, server, Instant::now() + config.start_limit());
    let configure = ToSession::Configure(SessionConfig { library: start.renderer.library.clone(), limits });
    live.session
        .say(&configure, &[live.server.control().as_fd()])
        .map_err(|error| format!("its session takes no message: {}", with_causes(&error)))?;
    Ok(live)
}
