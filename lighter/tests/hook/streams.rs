// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gate at work: which process gets a stream.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use lighter_agent::{Limits, Record};

use crate::containers::{Cgroup, Container, Host, METAL, MPS, Scripted, eventually};

#[test]
fn a_process_that_only_shares_the_network_is_refused() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    assert_eq!(container.connect_as(&["--net"], &[], host.metal), "", "closed without a word");
    let never_asked = Container::start_beside("beside", &container, host.bundle("beside", &[]));
    assert_eq!(never_asked.connect(host.metal), "");
    assert_eq!(container.connect(host.metal), "served metal c1");
    assert_eq!(host.services.offers.lock().unwrap().len(), 1);
}

#[test]
fn a_container_beside_another_uses_its_own_devices_only() {
    let host = Host::new();
    let first = host.granted("first", &[METAL]);
    let second = Container::start_beside("second", &first, host.bundle("second", &[MPS]));
    assert!(host.hook("grant", &second, MPS).status.success());
    assert_eq!(second.connect(host.mps), "served mps second");
    assert_eq!(second.connect(host.metal), "");
    assert_eq!(first.connect(host.mps), "");
    assert_eq!(first.connect(host.metal), "served metal first");
}

#[test]
fn two_devices_of_one_container_are_two_grants_at_two_endpoints() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL, MPS]);
    assert_eq!(container.connect(host.metal), "served metal c1");
    assert_eq!(container.connect(host.mps), "served mps c1");
    assert_eq!(host.agent().grants().len(), 2);
}

#[test]
fn with_host_networking_the_gate_alone_decides() {
    let host = Host::new();
    let on_host = |id: &str| {
        let container = Container::start(id, &["--mount"], host.bundle(id, &[METAL]));
        assert!(host.hook("grant", &container, METAL).status.success());
        container
    };
    let (mut a, b) = (on_host("a"), on_host("b"));
    assert_eq!(a.connect_as(&["--mount"], &[], host.metal), "served metal a");
    assert_eq!(b.connect_as(&["--mount"], &[], host.metal), "served metal b");
    let mut own = TcpStream::connect(("127.0.0.1", host.metal)).unwrap();
    assert_eq!(std::io::Read::read(&mut own, &mut [0]).unwrap(), 0, "the host's own process is no container");
    a.kill();
    eventually("a's grant ends", || host.agent().grants().len() == 1);
    assert_eq!(b.connect_as(&["--mount"], &[], host.metal), "served metal b");
    drop(b);
    eventually("the listener closes", || TcpStream::connect(("127.0.0.1", host.metal)).is_err());
}

#[test]
fn a_user_of_the_container_who_is_not_root_is_served() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    let nobody = ["setpriv", "--reuid=65534", "--clear-groups"];
    assert_eq!(container.connect_as(&["--net", "--mount"], &nobody, host.metal), "served metal c1");
}

#[test]
fn an_ipv6_socket_to_the_ipv4_address_is_served() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    let script = format!(
        "import socket\ns = socket.socket(socket.AF_INET6)\ns.connect(('::ffff:127.0.0.1', {}))\n\
         print(s.makefile().readline().strip())",
        host.metal
    );
    let output = Command::new("nsenter")
        .args(["--net", "--mount", "--target", &container.pid().to_string(), "python3", "-c", &script])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served metal c1\n");
}

#[test]
fn the_containers_group_covers_exec_and_containers_in_it() {
    let host = Host::new();
    let group = Cgroup::new("outer");
    let container = Container::start("outer", &["--net", "--mount"], host.bundle("outer", &[METAL]));
    group.add(container.pid());
    assert!(host.hook("grant", &container, METAL).status.success());
    assert!(host.agent().grants()[0].cgroup.as_ref().unwrap().ends_with("-outer"));
    // Neither shares the mount namespace of the init.
    let through = |group: &Cgroup| {
        let enter = format!("echo $$ > {} && exec \"$@\"", group.procs());
        container.connect_as(&["--net"], &["sh", "-c", &enter, "sh"], host.metal)
    };
    assert_eq!(through(&group), "served metal outer");
    let inner = group.below("inner");
    assert_eq!(through(&inner), "served metal outer");
    let beside = Cgroup::new("outer2");
    assert_eq!(through(&beside), "", "a name that only starts alike is another group");
    drop((inner, container));
}

#[test]
fn a_group_that_others_are_in_identifies_nobody() {
    let host = Host::new();
    let group = Cgroup::new("shared");
    let container = Container::start("c1", &["--net", "--mount"], host.bundle("c1", &[METAL]));
    let other = Container::start("other", &["--net", "--mount"], host.bundle("other", &[]));
    group.add(container.pid());
    group.add(other.pid());
    assert!(host.hook("grant", &container, METAL).status.success());
    assert_eq!(host.agent().grants()[0].cgroup, None);
    assert_eq!(container.connect(host.metal), "served metal c1");
    drop((container, other));
}

#[test]
fn peers_that_are_gone_before_the_look_up_harm_nobody() {
    let host = Host::new();
    let on_host = Container::start("a", &["--mount"], host.bundle("a", &[METAL]));
    assert!(host.hook("grant", &on_host, METAL).status.success());
    for _ in 0..200 {
        let hasty = TcpStream::connect(("127.0.0.1", host.metal)).unwrap();
        // Resets instead of closing.
        rustix::net::sockopt::set_socket_linger(hasty.as_fd(), Some(Duration::ZERO)).unwrap();
    }
    assert_eq!(on_host.connect_as(&["--mount"], &[], host.metal), "served metal a");
    assert_eq!(host.services.offers.lock().unwrap().len(), 1);
}

