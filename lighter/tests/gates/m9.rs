// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gate m9: stock Mesa in a container shows the host's GPU, and what is computed on it is right; without the device the same
//! commands find no GPU of the host.

use crate::gpu::{CHECK, GPU, SID, TRIXIE, attempt, check, container, daemon};
use crate::support::{Engine, model, run, stdout_of, text_of};

/// What Mesa's driver calls a host's GPU.
const VENUS: &str = "Virtio-GPU Venus (";
const MODEL: &str = "/models/model.gguf";

fn summary(engine: &Engine, options: &[&str], image: &str) -> String {
    text_of(&run(container(engine, options, image, &["vulkaninfo", "--summary"])))
}

fn shows_the_hosts_gpu(image: &str) {
    let engine = Engine::take();
    let daemon = daemon(&engine, "");
    let found = stdout_of(daemon.lighter().arg("doctor"));
    let with = summary(&engine, &["--device", GPU], image);
    let venus =
        with.lines().find(|line| line.contains(VENUS)).unwrap_or_else(|| panic!("{with}\n{}", daemon.log()));
    // What is in the brackets is what the host's own driver says.
    let name = venus.split(VENUS).nth(1).unwrap().strip_suffix(')').unwrap();
    assert!(found.contains(name), "{name:?} is not among the host's: {found}");
    let says = check(&engine, image);
    assert!(says.contains(VENUS) && says.contains("wrong values: 0"), "{says}");
    println!("m9: {image}: {}", says.trim());
    let without = summary(&engine, &[], image);
    assert!(!without.contains(VENUS), "{without}");
}

#[test]
fn debian_13s_mesa_computes_on_the_hosts_gpu() {
    shows_the_hosts_gpu(TRIXIE);
}

#[test]
fn debian_sids_mesa_computes_on_the_hosts_gpu() {
    shows_the_hosts_gpu(SID);
}

#[test]
fn a_container_without_the_device_is_refused_also_at_the_socket_itself() {
    let engine = Engine::take();
    let daemon = daemon(&engine, "");
    let sockets = format!("{}:/run/lighter/gpu:ro", daemon.dir.path().join("state/gpu").display());
    let variables = ["VN_DEBUG=vtest", "VTEST_SOCKET_NAME=/run/lighter/gpu/socket"];
    let options = ["-e", variables[0], "-e", variables[1], "-v", &sockets];
    let (_, says) = attempt(&engine, &options, SID);
    assert!(!says.contains(VENUS), "{says}");
    assert!(daemon.log().contains("refused"), "{}\n{says}", daemon.log());
}

#[test]
fn one_gpu_is_shown_by_its_name_and_a_wrong_name_is_refused_by_docker() {
    let engine = Engine::take();
    let _daemon = daemon(&engine, "");
    for name in ["lighter.sh/gpu=cpu", "lighter.sh/gpu=0"] {
        let (works, says) = attempt(&engine, &["--device", name], SID);
        assert!(works && says.contains(VENUS) && says.contains("wrong values: 0"), "{name}: {says}");
    }
    let (works, says) = attempt(&engine, &["--device", "lighter.sh/gpu=none"], SID);
    assert!(!works && says.contains("lighter.sh/gpu=none"), "{says}");
}

#[test]
fn three_containers_compute_at_once() {
    let engine = Engine::take();
    let _daemon = daemon(&engine, "");
    std::thread::scope(|scope| {
        let runs: Vec<_> = [TRIXIE, SID, TRIXIE]
            .into_iter()
            .map(|image| {
                let command = container(&engine, &["--device", GPU], image, &[CHECK]);
                scope.spawn(move || stdout_of(command))
            })
            .collect();
        for run in runs {
            let says = run.join().unwrap();
            assert!(says.contains("wrong values: 0"), "{says}");
        }
    });
}

#[test]
fn llama_writes_the_same_text_through_the_device_as_on_the_hosts_driver() {
    let engine = Engine::take();
    let daemon = daemon(&engine, "");
    let mount = format!("{}:{MODEL}:ro", model().display());
    // ggml passes over processors unless it is told which device to take.
    let options = ["-v", &mount, "-e", "GGML_VK_VISIBLE_DEVICES=0"];
    let command = [
        "llama-completion",
        "-m",
        MODEL,
        "-no-cnv",
        "--temp",
        "0",
        "--seed",
        "1",
        "-n",
        "16",
        "-c",
        "256",
        "-t",
        "1",
        "-b",
        "1",
        "-ub",
        "1",
        "--no-warmup",
        "--simple-io",
        "-ngl",
        "99",
        "-p",
        "1 2 3 4",
    ];
    let written = |more: &[&str]| {
        let options: Vec<&str> = options.iter().chain(more).copied().collect();
        let output = run(container(&engine, &options, SID, &command));
        assert!(output.status.success(), "{}", text_of(&output));
        (String::from_utf8_lossy(&output.stdout).into_owned(), text_of(&output))
    };
    // The image's own software driver, as it would be without lighter.
    let (native, _) = written(&["-e", "VK_DRIVER_FILES=/usr/share/vulkan/icd.d/lvp_icd.json"]);
    let (device, all) =
        written(&["--device", GPU, "-e", "VK_DRIVER_FILES=/usr/share/vulkan/icd.d/virtio_icd.json"]);
    assert_eq!(device, native, "{all}");
    assert!(daemon.log().contains("program=\"llama-completion\""), "it computed elsewhere: {}", daemon.log());
    let options: Vec<&str> = options.into_iter().chain(["--device", GPU]).collect();
    let listed = container(&engine, &options, SID, &["llama-completion", "--list-devices"]);
    let listed = text_of(&run(listed));
    assert!(listed.contains(VENUS), "{listed}");
    println!("m9: llama.cpp: {:?}", device.trim());
}
