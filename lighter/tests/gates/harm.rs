// SPDX-License-Identifier: MIT OR Apache-2.0
//! One container's trouble stays its own: crashes, quotas, crowds, and hooks that nobody's record backs.

use std::process::Command;

use crate::support::{
    BASE_IMAGE, DEVICE, Daemon, Engine, HELLO, LLAMA_IMAGE, children, eventually, run, stdout_of, text_of,
    tiny_model,
};

const MODEL: &str = "/tiny.gguf";

fn bench(engine: &Engine, tokens: &str, options: &[&str]) -> &'static mut Command {
    let mount = format!("{}:{MODEL}:ro", tiny_model().display());
    engine.docker(["run", "--rm", "-v", &mount]).args(options).args([
        LLAMA_IMAGE,
        "llama-bench",
        "-m",
        MODEL,
        "-p",
        "0",
        "-n",
        tokens,
        "-r",
        "1",
        "-t",
        "1",
        "-ngl",
        "99",
        "--rpc",
        "127.0.0.1:50052",
    ])
}

/// The workers of the service, by pid.
fn workers(daemon: &Daemon) -> Vec<u32> {
    let service = daemon.status()["services"]["metal"]["pid"].as_u64().unwrap();
    children(u32::try_from(service).unwrap())
}

#[test]
fn a_worker_that_dies_takes_only_its_own_container_along() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let bystander = engine.sleeper(&["--device", DEVICE]);
    assert_eq!(bystander.hello(), "served 1 devices\n");
    let spared = workers(&daemon);
    let mut victim = bench(&engine, "200000", &["--device", DEVICE, "--name", "gate-victim"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let worker = eventually("the victim's worker runs", || {
        workers(&daemon).into_iter().find(|pid| !spared.contains(pid))
    });
    // Its client must be in the midst of it.
    eventually("it computes", || {
        let stat = std::fs::read_to_string(format!("/proc/{worker}/stat")).ok()?;
        let ticks: u64 = stat.rsplit(')').next()?.split_whitespace().nth(11)?.parse().ok()?;
        (ticks > 50).then_some(())
    });
    stdout_of(Command::new("kill").args(["-9", &worker.to_string()]));
    let status = eventually("the victim's client ends", || victim.try_wait().unwrap());
    assert!(!status.success(), "the client saw no error");
    assert_eq!(bystander.hello(), "served 1 devices\n");
    assert_eq!(workers(&daemon), spared, "the bystander's worker is the one it had");
    eventually("the log says whose worker ended", || daemon.log().contains("worker").then_some(()));
    let again = run(bench(&engine, "8", &["--device", DEVICE]));
    assert!(again.status.success(), "the next container is served: {}", text_of(&again));
}

#[test]
fn a_container_over_its_quota_is_told_and_others_are_served() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, "max_bytes_per_container = 65536");
    let output = run(bench(&engine, "8", &["--device", DEVICE]));
    assert!(!output.status.success(), "{}", text_of(&output));
    assert_eq!(engine.hello(&["--device", DEVICE]), "served 1 devices\n");
    let log = daemon.log();
    assert!(
        log.contains("max_bytes_per_container") || log.contains("65536"),
        "the log names the limit: {log}"
    );
}

#[test]
fn sixteen_clients_of_four_containers_are_served_at_once() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let mount = format!("{}:{MODEL}:ro", tiny_model().display());
    let names: Vec<String> = (0..4).map(|index| format!("gate-crowd-{index}")).collect();
    run(engine.docker(["rm", "-f"]).args(&names));
    for name in &names {
        stdout_of(engine.docker([
            "run",
            "-d",
            "--device",
            DEVICE,
            "--name",
            name,
            "-v",
            &mount,
            LLAMA_IMAGE,
            "sleep",
            "600",
        ]));
    }
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..16)
            .map(|index| {
                let (engine, name) = (&engine, &names[index % 4]);
                scope.spawn(move || {
                    run(engine.docker(["exec", name, "llama-bench", "-m", MODEL]).args([
                        "-p",
                        "16",
                        "-n",
                        "16",
                        "-r",
                        "1",
                        "-t",
                        "1",
                        "-ngl",
                        "99",
                        "--rpc",
                        "127.0.0.1:50052",
                    ]))
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(workers(&daemon).len(), 4, "one worker a container");
    run(engine.docker(["rm", "-f"]).args(&names));
    for output in outputs {
        assert!(output.status.success(), "{}", text_of(&output));
    }
}

#[test]
fn a_hook_that_came_by_another_spec_is_not_backed_by_the_engines_record() {
    let engine = Engine::take();
    let daemon = Daemon::start(&engine);
    let ours = std::fs::read_to_string(engine.spec_dir().join("lighter.sh-metal.json")).unwrap();
    let sneaky = ours.replace("\"kind\": \"lighter.sh/metal\"", "\"kind\": \"gate.test/sneaky\"");
    assert_ne!(ours, sneaky);
    let file = engine.spec_dir().join("gate.test-sneaky.json");
    std::fs::write(&file, sneaky).unwrap();
    let text = eventually("the engine sees the other spec", || {
        let output = run(engine.docker([
            "run",
            "--rm",
            "--device",
            "gate.test/sneaky=all",
            BASE_IMAGE,
            "python3",
            "-c",
            HELLO,
        ]));
        Some(text_of(&output)).filter(|text| !text.contains("unresolvable"))
    });
    std::fs::remove_file(&file).unwrap();
    assert!(text.starts_with("refused: "), "{text}");
    eventually("the log says what was missing", || daemon.log().contains("refused").then_some(()));
}
