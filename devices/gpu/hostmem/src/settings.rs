// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the layer is told, by variables of the render server's environment. Pure but for reading them.
//!
//! | variable | content | without it |
//! | --- | --- | --- |
//! | `LIGHTER_GPU_DEVICE` | UUID of the GPU that is shown, 32 hexadecimal digits | all are |
//! | `LIGHTER_GPU_MEMORY_TYPES` | memory types that take host pointers, `UUID=MASK` by commas, both hexadecimal | all do |
//! | `LIGHTER_GPU_MAX_BYTES` | most bytes of all allocations together | no limit |
//! | `LIGHTER_GPU_HOSTMEM` | `0`: leave memory alone, and only show one GPU or count | memory is handed out |

use std::collections::HashMap;
use std::sync::OnceLock;

/// A GPU's UUID as Vulkan says it.
pub(crate) type Uuid = [u8; 16];

/// What the layer is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The only GPU that is shown.
    pub(crate) device: Option<Uuid>,
    /// Memory types that take host pointers, by GPU.
    pub(crate) memory_types: HashMap<Uuid, u32>,
    /// Most bytes.
    pub(crate) max_bytes: Option<u64>,
    /// Whether memory is handed out.
    pub(crate) hostmem: bool,
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
        let mut settings = Self {
            device: None,
            memory_types: HashMap::new(),
            max_bytes: None,
            hostmem: variable("LIGHTER_GPU_HOSTMEM").is_none_or(|text| text != "0"),
        };
        if let Some(text) = variable("LIGHTER_GPU_DEVICE") {
            settings.device = Some(uuid(&text).ok_or_else(|| bad("LIGHTER_GPU_DEVICE", &text))?);
        }
        if let Some(text) = variable("LIGHTER_GPU_MAX_BYTES") {
            settings.max_bytes = Some(text.parse().map_err(|_| bad("LIGHTER_GPU_MAX_BYTES", &text))?);
        }
        if let Some(text) = variable("LIGHTER_GPU_MEMORY_TYPES") {
            for pair in text.split(',').filter(|pair| !pair.is_empty()) {
                let parsed = pair
                    .split_once('=')
                    .and_then(|(device, mask)| Some((uuid(device)?, u32::from_str_radix(mask, 16).ok()?)));
                let (device, mask) = parsed.ok_or_else(|| bad("LIGHTER_GPU_MEMORY_TYPES", &text))?;
                settings.memory_types.insert(device, mask);
            }
        }
        Ok(settings)
    }

    /// Whether memory of this type can be imported on this GPU.
    pub(crate) fn takes_host_pointers(&self, device: &Uuid, memory_type: u32) -> bool {
        let mask = self.memory_types.get(device).copied().unwrap_or(u32::MAX);
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
        assert!(settings.hostmem);
        assert_eq!((settings.device, settings.max_bytes), (None, None));
        assert!(settings.takes_host_pointers(&[7; 16], 31));
    }

    #[test]
    fn types_are_those_of_their_gpu() {
        let settings =
            parse(&[("LIGHTER_GPU_MEMORY_TYPES", &format!("{A}=c,")), ("LIGHTER_GPU_DEVICE", A)]).unwrap();
        let device = settings.device.unwrap();
        let taken: Vec<u32> = (0..40).filter(|index| settings.takes_host_pointers(&device, *index)).collect();
        assert_eq!(taken, [2, 3]);
        assert!(settings.takes_host_pointers(&[7; 16], 4));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (name, text) in [
            ("LIGHTER_GPU_DEVICE", "0001"),
            ("LIGHTER_GPU_DEVICE", "zz0102030405060708090a0b0c0d0e0f"),
            ("LIGHTER_GPU_MAX_BYTES", "-1"),
            ("LIGHTER_GPU_MEMORY_TYPES", "1=2"),
            ("LIGHTER_GPU_MEMORY_TYPES", A),
        ] {
            let bad = parse(&[(name, text)]).unwrap_err();
            assert!(bad.contains(name) && bad.contains(text), "{bad}");
        }
    }
}
