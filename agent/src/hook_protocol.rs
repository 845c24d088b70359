// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `lighter-hook` and the agent say to each other, one JSON message a packet over `SOCK_SEQPACKET`.
//!
//! ```text
//! hook                                                agent
//!  Grant + [pidfd of the init, its network namespace]  ─►
//!                                                      ◄─  Open { ports }        (only when some are not open yet)
//!  Opened + [sock_diag, listener, listener, …]         ─►
//!  or OpenFailed + [sock_diag]                         ─►
//!                                                      ◄─  Granted | Refused
//! ```
//! `Release` is a hint without an answer. Both ends set a time limit on their socket; a message over
//! [`MAX_MESSAGE_BYTES`] is refused before it is read.

use std::path::PathBuf;

use lighter_wire::GrantId;
use serde::{Deserialize, Serialize};

use crate::device::DeviceName;

/// Version of these messages. A hook of another version is refused by name, since a specification file
/// on disk may call a hook of another installation.
pub const HOOK_VERSION: u32 = 2;

/// Where the hook looks for the agent when its arguments do not say.
pub const DEFAULT_HOOK_SOCKET: &str = "/run/lighter/hook.sock";

/// Largest message in either direction.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// Largest OCI state that the hook reads; annotations make up most of it.
pub const MAX_STATE_BYTES: usize = 4 << 20;

/// Hook to agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToAgent {
    /// Asks for a grant; descriptors: the init's pidfd, its network namespace.
    Grant {
        /// [`HOOK_VERSION`] of the hook.
        version: u32,
        /// The container's id by its engine.
        id: String,
        /// Its bundle directory.
        bundle: PathBuf,
        /// The device asked for.
        device: DeviceName,
    },
    /// The ports are open; descriptors: `sock_diag`, then one listener per port in the order asked for.
    Opened,
    /// One port could not be opened; descriptor: `sock_diag`, so that the agent can name who holds it.
    OpenFailed {
        /// Which one.
        port: u16,
        /// The kernel's error number.
        errno: i32,
    },
    /// The container has ended, says the runtime. A hint: the init's pidfd decides.
    Release {
        /// [`HOOK_VERSION`] of the hook.
        version: u32,
        /// The container's id by its engine.
        id: String,
        /// The device.
        device: DeviceName,
    },
}

/// Agent to hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromAgent {
    /// Listen on 127.0.0.1 in the container's network namespace, and open a `sock_diag` socket there.
    Open {
        /// At which ports, in order.
        ports: Vec<u16>,
    },
    /// The container may use the device.
    Granted {
        /// Under this grant.
        grant: GrantId,
    },
    /// The container does not start.
    Refused {
        /// Why.
        cause: String,
        /// What the user can do about it.
        remedy: String,
    },
}

/// What the hook needs of the OCI state; the rest is the runtime's business.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OciState {
    /// The container's id by its engine.
    pub id: String,
    /// Its init in the caller's pid namespace; a stopped container has none, or 0.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Its bundle directory; absent from some runtimes' poststop state.
    #[serde(default)]
    pub bundle: PathBuf,
}

/// Whether this can be a container's id: the characters that engines allow, no longer than a file name.
#[must_use]
pub fn id_is_plain(id: &str) -> bool {
    let starts_well = id.chars().next().is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    starts_well
        && id.len() <= 255
        && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | ':' | '@'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_state_of_runc_is_read_and_a_stopped_one_has_no_pid() {
        let created = br#"{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":42,
            "bundle":"/run/b/c1","annotations":{"a":"b"}}"#;
        let state: OciState = serde_json::from_slice(created).unwrap();
        assert_eq!((state.id.as_str(), state.pid), ("c1", Some(42)));
        let stopped = br#"{"ociVersion":"1.2.0","id":"c1","status":"stopped"}"#;
        assert_eq!(serde_json::from_slice::<OciState>(stopped).unwrap().pid, None);
    }

    #[test]
    fn ids_of_engines_are_plain_and_paths_are_not() {
        assert!(id_is_plain("0f3c") && id_is_plain("my_box.1") && id_is_plain("a@b+c:d-e"));
        for id in ["", ".", "../x", "a/b", "a b", "a\nb", "-x", &"x".repeat(256)] {
            assert!(!id_is_plain(id), "{id:?}");
        }
    }

    proptest! {
        #[test]
        fn no_state_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = serde_json::from_slice::<OciState>(&bytes);
            let _ = serde_json::from_slice::<ToAgent>(&bytes);
            let _ = serde_json::from_slice::<FromAgent>(&bytes);
        }

        #[test]
        fn a_message_comes_back_as_it_was(id in ".{0,40}", bundle in ".{0,40}") {
            let message = ToAgent::Grant {
                version: HOOK_VERSION,
                id,
                bundle: bundle.into(),
                device: "lighter.sh/metal=all".parse().unwrap(),
            };
            let bytes = serde_json::to_vec(&message).unwrap();
            prop_assert_eq!(serde_json::from_slice::<ToAgent>(&bytes).unwrap(), message);
        }
    }
}
