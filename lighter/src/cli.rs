// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line: its grammar, and which module runs which command.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};

use crate::ane_command::{self, AneCommand};
use crate::cdi_command::{self, CdiCommand};
use crate::config::Config;
use crate::config_command::{self, ConfigArgs};
use crate::control::{self, ControlError, Reply, Request};
use crate::hidden::{self, Hidden};
use crate::places::Places;
use crate::setup::{self, SetupArgs};
use crate::{daemon, detach, devices_command, doctor_command, logging, output, status};

/// The same four accelerators in any container, on any host
#[derive(Debug, Parser)]
#[command(name = "lighter", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// Configuration file [default: /etc/lighter/config.toml for root, else the XDG one]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon
    Start {
        /// Run it in the background; return when it serves
        #[arg(long)]
        detach: bool,
        /// Become the leader of a session of its own
        #[arg(long, hide = true)]
        own_session: bool,
    },
    /// Stop the daemon; grants of running containers are taken up again by the next start
    Stop,
    /// Stop the daemon and start it in the background
    Restart,
    /// Say what runs, and for which containers
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show or change the configuration
    Config(ConfigArgs),
    /// Check every device: on and by which engine, off, missing, not built in, or broken
    #[command(after_help = doctor_command::EXIT_CODES)]
    Doctor {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List the device names that containers can ask for
    Devices {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Fetch the host part of a device
    Setup(SetupArgs),
    /// List the ane device's models and the engines chosen for them, or have one judged anew
    #[command(subcommand)]
    Ane(AneCommand),
    /// Work with CDI specs, whoever wrote them
    #[command(subcommand)]
    Cdi(CdiCommand),
    #[command(flatten)]
    Hidden(Hidden),
}

/// Runs the command.
pub(crate) fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    let config_file = match &cli.config {
        Some(path) => {
            std::path::absolute(path).with_context(|| format!("no usable path: {}", path.display()))?
        }
        None => Places::of_this_user().config_file,
    };
    match &cli.command {
        Command::Start { detach: true, .. } => start_detached(&config_file),
        Command::Start { detach: false, own_session } => {
            if *own_session {
                rustix::process::setsid().context("cannot start a session")?;
            }
            logging::start();
            daemon::run(&config_file)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Stop => {
            let config = Config::load(&config_file)?;
            let pid = stop(&config)?;
            output::line(&format!("stopped: process {pid}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Restart => {
            let config = Config::load(&config_file)?;
            match stop(&config) {
                Ok(_) => {}
                Err(error) if matches!(error.downcast_ref(), Some(ControlError::NotRunning { .. })) => {}
                Err(error) => return Err(error),
            }
            start_detached(&config_file)
        }
        Command::Status { json } => show_status(&Config::load(&config_file)?, *json),
        Command::Config(args) => config_command::run(args, &config_file),
        Command::Doctor { json } => doctor_command::run(&Config::load(&config_file)?, *json),
        Command::Devices { json } => devices_command::run(&Config::load(&config_file)?, *json),
        Command::Setup(args) => setup::run(args, &Config::load(&config_file)?),
        Command::Ane(command) => ane_command::run(command, &Config::load(&config_file)?),
        Command::Cdi(command) => cdi_command::run(command),
        Command::Hidden(command) => {
            logging::start();
            hidden::run(command)
        }
    }
}

fn start_detached(config_file: &std::path::Path) -> anyhow::Result<ExitCode> {
    let config = Config::load(config_file)?;
    let pid = detach::start(config_file, &config)?;
    output::line(&format!("started: process {pid}, log {}", config.daemon.log_file.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks the daemon to stop and waits until it is gone; returns its pid.
fn stop(config: &Config) -> anyhow::Result<u32> {
    let socket = config.daemon.control_socket();
    let Reply::Status(status) = control::ask(&socket, &Request::Status)? else {
        bail!("the daemon at {} gave an answer of another version", socket.display())
    };
    let raw = i32::try_from(status.pid).context("the daemon named no valid process")?;
    let pid = rustix::process::Pid::from_raw(raw).context("the daemon named no valid process")?;
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        .with_context(|| format!("cannot watch process {raw}"))?;
    match control::ask(&socket, &Request::Stop)? {
        Reply::Done => {}
        Reply::Failed { reason } => bail!("the daemon refused to stop: {reason}"),
        _ => bail!("the daemon at {} gave an answer of another version", socket.display()),
    }
    let mut polled = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    if rustix::event::poll(&mut polled, Some(&limit)).context("cannot wait for the daemon's end")? == 0 {
        bail!("process {raw} was asked to stop and has not ended after {} s; see its log", limit.tv_sec);
    }
    Ok(status.pid)
}

fn show_status(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    match control::ask(&config.daemon.control_socket(), &Request::Status)? {
        Reply::Status(report) if json => output::json(&report)?,
        Reply::Status(report) => output::line(&status::render(&report))?,
        Reply::Failed { reason } => bail!("{reason}"),
        _ => bail!("the daemon gave an answer of another version: restart it"),
    }
    Ok(ExitCode::SUCCESS)
}
