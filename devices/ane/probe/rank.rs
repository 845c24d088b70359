// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which of the found devices are engines, what they are called, and which is the best. Pure.

use std::collections::BTreeMap;

use super::super::config::{Class, Units};
use super::super::control::Provider;
use super::super::locate::Library;
use super::{AneEngine, Found};
use crate::host::{Engine, Probe};

/// All engines, best first, the processor's last. Of several libraries with one engine the first has it.
pub(super) fn engines(answers: Vec<(Library, String, Vec<Found>)>) -> Vec<AneEngine> {
    let mut engines: Vec<AneEngine> = Vec::new();
    for (library, version, devices) in answers {
        for found in devices {
            let engine = engine(&library, &version, &found);
            if engines.iter().all(|known| known.name != engine.name) {
                engines.push(engine);
            }
        }
    }
    engines.sort_by_key(rank);
    engines
}

fn rank(engine: &AneEngine) -> u8 {
    match (engine.provider, engine.class) {
        (Provider::CoreMl, _) => 0,
        (_, Class::Npu) => 1,
        (Provider::TensorRt, _) => 2,
        (Provider::Cuda | Provider::MiGraphX, _) => 3,
        (_, Class::Gpu) => 4,
        (Provider::Cpu, _) => 9,
        (_, Class::Cpu) => 8,
    }
}

fn engine(library: &Library, version: &str, found: &Found) -> AneEngine {
    let class = match found.provider {
        Provider::Cpu => Class::Cpu,
        Provider::Cuda | Provider::TensorRt | Provider::MiGraphX => Class::Gpu,
        Provider::CoreMl => Class::Npu,
        Provider::OpenVino if found.device.starts_with("NPU") => Class::Npu,
        Provider::OpenVino if found.device.starts_with("GPU") => Class::Gpu,
        Provider::OpenVino => Class::Cpu,
    };
    let mut options = BTreeMap::new();
    if found.provider == Provider::OpenVino {
        options.insert("device_type".to_owned(), found.device.clone());
    }
    let name = if found.device.is_empty() {
        found.provider.as_str().to_owned()
    } else {
        format!("{}-{}", found.provider, cdi_name(&found.device))
    };
    AneEngine {
        name,
        description: found.description.trim().to_owned(),
        class,
        provider: found.provider,
        options,
        library: library.clone(),
        version: version.to_owned(),
    }
}

/// What a CDI device name may hold; the rest becomes a dash.
fn cdi_name(text: &str) -> String {
    let name: String = text
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' })
        .collect();
    name.trim_matches(['-', '.']).to_owned()
}

/// Whether an engine may compute under these units; the processor always answers until another one may.
pub(crate) fn is_meant(engine: &AneEngine, units: &Units) -> bool {
    match units {
        Units::Auto => true,
        // The processor by ONNX Runtime's own kernels: whoever pins it wants what the container would compute.
        Units::Only(Class::Cpu) => engine.provider == Provider::Cpu,
        Units::Only(class) => engine.class == *class,
        Units::Engine(name) => engine.name == *name,
    }
}

/// The engines that the user's units allow, as the rest of lighter sees them.
pub(super) fn offered(engines: &[AneEngine], units: &Units) -> Probe {
    let meant: Vec<Engine> =
        engines.iter().filter(|engine| is_meant(engine, units)).map(AneEngine::as_engine).collect();
    if !meant.is_empty() {
        return Probe::Found(meant);
    }
    let names: Vec<&str> = engines.iter().map(|engine| engine.name.as_str()).collect();
    Probe::Missing {
        reason: format!("ane.units = \"{units}\": this host has {} only", names.join(", ")),
        remedy: "set ane.units to \"auto\" or to one of them, or install the provider for it".to_owned(),
    }
}

impl AneEngine {
    /// As the rest of lighter sees it.
    #[must_use]
    pub fn as_engine(&self) -> Engine {
        Engine {
            name: self.name.clone(),
            description: self.description.clone(),
            version: self.version.clone(),
            memory_bytes: None,
            stable_name: self.name.clone(),
            aliases: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(provider: Provider, device: &str) -> Found {
        Found { provider, device: device.to_owned(), description: String::new() }
    }

    fn library(path: &str) -> Library {
        Library { path: path.into(), folders: Vec::new() }
    }

    fn host() -> Vec<AneEngine> {
        engines(vec![
            (library("/stock.so"), "1.32.0".to_owned(), vec![found(Provider::Cpu, "")]),
            (
                library("/openvino.so"),
                "1.24.1".to_owned(),
                vec![
                    found(Provider::Cpu, ""),
                    found(Provider::OpenVino, "CPU"),
                    found(Provider::OpenVino, "GPU.1"),
                    found(Provider::OpenVino, "NPU"),
                ],
            ),
        ])
    }

    fn names(engines: &[AneEngine]) -> Vec<&str> {
        engines.iter().map(|engine| engine.name.as_str()).collect()
    }

    #[test]
    fn the_best_is_first_and_the_processor_last() {
        assert_eq!(names(&host()), ["openvino-npu", "openvino-gpu.1", "openvino-cpu", "cpu"]);
        let cpu = host().pop().unwrap();
        assert_eq!((cpu.library.path.to_str(), cpu.version.as_str()), (Some("/stock.so"), "1.32.0"));
        let nvidia = vec![found(Provider::Cpu, ""), found(Provider::Cuda, ""), found(Provider::TensorRt, "")];
        let engines = engines(vec![(library("/gpu.so"), "1.31.1".to_owned(), nvidia)]);
        assert_eq!(names(&engines), ["tensorrt", "cuda", "cpu"]);
    }

    #[test]
    fn openvino_is_told_its_device() {
        let engines = host();
        assert_eq!(engines[1].options.get("device_type").map(String::as_str), Some("GPU.1"));
        assert!(engines[3].options.is_empty());
    }

    #[test]
    fn units_narrow_what_is_offered() {
        let engines = host();
        let count = |units: &str| match offered(&engines, &units.parse().unwrap()) {
            Probe::Found(found) => found.len(),
            Probe::Missing { .. } => 0,
        };
        assert_eq!((count("auto"), count("cpu"), count("npu"), count("openvino-gpu.1")), (4, 1, 1, 1));
        let Probe::Missing { reason, .. } = offered(&engines, &"cuda".parse().unwrap()) else {
            panic!("is offered")
        };
        assert!(reason.contains("cuda") && reason.contains("openvino-npu, "), "{reason}");
    }
}
