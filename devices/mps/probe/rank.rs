// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which of torch's devices are engines, what they are called, and which is the best. Pure.

use super::Torch;
use crate::host::{Engine, Probe};
use crate::text::cut;

/// More devices of one host are not listed.
const MAX_DEVICES: usize = 64;
/// Kinds of devices, best first. AMD's are called `cuda` by torch.
const KINDS: [&str; 4] = ["mps", "cuda", "xpu", "cpu"];

/// The engines, best first: all, or the one that is named.
pub(super) fn choose(named: Option<&str>, torch: &Torch) -> Probe {
    let mut engines: Vec<(usize, u16, Engine)> = Vec::new();
    for device in torch.devices.iter().take(MAX_DEVICES) {
        let Some((rank, index)) = place(&device.name) else { continue };
        if engines.iter().all(|(_, _, known)| known.name != device.name) {
            engines.push((rank, index.unwrap_or(0), engine(torch, &device.name, &device.description)));
        }
    }
    engines.sort_by_key(|(rank, index, _)| (*rank, *index));
    let mut engines: Vec<Engine> = engines.into_iter().map(|(_, _, engine)| engine).collect();
    let names: Vec<String> = engines.iter().map(|engine| engine.name.clone()).collect();
    if let Some(named) = named {
        engines.retain(|engine| engine.name == named || engine.is_called(named));
        if engines.is_empty() {
            return Probe::Missing {
                reason: format!("torch has no device {named:?}; it has {}", names.join(", ")),
                remedy: "name one of these, or leave the choice to lighter with `lighter config set mps.engine auto`"
                    .to_owned(),
            };
        }
    }
    if engines.is_empty() {
        return Probe::Missing {
            reason: format!("torch {} at {} lists no device", torch.version, torch.executable.display()),
            remedy: super::remedy().to_owned(),
        };
    }
    Probe::Found(engines)
}

/// Rank and number of a device by its name; `None` for what is no device that lighter uses.
fn place(name: &str) -> Option<(usize, Option<u16>)> {
    let (kind, index) = match name.split_once(':') {
        Some((kind, index)) => (kind, Some(index.parse().ok()?)),
        None => (name, None),
    };
    // Written one way only, since it becomes a name of a CDI device.
    let canonical = index.map_or_else(|| kind.to_owned(), |index: u16| format!("{kind}:{index}"));
    if canonical != name {
        return None;
    }
    Some((KINDS.iter().position(|known| *known == kind)?, index))
}

fn engine(torch: &Torch, name: &str, description: &str) -> Engine {
    let aliases = name.strip_suffix(":0").map(str::to_owned).into_iter().collect();
    Engine {
        name: name.to_owned(),
        description: cut(description.trim()),
        version: format!("{} (Python {}, {})", torch.version, torch.python, torch.executable.display()),
        memory_bytes: None,
        stable_name: name.replace(':', "-"),
        aliases,
    }
}

#[cfg(test)]
mod tests {
    use super::super::TorchDevice;
    use super::*;

    fn torch(names: &[&str]) -> Torch {
        Torch {
            executable: "/x/python3".into(),
            version: "2.15.0".into(),
            python: "3.11.7".into(),
            devices: names
                .iter()
                .map(|name| TorchDevice { name: (*name).to_owned(), description: "a\u{7}b".to_owned() })
                .collect(),
            folders: Vec::new(),
        }
    }

    fn names(probe: &Probe) -> Vec<&str> {
        match probe {
            Probe::Found(engines) => engines.iter().map(|engine| engine.stable_name.as_str()).collect(),
            Probe::Missing { .. } => Vec::new(),
        }
    }

    #[test]
    fn the_best_device_comes_first_and_strange_names_are_left_out() {
        let torch =
            torch(&["cpu", "cuda:10", "cuda:2", "xpu:0", "mps", "cpu", "../x", "cuda:02", "cuda:-1", "hpu"]);
        let probe = choose(None, &torch);
        assert_eq!(names(&probe), ["mps", "cuda-2", "cuda-10", "xpu-0", "cpu"]);
        let engine = probe.named("xpu").unwrap();
        assert_eq!((engine.name.as_str(), engine.description.as_str()), ("xpu:0", "ab"));
        assert_eq!(engine.version, "2.15.0 (Python 3.11.7, /x/python3)");
    }

    #[test]
    fn a_named_engine_is_the_only_one_or_missing() {
        let torch = torch(&["cuda:0", "cuda:1", "cpu"]);
        assert_eq!(names(&choose(Some("cpu"), &torch)), ["cpu"]);
        assert_eq!(names(&choose(Some("cuda-1"), &torch)), ["cuda-1"]);
        let Probe::Missing { reason, remedy } = choose(Some("mps"), &torch) else { panic!("found") };
        assert!(reason.contains("\"mps\"") && reason.contains("cuda:0, cuda:1, cpu"), "{reason}");
        assert!(remedy.contains("mps.engine"), "{remedy}");
    }

    #[test]
    fn a_torch_without_devices_is_none() {
        assert!(matches!(choose(None, &torch(&[])), Probe::Missing { .. }));
    }
}
