// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thousand containers one after another leave nothing behind. A test program of its own, since it counts the
//! descriptors of the whole process.

#[path = "../hook/containers.rs"]
mod containers;

use std::fs::File;
use std::sync::{Mutex, PoisonError};

use containers::{Container, Host, METAL, descriptors, eventually, stderr};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Both tests are about the descriptors of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn an_agent_without_descriptors_serves_again_when_it_has_some() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    let late = Container::start("late", &["--net", "--mount"], host.bundle("late", &[METAL]));
    assert_eq!(container.connect(host.metal), "served metal c1");
    let limit = getrlimit(Resource::Nofile);
    let (mut client, mut hook) = (host.connecting(&container), host.asking(&late));
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), maximum: limit.maximum }).unwrap();
    let mut all = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        all.push(file);
    }
    client.go();
    hook.go();
    // Long enough for both accepts to fail at least once.
    std::thread::sleep(std::time::Duration::from_millis(300));
    drop(all);
    setrlimit(Resource::Nofile, limit).unwrap();
    let (client, hook) = (client.output(), hook.output());
    assert_eq!(String::from_utf8_lossy(&client.stdout), "served metal c1\n");
    assert!(hook.status.success(), "{}", stderr(&hook));
}

#[test]
fn a_thousand_containers_leave_no_descriptor_and_no_file() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let host = Host::new();
    // The first one starts threads and whatever else is kept once.
    drop(host.granted("first", &[METAL]));
    eventually("the first grant ends", || host.state_files().is_empty() && host.agent().grants().is_empty());
    let before = descriptors();
    for number in 0..1000 {
        let container = host.granted(&format!("c{number}"), &[METAL]);
        if number % 10 == 0 {
            assert_eq!(container.connect(host.metal), format!("served metal c{number}"));
        }
        std::fs::remove_dir_all(&container.bundle).unwrap();
    }
    eventually("all grants end", || host.state_files().is_empty() && host.agent().grants().is_empty());
    assert_eq!(host.services.open_streams(), 0);
    eventually("all descriptors are closed", || descriptors() <= before);
}
