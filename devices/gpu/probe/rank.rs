// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which devices are GPUs for containers, in which order, under which names, and how their memory comes about. Pure.

use super::super::config::{GpuConfig, MemoryMode};
use super::{DeviceClass, VulkanDevice};
use crate::host::{Engine, Missing};

/// How a client's memory comes about on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The driver exports it.
    Export,
    /// It is shared memory that the driver imports, for these types.
    Hostmem {
        /// By bit.
        types: u32,
    },
}

/// A GPU that containers can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its name and the like.
    pub engine: Engine,
    /// 32 hexadecimal digits.
    pub uuid: String,
    /// How memory comes about.
    pub mode: Mode,
    /// Whether it is the processor, which needs no device node.
    pub on_processor: bool,
    /// What a person should know of it.
    pub notes: Vec<String>,
}

/// Chooses among what the drivers show.
pub(super) fn choose(config: &GpuConfig, devices: &[VulkanDevice]) -> Result<Vec<Gpu>, Missing> {
    let mut refused = Vec::new();
    let mut found: Vec<(&VulkanDevice, Mode)> = Vec::new();
    for device in devices {
        match judge(config, device) {
            // Two drivers may show the same GPU; the first of the loader's order is taken.
            Ok(_) if found.iter().any(|(other, _)| is_same(other, device)) => {}
            Ok(mode) => found.push((device, mode)),
            Err(why) => refused.push(format!("{}: {why}", device.name)),
        }
    }
    found.sort_by_key(|(device, _)| order(device.class));
    if found.is_empty() {
        let reason = if refused.is_empty() {
            "no Vulkan driver shows a device".to_owned()
        } else {
            format!("no device can be served: {}", refused.join("; "))
        };
        let remedy = "install a Vulkan driver for this host's GPU (Debian: mesa-vulkan-drivers), or see docs/gpu.md for what a \
                      driver needs";
        return Err(Missing { reason, remedy: remedy.to_owned() });
    }
    let mut gpus: Vec<Gpu> = Vec::new();
    for (index, (device, mode)) in found.into_iter().enumerate() {
        let mut stable_name = stable_name(device);
        if gpus.iter().any(|gpu| gpu.engine.stable_name == stable_name) {
            stable_name = device.uuid.clone();
        }
        gpus.push(Gpu {
            engine: Engine {
                name: device.name.clone(),
                description: String::new(),
                version: device.driver.clone(),
                memory_bytes: device.memory_bytes,
                stable_name,
                aliases: vec![index.to_string()],
            },
            uuid: device.uuid.clone(),
            mode,
            on_processor: device.class == DeviceClass::Cpu,
            notes: device.troubles.clone(),
        });
    }
    Ok(gpus)
}

/// How memory comes about, or why the device cannot be served.
fn judge(config: &GpuConfig, device: &VulkanDevice) -> Result<Mode, String> {
    if device.class == DeviceClass::Cpu && !config.allow_processor {
        return Err("it is the processor, and gpu.allow_processor is off".to_owned());
    }
    if !device.lacks.is_empty() {
        return Err(format!("its driver lacks {}", device.lacks.join(", ")));
    }
    let troubles = || {
        let list = device.troubles.join("; ");
        if list.is_empty() { "the driver does not say why".to_owned() } else { list }
    };
    let can_export = device.visible_types != 0 && device.export_types == device.visible_types;
    let hostmem = Mode::Hostmem { types: device.import_types };
    match config.memory {
        MemoryMode::Export if can_export => Ok(Mode::Export),
        MemoryMode::Export => Err(format!(
            "gpu.memory is \"export\", and its memory cannot be mapped by a client: {}",
            troubles()
        )),
        MemoryMode::Hostmem if device.import_types != 0 => Ok(hostmem),
        MemoryMode::Hostmem => {
            Err(format!("gpu.memory is \"hostmem\", and it takes no memory of ours: {}", troubles()))
        }
        // Memory of the driver's own can be the GPU's.
        MemoryMode::Auto if can_export => Ok(Mode::Export),
        MemoryMode::Auto if device.import_types != 0 => Ok(hostmem),
        MemoryMode::Auto => Err(format!("none of its memory can be mapped by a client: {}", troubles())),
    }
}

/// Whether two drivers show one GPU.
fn is_same(one: &VulkanDevice, other: &VulkanDevice) -> bool {
    one.uuid == other.uuid || (one.address.is_some() && one.address == other.address)
}

