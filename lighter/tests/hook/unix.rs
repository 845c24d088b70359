// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unix endpoints: one socket of the host in all containers' reach, and which process gets a stream there.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use lighter_agent::{Agent, Devices, Record};
use lighter_wire::{Endpoint, Kind, recv};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket, socketpair};

use crate::containers::{ANE, Cgroup, Container, GPU, Host, METAL, Scripted, eventually, refusal, stderr};

const NET_AND_MOUNT: [&str; 2] = ["--net", "--mount"];

/// What a process of this host gets that connects by itself.
fn ask_on_host(host: &Host, kind: Kind) -> String {
    let Ok(mut stream) = UnixStream::connect(host.endpoint(kind)) else { return "not reached".to_owned() };
    let mut answer = String::new();
    // The end of a socket that was closed over unread bytes is a reset; both mean that nothing was served.
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn a_container_with_the_device_is_served_and_others_that_see_the_socket_are_not() {
    let host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE]);
    let never_asked = host.with_endpoints("never", &["--net"], &[]);
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
    assert_eq!(never_asked.ask(Kind::Ane), "", "closed without a word");
    assert_eq!(ask_on_host(&host, Kind::Ane), "", "the host's own process is no container");
    let beside = Container::start_beside("beside", &container, host.bundle("beside", &[]));
    assert_eq!(beside.ask_at(&NET_AND_MOUNT, &[], &host.endpoint(Kind::Ane)), "");
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
    assert_eq!(host.services.offers.lock().unwrap().len(), 2);
    let [grant] = &host.agent().grants()[..] else { panic!("{:?}", host.agent().grants()) };
    assert_eq!(grant.endpoints, vec!["/run/lighter/ane/socket"]);
}

#[test]
fn another_device_is_another_socket() {
    let host = Host::new();
    let ane = host.granted_endpoints("a", &[ANE]);
    let gpu = host.granted_endpoints("g", &[GPU]);
    let both = host.granted_endpoints("b", &[GPU, ANE, METAL]);
    assert_eq!((ane.ask(Kind::Ane).as_str(), ane.ask(Kind::Gpu).as_str()), ("served ane a", ""));
    assert_eq!((gpu.ask(Kind::Gpu).as_str(), gpu.ask(Kind::Ane).as_str()), ("served gpu g", ""));
    assert_eq!(
        (both.ask(Kind::Gpu).as_str(), both.ask(Kind::Ane).as_str()),
        ("served gpu b", "served ane b")
    );
    assert_eq!(both.connect(host.metal), "served metal b", "beside a port of its own network namespace");
    assert_eq!(ane.connect(host.metal), "connection refused");
}

#[test]
fn a_socket_may_be_passed_by_everybody_and_made_by_nobody_in_a_container() {
    let host = Host::new();
    let path = host.endpoint(Kind::Ane);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o666, 0o755));
    let container = host.granted_endpoints("c1", &[ANE]);
    let replace = format!("rm -f {}", Container::endpoint(Kind::Ane).display());
    let output = Command::new("nsenter")
        .args(["--mount", "--target", &container.pid().to_string(), "--", "sh", "-c", &replace])
        .output()
        .unwrap();
    assert!(!output.status.success() && stderr(&output).contains("Read-only"), "{}", stderr(&output));
}

#[test]
fn the_network_of_a_container_does_not_matter() {
    let host = Host::new();
    for (id, namespaces) in [("none", &["--net"][..]), ("host", &[][..])] {
        let container = host.with_endpoints(id, namespaces, &[ANE]);
        let output = host.hook("grant", &container, ANE);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(container.ask(Kind::Ane), format!("served ane {id}"));
    }
}

#[test]
fn users_exec_and_containers_within_are_the_container_still() {
    let host = Host::new();
    let group = Cgroup::new("unix");
    let container = host.with_endpoints("outer", &["--net"], &[ANE]);
    group.add(container.pid());
    assert!(host.hook("grant", &container, ANE).status.success());
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    assert_eq!(container.ask_as(&NET_AND_MOUNT, &nobody, Kind::Ane), "served ane outer");
    // Neither shares the mount namespace of the init.
    let through = |group: &Cgroup| {
        let enter = format!("echo $$ > {} && exec \"$@\"", group.procs());
        container.ask_at(&["--net"], &["sh", "-c", &enter, "sh"], &host.endpoint(Kind::Ane))
    };
    assert_eq!(through(&group), "served ane outer");
    let inner = group.below("inner");
    assert_eq!(through(&inner), "served ane outer");
    let beside = Cgroup::new("unix2");
    assert_eq!(through(&beside), "", "a name that only starts alike is another group");
    let within = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"];
    let mut nested = vec!["sh", "-c"];
    let enter = format!("echo $$ > {} && exec \"$@\"", inner.procs());
    nested.extend([enter.as_str(), "sh"]);
    nested.extend(within);
    assert_eq!(container.ask_as(&["--mount"], &nested, Kind::Ane), "served ane outer");
    drop((inner, container));
}

