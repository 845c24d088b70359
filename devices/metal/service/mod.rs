// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metal service.

use std::os::fd::OwnedFd;

use super::MetalConfig;

/// Why the service cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum MetalServiceError {
    /// The loop with the daemon failed.
    #[error("metal service")]
    Serve(#[from] crate::service::ServeError),
}

/// Serves the daemon.
///
/// # Errors
/// When the control socket fails.
pub fn run(_control: OwnedFd, _config: MetalConfig) -> Result<(), MetalServiceError> {
    Ok(())
}
