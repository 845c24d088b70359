// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which renderer and which GPUs the host has, found out when it is first asked for: by the first stream, or by the first
//! report; and what of it a container's device name stands for.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::config::GpuConfig;
use super::super::locate::{Missing, Renderer, locate};
use super::super::probe::{self, Gpu, Mode};
use crate::host::Probe;
use crate::service::WorkerProgram;
use crate::service::known::Known;
use crate::text::with_causes;

/// The host's renderer and GPUs.
#[derive(Debug)]
pub(super) struct Found {
    /// What starts sessions; `None` when there is nothing to start.
    pub(super) start: Option<Start>,
    /// The GPUs.
    pub(super) gpus: Result<Vec<Gpu>, Missing>,
}

/// What starts a session and its render server.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) renderer: Renderer,
    pub(super) session: WorkerProgram,
    pub(super) server: WorkerProgram,
    /// The folder with lighter's layer.
    pub(super) layers: PathBuf,
}

/// What a device name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    /// Variables of the render server's layer: which GPUs are shown, and whose memory is ours.
    pub(super) variables: Vec<(String, String)>,
    /// Whether the layer is needed at all.
    pub(super) layer: bool,
    /// Whether none of them needs a device node.
    pub(super) on_processor: bool,
    /// Their names, for the log.
    pub(super) label: String,
}

#[derive(Debug, Default)]
pub(super) struct Engines(Known<Arc<Found>>);

impl Engines {
    /// The renderer and the GPUs; asks a child when they are not known.
    pub(super) fn get(&self, config: &GpuConfig) -> Arc<Found> {
        self.0.get(|found| found.start.is_some(), || Arc::new(find(config)))
    }
}

impl Found {
    pub(super) fn probe(&self) -> Probe {
        probe::as_probe(&self.gpus)
    }

    /// What a device name stands for; `None` when it is none of the GPUs.
    pub(super) fn choose(&self, device: &str) -> Option<Choice> {
        choose(self.gpus.as_deref().unwrap_or_default(), device)
    }
}

/// `all` is every GPU, or the processor where there is none; other names are one GPU.
fn choose(gpus: &[Gpu], device: &str) -> Option<Choice> {
    let mut chosen: Vec<&Gpu> = if device == crate::ALL {
        gpus.iter().collect()
    } else {
        gpus.iter().filter(|gpu| gpu.engine.is_called(device)).collect()
    };
    if chosen.iter().any(|gpu| !gpu.on_processor) {
        chosen.retain(|gpu| !gpu.on_processor);
    }
    if chosen.is_empty() {
        return None;
    }
    let ours: Vec<String> = chosen
        .iter()
        .filter_map(|gpu| match gpu.mode {
            Mode::Hostmem { types } => Some(format!("{}={types:x}", gpu.uuid)),
            Mode::Export => None,
        })
        .collect();
    // Two drivers may show one GPU under one UUID.
    let shown: BTreeSet<&str> = chosen.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let shown: Vec<&str> = shown.into_iter().collect();
    Some(Choice {
        layer: !ours.is_empty() || chosen.len() < gpus.len(),
        variables: vec![
            ("LIGHTER_GPU_DEVICES".to_owned(), shown.join(",")),
            ("LIGHTER_GPU_MEMORY_TYPES".to_owned(), ours.join(",")),
        ],
        on_processor: chosen.iter().all(|gpu| gpu.on_processor),
        label: chosen.iter().map(|gpu| gpu.engine.name.as_str()).collect::<Vec<_>>().join(", "),
    })
}

fn find(config: &GpuConfig) -> Found {
    let (gpus, start) = match look(config) {
        Ok((gpus, start)) => (Ok(gpus), Some(start)),
        Err(missing) => (Err(missing), None),
    };
    match &gpus {
        Ok(gpus) => {
            for gpu in gpus {
                tracing::info!(
                    name = gpu.engine.name,
                    device = gpu.engine.stable_name,
                    driver = gpu.engine.version,
                    mode = ?gpu.mode,
                    notes = gpu.notes.join("; "),
                    "GPU found"
                );
            }
        }
        Err(missing) => tracing::warn!(reason = missing.reason, "no GPU"),
    }
    Found { start, gpus }
}

fn look(config: &GpuConfig) -> Result<(Vec<Gpu>, Start), Missing> {
    let layers = probe::check_layer(config)?;
    let renderer = locate(config, Path::new("/"))?;
    let program = |result: Result<WorkerProgram, crate::service::SpawnError>| {
        result.map_err(|error| Missing {
            reason: with_causes(&error),
            remedy: "run `lighter setup gpu` again".to_owned(),
        })
    };
    let session = program(WorkerProgram::own(lighter_wire::Kind::Gpu))?;
    let gpus = probe::gpus(&session.path(), config, &renderer)?;
    // Its socket is its standard input.
    let args = ["--socket-fd", "0"].map(Into::into).into();
    let server = program(WorkerProgram::new(&renderer.server, args))?;
    Ok((gpus, Start { renderer, session, server, layers }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Engine;

    fn gpu(name: &str, mode: Mode, on_processor: bool) -> Gpu {
        Gpu {
            engine: Engine {
                name: name.to_owned(),
                description: String::new(),
                version: String::new(),
                memory_bytes: None,
                stable_name: name.to_owned(),
                aliases: vec![format!("{name}-again")],
            },
            uuid: format!("uuid-{name}"),
            mode,
            on_processor,
            notes: Vec::new(),
        }
    }

    #[test]
    fn all_is_every_gpu_without_the_processor_and_a_name_is_one() {
        let gpus = [
            gpu("a", Mode::Export, false),
            gpu("b", Mode::Hostmem { types: 12 }, false),
            gpu("cpu", Mode::Hostmem { types: 1 }, true),
        ];
        let all = choose(&gpus, "all").unwrap();
        assert_eq!(all.label, "a, b");
        assert_eq!(all.variables[0].1, "uuid-a,uuid-b");
        assert_eq!(all.variables[1].1, "uuid-b=c");
        assert!(all.layer && !all.on_processor);
        let one = choose(&gpus, "a-again").unwrap();
        assert_eq!((one.variables[0].1.as_str(), one.variables[1].1.as_str()), ("uuid-a", ""));
        assert!(one.layer, "the others must not be shown");
        assert!(choose(&gpus, "cpu").unwrap().on_processor);
        assert_eq!(choose(&gpus, "c"), None);
        assert!(choose(&gpus[2..], "all").unwrap().on_processor);
        assert!(!choose(&gpus[..1], "all").unwrap().layer, "nothing to hide and nothing to hand out");
        assert_eq!(choose(&[], "all"), None);
    }
}
