// SPDX-License-Identifier: MIT OR Apache-2.0
//! Making a grant: what the hook's one line says when there is none.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::Command;

use lighter_wire::Kind;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

use crate::containers::{Container, HOOK, Host, METAL, MPS, eventually, refusal, run_hook, stderr};

#[test]
fn a_grant_opens_the_endpoint_inside_and_nowhere_else() {
    let host = Host::new();
    let without = Container::start("without", &["--net", "--mount"], host.bundle("without", &[]));
    assert_eq!(without.connect(host.metal), "connection refused");
    let container = host.granted("c1", &[METAL]);
    assert_eq!(container.connect(host.metal), "served metal c1");
    assert_eq!(without.connect(host.metal), "connection refused");
    assert!(std::net::TcpStream::connect(("127.0.0.1", host.metal)).is_err(), "no port on the host");
    let [grant] = &host.agent().grants()[..] else { panic!("{:?}", host.agent().grants()) };
    assert_eq!((grant.container.as_str(), grant.device.as_str()), ("c1", METAL));
    assert_eq!(grant.init_pid, container.pid());
}

#[test]
fn the_same_grant_twice_is_one() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    assert!(host.hook("grant", &container, METAL).status.success());
    assert_eq!(host.agent().grants().len(), 1);
}

#[test]
fn a_port_that_is_taken_is_told_with_its_holder() {
    let host = Host::new();
    let container = Container::start("c1", &["--net", "--mount"], host.bundle("c1", &[METAL]));
    let script = format!(
        "import socket, time\ns = socket.create_server(('127.0.0.1', {}))\nprint('up', flush=True)\ntime.sleep(1000)",
        host.metal
    );
    let mut holder = Command::new("nsenter")
        .args(["--net", "--target", &container.pid().to_string(), "python3", "-c", &script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut byte = [0];
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut byte).unwrap();
    let line = refusal(&host.hook("grant", &container, METAL));
    let pid = holder.id();
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(line.contains(&format!("127.0.0.1:{}", host.metal)), "{line}");
    assert!(line.contains(&format!("by process {pid} (")) && line.contains("python3 -c"), "{line}");
    assert!(host.agent().grants().is_empty() && host.state_files().is_empty());
    assert!(host.hook("grant", &container, METAL).status.success(), "the port is free again");
}

#[test]
fn without_a_daemon_the_container_does_not_start_and_poststop_still_succeeds() {
    let mut host = Host::new();
    let container = Container::start("c1", &["--net", "--mount"], host.bundle("c1", &[METAL]));
    host.agent = None;
    let line = refusal(&host.hook("grant", &container, METAL));
    assert!(line.contains("no lighter daemon answers") && line.contains("lighter start"), "{line}");
    assert!(host.hook("release", &container, METAL).status.success());
    fs::remove_file(host.socket()).unwrap();
    assert!(refusal(&host.hook("grant", &container, METAL)).contains(&host.socket().display().to_string()));
    // A daemon that is there and never answers.
    let hung = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&hung, &SocketAddrUnix::new(host.socket()).unwrap()).unwrap();
    listen(&hung, 4).unwrap();
    let mut hasty = Command::new(HOOK);
    hasty.args(["grant", "--timeout-ms", "100"]);
    let state = format!(r#"{{"id":"c1","pid":{},"bundle":"/b"}}"#, container.pid());
    let line = refusal(&run_hook(hasty.arg("--socket").arg(host.socket()).arg(METAL), &state));
    assert!(line.contains("does not answer in time"), "{line}");
}

#[test]
fn bad_orders_and_states_are_named() {
    let host = Host::new();
    let hook = |args: &[&str], state: &str| {
        refusal(&run_hook(Command::new(HOOK).args(args).arg("--socket").arg(host.socket()), state))
    };
    assert!(hook(&["grant"], "{}").contains("there is no device"));
    assert!(hook(&["start", METAL], "{}").contains("neither grant nor release"));
    assert!(hook(&["grant", METAL, MPS], "{}").contains("too many"));
    assert!(hook(&["grant", "nvidia.com/gpu=all"], "{}").contains("vendor"));
    assert!(hook(&["grant", METAL], "").contains("no container state"));
    assert!(hook(&["grant", METAL], "{").contains("cannot be read"));
    assert!(hook(&["grant", METAL], "[1]").contains("cannot be read"));
    assert!(hook(&["grant", METAL], r#"{"id":"x","pid":0,"bundle":"/b"}"#).contains("names no process"));
    assert!(
        hook(&["grant", METAL], r#"{"id":"x","pid":4194305,"bundle":"/b"}"#).contains("cannot be opened")
    );
    let long = format!(r#"{{"id":"x","annotations":{{"a":"{}"}}}}"#, "x".repeat(5 << 20));
    assert!(hook(&["grant", METAL], &long).contains("no container state"));
    assert!(host.agent().grants().is_empty());
}

#[test]
fn a_bundle_that_does_not_call_the_hook_gets_nothing() {
    let host = Host::new();
    let start = |bundle| Container::start("c1", &["--net", "--mount"], bundle);
    let other = start(host.bundle("c1", &[MPS]));
    let line = refusal(&host.hook("grant", &other, METAL));
    assert!(line.contains("has no createRuntime hook") && line.contains("--device"), "{line}");
    let none = start(host.dir.path().join("nowhere"));
    assert!(refusal(&host.hook("grant", &none, METAL)).contains("nowhere/config.json cannot be read"));
    assert!(host.agent().grants().is_empty());
    assert_eq!(other.connect(host.metal), "connection refused");
}

#[test]
fn a_device_that_is_off_says_how_to_switch_it_on() {
    let host = Host::with(|config| {
        config.devices.remove(&Kind::Mps);
    });
    let container = Container::start("c1", &["--net", "--mount"], host.bundle("c1", &[MPS]));
    let line = refusal(&host.hook("grant", &container, MPS));
    assert!(line.contains("mps is off") && line.contains("lighter config"), "{line}");
}

#[test]
fn the_host_itself_is_no_container() {
    let host = Host::new();
    let bare = Container::start_by(Command::new("env"), "bare", host.bundle("bare", &[METAL]));
    let line = refusal(&host.hook("grant", &bare, METAL));
    assert!(line.contains("neither a control group nor a mount namespace"), "{line}");
}

#[test]
fn a_container_that_found_the_hooks_socket_cannot_ask() {
    let host = Host::new();
    let container = host.granted("c1", &[METAL]);
    host.bundle("c1", &[METAL, MPS]);
    let mut inside = Command::new("nsenter");
    inside.args(["--mount", "--target", &container.pid().to_string(), HOOK]);
    let line = refusal(&host.hook_by(&mut inside, "grant", &container, MPS));
    assert!(line.contains("no container runtime"), "{line}");
    let mut elsewhere = Command::new("unshare");
    elsewhere.args(["--pid", "--fork", "--mount-proc", HOOK, "grant", MPS, "--socket"]).arg(host.socket());
    let itself = format!(r#"{{"id":"c1","pid":1,"bundle":"{}"}}"#, container.bundle.display());
    let line = refusal(&run_hook(&mut elsewhere, &itself));
    assert!(line.contains("no container runtime"), "{line}");
    assert!(host.hook("grant", &container, MPS).status.success(), "its runtime may");
}

#[test]
fn a_user_may_ask_for_own_user_namespaces_only_and_only_when_allowed() {
    const USER: u32 = 54321;
    let as_user = |program: &str| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={USER}"), "--clear-groups", program]);
        command
    };
    // The user must reach the hook's program wherever the build directory lies.
    let stranger = Host::new();
    let hook = stranger.dir.path().join("lighter-hook");
    // By a child: a program that this process has open for writing, or a child forked meanwhile, cannot be run.
    assert!(Command::new("cp").arg(HOOK).arg(&hook).status().unwrap().success());
    let hook = hook.display().to_string();
    let roots = Container::start("c1", &["--net", "--mount"], stranger.bundle("c1", &[METAL]));
    let ask =
        |host: &Host, container: &Container| host.hook_by(&mut as_user(&hook), "grant", container, METAL);
    let line = refusal(&run_hook(
        as_user(&hook).args(["grant", METAL, "--socket"]).arg(stranger.socket()),
        &format!(r#"{{"id":"c1","pid":{},"bundle":"/b"}}"#, roots.pid()),
    ));
    assert!(line.contains("cannot be opened"), "a user cannot even look into root's process: {line}");

    let host = Host::with(|config| {
        config.hook_uids = BTreeSet::from([USER]);
        config.trust.uids = BTreeSet::from([USER]);
    });
    let mut own = as_user("unshare");
    own.args(["--user", "--map-root-user", "--net", "--mount"]);
    let own = Container::start_by(own, "own", host.bundle("own", &[METAL]));
    let line = refusal(&ask(&stranger, &own));
    assert!(line.contains(&format!("uid {USER} may not ask")), "{line}");
    let output = ask(&host, &own);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(own.connect_as(&["--net", "--mount"], &[], host.metal), "served metal own");
}

#[test]
fn a_second_daemon_is_refused_by_the_pid_of_the_first() {
    let mut host = Host::new();
    let first = host.agent.take();
    let error = host.start_again(host.trusting()).unwrap_err().to_string();
    assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
    drop(first);
    host.start_again(host.trusting()).unwrap();
    let mut other = host.trusting();
    other.state_dir = host.dir.path().join("other");
    other.socket_dir = host.dir.path().join("other-run");
    let error = lighter_agent::Agent::start(other, host.services.clone()).unwrap_err().to_string();
    assert!(error.contains("answered by another program"), "{error}");
}

#[test]
fn a_file_in_the_place_of_the_socket_is_replaced_and_a_failed_start_leaves_the_state() {
    let host = Host::new();
    let path = host.dir.path().join("old.sock");
    drop(UnixListener::bind(&path).unwrap());
    let mut config = host.trusting();
    config.state_dir = host.dir.path().join("other");
    config.hook_socket = path;
    config.socket_dir = host.dir.path().join("other-run");
    let agent = lighter_agent::Agent::start(config, host.services.clone()).unwrap();
    agent.stop();
}

#[test]
fn a_grant_that_cannot_be_written_down_is_refused() {
    let host = Host::new();
    let container = Container::start("c1", &["--net", "--mount"], host.bundle("c1", &[METAL]));
    let grants = host.dir.path().join("state/grants");
    fs::remove_dir(&grants).unwrap();
    let line = refusal(&host.hook("grant", &container, METAL));
    assert!(line.contains("cannot write the grant") && line.contains("make room"), "{line}");
    eventually("the endpoint is closed again", || container.connect(host.metal) == "connection refused");
    fs::create_dir(&grants).unwrap();
    assert!(host.hook("grant", &container, METAL).status.success());
}

#[test]
fn many_containers_start_at_once() {
    let host = Host::new();
    let containers: Vec<Container> = (0..100)
        .map(|number| {
            let id = format!("c{number}");
            let bundle = host.bundle(&id, &[METAL]);
            Container::start(&id, &["--net", "--mount"], bundle)
        })
        .collect();
    std::thread::scope(|scope| {
        for container in &containers {
            scope.spawn(|| {
                let output = host.hook("grant", container, METAL);
                assert!(output.status.success(), "{}", stderr(&output));
                assert_eq!(container.connect(host.metal), format!("served metal {}", container.id));
            });
        }
    });
    assert_eq!(host.agent().grants().len(), 100);
    drop(containers);
    eventually("all grants end", || host.agent().grants().is_empty() && host.state_files().is_empty());
}

#[test]
fn a_taken_port_on_the_host_concerns_containers_with_host_networking_only() {
    let host = Host::new();
    let holder = TcpListener::bind(("127.0.0.1", host.metal)).unwrap();
    let bridged = host.granted("bridged", &[METAL]);
    assert_eq!(bridged.connect(host.metal), "served metal bridged");
    let on_host = Container::start("on-host", &["--mount"], host.bundle("on-host", &[METAL]));
    let line = refusal(&host.hook("grant", &on_host, METAL));
    // By this process, or by a child of another test that is just being started.
    assert!(line.contains("already in use in its network namespace, by process"), "{line}");
    drop(holder);
    // A child of another test that is just being started may hold a copy for a moment.
    eventually("the port is free", || host.hook("grant", &on_host, METAL).status.success());
}