#[test]
fn a_container_with_remapped_users_is_served() {
    const ROOT_INSIDE: &str = "--reuid=100000";
    let host = Host::new();
    let mut command = Command::new("setpriv");
    command.args([ROOT_INSIDE, "--regid=100000", "--clear-groups"]);
    command.args(["unshare", "--user", "--map-root-user", "--net", "--mount"]);
    let container = host.with_endpoints_by(command, "remapped", &[ANE]);
    assert!(host.hook("grant", &container, ANE).status.success());
    let inside = ["setpriv", ROOT_INSIDE, "--clear-groups"];
    assert_eq!(container.ask_as(&NET_AND_MOUNT, &inside, Kind::Ane), "served ane remapped");
}

#[test]
fn peers_that_are_gone_before_the_look_up_harm_nobody() {
    let host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE]);
    let script = format!(
        "import os, socket\nfor n in range(300):\n  if os.fork() == 0:\n    \
         socket.socket(socket.AF_UNIX).connect('{}')\n    os._exit(0)\n",
        host.endpoint(Kind::Ane).display()
    );
    // Of the host: none of them may be taken for a process of the container that got its number.
    assert!(Command::new("python3").args(["-c", &script]).status().unwrap().success());
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
    assert_eq!(host.services.offers.lock().unwrap().len(), 1);
}

#[test]
fn a_stream_belongs_to_the_process_that_connected_it() {
    let host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE]);
    let path = Container::endpoint(Kind::Ane);
    // A granted process passes its stream on to this one, which has no grant: the stream stays the container's.
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    let script = format!(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('{}')\n\
         socket.send_fds(socket.socket(fileno=0), [b'\"passed\"'], [s.fileno()])\ns.recv(1, socket.MSG_PEEK)",
        path.display()
    );
    let mut client = container.python(&script, theirs).spawn().unwrap();
    let (word, mut passed) = recv::<String>(&ours).unwrap().unwrap();
    assert_eq!(word, "passed");
    let mut stream = UnixStream::from(passed.pop().unwrap());
    let mut answer = [0; 13];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"served ane c1");
    client.wait().unwrap();
    let mut ended = container;
    ended.kill();
    eventually("it ends with the container's grant", || host.services.open_streams() == 0);
    assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 1, "the rest of the line, then the end");
}

#[test]
fn a_socket_of_a_stranger_that_a_process_of_the_container_connects_is_the_containers() {
    let host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE]);
    let ours: OwnedFd = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let connect = format!(
        "import socket\ns = socket.socket(fileno=0)\ns.connect('{}')\nprint(s.makefile().readline().strip())",
        Container::endpoint(Kind::Ane).display()
    );
    let output = container.python(&connect, ours.try_clone().unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served ane c1\n");
    // The other way round: what this process connects stays a stranger's, whoever reads from it.
    let ours = UnixStream::connect(host.endpoint(Kind::Ane)).unwrap();
    let read = "import socket\nprint(socket.socket(fileno=0).recv(9))";
    let output = container.python(read, ours.into()).stdout(Stdio::piped()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b''\n");
}

#[test]
fn the_offer_names_the_process_and_ends_with_the_grant() {
    let host = Host::new();
    let mut container = host.granted_endpoints("c1", &[ANE]);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let script = format!(
        "import socket, os\ns = socket.socket(socket.AF_UNIX)\ns.connect('{}')\n\
         os.write(0, s.recv(100))\nos.write(0, s.recv(100) or b'end')",
        Container::endpoint(Kind::Ane).display()
    );
    let mut client = container.python(&script, theirs.into()).spawn().unwrap();
    let mut line = [0; 14];
    ours.read_exact(&mut line).unwrap();
    let (kind, offer) = host.services.offers.lock().unwrap()[0].clone();
    assert_eq!((kind, offer.peer_pid), (Kind::Ane, Some(client.id())));
    assert_eq!((offer.device.as_str(), offer.owner.0.as_str()), ("all", "container/0/c1"));
    let grant = host.agent().grants()[0].grant.clone();
    assert_eq!(offer.grant, grant);
    container.kill();
    let mut end = [0; 3];
    ours.read_exact(&mut end).unwrap();
    assert_eq!(&end, b"end");
    client.wait().unwrap();
    eventually("the grant ends", || host.agent().grants().is_empty() && host.state_files().is_empty());
    assert_eq!(*host.services.revoked.lock().unwrap(), vec![grant]);
    assert_eq!(ask_on_host(&host, Kind::Ane), "", "the socket outlives the grant and serves nobody");
}

#[test]
fn a_living_container_reaches_the_next_daemon_through_the_same_mount() {
    let mut host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE]);
    let never_asked = host.with_endpoints("never", &["--net"], &[]);
    let inode = |host: &Host| fs::metadata(host.endpoint(Kind::Ane)).unwrap().ino();
    let before = inode(&host);
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
    host.agent.take().unwrap().stop();
    assert_eq!(container.ask(Kind::Ane), "connection refused");
    host.start_again(host.trusting()).unwrap();
    assert_ne!(inode(&host), before, "a mounted socket would be the old one");
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
    assert_eq!(never_asked.ask(Kind::Ane), "");
}

