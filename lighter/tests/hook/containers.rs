// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests of hook and agent share: containers made of nothing but namespaces, a bundle that calls the real hook,
//! services that note what they are given. Needs root, `unshare`, `nsenter`, `ip` and `bash`.
#![allow(dead_code, unreachable_pub, missing_docs, missing_debug_implementations)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lighter_agent::{
    Agent, AgentConfig, AgentError, Devices, EngineRecord, Limits, ServiceUnavailable, Services, Trust,
};
use lighter_wire::{Endpoint, GrantId, Kind, StreamOffer};

pub const HOOK: &str = env!("CARGO_BIN_EXE_lighter-hook");
pub const METAL: &str = "lighter.sh/metal=all";
pub const MPS: &str = "lighter.sh/mps=all";
pub const ANE: &str = "lighter.sh/ane=all";
pub const GPU: &str = "lighter.sh/gpu=all";

/// Waits until something holds; the tests' only limit, far above what it takes.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Services that greet every stream with its grant and keep it until the grant is revoked.
#[derive(Default)]
pub struct Greeter {
    pub offers: Mutex<Vec<(Kind, StreamOffer)>>,
    streams: Mutex<Vec<(GrantId, OwnedFd)>>,
    pub revoked: Mutex<Vec<GrantId>>,
    pub down: Mutex<bool>,
}

impl Services for Greeter {
    fn hand_over(&self, kind: Kind, offer: StreamOffer, stream: OwnedFd) -> Result<(), ServiceUnavailable> {
        if *self.down.lock().unwrap() {
            return Err(ServiceUnavailable { kind, reason: "down for the test".into() });
        }
        // Noted before the client can know that it was served.
        let mut streams = self.streams.lock().unwrap();
        self.offers.lock().unwrap().push((kind, offer.clone()));
        let _ = rustix::io::write(&stream, format!("served {kind} {}\n", offer.container).as_bytes());
        streams.push((offer.grant, stream));
        Ok(())
    }

    fn revoke(&self, _: Kind, grant: &GrantId) {
        self.streams.lock().unwrap().retain(|(of, _)| of != grant);
        self.revoked.lock().unwrap().push(grant.clone());
    }
}

impl Greeter {
    pub fn open_streams(&self) -> usize {
        self.streams.lock().unwrap().len()
    }
}

