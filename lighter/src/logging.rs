// SPDX-License-Identifier: MIT OR Apache-2.0
//! Logs go to standard error. `LIGHTER_LOG` chooses the level (`error`, `warn`, `info`, `debug`, `trace`, or a
//! filter by module); `info` is the default. What each level means stands in docs/logging.md.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Starts logging for this process.
pub(crate) fn start() {
    let filter = EnvFilter::builder()
        .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
        .with_env_var("LIGHTER_LOG")
        .from_env_lossy();
    let result = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .try_init();
    if let Err(error) = result {
        eprintln!("lighter: logging cannot be started: {error}");
    }
}
