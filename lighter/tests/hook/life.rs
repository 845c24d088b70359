// SPDX-License-Identifier: MIT OR Apache-2.0
//! How grants end, and how they live through a restart of the daemon.

use std::fs;
use std::io::Read;
use std::net::TcpListener;

use lighter_agent::{Devices, Record};
use lighter_wire::{Endpoint, Kind};

use crate::containers::{Container, Host, METAL, MPS, Scripted, eventually};

#[test]
fn the_end_of_the_init_ends_everything_and_a_late_poststop_nothing() {
    let host = Host::new();
    let mut container = host.granted("c1", &[METAL]);
    let grant = host.agent().grants()[0].grant.clone();
    assert!(host.hook("release", &container, METAL).status.success());
    assert_eq!(
        container.connect(host.metal),
        "served metal c1",
        "the init lives: poststop is for an earlier run"
    );
    assert_eq!(host.state_files(), vec![format!("{grant}.json")]);
    let mut client = container.stay_connected(host.metal);
    container.kill();
    eventually("the grant ends", || host.agent().grants().is_empty());
    let mut rest = String::new();
    client.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    client.wait().unwrap();
    eventually("state file and streams are gone", || {
        host.state_files().is_empty() && host.services.open_streams() == 0
    });
    assert_eq!(*host.services.revoked.lock().unwrap(), vec![grant]);
}

#[test]
fn a_restarted_container_gets_a_grant_of_its_own() {
    let host = Host::new();
    let mut first = host.granted("same", &[METAL]);
    let before = host.agent().grants()[0].grant.clone();
    first.kill();
    let second = host.granted("same", &[METAL]);
    assert!(host.hook("release", &second, METAL).status.success());
    assert_eq!(second.connect(host.metal), "served metal same");
    eventually("the first run's grant ends", || host.agent().grants().len() == 1);
    assert_ne!(host.agent().grants()[0].grant, before);
}

#[test]
fn the_listener_of_a_shared_namespace_lives_as_long_as_its_last_grant() {
    let host = Host::new();
    let mut first = host.granted("first", &[METAL]);
    let mut second = Container::start_beside("second", &first, host.bundle("second", &[METAL]));
    assert!(host.hook("grant", &second, METAL).status.success());
    let never_asked = Container::start_beside("never", &first, host.bundle("never", &[]));
    first.kill();
    eventually("the first grant ends", || host.agent().grants().len() == 1);
    assert_eq!(second.connect(host.metal), "served metal second");
    second.kill();
    eventually("the listener closes", || never_asked.connect(host.metal) == "connection refused");
}

#[test]
fn a_daemon_that_starts_again_takes_over_living_containers_only() {
    let mut host = Host::new();
    let living = host.granted("living", &[METAL, MPS]);
    let mut ending = host.granted("ending", &[METAL]);
    let mut before: Vec<_> =
        host.agent().grants().into_iter().map(|grant| (grant.grant, grant.device)).collect();
    host.agent.take().unwrap().stop();
    assert_eq!(living.connect(host.metal), "connection refused");
    ending.kill();
    host.start_again(host.trusting()).unwrap();
    let after: Vec<_> = host.agent().grants().into_iter().map(|grant| (grant.grant, grant.device)).collect();
    before.retain(|before| after.contains(before));
    assert_eq!((before.len(), after.len(), host.state_files().len()), (2, 2, 2));
    assert_eq!(living.connect(host.metal), "served metal living");
    assert_eq!(living.connect(host.mps), "served mps living");
    assert_eq!(living.connect_as(&["--net"], &[], host.metal), "", "the gate holds as before");
    drop(living);
    eventually("the taken over grants end too", || {
        host.agent().grants().is_empty() && host.state_files().is_empty()
    });
}

#[test]
fn the_engines_confirmation_outlives_the_daemon() {
    let engine = Scripted::default();
    *engine.answers.lock().unwrap() =
        vec![Record::Found { devices: vec![METAL.into()], project: None, init_pid: None }];
    let mut host = Host::with(|config| config.records = vec![Box::new(engine.clone())]);
    let container = host.granted("c1", &[METAL]);
    assert_eq!(container.connect(host.metal), "served metal c1");
    host.agent = None;
    let mut without_engine = host.config();
    without_engine.records = vec![];
    host.start_again(without_engine).unwrap();
    assert_eq!(container.connect(host.metal), "served metal c1");
}

#[test]
fn a_port_that_was_taken_meanwhile_is_opened_when_it_is_free() {
    let mut host = Host::new();
    let container = Container::start("a", &["--mount"], host.bundle("a", &[METAL]));
    assert!(host.hook("grant", &container, METAL).status.success());
    host.agent = None;
    let squatter = TcpListener::bind(("127.0.0.1", host.metal)).unwrap();
    host.start_again(host.trusting()).unwrap();
    assert_eq!(host.agent().grants().len(), 1);
    drop(squatter);
    eventually("the endpoint is opened again", || {
        container.connect_as(&["--mount"], &[], host.metal) == "served metal a"
    });
}

#[test]
fn a_broken_state_file_hides_no_other() {
    let mut host = Host::new();
    let container = host.granted("c1", &[METAL]);
    host.agent = None;
    fs::write(host.dir.path().join("state/grants/metal-0.json"), "{\"version\":1").unwrap();
    host.start_again(host.trusting()).unwrap();
    assert_eq!(container.connect(host.metal), "served metal c1");
}

#[test]
fn a_device_that_is_switched_off_ends_its_grants_and_no_others() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL, MPS]);
    let mps_only = Devices::from([(Kind::Mps, vec![Endpoint::Loopback(host.mps)])]);
    host.agent().set_devices(mps_only).unwrap();
    assert_eq!(host.services.revoked.lock().unwrap().len(), 1);
    assert_eq!(container.connect(host.metal), "connection refused");
    assert_eq!(container.connect(host.mps), "served mps c1");
    assert_eq!(host.state_files().len(), 1);
}