/// An agent in this process with a directory of its own.
pub struct Host {
    pub dir: tempfile::TempDir,
    pub services: Arc<Greeter>,
    pub agent: Option<Agent>,
    pub metal: u16,
    pub mps: u16,
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Host {
    /// Trusts root's containers: no engine's record is wanted.
    pub fn new() -> Self {
        Self::with(|config| config.trust = Trust { uids: BTreeSet::from([0]), cgroups: vec![] })
    }

    pub fn with(change: impl FnOnce(&mut AgentConfig)) -> Self {
        assert!(rustix::process::geteuid().is_root(), "this test makes namespaces and needs root");
        let dir = tempfile::Builder::new().prefix("lighter").tempdir_in("/tmp").unwrap();
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut host =
            Self { dir, services: Arc::default(), agent: None, metal: free_port(), mps: free_port() };
        let mut config = host.config();
        change(&mut config);
        host.agent = Some(Agent::start(config, host.services.clone()).unwrap());
        host
    }

    pub fn devices(&self) -> Devices {
        BTreeMap::from([
            (Kind::Metal, vec![Endpoint::Loopback(self.metal)]),
            (Kind::Mps, vec![Endpoint::Loopback(self.mps)]),
            (Kind::Ane, vec![Endpoint::Unix(Kind::Ane)]),
            (Kind::Gpu, vec![Endpoint::Unix(Kind::Gpu)]),
        ])
    }

    pub fn config(&self) -> AgentConfig {
        AgentConfig {
            state_dir: self.dir.path().join("state"),
            hook_socket: self.socket(),
            socket_dir: self.dir.path().join("run"),
            hook_path: HOOK.into(),
            devices: self.devices(),
            records: vec![],
            trust: Trust::default(),
            hook_uids: BTreeSet::new(),
            limits: Limits::default(),
        }
    }

    pub fn trusting(&self) -> AgentConfig {
        AgentConfig { trust: Trust { uids: BTreeSet::from([0]), cgroups: vec![] }, ..self.config() }
    }

    pub fn start_again(&mut self, config: AgentConfig) -> Result<(), AgentError> {
        self.agent = Some(Agent::start(config, self.services.clone())?);
        Ok(())
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("hook.sock")
    }

    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    pub fn state_files(&self) -> Vec<String> {
        let grants = fs::read_dir(self.dir.path().join("state/grants")).unwrap();
        grants.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// A bundle whose configuration calls the real hook for these devices.
    pub fn bundle(&self, id: &str, devices: &[&str]) -> PathBuf {
        let bundle = self.dir.path().join("bundles").join(id);
        fs::create_dir_all(&bundle).unwrap();
        let hooks: Vec<_> = devices
            .iter()
            .map(|device| serde_json::json!({"path": HOOK, "args": ["lighter-hook", "grant", device], "timeout": 10}))
            .collect();
        let config = serde_json::json!({"ociVersion": "1.2.0", "hooks": {"createRuntime": hooks}});
        fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        bundle
    }

    pub fn hook(&self, action: &str, container: &Container, device: &str) -> Output {
        self.hook_by(&mut Command::new(HOOK), action, container, device)
    }

    /// Runs the hook as a runtime does, through `command`.
    pub fn hook_by(
        &self,
        command: &mut Command,
        action: &str,
        container: &Container,
        device: &str,
    ) -> Output {
        let state = serde_json::json!({
            "ociVersion": "1.2.0", "id": container.id, "status": "creating", "pid": container.pid(),
            "bundle": container.bundle, "annotations": {"a": "b"},
        });
        run_hook(command.arg(action).arg("--socket").arg(self.socket()).arg(device), &state.to_string())
    }

    /// A container that was granted the devices.
    pub fn granted(&self, id: &str, devices: &[&str]) -> Container {
        let container = Container::start(id, &["--net", "--mount"], self.bundle(id, devices));
        for device in devices {
            let output = self.hook("grant", &container, device);
            assert!(output.status.success(), "{}", stderr(&output));
        }
        container
    }
}

pub fn run_hook(command: &mut Command, state: &str) -> Output {
    let mut hook = command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A hook that has given up by then has closed its end.
    let _ = hook.stdin.take().unwrap().write_all(state.as_bytes());
    hook.wait_with_output().unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The one line that a hook which refuses writes.
pub fn refusal(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(output.stdout.is_empty());
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("lighter-hook: "), "{text}");
    text
}

/// A process with namespaces of its own, which is what a container is to the agent.
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    init: Child,
}

impl Container {
    /// `unshare` takes the flags; loopback is up when this returns.
    pub fn start(id: &str, flags: &[&str], bundle: PathBuf) -> Self {
        let mut command = Command::new("unshare");
        command.args(flags);
        Self::start_by(command, id, bundle)
    }

