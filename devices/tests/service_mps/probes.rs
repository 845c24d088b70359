// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the service says of hosts whose Python has no torch, a broken one, or one that hangs; and that it asks once.

use lighter_wire::EngineState;

use super::running::{Running, python};

fn missing(service: &Running) -> (String, String) {
    match service.report().engine {
        EngineState::Missing { reason, remedy } => (reason, remedy),
        EngineState::Available { name, .. } => panic!("found {name}"),
    }
}

#[test]
fn a_python_that_cannot_serve_is_told_with_the_reason_and_a_remedy() {
    for (start, expected) in [
        ("no torch", "No module named 'torch'"),
        ("broken torch", "libtorch.so: cannot open shared object file"),
        ("hanging torch", "no answer within 1 s"),
    ] {
        let service = Running::start(start, |config| {
            if start == "hanging torch" {
                config.probe_limit_ms = 1000;
            }
        });
        let (reason, remedy) = missing(&service);
        assert!(reason.contains("mps.torch_python") && reason.contains(expected), "{start}: {reason}");
        assert!(remedy.contains("lighter setup mps") && remedy.contains("--torch-python"), "{remedy}");
        // The container learns that the host lacks torch, and nothing else about the host.
        let refusal = service.refusal("a");
        assert!(refusal.contains("no torch that works") && !refusal.contains("python"), "{refusal}");
        assert_eq!(service.report().containers["grant-a"].errors, 1);
    }
}

#[test]
fn a_python_that_is_not_there_is_named() {
    let service = Running::start("", |config| config.torch_python = Some("/nonexistent/python3".into()));
    let (reason, remedy) = missing(&service);
    assert!(reason.contains("/nonexistent/python3"), "{reason}");
    assert!(remedy.contains("--torch-python"), "{remedy}");
}

#[test]
fn a_missing_package_is_named() {
    let service = Running::start("", |config| config.host_package = Some("/nonexistent/host.pyz".into()));
    let (reason, _) = missing(&service);
    assert!(reason.contains("/nonexistent/host.pyz"), "{reason}");
}

#[test]
fn the_engine_is_named_with_its_torch_and_its_python() {
    let service = Running::start("", |config| config.engine = "auto".to_owned());
    let EngineState::Available { name, version } = service.report().engine else { panic!("missing") };
    assert_eq!(name, "cuda:0 (no GPU)", "the best comes first");
    assert_eq!(version, format!("9.9.9 (Python 3, {})", python().display()));
    let service = Running::start("", |config| config.engine = "xpu:3".to_owned());
    let (reason, _) = missing(&service);
    assert!(reason.contains("\"xpu:3\"") && reason.contains("cuda:0, cpu"), "{reason}");
}

#[test]
fn what_a_python_has_said_is_remembered_by_the_next_service_until_it_changes() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("host.py");
    std::fs::copy(super::running::bad_host(), &package).unwrap();
    let count = folder.path().join("count");
    let start = || {
        Running::start("", |config| {
            config.host_package = Some(package.clone());
            config.state_dir = folder.path().join("state");
            // Restricted, the child could not count.
            config.sandbox = false;
            config.environment.insert("PROBED".to_owned(), count.to_string_lossy().into_owned());
        })
    };
    let asked = || std::fs::read(&count).map_or(0, |bytes| bytes.len());
    let service = start();
    service.report();
    service.report();
    assert!(service.ask("a", "hello").starts_with("cpu "));
    assert_eq!(asked(), 1);
    drop(service);
    let service = start();
    service.report();
    assert_eq!(asked(), 1, "remembered");
    let changed = [std::fs::read(&package).unwrap(), b"# changed\n".to_vec()].concat();
    std::fs::write(&package, changed).unwrap();
    service.until("a running service notices a change", |_| asked() == 2);
}
