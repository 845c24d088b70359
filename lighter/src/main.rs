// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter`: the daemon that publishes and enforces the devices, and the commands to run and examine it.

mod ane_command;
mod cdi_command;
mod cli;
mod config;
mod config_command;
mod control;
mod control_server;
mod daemon;
mod detach;
mod devices_command;
mod doctor;
mod doctor_command;
mod facts;
mod hidden;
mod logging;
mod output;
mod places;
mod publish;
mod setup;
mod status;
mod supervise;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match cli::run(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("lighter: {error:#}");
            ExitCode::FAILURE
        }
    }
}
