// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client of Vulkan for tests and measurements: computes on a device and compares every value, or measures.
//!
//! usage: gpu_check [check|bench|hold|wait|repeat TIMES|allocate BYTES] [DEVICE]
//!
//! - `check` (the default) computes in three kinds of memory and prints `NAME: wrong values: 0`;
//! - `bench` prints what a step takes, as one line of JSON;
//! - `hold` computes again and again until something fails, and says what;
//! - `repeat` checks so many times with one device;
//! - `wait` waits for one long computation, and says what failed;
//! - `allocate` takes mapped memory piece by piece and writes to all of it, until BYTES or an error.
//!
//! DEVICE is part of a device's name; without it the first is taken. Ends with 1 where a value is wrong or a call fails.
#![allow(unsafe_code, clippy::print_stdout)]

use std::error::Error;
use std::time::Instant;

use ash::{Device, Entry, Instance, StaticFn, vk};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

type Failure = Box<dyn Error>;

const SHADER: &[u8] = include_bytes!("gpu_check/steps.spv");
/// Words that a check computes on.
const WORDS: u32 = 1 << 16;
/// Threads of a group of the shader.
const GROUP: u32 = 64;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut words = arguments.iter().map(String::as_str);
    match words.next().unwrap_or("check") {
        "check" => check(&Gpu::open(words.next())?),
        "bench" => bench(words.next()),
        "hold" => {
            let gpu = Gpu::open(words.next())?;
            println!("{}: holding", gpu.name);
            loop {
                if let Err(error) = check(&gpu) {
                    std::mem::forget(gpu);
                    return Err(error);
                }
            }
        }
        "repeat" => {
            let times: u32 = words.next().ok_or("how many times?")?.parse()?;
            let gpu = Gpu::open(words.next())?;
            (0..times).try_for_each(|_| check(&gpu))
        }
        "wait" => {
            let gpu = Gpu::open(words.next())?;
            let mapped = gpu.map(4 << 20, *gpu.mapped_types().first().ok_or("no memory can be mapped")?)?;
            gpu.bind(&mapped);
            println!("{}: waiting", gpu.name);
            if let Err(error) = gpu.run(1, 1 << 20, 1 << 20) {
                // Not ended in order: Mesa would wait for a renderer that is gone.
                std::mem::forget(gpu);
                return Err(error.into());
            }
            Ok(())
        }
        "allocate" => {
            let most = words.next().ok_or("how many bytes?")?.parse()?;
            allocate(&Gpu::open(words.next())?, most)
        }
        other => Err(format!("{other}: check, bench, hold, wait, repeat or allocate").into()),
    }
}

/// A device with one queue and the shader.
struct Gpu {
    name: String,
    _entry: Entry,
    instance: Instance,
    device: Device,
    queue: vk::Queue,
    memory: vk::PhysicalDeviceMemoryProperties,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
    set: vk::DescriptorSet,
    commands: vk::CommandBuffer,
    fence: vk::Fence,
}

/// Mapped memory with a buffer over all of it.
struct Mapped {
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    words: *mut u32,
}

