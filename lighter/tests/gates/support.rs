// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every gate uses: the test engine, a daemon of its own, containers, and a small ggml RPC client.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

pub(crate) const DEVICE: &str = "lighter.sh/metal=all";
pub(crate) const BASE_IMAGE: &str = "lighter-test/base:bookworm";
pub(crate) const LLAMA_IMAGE: &str = "lighter-test/llama:sid";
pub(crate) const WHISPER_IMAGE: &str = "lighter-test/whisper:sid";

/// Says hello to the metal endpoint as a client of protocol 8 does and prints `served N devices`, or
/// `refused: why`.
pub(crate) const HELLO: &str = r#"
import socket, struct, sys
port = int(sys.argv[1]) if len(sys.argv) > 1 else 50052
def take(s, n):
    data = b""
    while len(data) < n:
        more = s.recv(n - len(data))
        if not more: raise EOFError("closed by the other side")
        data += more
    return data
def call(s, command, body):
    s.sendall(struct.pack("<BQ", command, len(body)) + body)
    return take(s, struct.unpack("<Q", take(s, 8))[0])
try:
    s = socket.create_connection(("127.0.0.1", port), 30)
    s.settimeout(120)
    call(s, 14, bytes(24))
    print("served", struct.unpack("<I", call(s, 15, b""))[0], "devices", flush=True)
except (OSError, EOFError) as error:
    print("refused:", error, flush=True)
"#;

/// The repository's root.
pub(crate) fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Where the tools keep what they made.
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("LIGHTER_CACHE").map_or_else(|| repo().join(".cache"), PathBuf::from)
}