#[test]
fn a_socket_that_a_stranger_holds_too_is_refused() {
    let host = Host::new();
    let container = Container::start("a", &["--mount"], host.bundle("a", &[METAL]));
    assert!(host.hook("grant", &container, METAL).status.success());
    // The client in the container inherits a socket that this process made, connects it, and both hold it.
    let ours =
        rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let script = format!(
        "import socket\ns = socket.socket(fileno=0)\ns.connect(('127.0.0.1', {}))\nprint(s.recv(9))",
        host.metal
    );
    let output = Command::new("nsenter")
        .args(["--mount", "--target", &container.pid().to_string(), "python3", "-c", &script])
        .stdin(ours.try_clone().unwrap())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b''\n");
    // Nobody else holds the client's own socket.
    let output = Command::new("nsenter")
        .args(["--mount", "--target", &container.pid().to_string(), "python3", "-c"])
        .arg(script.replace("fileno=0", ""))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'served me'\n");
}

#[test]
fn a_service_that_is_down_closes_the_stream_and_the_next_one_works() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    *host.services.down.lock().unwrap() = true;
    assert_eq!(container.connect(host.metal), "");
    *host.services.down.lock().unwrap() = false;
    assert_eq!(container.connect(host.metal), "served metal c1");
}

fn found(devices: &[&str], project: Option<&str>) -> Record {
    Record::Found {
        devices: devices.iter().map(ToString::to_string).collect(),
        project: project.map(ToOwned::to_owned),
        init_pid: None,
    }
}

fn recording(engine: &Scripted) -> Host {
    Host::with(|config| {
        config.records = vec![Box::new(engine.clone())];
        config.limits = Limits { record_retry: Duration::ZERO, ..Limits::default() };
    })
}

#[test]
fn without_the_engines_record_nothing_is_served_until_it_is_there() {
    let engine = Scripted::default();
    *engine.answers.lock().unwrap() = vec![
        Record::Unavailable { reason: "away".into() },
        Record::NoSuchContainer,
        found(&[], None),
        found(&[MPS], None),
        found(&[METAL], Some("shop")),
        Record::Unavailable { reason: "away again".into() },
    ];
    let host = recording(&engine);
    let container = host.granted("c1", &[METAL]);
    assert_eq!(*engine.asked.lock().unwrap(), 0, "the hook never waits for the engine");
    for _ in 0..4 {
        assert_eq!(container.connect(host.metal), "");
    }
    for _ in 0..3 {
        assert_eq!(container.connect(host.metal), "served metal c1", "a confirmation is kept");
    }
    assert_eq!(*engine.asked.lock().unwrap(), 5);
    assert_eq!(host.services.offers.lock().unwrap()[0].1.owner.0, "compose/0/shop");
}

#[test]
fn a_slow_engine_is_asked_once_and_holds_up_its_own_container_only() {
    let engine = Scripted { slow: Some(Duration::from_secs(1)), ..Scripted::default() };
    *engine.answers.lock().unwrap() = vec![found(&[METAL], None)];
    let host = Host::with(|config| {
        config.records = vec![Box::new(engine.clone())];
        config.trust.cgroups = vec![format!("/lighter-test-{}-trusted", std::process::id())];
    });
    let slow = host.granted("slow", &[METAL]);
    let group = Cgroup::new("trusted");
    let trusted = Container::start("trusted", &["--net", "--mount"], host.bundle("trusted", &[METAL]));
    group.add(trusted.pid());
    assert!(host.hook("grant", &trusted, METAL).status.success());
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..8).map(|_| scope.spawn(|| slow.connect(host.metal))).collect();
        eventually("the engine is asked", || *engine.asked.lock().unwrap() == 1);
        assert_eq!(trusted.connect(host.metal), "served metal trusted");
        assert_eq!(host.services.offers.lock().unwrap()[0].1.container, "trusted");
        for stream in waiting {
            assert_eq!(stream.join().unwrap(), "served metal slow");
        }
    });
    assert_eq!(*engine.asked.lock().unwrap(), 1);
    drop(trusted);
}

#[test]
fn a_docker_socket_that_is_away_refuses_by_name() {
    let host = Host::with(|config| {
        config.records = vec![Box::new(lighter_agent::Docker::new("/nonexistent/docker.sock".into(), 0))];
    });
    let container = host.granted("c1", &[METAL]);
    assert_eq!(container.connect(host.metal), "");
    let record = &host.agent().grants()[0].record;
    assert!(record.contains("no answer from docker at /nonexistent/docker.sock"), "{record}");
}

#[test]
fn the_offer_names_the_process_that_connected() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    let mut client = container.stay_connected(host.metal);
    let offer = host.services.offers.lock().unwrap()[0].1.clone();
    assert_eq!(offer.peer_pid, Some(client.id()));
    assert_eq!((offer.device.as_str(), offer.owner.0.as_str()), ("all", "container/0/c1"));
    assert_eq!(offer.grant, host.agent().grants()[0].grant);
    client.kill().unwrap();
    client.wait().unwrap();
}
