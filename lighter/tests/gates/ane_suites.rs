// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane device in images of other suites: Debian 13 and sid with their own Pythons, sid's own ONNX Runtime, which is
//! too old, an image with no C library but musl, and a program in C.

use std::path::PathBuf;
use std::process::Command;

use crate::ane::{ANE, calls, image, library, settings, wheels};
use crate::support::{Daemon, Engine, cache, repo, run, stdout_of, text_of};

/// Runs a command with the variables of the container's devices.
const ENV: &str = "/usr/lib/lighter/bin/lighter-env";
const MUSL: &str = "lighter-test/musl:sid";
const LIBRARY: &str = "/usr/lib/lighter/ane/liblighter_ane_ep.so";
const MODELS: [&str; 3] = ["ch_ppocr_mobile_v2.0_cls_infer", "magika", "silero_vad_op18_ifless"];
const RUNS: u64 = 2;

/// What `tools/ane-programs` has built.
fn programs() -> PathBuf {
    let folder = cache().join("ane-programs");
    assert!(folder.exists(), "{} is missing: run `tools/ane-programs`", folder.display());
    folder
}

/// Options of `docker run` that show files of the host in a container.
pub(crate) fn mounts(list: &[(PathBuf, &str)]) -> Vec<String> {
    let mount = |(from, to): &(PathBuf, &str)| ["-v".to_owned(), format!("{}:{to}:ro", from.display())];
    list.iter().flat_map(mount).collect()
}

/// What a Python of the gates needs: a folder of `tools/wheels`, which may lack numpy, the models, and the programs beside
/// this file.
pub(crate) fn python(runtime: &str) -> Vec<String> {
    let mut options = mounts(&[
        (wheels(runtime), "/runtime"),
        (wheels("base"), "/base"),
        (wheels("models"), "/models"),
        (repo().join("lighter/tests/gates/ane"), "/gate"),
    ]);
    options.extend(["-e".to_owned(), "PYTHONPATH=/runtime:/base".to_owned()]);
    options
}

/// A container that sleeps, and in which programs are run.
pub(crate) struct Guest<'a> {
    engine: &'a Engine,
    pub(crate) id: String,
}

impl<'a> Guest<'a> {
    pub(crate) fn start<S: AsRef<str>>(
        engine: &'a Engine,
        image: &str,
        options: &[S],
        more: &[&str],
    ) -> Self {
        let found = run(engine.docker(["image", "inspect", image]));
        assert!(found.status.success(), "image {image} is missing: run `tools/images` for it");
        let command = engine.docker(["run", "-d", "--init"]);
        command.args(options.iter().map(AsRef::as_ref)).args(more).args([image, "sleep", "infinity"]);
        Self { engine, id: stdout_of(command).trim().to_owned() }
    }

    /// What a command in it wrote, with the variables of its devices, which `docker exec` alone does not give; the test
    /// fails unless it ends well.
    pub(crate) fn exec(&self, command: &[&str]) -> String {
        let output = run(self.engine.docker(["exec", &self.id, ENV]).args(command));
        assert!(output.status.success(), "{command:?}: {}", text_of(&output));
        text_of(&output)
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        run(self.engine.docker(["rm", "-f", "-v", &self.id]));
    }
}

/// Runs the models in a guest: equal to its own processor's, and on the host.
pub(crate) fn computes_on_the_host(daemon: &Daemon, guest: &Guest<'_>, name: &str) {
    let before = calls(daemon);
    let paths = MODELS.map(|model| format!("/models/{model}.onnx"));
    let runs = RUNS.to_string();
    let mut command = vec!["python3", "/gate/models.py", &runs];
    command.extend(paths.iter().map(String::as_str));
    let text = guest.exec(&command);
    assert_eq!(text.matches("\"equal\": true").count(), MODELS.len(), "{name}: {text}");
    let ran = calls(daemon) - before;
    assert!(ran >= RUNS * MODELS.len() as u64, "{name}: {ran} runs on the host\n{text}\n{}", daemon.log());
    println!("{name}: {} models equal to the bit, {ran} runs on the host", MODELS.len());
}

fn suite(name: &str) {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let image = format!("lighter-test/python:{name}");
    let guest = Guest::start(&engine, &image, &python(&format!("python-{name}")), &["--device", ANE]);
    let versions = "import sys, onnxruntime; print(sys.version.split()[0], onnxruntime.__version__)";
    let versions = guest.exec(&["python3", "-c", versions]);
    computes_on_the_host(&daemon, &guest, &format!("{name}, Python and ONNX Runtime {}", versions.trim()));
}

