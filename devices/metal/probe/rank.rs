// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which of ggml's devices are engines, which is the best, and what their CDI devices are called. Pure.

use super::{GgmlClass, GgmlDevice};
use crate::host::{Engine, Probe};

/// Software implementations of Vulkan: they compute on the processor, and slower than ggml's CPU backend.
const SOFTWARE: [&str; 3] = ["llvmpipe", "lavapipe", "SwiftShader"];
/// ggml's GPU backends, best first; others come behind them.
const BACKENDS: [&str; 4] = ["Metal", "CUDA", "ROCm", "Vulkan"];
const OTHER_BACKEND: u8 = 9;

/// Engines among `devices`, best first; `wanted` alone when the user named one.
pub(super) fn choose(wanted: Option<&str>, version: &str, devices: &[GgmlDevice]) -> Probe {
    let mut ranked: Vec<(u8, &GgmlDevice)> =
        devices.iter().filter_map(|device| rank(device).map(|rank| (rank, device))).collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    let mut engines: Vec<Engine> = Vec::new();
    for (_, device) in ranked {
        let engine = engine(device, version);
        // Two backends can drive one GPU: the better one serves it, under both names.
        match engines.iter_mut().find(|known| known.stable_name == engine.stable_name) {
            Some(known) => known.aliases.extend(engine.aliases),
            None => engines.push(engine),
        }
    }
    let Some(wanted) = wanted else {
        // Software Vulkan is taken only by name.
        engines.retain(|engine| !is_software(&engine.description));
        return if engines.is_empty() {
            Probe::Missing {
                reason: format!("ggml {version} finds no device, not even the processor"),
                remedy: "install ggml's CPU backend (Debian: libggml0), or run `lighter setup metal`"
                    .to_owned(),
            }
        } else {
            Probe::Found(engines)
        };
    };
    match devices.iter().find(|device| device.name.eq_ignore_ascii_case(wanted)) {
        Some(device) => Probe::Found(vec![engine(device, version)]),
        None => {
            let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
            Probe::Missing {
                reason: format!("metal.engine = {wanted:?} is none of ggml's devices ({})", names.join(", ")),
                remedy: "set metal.engine to one of them or to \"auto\", or install the backend for it"
                    .to_owned(),
            }
        }
    }
}

/// Place in the order, lower is better; `None` is no engine.
fn rank(device: &GgmlDevice) -> Option<u8> {
    // A remote ggml is another lighter's or a stranger's: never this host's engine.
    if device.name.starts_with("RPC") {
        return None;
    }
    let backend = BACKENDS.iter().position(|backend| device.name.starts_with(backend));
    let backend = backend.and_then(|place| u8::try_from(place).ok()).unwrap_or(OTHER_BACKEND);
    match device.class {
        GgmlClass::Accelerator => None,
        GgmlClass::Cpu => Some(100),
        _ if is_software(&device.description) => Some(200),
        GgmlClass::Gpu => Some(backend),
        GgmlClass::IntegratedGpu => Some(50 + backend),
    }
}

fn is_software(description: &str) -> bool {
    SOFTWARE.iter().any(|name| description.contains(name))
}

fn engine(device: &GgmlDevice, version: &str) -> Engine {
    let by_order = cdi_name(&device.name.to_lowercase());
    let stable_name = match &device.address {
        Some(address) => cdi_name(&address.to_lowercase()),
        None => by_order.clone(),
    };
    let aliases = if stable_name == by_order { Vec::new() } else { vec![by_order] };
    Engine {
        name: device.name.clone(),
        description: device.description.trim().to_owned(),
        version: version.to_owned(),
        memory_bytes: device.memory_bytes,
        stable_name,
        aliases,
    }
}

/// A CDI device name: what is not allowed in one becomes a dash.
fn cdi_name(text: &str) -> String {
    let name: String =
        text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() { "engine".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn device(name: &str, description: &str, class: GgmlClass, address: Option<&str>) -> GgmlDevice {
        let address = address.map(str::to_owned);
        GgmlDevice { name: name.into(), description: description.into(), class, memory_bytes: None, address }
    }

    fn host() -> Vec<GgmlDevice> {
        vec![
            device("BLAS", "OpenBLAS", GgmlClass::Accelerator, None),
            device("Vulkan0", "RTX 4090", GgmlClass::Gpu, Some("0000:01:00.0")),
            device("Vulkan1", "Iris", GgmlClass::IntegratedGpu, Some("0000:00:02.0")),
            device("Vulkan2", "llvmpipe (LLVM 19.1)", GgmlClass::Gpu, None),
            device("CUDA0", "RTX 4090", GgmlClass::Gpu, Some("0000:01:00.0")),
            device("RPC0", "127.0.0.1:50052", GgmlClass::Gpu, None),
            device("CPU", "AMD EPYC", GgmlClass::Cpu, None),
        ]
    }

    fn names(probe: &Probe) -> Vec<(&str, &str)> {
        match probe {
            Probe::Found(engines) => {
                engines.iter().map(|engine| (engine.name.as_str(), engine.stable_name.as_str())).collect()
            }
            Probe::Missing { .. } => Vec::new(),
        }
    }

    #[test]
    fn the_best_comes_first_and_one_gpu_is_one_engine() {
        let probe = choose(None, "0.27.0", &host());
        assert_eq!(names(&probe), [("CUDA0", "0000-01-00.0"), ("Vulkan1", "0000-00-02.0"), ("CPU", "cpu")]);
        assert_eq!(probe.named("vulkan0").unwrap().name, "CUDA0");
        assert_eq!(probe.named(crate::ALL).unwrap().name, "CUDA0");
        assert_eq!(probe.named("rpc0"), None);
    }

    #[test]
    fn software_vulkan_is_taken_by_name_only() {
        assert_eq!(names(&choose(Some("vulkan2"), "0.27.0", &host())), [("Vulkan2", "vulkan2")]);
    }

    #[test]
    fn a_name_that_is_not_there_is_refused_with_those_that_are() {
        let Probe::Missing { reason, remedy } = choose(Some("CUDA7"), "0.27.0", &host()) else { panic!() };
        assert!(reason.contains("\"CUDA7\"") && reason.contains("CUDA0"), "{reason}");
        assert!(remedy.contains("auto"), "{remedy}");
    }

    #[test]
    fn no_device_at_all_is_missing() {
        assert!(matches!(choose(None, "0.27.0", &host()[..1]), Probe::Missing { .. }));
    }

    proptest! {
        #[test]
        fn every_name_is_one_that_cdi_allows(name in ".{0,20}", address in proptest::option::of(".{0,20}")) {
            let engine = engine(&device(&name, "", GgmlClass::Gpu, address.as_deref()), "1");
            for name in [&engine.stable_name].into_iter().chain(&engine.aliases) {
                prop_assert!(name.parse::<lighter_cdi::DeviceName>().is_ok(), "{}", name);
            }
        }
    }
}
