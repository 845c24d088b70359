// SPDX-License-Identifier: MIT OR Apache-2.0
//! The few names that every part of lighter shares.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The four devices, by the class part of their CDI kind (`lighter.sh/<kind>`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Vulkan.
    Gpu,
    /// ONNX models.
    Ane,
    /// PyTorch's `mps` device.
    Mps,
    /// ggml.
    Metal,
}

impl Kind {
    /// All four, in the order in which they are listed to a user.
    pub const ALL: [Self; 4] = [Self::Gpu, Self::Metal, Self::Ane, Self::Mps];

    /// `gpu`, `ane`, `mps` or `metal`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Ane => "ane",
            Self::Mps => "mps",
            Self::Metal => "metal",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is none of the four devices.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no device of lighter; the devices are gpu, metal, ane, mps")]
pub struct UnknownKind(pub String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| UnknownKind(text.to_owned()))
    }
}

/// Names one grant for as long as it lives; never used again after it has ended.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GrantId(pub String);

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whose data this is: containers of one owner may learn that they uploaded the same thing.
/// A Compose project where the engine records one, else the container itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Owner(pub String);

/// Folder of lighter in a container, below which each unix endpoint has its directory.
pub const CONTAINER_SOCKETS: &str = "/run/lighter";
/// Name of a unix endpoint's socket in its directory.
pub const SOCKET_NAME: &str = "socket";

/// Where a container reaches a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// TCP on 127.0.0.1 at this port, opened inside the container's network namespace.
    Loopback(u16),
    /// The unix socket of this device: one for the whole host, in a directory that is mounted into containers.
    /// Printed as the path that a container sees, `/run/lighter/ane/socket`.
    Unix(Kind),
}

/// The directory with the socket of a device's unix endpoint: below the daemon's folder for sockets on the host, below
/// [`CONTAINER_SOCKETS`] in a container. It is what is mounted, since a socket that is made anew is another file.
#[must_use]
pub fn socket_directory(sockets: &Path, kind: Kind) -> PathBuf {
    sockets.join(kind.as_str())
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback(port) => write!(f, "127.0.0.1:{port}"),
            Self::Unix(kind) => write!(f, "{CONTAINER_SOCKETS}/{kind}/{SOCKET_NAME}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_parses_back_from_its_own_word() {
        for kind in Kind::ALL {
            assert_eq!(kind.as_str().parse::<Kind>().unwrap(), kind);
        }
        assert!("video".parse::<Kind>().unwrap_err().to_string().contains("\"video\""));
    }

    #[test]
    fn an_endpoint_is_printed_as_a_container_reaches_it() {
        assert_eq!(Endpoint::Loopback(50052).to_string(), "127.0.0.1:50052");
        let printed = Endpoint::Unix(Kind::Ane).to_string();
        let directory = socket_directory(Path::new(CONTAINER_SOCKETS), Kind::Ane);
        assert_eq!(
            (printed.as_str(), directory.join(SOCKET_NAME)),
            ("/run/lighter/ane/socket", (&printed).into())
        );
    }
}