#[test]
#[ignore = "long: part of `make gates`"]
fn debian_13_computes_on_the_host() {
    suite("trixie");
}

#[test]
#[ignore = "long: part of `make gates`"]
fn debian_sid_computes_on_the_host() {
    suite("sid");
}

/// Debian's own is of version 1.23, which cannot use the device: its programs learn that, and what would help.
#[test]
#[ignore = "long: part of `make gates`"]
fn debian_sids_own_runtime_is_refused_with_the_version_that_is_needed() {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let image = "lighter-test/onnxruntime:sid";
    let found = run(engine.docker(["image", "inspect", image]));
    assert!(found.status.success(), "image {image} is missing: run `tools/images onnxruntime`");
    let options = mounts(&[(wheels("models"), "/models"), (repo().join("lighter/tests/gates/ane"), "/gate")]);
    let run_in = |command: &[&str]| {
        let docker = engine.docker(["run", "--rm", "--device", ANE]).args(&options);
        run(docker.arg(image).args(command))
    };
    let program = run_in(&["python3", "/gate/models.py", "1", "/models/magika.onnx"]);
    let text = text_of(&program);
    assert!(!program.status.success() && text.contains("needs ONNX Runtime 1.24 or newer"), "{text}");
    let last = text.lines().rfind(|line| line.contains("1.24 or newer")).unwrap_or_default();
    println!("sid's own runtime: {last}");
    let check = run_in(&["/usr/lib/lighter/ane/lighter-ane-check"]);
    let text = text_of(&check);
    assert!(!check.status.success() && text.contains("1.24 or newer"), "{text}");
    println!("sid's own runtime, lighter-ane-check: {}", text.lines().last().unwrap_or_default());
    let own = run_in(&[
        "python3",
        "-c",
        "import onnxruntime as o; print(o.InferenceSession('/models/magika.onnx').get_inputs()[0].name)",
    ]);
    assert!(own.status.success(), "without the device it works as ever: {}", text_of(&own));
    assert!(!daemon.log().contains(" WARN "), "{}", daemon.log());
}

/// An image that has no C library but musl loads the device's library, finds the service and is told what is wrong.
#[test]
#[ignore = "long: part of `make gates`"]
fn an_image_of_musl_loads_the_library() {
    let engine = Engine::take();
    let _daemon = Daemon::with(&engine, &settings("ort-1.32"));
    let tar = tempfile::NamedTempFile::new().unwrap();
    stdout_of(
        Command::new("tar").arg("-C").arg(programs().join("image")).arg("-cf").arg(tar.path()).arg("."),
    );
    stdout_of(engine.docker(["import"]).arg(tar.path()).arg(MUSL));
    let output = run(engine.docker(["run", "--rm", "--device", ANE, MUSL, "/bin/musl", LIBRARY]));
    stdout_of(engine.docker(["image", "rm", MUSL]));
    let text = text_of(&output);
    assert!(output.status.success() && !text.contains("does not answer"), "{text}");
    for line in [
        "LighterANE needs ONNX Runtime 1.24 or newer",
        "as 1.23.2: 0 factories",
        "as 1.24.4: 1 factories",
        "LighterANE of Lighter: 1 devices",
        "a provider named LighterANE",
        "option transport is \"pigeons\"",
        "unloaded: 0",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    println!("musl: {}", text.lines().collect::<Vec<_>>().join("; "));
}

#[test]
#[ignore = "long: part of `make gates`"]
fn a_program_in_c_computes_on_the_host() {
    const RUNS: &str = "5";
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings("ort-1.32"));
    for version in ["ort-1.24", "ort-1.32"] {
        let mut options = python(version);
        options.extend(mounts(&[(programs(), "/programs")]));
        let guest = Guest::start(&engine, &image(), &options, &["--device", ANE]);
        let name = library(version).file_name().unwrap().to_string_lossy().into_owned();
        let runtime = format!("/runtime/onnxruntime/capi/{name}");
        let model = format!("/models/{}.onnx", MODELS[0]);
        let text = guest.exec(&["/programs/c_api", &runtime, LIBRARY, &model, RUNS, "1", "3", "48", "192"]);
        assert_eq!(text.trim(), "5 runs, 5 equal", "{version}");
        let ran = calls(&daemon);
        assert_eq!(ran, 5, "{version}: runs on the host");
        println!("C, {name}: {}, {ran} runs on the host", text.trim());
    }
}