    /// In the network namespace of another one, as `--network container:X` and pods do.
    pub fn start_beside(id: &str, other: &Self, bundle: PathBuf) -> Self {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &other.pid().to_string(), "unshare", "--mount"]);
        Self::start_by(command, id, bundle)
    }

    pub fn start_by(mut command: Command, id: &str, bundle: PathBuf) -> Self {
        let mut init = command
            .args(["sh", "-c", "ip link set lo up; echo up; exec sleep 1000"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(init.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        Self { id: id.into(), bundle, init }
    }

    pub fn pid(&self) -> u32 {
        self.init.id()
    }

    /// What a process in it reads from a port.
    pub fn connect(&self, port: u16) -> String {
        self.connect_as(&["--net", "--mount"], &[], port)
    }

    /// As [`Self::connect`], from some of its namespaces only, behind another command.
    pub fn connect_as(&self, namespaces: &[&str], through: &[&str], port: u16) -> String {
        let output = Command::new("nsenter")
            .args(namespaces)
            .args(["--target", &self.pid().to_string(), "--"])
            .args(through)
            .args([
                "bash",
                "-c",
                &format!("exec 3<>/dev/tcp/127.0.0.1/{port} && read -r line <&3; echo \"$line\""),
            ])
            .output()
            .unwrap();
        let mut text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if stderr(&output).contains("Connection refused") {
            text.push_str("connection refused");
        }
        text
    }

    /// A process in it that connects and stays.
    pub fn stay_connected(&self, port: u16) -> Child {
        let mut client = Command::new("nsenter")
            .args(["--net", "--mount", "--target", &self.pid().to_string(), "--"])
            .args([
                "bash",
                "-c",
                &format!("exec 3<>/dev/tcp/127.0.0.1/{port} && read -r l <&3; echo $l; cat <&3"),
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(client.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        client.stdout = Some(stdout.into_inner());
        assert!(line.starts_with("served"), "{line:?}");
        client
    }

    pub fn kill(&mut self) {
        let _ = self.init.kill();
        let _ = self.init.wait();
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An engine whose answers the test writes: what no real one does on demand is to hang, to be away, and to come back.
#[derive(Clone, Default)]
pub struct Scripted {
    pub answers: Arc<Mutex<Vec<lighter_agent::Record>>>,
    pub asked: Arc<Mutex<usize>>,
    pub slow: Option<Duration>,
}

impl EngineRecord for Scripted {
    fn name(&self) -> String {
        "the scripted engine".into()
    }
    fn uid(&self) -> u32 {
        0
    }
    fn look_up(&self, _: &str, _: Instant) -> lighter_agent::Record {
        *self.asked.lock().unwrap() += 1;
        if let Some(time) = self.slow {
            std::thread::sleep(time);
        }
        let mut answers = self.answers.lock().unwrap();
        if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() }
    }
}

/// A process that was started and waits for a word, so that it needs nothing of this process any more.
pub struct Waiting(Child);

impl Waiting {
    fn start(mut command: Command) -> Self {
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(pipes.spawn().unwrap())
    }

    /// Closes nothing: that would give this process a descriptor.
    pub fn go(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    pub fn output(self) -> Output {
        self.0.wait_with_output().unwrap()
    }
}

impl Host {
    /// A client in a container that connects to metal when it is told to.
    pub fn connecting(&self, container: &Container) -> Waiting {
        let script = format!("read -r; exec 3<>/dev/tcp/127.0.0.1/{} && read -r l <&3; echo $l", self.metal);
        let mut command = Command::new("nsenter");
        command.args([
            "--net",
            "--mount",
            "--target",
            &container.pid().to_string(),
            "--",
            "bash",
            "-c",
            &script,
        ]);
        Waiting::start(command)
    }

    /// A hook that asks for metal when it is told to.
    pub fn asking(&self, container: &Container) -> Waiting {
        let state = self.dir.path().join("oci-state.json");
        let (id, pid, bundle) = (&container.id, container.pid(), &container.bundle);
        fs::write(&state, serde_json::json!({"id": id, "pid": pid, "bundle": bundle}).to_string()).unwrap();
        let mut command = Command::new("bash");
        command.args(["-c", "read -r; exec \"$0\" grant --socket \"$1\" \"$2\" <\"$3\"", HOOK]);
        command.arg(self.socket()).arg(METAL).arg(state);
        Waiting::start(command)
    }
}

/// Descriptors of this process.
pub fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A control group of its own for a container, removed with it; in whatever hierarchy this machine has.
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn new(name: &str) -> Self {
        let top = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"]
            .into_iter()
            .find(|top| Path::new(top).join("cgroup.procs").exists())
            .unwrap();
        let path = Path::new(top).join(format!("lighter-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn below(&self, name: &str) -> Self {
        let path = self.0.join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    pub fn procs(&self) -> String {
        self.0.join("cgroup.procs").display().to_string()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its processes were killed a moment ago; the kernel lets go of them soon.
        eventually("the test's control group is empty", || fs::remove_dir(&self.0).is_ok());
    }
}
