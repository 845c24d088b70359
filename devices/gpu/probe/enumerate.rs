// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vulkan's devices: runs in the probe's child only.
#![allow(unsafe_code)]

use std::ffi::CStr;

use ash::{Entry, Instance, StaticFn, vk};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::trial::Trial;
use super::{DeviceClass, VulkanDevice};

/// Extensions without which virglrenderer serves no device.
const NEEDED: [&CStr; 1] = [c"VK_KHR_external_memory_fd"];
/// The oldest Vulkan that it serves.
const OLDEST_API: (u32, u32) = (1, 1);

/// Why there are no devices.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnumerateError {
    /// No Vulkan loader.
    #[error("the Vulkan loader (libvulkan.so.1) is not there")]
    Loader(#[from] libloading::Error),
    /// A call failed.
    #[error("{call} failed: {result}")]
    Call {
        /// Which.
        call: &'static str,
        /// How.
        result: vk::Result,
    },
}

/// All devices of all drivers.
pub(super) fn devices() -> Result<Vec<VulkanDevice>, EnumerateError> {
    let failed = |call| move |result| EnumerateError::Call { call, result };
    let entry = load()?;
    let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
    let info = vk::InstanceCreateInfo::default().application_info(&application);
    // SAFETY: the structures live through the call.
    let instance = unsafe { entry.create_instance(&info, None) }.map_err(failed("vkCreateInstance"))?;
    // SAFETY: the instance is live.
    let physical =
        unsafe { instance.enumerate_physical_devices() }.map_err(failed("vkEnumeratePhysicalDevices"))?;
    let devices = physical.into_iter().map(|device| describe(&instance, device)).collect();
    // The instance is not ended: the process is about to, and drivers do not like to be unloaded.
    Ok(devices)
}

/// The Vulkan loader, which stays loaded.
fn load() -> Result<Entry, EnumerateError> {
    // SAFETY: runs the loader's initialisers; that is the purpose of this process.
    let library = unsafe { Library::open(Some("libvulkan.so.1"), RTLD_NOW | RTLD_LOCAL) }?;
    // SAFETY: a function of this name is of this type.
    let get_instance_proc_addr =
        *unsafe { library.get::<vk::PFN_vkGetInstanceProcAddr>(c"vkGetInstanceProcAddr") }?;
    std::mem::forget(library);
    // SAFETY: the loader's own function, in a library that stays.
    Ok(unsafe { Entry::from_static_fn(StaticFn { get_instance_proc_addr }) })
}

fn describe(instance: &Instance, device: vk::PhysicalDevice) -> VulkanDevice {
    // SAFETY: the instance's own device; a failure means that the driver cannot say.
    let extensions = unsafe { instance.enumerate_device_extension_properties(device) }.unwrap_or_default();
    let has = |name: &CStr| {
        extensions.iter().any(|one| one.extension_name_as_c_str().is_ok_and(|known| known == name))
    };
    // SAFETY: the instance's own device.
    let plain = unsafe { instance.get_physical_device_properties(device) };
    let api = (vk::api_version_major(plain.api_version), vk::api_version_minor(plain.api_version));
    let mut lacks: Vec<String> = NEEDED.iter().filter(|name| !has(name)).map(|name| text(name)).collect();
    if api < OLDEST_API {
        lacks.push(format!("Vulkan {}.{}", OLDEST_API.0, OLDEST_API.1));
    }
    let mut described = VulkanDevice {
        name: plain.device_name_as_c_str().map(text).unwrap_or_default(),
        class: match plain.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => DeviceClass::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceClass::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceClass::Virtual,
            vk::PhysicalDeviceType::CPU => DeviceClass::Cpu,
            _ => DeviceClass::Other,
        },
        uuid: String::new(),
        address: None,
        driver: String::new(),
        api,
        memory_bytes: None,
        lacks,
        visible_types: 0,
        export_types: 0,
        import_types: 0,
        troubles: Vec::new(),
    };
    if api < OLDEST_API {
        return described;
    }
    let mut ids = vk::PhysicalDeviceIDProperties::default();
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut bus = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut ids);
    if api >= (1, 2) || has(c"VK_KHR_driver_properties") {
        properties = properties.push_next(&mut driver);
    }
    let has_bus = has(c"VK_EXT_pci_bus_info");
    if has_bus {
        properties = properties.push_next(&mut bus);
    }
    // SAFETY: the instance's own device; what is asked for is what it has.
    unsafe { instance.get_physical_device_properties2(device, &mut properties) };
    described.uuid = ids.device_uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let words = [driver.driver_name_as_c_str(), driver.driver_info_as_c_str()];
    let words: Vec<String> = words.into_iter().flatten().map(text).filter(|word| !word.is_empty()).collect();
    described.driver = words.join(" ");
    if has_bus && described.class != DeviceClass::Cpu {
        described.address = Some(format!(
            "{:04x}:{:02x}:{:02x}.{}",
            bus.pci_domain, bus.pci_bus, bus.pci_device, bus.pci_function
        ));
    }
    // SAFETY: the instance's own device.
    let memory = unsafe { instance.get_physical_device_memory_properties(device) };
    let own = memory.memory_heaps_as_slice().iter();
    let own = own.filter(|heap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
    described.memory_bytes =
        own.map(|heap| heap.size).max().filter(|_| described.class == DeviceClass::Discrete);
    match Trial::new(instance, device, &has) {
        Ok(trial) => {
            for (index, one) in (0..).zip(memory.memory_types_as_slice()) {
                if one.property_flags.contains(vk::MemoryPropertyFlags::HOST_VISIBLE) {
                    described.visible_types |= 1 << index;
                    trial.try_type(index, &mut described);
                }
            }
        }
        Err(result) => described.lacks.push(format!("a device that can be opened ({result})")),
    }
    described
}

fn text(name: &CStr) -> String {
    name.to_string_lossy().chars().filter(|c| !c.is_control()).collect()
}
