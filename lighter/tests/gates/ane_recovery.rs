// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane device's processes die under a program that computes: it gets right answers throughout, and runs on the host
//! again as soon as there is one.

use crate::ane::{ANE, Program, calls, settings};
use crate::support::{Daemon, Engine, children, eventually, stdout_of};

const LOOP: &str = "python3 /gate/loop.py /models/ch_ppocr_mobile_v2.0_cls_infer.onnx 1 3 48 192";

fn service(daemon: &Daemon) -> Option<u32> {
    daemon.status()["services"]["ane"]["pid"].as_u64().map(|pid| u32::try_from(pid).unwrap())
}

fn kill(pid: u32) {
    stdout_of(std::process::Command::new("kill").args(["-KILL", &pid.to_string()]));
}

/// More runs than now; a service that was started again counts from 0.
fn goes_on(what: &str, daemon: &Daemon) {
    let mut last = calls(daemon);
    let mut steps = 0;
    eventually(what, || {
        let now = calls(daemon);
        steps += u32::from(now > last);
        last = now;
        (steps > 2).then_some(())
    });
}

fn stop(engine: &Engine, program: &Program<'_>) -> serde_json::Value {
    stdout_of(engine.docker(["exec", &program.id, "touch", "/stop"]));
    let text = program.finish();
    let line = text.lines().find(|line| line.starts_with("{\"runs\""));
    serde_json::from_str(line.unwrap_or_else(|| panic!("{text}"))).unwrap()
}

#[test]
fn right_answers_while_worker_service_and_daemon_are_killed_and_come_back() {
    let engine = Engine::take();
    let mut daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let program = Program::start(&engine, "ort-1.32", &["--device", ANE], LOOP);
    eventually("the grant is made", || (daemon.grants() == 1).then_some(()));
    goes_on("runs on the host", &daemon);

    let worker = *children(service(&daemon).unwrap()).first().expect("the service has a worker");
    kill(worker);
    eventually("another worker", || {
        children(service(&daemon)?).first().filter(|pid| **pid != worker).map(|_| ())
    });
    goes_on("runs on another worker", &daemon);

    let first = service(&daemon).unwrap();
    kill(first);
    eventually("another service", || service(&daemon).filter(|pid| *pid != first));
    goes_on("runs on another service", &daemon);

    daemon.kill();
    std::thread::sleep(std::time::Duration::from_secs(1));
    daemon.launch();
    eventually("the grant is known again", || (daemon.grants() == 1).then_some(()));
    goes_on("runs under another daemon", &daemon);

    let result = stop(&engine, &program);
    println!("ane: worker, service and daemon killed: {result}");
    assert_eq!((&result["wrong"], &result["failed"]), (&0.into(), &0.into()), "{result}");
}

#[test]
fn a_device_that_is_gone_for_good_leaves_the_containers_own_processor() {
    let engine = Engine::take();
    let mut daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let program = Program::start(&engine, "ort-1.32", &["--device", ANE], LOOP);
    eventually("the grant is made", || (daemon.grants() == 1).then_some(()));
    goes_on("runs on the host", &daemon);
    daemon.kill();
    std::thread::sleep(std::time::Duration::from_secs(3));
    let result = stop(&engine, &program);
    assert_eq!((&result["wrong"], &result["failed"]), (&0.into(), &0.into()), "{result}");
    let said = program.written();
    assert_eq!(said.matches("is away").count(), 1, "said once: {said}");
}