/// The model that the gates generate text with.
pub(crate) fn model() -> PathBuf {
    cached_model("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// A model of random weights, so small that it shows only what surrounds the computing.
pub(crate) fn tiny_model() -> PathBuf {
    cached_model("random-tiny.gguf")
}

/// A whisper.cpp model of random weights.
pub(crate) fn whisper_model() -> PathBuf {
    cached_model("random-whisper.bin")
}

fn cached_model(name: &str) -> PathBuf {
    let path = cache().join("models").join(name);
    assert!(path.exists(), "{} is missing: run `tools/models smollm2 tiny whisper`", path.display());
    path
}

/// Runs a command to its end and gives its output; the test fails when it cannot be started.
pub(crate) fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Standard output of a command that must succeed.
pub(crate) fn stdout_of(command: &mut Command) -> String {
    let output = run(command);
    assert!(
        output.status.success(),
        "{command:?} ended with {}\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Both outputs as text.
pub(crate) fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A process's children, by pid.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // A thread that ends meanwhile has left its children to another.
    let lists =
        tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    lists.collect::<String>().split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Waits until `test` gives something, and fails with `what` if it never does.
pub(crate) fn eventually<T>(what: &str, test: impl FnMut() -> Option<T>) -> T {
    eventually_within(30, what, test)
}

/// The same with more patience.
pub(crate) fn eventually_within<T>(seconds: u64, what: &str, mut test: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(seconds);
    loop {
        if let Some(value) = test() {
            return value;
        }
        assert!(Instant::now() < deadline, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The folder that `tools/engine-root NAME` makes.
pub(crate) fn engine_root(name: &str) -> PathBuf {
    let root = cache().join("engine-root").join(name);
    assert!(root.exists(), "{} is missing: run `tools/engine-root {name}`", root.display());
    root
}

/// The test engine. One for all gates: they take turns.
pub(crate) struct Engine {
    dir: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Engine {
    /// Waits for this gate's turn and starts the engine if it is not running.
    pub(crate) fn take() -> Self {
        let turn = turn();
        let socket = stdout_of(Command::new(repo().join("tools/engine")).arg("start"));
        let engine = Self { dir: Path::new(socket.trim()).parent().unwrap().to_owned(), _turn: turn };
        static IMAGES: OnceLock<()> = OnceLock::new();
        IMAGES.get_or_init(|| {
            for image in [BASE_IMAGE, LLAMA_IMAGE] {
                let found = run(engine.docker(["image", "inspect", image]));
                assert!(
                    found.status.success(),
                    "image {image} is missing in the test engine: run `make images`"
                );
            }
        });
        engine
    }

    /// A second engine that maps containers' users to others of the host; the caller purges it.
    pub(crate) fn remapped() -> Self {
        let turn = turn();
        let dir = std::env::temp_dir().join(format!("lighter-remap-{}", std::process::id()));
        let with_dir = |program: &str, args: &[&str]| {
            stdout_of(Command::new(repo().join(program)).env("LIGHTER_ENGINE_DIR", &dir).args(args))
        };
        with_dir("tools/engine", &["start", "--userns-remap"]);
        with_dir("tools/images", &["base"]);
        Self { dir, _turn: turn }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("docker.sock")
    }

    pub(crate) fn spec_dir(&self) -> PathBuf {
        self.dir.join("cdi")
    }

    /// A docker command on this engine.
    pub(crate) fn docker<S: AsRef<std::ffi::OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> &'static mut Command {
        let mut command = Command::new(cache().join("engine/root/usr/bin/docker"));
        command
            .env("DOCKER_HOST", format!("unix://{}", self.socket().display()))
            .env("DOCKER_CONFIG", self.dir.join("client"))
            .args(args);
        // Leaked: a test process runs a few hundred of them, and callers can chain on a reference.
        Box::leak(Box::new(command))
    }

    /// Another verb of the engine's script.
    pub(crate) fn script(&self, args: &[&str]) {
        stdout_of(Command::new(repo().join("tools/engine")).env("LIGHTER_ENGINE_DIR", &self.dir).args(args));
    }

    /// Runs the hello client in a new container with these `docker run` options; gives what it printed.
    pub(crate) fn hello(&self, options: &[&str]) -> String {
        let output =
            run(self.docker(["run", "--rm"]).args(options).args([BASE_IMAGE, "python3", "-c", HELLO]));
        text_of(&output)
    }

    /// A container that sleeps until it is removed.
    pub(crate) fn sleeper(&self, options: &[&str]) -> Container<'_> {
        let id = stdout_of(
            self.docker(["run", "-d", "--init"]).args(options).args([BASE_IMAGE, "sleep", "infinity"]),
        );
        Container { engine: self, id: id.trim().to_owned() }
    }
}

/// A container, removed when dropped.
pub(crate) struct Container<'a> {
    engine: &'a Engine,
    pub(crate) id: String,
}

impl Container<'_> {
    /// Runs the hello client in it; gives what it printed.
    pub(crate) fn hello(&self) -> String {
        self.exec(&["python3", "-c", HELLO])
    }

    pub(crate) fn exec(&self, command: &[&str]) -> String {
        text_of(&run(self.engine.docker(["exec", &self.id]).args(command)))
    }

    /// Pid of its first process.
    pub(crate) fn pid(&self) -> u32 {
        let text = stdout_of(self.engine.docker(["inspect", "--format", "{{.State.Pid}}", &self.id]));
        text.trim().parse().unwrap()
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        run(self.engine.docker(["rm", "-f", "-v", &self.id]));
    }
}

/// A daemon with folders of its own, publishing to the engine's spec directory.
pub(crate) struct Daemon {
    pub(crate) dir: tempfile::TempDir,
    spec_dir: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Starts one for this engine.
    pub(crate) fn start(engine: &Engine) -> Self {
        Self::with(engine, "")
    }

    /// Starts one whose `[metal]` section holds these lines besides; they may go on with other sections, `[ane]` last.
    /// `@dir@` in them stands for the daemon's own folder.
    pub(crate) fn with(engine: &Engine, sections: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("lighter-gate-").tempdir().unwrap();
        // Containers whose users are remapped must reach the client folder below it.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let hook = std::env::var_os("LIGHTER_GATE_HOOK")
            .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_lighter-hook")), PathBuf::from);
        // `tools/build` lays the plug-ins for containers beside the hook.
        let plugin_dir = hook.parent().unwrap().to_owned();
        let engine_root = if sections.contains("engine_root") {
            String::new()
        } else {
            format!("engine_root = \"{}\"", engine_root("metal").display())
        };
        // A gate that is not about a device does without it, and without the doctor's word on its host part.
        let off = ["gpu", "ane", "mps"].map(|device| {
            if sections.contains(&format!("[{device}]")) {
                String::new()
            } else {
                format!("{device} = false\n")
            }
        });
        let off = off.concat();
        let ane = if sections.contains("[ane]") { "" } else { "[ane]" };
        let sections = sections.replace("@dir@", &dir.path().display().to_string());
        let config = format!(
            "[daemon]\nstate_dir = \"{0}/state\"\nspec_dir = \"{1}\"\nclient_dir = \"{0}/client\"\nlog_file = \"{0}/log\"\n\
             hook = \"{2}\"\nplugin_dir = \"{4}\"\n[engines]\ndocker = [\"{3}\"]\n\
             [devices]\n{off}[metal]\n{engine_root}\ncache_dir = \"{0}/cache\"\n{sections}\n\
             {ane}\nstate_dir = \"{0}/ane\"\ncache_dir = \"{0}/ane-cache\"\n",
            dir.path().display(),
            engine.spec_dir().display(),
            hook.display(),
            engine.socket().display(),
            plugin_dir.display(),
        );
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        let mut daemon = Self { dir, spec_dir: engine.spec_dir(), child: None };
        daemon.launch();
        daemon
    }

    /// Starts the process again after [`Daemon::kill`] or [`Daemon::stop`].
    pub(crate) fn launch(&mut self) {
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let child = self.lighter().arg("start").stderr(log).stdin(Stdio::null()).spawn().unwrap();
        self.child = Some(child);
        // It answers once it has asked the host's torch, which may take its time to load.
        eventually_within(90, "the daemon answers", || {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!("the daemon ended with {status}\n{}", self.log());
            }
            run(self.lighter().arg("status")).status.success().then_some(())
        });
    }

    /// `lighter` with this daemon's configuration.
    pub(crate) fn lighter(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lighter"));
        command.arg("--config").arg(self.dir.path().join("config.toml"));
        command
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Everything that it has logged so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The status as JSON.
    pub(crate) fn status(&self) -> serde_json::Value {
        serde_json::from_str(&stdout_of(self.lighter().args(["status", "--json"]))).unwrap()
    }

    /// How many grants live.
    pub(crate) fn grants(&self) -> usize {
        self.status()["grants"].as_array().unwrap().len()
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Ends it in an orderly way and waits.
    pub(crate) fn stop(&mut self) {
        stdout_of(self.lighter().arg("stop"));
        if let Some(mut child) = self.child.take() {
            assert!(child.wait().unwrap().success(), "{}", self.log());
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            run(self.lighter().arg("stop"));
            let deadline = Instant::now() + Duration::from_secs(10);
            while child.try_wait().ok().flatten().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        for device in ["gpu", "metal", "ane", "mps"] {
            let _ = std::fs::remove_file(self.spec_dir.join(format!("lighter.sh-{device}.json")));
        }
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}", self.log());
        }
    }
}
