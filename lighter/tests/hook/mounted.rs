// SPDX-License-Identifier: MIT OR Apache-2.0
//! Containers that have the directories of unix endpoints mounted, and their clients. Needs `perl` and `python3` besides.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use lighter_wire::{Kind, SOCKET_NAME, socket_directory};

use crate::containers::{Container, Host, stderr};

/// Where a container has the directory of a unix endpoint mounted.
const MOUNTED: &str = "/mnt/lighter";

/// Prints the line that a unix socket greets with: nothing when it is closed without a word.
const READ_LINE: &str = r"
socket(my $s, PF_UNIX, SOCK_STREAM, 0) or die $!;
unless (connect($s, pack_sockaddr_un($ARGV[0]))) { die $! unless $!{ECONNREFUSED}; print 'connection refused'; exit }
my $line = <$s>;
print $line // '';
";

impl Host {
    /// The host's side of a unix endpoint.
    pub(crate) fn endpoint(&self, kind: Kind) -> PathBuf {
        socket_directory(&self.dir.path().join("run"), kind).join(SOCKET_NAME)
    }

    /// A container with the directories of unix endpoints mounted read-only, as the CDI specification does it; in
    /// these namespaces and a mount namespace.
    pub(crate) fn with_endpoints(&self, id: &str, namespaces: &[&str], devices: &[&str]) -> Container {
        let mut command = Command::new("unshare");
        command.args(namespaces).arg("--mount");
        self.with_endpoints_by(command, id, devices)
    }

    /// As [`Self::with_endpoints`], in the namespaces that `command` makes.
    pub(crate) fn with_endpoints_by(&self, mut command: Command, id: &str, devices: &[&str]) -> Container {
        let run = self.dir.path().join("run");
        let mut script = format!("set -e; run={}; mount -t tmpfs tmpfs /mnt; ", run.display());
        for kind in [Kind::Ane, Kind::Gpu] {
            script.push_str(&format!(
                "mkdir -p {MOUNTED}/{kind}; mount --bind $run/{kind} {MOUNTED}/{kind}; \
                 mount -o remount,bind,ro {MOUNTED}/{kind}; "
            ));
        }
        script.push_str("exec \"$@\"");
        command.args(["sh", "-c", &script, "sh"]);
        Container::start_by(command, id, self.bundle(id, devices))
    }

    /// A container with its endpoints mounted that was granted the devices.
    pub(crate) fn granted_endpoints(&self, id: &str, devices: &[&str]) -> Container {
        let container = self.with_endpoints(id, &["--net"], devices);
        for device in devices {
            let output = self.hook("grant", &container, device);
            assert!(output.status.success(), "{}", stderr(&output));
        }
        container
    }
}

impl Container {
    /// What a process in it reads from the unix endpoint of a device.
    pub(crate) fn ask(&self, kind: Kind) -> String {
        self.ask_as(&["--net", "--mount"], &[], kind)
    }

    /// As [`Self::ask`], from some of its namespaces only, behind another command.
    pub(crate) fn ask_as(&self, namespaces: &[&str], through: &[&str], kind: Kind) -> String {
        self.ask_at(namespaces, through, &Self::endpoint(kind))
    }

    /// As [`Self::ask_as`], at any path.
    pub(crate) fn ask_at(&self, namespaces: &[&str], through: &[&str], path: &Path) -> String {
        let output = Command::new("nsenter")
            .args(namespaces)
            .args(["--target", &self.pid().to_string(), "--"])
            .args(through)
            .args(["perl", "-MSocket", "-MErrno", "-e", READ_LINE])
            .arg(path)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Where a container reaches a unix endpoint.
    pub(crate) fn endpoint(kind: Kind) -> PathBuf {
        socket_directory(Path::new(MOUNTED), kind).join(SOCKET_NAME)
    }

    /// A Python program in it, with a descriptor of the test's as its standard input.
    pub(crate) fn python(&self, script: &str, stdin: OwnedFd) -> Command {
        let mut command = Command::new("nsenter");
        command.args([
            "--net",
            "--mount",
            "--target",
            &self.pid().to_string(),
            "--",
            "python3",
            "-c",
            script,
        ]);
        command.stdin(stdin);
        command
    }
}
