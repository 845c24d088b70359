// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the layer is told, by variables of the render server's environment. Pure but for reading them.
//!
//! | variable | content | without it |
//! | --- | --- | --- |
//! | `LIGHTER_GPU_DEVICES` | UUIDs of the GPUs that are shown, by commas, each 32 hexadecimal digits | all are |
//! | `LIGHTER_GPU_MEMORY_TYPES` | GPUs whose memory is ours, with the types that take it: `UUID=MASK` by commas, hexadecimal; memory of others is left alone | all types of all GPUs |
//! | `LIGHTER_GPU_MAX_BYTES` | most bytes of all allocations together | no limit |

use std::collections::HashMap;
use std::sync::OnceLock;

/// A GPU's UUID as Vulkan says it.
pub(crate) type Uuid = [u8; 16];

/// What the layer is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The GPUs that are shown.
    pub(crate) devices: Option<Vec<Uuid>>,
    /// Memory types that take memory of ours, by GPU.
    memory_types: Option<HashMap<Uuid, u32>>,
    /// Most bytes.
    pub(crate) max_bytes: Option<u64>,
}

impl Settings {
    /// Those of this process.
    pub(crate) fn get() -> &'static Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            let settings = Self::parse(|name| std::env::var(name).ok());
            settings.unwrap_or_else(|bad| {
                // On the render server's standard error, which the service reads.
                eprintln!("lighter's Vulkan layer: {bad}");
                std::process::abort();
            })
        })
    }

    fn parse(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let bad = |name: &str, text: &str| format!("{name}={text:?} is not what it should be");
        let mut settings = Self { devices: None, memory_types: None, max_bytes: None };
        if let Some(text) = variable("LIGHTER_GPU_DEVICES") {
            let devices: Option<Vec<Uuid>> =
                text.split(',').filter(|one| !one.is_empty()).map(uuid).collect();
            settings.devices = Some(devices.ok_or_else(|| bad("LIGHTER_GPU_DEVICES", &text))?);
        }
        if let Some(text) = variable("LIGHTER_GPU_MAX_BYTES") {
            settings.max_bytes = Some(text.parse().map_err(|_| bad("LIGHTER_GPU_MAX_BYTES", &text))?);
        }
        if let Some(text) = variable("LIGHTER_GPU_MEMORY_TYPES") {
            let parsed: Option<HashMap<Uuid, u32>> = text
                .split(',')
                .filter(|pair| !pair.is_empty())
                .map(|pair| {
                    let (device, mask) = pair.split_once('=')?;
                    Some((uuid(device)?, u32::from_str_radix(mask, 16).ok()?))
                })
                .collect();
            settings.memory_types = Some(parsed.ok_or_else(|| bad("LIGHTER_GPU_MEMORY_TYPES", &text))?);
        }
        Ok(settings)
    }

    /// Whether a GPU is shown.
    pub(crate) fn shows(&self, device: &Uuid) -> bool {
        self.devices.as_ref().is_none_or(|devices| devices.contains(device))
    }

    /// Whether a GPU's memory is ours.
    pub(crate) fn is_ours(&self, device: &Uuid) -> bool {
        self.memory_types.as_ref().is_none_or(|types| types.contains_key(device))
    }

    /// Whether memory of this type is ours on this GPU.
    pub(crate) fn takes(&self, device: &Uuid, memory_type: u32) -> bool {
        let mask = match &self.memory_types {
            None => u32::MAX,
            Some(types) => types.get(device).copied().unwrap_or_default(),
        };
        mask.checked_shr(memory_type).unwrap_or_default() & 1 == 1
    }
}

/// Reads 32 hexadecimal digits.
fn uuid(text: &str) -> Option<Uuid> {
    if text.len() != 32 || !text.is_ascii() {
        return None;
    }
    let mut uuid = Uuid::default();
    for (index, byte) in uuid.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "000102030405060708090a0b0c0d0e0f";

    fn parse(pairs: &[(&str, &str)]) -> Result<Settings, String> {
        let found =
            |name: &str| pairs.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned());
        Settings::parse(found)
    }

    #[test]
    fn what_is_not_said_is_open() {
        let settings = parse(&[]).unwrap();
        assert_eq!((&settings.devices, settings.max_bytes), (&None, None));
        assert!(settings.shows(&[7; 16]) && settings.is_ours(&[7; 16]) && settings.takes(&[7; 16], 31));
    }

    #[test]
    fn types_are_those_of_their_gpu_and_other_gpus_are_left_alone() {
        let types = format!("{A}=c,");
        let settings = parse(&[("LIGHTER_GPU_MEMORY_TYPES", &types), ("LIGHTER_GPU_DEVICES", A)]).unwrap();
        let device = uuid(A).unwrap();
        let taken: Vec<u32> = (0..40).filter(|index| settings.takes(&device, *index)).collect();
        assert_eq!(taken, [2, 3]);
        assert!(settings.is_ours(&device) && settings.shows(&device));
        assert!(!settings.is_ours(&[7; 16]) && !settings.takes(&[7; 16], 2) && !settings.shows(&[7; 16]));
        assert!(!parse(&[("LIGHTER_GPU_MEMORY_TYPES", "")]).unwrap().is_ours(&device));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (name, text) in [
            ("LIGHTER_GPU_DEVICES", "0001"),
            ("LIGHTER_GPU_DEVICES", "zz0102030405060708090a0b0c0d0e0f"),
            ("LIGHTER_GPU_MAX_BYTES", "-1"),
            ("LIGHTER_GPU_MEMORY_TYPES", "1=2"),
            ("LIGHTER_GPU_MEMORY_TYPES", A),
        ] {
            let bad = parse(&[(name, text)]).unwrap_err();
            assert!(bad.contains(name) && bad.contains(text), "{bad}");
        }
    }
}