fn order(class: DeviceClass) -> u8 {
    match class {
        DeviceClass::Discrete => 0,
        DeviceClass::Integrated => 1,
        DeviceClass::Virtual => 2,
        DeviceClass::Other => 3,
        DeviceClass::Cpu => 4,
    }
}

/// The same after every start: the address without what CDI's names do not allow.
fn stable_name(device: &VulkanDevice) -> String {
    match (&device.address, device.class) {
        (Some(address), _) => address.replace(':', "-"),
        (None, DeviceClass::Cpu) => "cpu".to_owned(),
        (None, _) => device.uuid.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, class: DeviceClass, address: Option<&str>) -> VulkanDevice {
        VulkanDevice {
            name: name.to_owned(),
            class,
            uuid: format!("{:032x}", name.len()),
            address: address.map(str::to_owned),
            driver: "driver 1".to_owned(),
            api: (1, 3),
            memory_bytes: None,
            lacks: Vec::new(),
            visible_types: 0b110,
            export_types: 0b110,
            import_types: 0b010,
            troubles: Vec::new(),
        }
    }

    #[test]
    fn gpus_come_before_the_processor_and_have_names_that_stay() {
        let devices = [
            device("llvmpipe", DeviceClass::Cpu, None),
            device("iGPU", DeviceClass::Integrated, Some("0000:00:02.0")),
            device("a card", DeviceClass::Discrete, Some("0000:03:00.0")),
            device("a card again", DeviceClass::Discrete, Some("0000:03:00.0")),
        ];
        let gpus = choose(&GpuConfig::default(), &devices).unwrap();
        let names: Vec<_> = gpus.iter().map(|gpu| gpu.engine.stable_name.as_str()).collect();
        assert_eq!(names, ["0000-03-00.0", "0000-00-02.0", "cpu"]);
        let aliases: Vec<_> = gpus.iter().flat_map(|gpu| gpu.engine.aliases.clone()).collect();
        assert_eq!(aliases, ["0", "1", "2"]);
        assert!(gpus[2].on_processor && !gpus[0].on_processor);
    }

    #[test]
    fn memory_comes_from_the_driver_where_all_of_it_can_be_mapped() {
        let choose_mode = |memory, change: fn(&mut VulkanDevice)| {
            let mut one = device("a card", DeviceClass::Discrete, None);
            change(&mut one);
            choose(&GpuConfig { memory, ..GpuConfig::default() }, &[one]).map(|gpus| gpus[0].mode)
        };
        let nothing = |_: &mut VulkanDevice| {};
        assert_eq!(choose_mode(MemoryMode::Auto, nothing), Ok(Mode::Export));
        assert_eq!(choose_mode(MemoryMode::Hostmem, nothing), Ok(Mode::Hostmem { types: 0b010 }));
        assert_eq!(
            choose_mode(MemoryMode::Auto, |one| one.export_types = 0b100),
            Ok(Mode::Hostmem { types: 0b010 })
        );
        let refused = choose_mode(MemoryMode::Export, |one| {
            one.export_types = 0;
            one.troubles = vec!["opaque".to_owned()];
        });
        let reason = refused.unwrap_err().reason;
        assert!(reason.contains("gpu.memory") && reason.contains("opaque"), "{reason}");
        let refused = choose_mode(MemoryMode::Auto, |one| (one.export_types, one.import_types) = (0, 0));
        assert!(refused.unwrap_err().reason.contains("a card: none of its memory"));
        let refused =
            choose_mode(MemoryMode::Auto, |one| one.lacks = vec!["VK_KHR_external_memory_fd".to_owned()]);
        assert!(refused.unwrap_err().reason.contains("VK_KHR_external_memory_fd"));
    }

    #[test]
    fn a_host_without_a_driver_or_with_the_processor_only_is_told_what_to_do() {
        let missing = choose(&GpuConfig::default(), &[]).unwrap_err();
        assert!(
            missing.reason.contains("no Vulkan driver") && missing.remedy.contains("mesa-vulkan-drivers")
        );
        let config = GpuConfig { allow_processor: false, ..GpuConfig::default() };
        let missing = choose(&config, &[device("llvmpipe", DeviceClass::Cpu, None)]).unwrap_err();
        assert!(missing.reason.contains("gpu.allow_processor"), "{missing:?}");
    }
}