impl Gpu {
    fn open(part_of_name: Option<&str>) -> Result<Self, Failure> {
        // SAFETY: all of this is Vulkan's own order of calls; every structure lives through its call.
        unsafe {
            let library = Library::open(Some("libvulkan.so.1"), RTLD_NOW | RTLD_LOCAL)?;
            let get_instance_proc_addr =
                *library.get::<vk::PFN_vkGetInstanceProcAddr>(c"vkGetInstanceProcAddr")?;
            std::mem::forget(library);
            let entry = Entry::from_static_fn(StaticFn { get_instance_proc_addr });
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
            let instance = entry
                .create_instance(&vk::InstanceCreateInfo::default().application_info(&application), None)?;
            let (physical, name) = choose(&instance, part_of_name)?;
            let memory = instance.get_physical_device_memory_properties(physical);
            let priorities = [1.0];
            let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&priorities)];
            let device = instance.create_device(
                physical,
                &vk::DeviceCreateInfo::default().queue_create_infos(&queues),
                None,
            )?;
            let queue = device.get_device_queue(0, 0);
            let code = ash::util::read_spv(&mut std::io::Cursor::new(SHADER))?;
            let shader =
                device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&code), None)?;
            let bindings = [vk::DescriptorSetLayoutBinding::default()
                .descriptor_count(1)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)];
            let sets = [device.create_descriptor_set_layout(
                &vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings),
                None,
            )?];
            let constants =
                [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(8)];
            let layout = device.create_pipeline_layout(
                &vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(&constants),
                None,
            )?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(shader)
                .name(c"main");
            let wanted = [vk::ComputePipelineCreateInfo::default().layout(layout).stage(stage)];
            let made = device.create_compute_pipelines(vk::PipelineCache::null(), &wanted, None);
            let pipeline = made.map_err(|(_, error)| error)?.pop().ok_or("no pipeline")?;
            let sizes = [vk::DescriptorPoolSize::default()
                .ty(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)];
            let pool = device.create_descriptor_pool(
                &vk::DescriptorPoolCreateInfo::default().max_sets(1).pool_sizes(&sizes),
                None,
            )?;
            let set = device
                .allocate_descriptor_sets(
                    &vk::DescriptorSetAllocateInfo::default().descriptor_pool(pool).set_layouts(&sets),
                )?
                .pop()
                .ok_or("no descriptor set")?;
            let pool = device.create_command_pool(
                &vk::CommandPoolCreateInfo::default().flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER),
                None,
            )?;
            let commands = device
                .allocate_command_buffers(
                    &vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1),
                )?
                .pop()
                .ok_or("no command buffer")?;
            let fence = device.create_fence(&vk::FenceCreateInfo::default(), None)?;
            Ok(Self {
                name,
                _entry: entry,
                instance,
                device,
                queue,
                memory,
                layout,
                pipeline,
                set,
                commands,
                fence,
            })
        }
    }

    /// Types of memory that can be mapped and need no flushing.
    fn mapped_types(&self) -> Vec<u32> {
        let wanted = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let types = (0..).zip(self.memory.memory_types_as_slice());
        types.filter(|(_, one)| one.property_flags.contains(wanted)).map(|(index, _)| index).collect()
    }

    fn map(&self, bytes: u64, memory_type: u32) -> Result<Mapped, vk::Result> {
        // SAFETY: as in `open`.
        unsafe {
            let buffer = self.device.create_buffer(
                &vk::BufferCreateInfo::default().size(bytes).usage(
                    vk::BufferUsageFlags::STORAGE_BUFFER
                        | vk::BufferUsageFlags::TRANSFER_SRC
                        | vk::BufferUsageFlags::TRANSFER_DST,
                ),
                None,
            )?;
            let needs = self.device.get_buffer_memory_requirements(buffer);
            let info =
                vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(memory_type);
            let memory = match self.device.allocate_memory(&info, None) {
                Ok(memory) => memory,
                Err(error) => {
                    self.device.destroy_buffer(buffer, None);
                    return Err(error);
                }
            };
            self.device.bind_buffer_memory(buffer, memory, 0)?;
            let words = self.device.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty())?;
            Ok(Mapped { buffer, memory, words: words.cast() })
        }
    }

    fn unmap(&self, mapped: &Mapped) {
        // SAFETY: made by `map`, and not in use.
        unsafe {
            self.device.destroy_buffer(mapped.buffer, None);
            self.device.free_memory(mapped.memory, None);
        }
    }

    /// Points the shader to a buffer.
    fn bind(&self, mapped: &Mapped) {
        let buffers = [vk::DescriptorBufferInfo::default().buffer(mapped.buffer).range(vk::WHOLE_SIZE)];
        let write = vk::WriteDescriptorSet::default()
            .dst_set(self.set)
            .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
            .buffer_info(&buffers);
        // SAFETY: as in `open`; the set is not in use.
        unsafe { self.device.update_descriptor_sets(&[write], &[]) };
    }

    /// Records so many dispatches, runs them and waits; returns the seconds for recording and for all.
    fn run(&self, dispatches: u32, words: u32, steps: u32) -> Result<(f64, f64), vk::Result> {
        let start = Instant::now();
        let device = &self.device;
        // SAFETY: as in `open`; the commands have ended when this is called.
        unsafe {
            device.begin_command_buffer(
                self.commands,
                &vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT),
            )?;
            if dispatches > 0 {
                let point = vk::PipelineBindPoint::COMPUTE;
                device.cmd_bind_pipeline(self.commands, point, self.pipeline);
                device.cmd_bind_descriptor_sets(self.commands, point, self.layout, 0, &[self.set], &[]);
            }
            let constants: Vec<u8> = [words, steps].iter().flat_map(|word| word.to_ne_bytes()).collect();
            let barrier =
                vk::MemoryBarrier::default().src_access_mask(vk::AccessFlags::SHADER_WRITE).dst_access_mask(
                    vk::AccessFlags::SHADER_READ | vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::HOST_READ,
                );
            for _ in 0..dispatches {
                let stage = vk::ShaderStageFlags::COMPUTE;
                device.cmd_push_constants(self.commands, self.layout, stage, 0, &constants);
                device.cmd_dispatch(self.commands, words.div_ceil(GROUP), 1, 1);
                device.cmd_pipeline_barrier(
                    self.commands,
                    vk::PipelineStageFlags::COMPUTE_SHADER,
                    vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::HOST,
                    vk::DependencyFlags::empty(),
                    &[barrier],
                    &[],
                    &[],
                );
            }
            device.end_command_buffer(self.commands)?;
            let recorded = start.elapsed().as_secs_f64();
            let commands = [self.commands];
            let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
            device.queue_submit(self.queue, &submit, self.fence)?;
            device.wait_for_fences(&[self.fence], true, u64::MAX)?;
            device.reset_fences(&[self.fence])?;
            Ok((recorded, start.elapsed().as_secs_f64()))
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: nothing is in use any more; what was made of the device ends with it.
        unsafe {
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

/// The first device whose name has this part.
fn choose(instance: &Instance, part: Option<&str>) -> Result<(vk::PhysicalDevice, String), Failure> {
    let mut names = Vec::new();
    // SAFETY: the instance's own devices.
    for device in unsafe { instance.enumerate_physical_devices() }? {
        // SAFETY: as above.
        let properties = unsafe { instance.get_physical_device_properties(device) };
        let name = properties.device_name_as_c_str()?.to_string_lossy().into_owned();
        if part.is_none_or(|part| name.contains(part)) {
            return Ok((device, name));
        }
        names.push(name);
    }
    Err(format!("no device {part:?} among {names:?}").into())
}

/// One step of the generator on the processor.
fn step(x: u32) -> u32 {
    x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)
}

fn check(gpu: &Gpu) -> Result<(), Failure> {
    let (dispatches, steps) = (3, 5);
    let types = gpu.mapped_types();
    if types.is_empty() {
        return Err("no memory can be mapped".into());
    }
    let mut wrong = 0;
    for memory_type in &types {
        let mapped = gpu.map(u64::from(WORDS) * 4, *memory_type)?;
        // SAFETY: mapped, of that size, and not in use by the device.
        let words = unsafe { std::slice::from_raw_parts_mut(mapped.words, WORDS as usize) };
        for (word, index) in words.iter_mut().zip(0..) {
            *word = index;
        }
        gpu.bind(&mapped);
        gpu.run(dispatches, WORDS, steps)?;
        let expected = |index| (0..dispatches * steps).fold(index, |x, _| step(x));
        wrong += words.iter().zip(0..).filter(|(word, index)| **word != expected(*index)).count();
        gpu.unmap(&mapped);
    }
    println!("{}: {} kinds of memory, wrong values: {wrong}", gpu.name, types.len());
    if wrong > 0 { Err("wrong values".into()) } else { Ok(()) }
}

fn allocate(gpu: &Gpu, most_bytes: u64) -> Result<(), Failure> {
    let piece = 16 << 20;
    let memory_type = *gpu.mapped_types().first().ok_or("no memory can be mapped")?;
    let mut bytes = 0;
    while bytes < most_bytes {
        let mapped = gpu.map(piece, memory_type).map_err(|error| format!("after {bytes} bytes: {error}"))?;
        gpu.bind(&mapped);
        gpu.run(1, u32::try_from(piece / 4)?, 1).map_err(|error| format!("after {bytes} bytes: {error}"))?;
        bytes += piece;
    }
    println!("{}: {bytes} bytes", gpu.name);
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn bench(part_of_name: Option<&str>) -> Result<(), Failure> {
    let start = Instant::now();
    let gpu = Gpu::open(part_of_name)?;
    let open_ms = start.elapsed().as_secs_f64() * 1e3;
    let memory_type = *gpu.mapped_types().first().ok_or("no memory can be mapped")?;
    let mut allocate_us = Vec::new();
    for _ in 0..300 {
        let start = Instant::now();
        let mapped = gpu.map(1 << 20, memory_type)?;
        // SAFETY: mapped, and not in use.
        unsafe { mapped.words.write_volatile(1) };
        gpu.unmap(&mapped);
        allocate_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let bytes: usize = 64 << 20;
    let mapped = gpu.map(bytes as u64, memory_type)?;
    let from = vec![7u8; bytes];
    let mut write_gbps = Vec::new();
    for _ in 0..8 {
        let start = Instant::now();
        // SAFETY: both of that size.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), mapped.words.cast(), bytes) };
        write_gbps.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    gpu.bind(&mapped);
    gpu.run(1, GROUP, 1)?;
    let measure = |dispatches, words, steps, times| -> Result<(f64, f64), vk::Result> {
        let (mut record, mut all) = (Vec::new(), Vec::new());
        for _ in 0..times {
            let (one, whole) = gpu.run(dispatches, words, steps)?;
            record.push(one * 1e6);
            all.push(whole * 1e6);
        }
        Ok((median(record), median(all)))
    };
    let (_, empty_us) = measure(0, 0, 0, 500)?;
    let (_, one_us) = measure(1, GROUP, 1, 500)?;
    let (record_us, thousand_us) = measure(1000, GROUP, 1, 20)?;
    let (_, heavy_us) = measure(1, 1 << 20, 200, 5)?;
    println!(
        "{{\"device\": {:?}, \"open_ms\": {open_ms:.2}, \"allocate_us\": {:.2}, \"write_gbps\": {:.2}, \
         \"empty_us\": {empty_us:.2}, \"one_us\": {one_us:.2}, \"record_1000_us\": {record_us:.2}, \
         \"thousand_us\": {thousand_us:.2}, \"heavy_us\": {heavy_us:.2}}}",
        gpu.name,
        median(allocate_us),
        median(write_gbps)
    );
    gpu.unmap(&mapped);
    Ok(())
}