#[test]
fn a_device_that_is_switched_off_closes_its_socket_and_opens_it_again() {
    let host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE, GPU]);
    let on =
        |kinds: &[Kind]| kinds.iter().map(|&kind| (kind, vec![Endpoint::Unix(kind)])).collect::<Devices>();
    host.agent().set_devices(on(&[Kind::Gpu])).unwrap();
    assert_eq!(host.agent().grants().len(), 1);
    assert_eq!(container.ask(Kind::Ane), "connection refused");
    assert_eq!(container.ask(Kind::Gpu), "served gpu c1");
    assert!(refusal(&host.hook("grant", &container, ANE)).contains("ane is off"));
    host.agent().set_devices(on(&[Kind::Gpu, Kind::Ane])).unwrap();
    assert_eq!(container.ask(Kind::Ane), "", "its grant has ended");
    assert!(host.hook("grant", &container, ANE).status.success());
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
}

#[test]
fn without_the_engines_record_nothing_is_served() {
    let engine = Scripted::default();
    *engine.answers.lock().unwrap() = vec![
        Record::Found { devices: vec![GPU.into()], project: None, init_pid: None },
        Record::Found { devices: vec![ANE.into()], project: None, init_pid: None },
    ];
    let host = Host::with(|config| {
        config.records = vec![Box::new(engine.clone())];
        config.limits.record_retry = std::time::Duration::ZERO;
    });
    let container = host.granted_endpoints("c1", &[ANE]);
    assert_eq!(*engine.asked.lock().unwrap(), 0, "the hook never waits for the engine");
    assert_eq!(container.ask(Kind::Ane), "");
    for _ in 0..2 {
        assert_eq!(container.ask(Kind::Ane), "served ane c1");
    }
    assert_eq!(*engine.asked.lock().unwrap(), 2);
}

#[test]
fn a_second_daemon_is_told_what_is_in_the_way() {
    let host = Host::new();
    let mut other = host.trusting();
    other.state_dir = host.dir.path().join("other");
    other.hook_socket = host.dir.path().join("other.sock");
    let error = Agent::start(other, host.services.clone()).unwrap_err().to_string();
    assert!(error.contains("answered by another program"), "{error}");
    assert!(error.contains(&host.endpoint(Kind::Gpu).display().to_string()), "{error}");
    let mut linked = host.trusting();
    linked.state_dir = host.dir.path().join("other");
    linked.hook_socket = host.dir.path().join("other.sock");
    linked.socket_dir = host.dir.path().join("linked");
    fs::create_dir(&linked.socket_dir).unwrap();
    std::os::unix::fs::symlink("/tmp", linked.socket_dir.join("ane")).unwrap();
    let error = Agent::start(linked, host.services.clone()).unwrap_err().to_string();
    assert!(error.contains("linked/ane"), "{error}");
    let container = host.granted_endpoints("c1", &[ANE]);
    assert_eq!(container.ask(Kind::Ane), "served ane c1", "the first one serves on");
}

#[test]
fn a_hundred_containers_connect_at_once() {
    let host = Host::new();
    let containers: Vec<Container> =
        (0..100).map(|number| host.with_endpoints(&format!("c{number}"), &["--net"], &[ANE])).collect();
    std::thread::scope(|scope| {
        for container in &containers {
            scope.spawn(|| {
                let output = host.hook("grant", container, ANE);
                assert!(output.status.success(), "{}", stderr(&output));
                assert_eq!(container.ask(Kind::Ane), format!("served ane {}", container.id));
            });
        }
    });
    assert_eq!(host.agent().grants().len(), 100);
    drop(containers);
    eventually("all grants end", || host.agent().grants().is_empty() && host.state_files().is_empty());
    assert_eq!(host.services.open_streams(), 0);
}

#[test]
fn who_holds_many_connections_that_say_nothing_stops_nobody() {
    let host = Host::new();
    let container = host.granted_endpoints("c1", &[ANE]);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let script = format!(
        "import socket, os\nall = []\nfor n in range(500):\n  s = socket.socket(socket.AF_UNIX)\n  \
         s.connect('{}')\n  all.append(s)\nos.write(0, b'x')\nos.read(0, 1)",
        host.endpoint(Kind::Ane).display()
    );
    let mut stranger =
        Command::new("python3").args(["-c", &script]).stdin(OwnedFd::from(theirs)).spawn().unwrap();
    ours.read_exact(&mut [0]).unwrap();
    assert_eq!(container.ask(Kind::Ane), "served ane c1");
    ours.write_all(b"x").unwrap();
    stranger.wait().unwrap();
    assert_eq!(host.services.offers.lock().unwrap().len(), 1);
}
