// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thousand containers one after another leave nothing behind. A test program of its own, since it counts the
//! descriptors of the whole process.

#[path = "../hook/containers.rs"]
mod containers;

use containers::{Host, METAL, descriptors, eventually};

#[test]
fn a_thousand_containers_leave_no_descriptor_and_no_file() {
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
