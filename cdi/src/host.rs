// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device nodes of the host, which fill in what a spec leaves open.
//!
//! Behind a trait, so that injection can be tested with nodes that the test's host does not have. Does not
//! follow links: a link to a device is refused, as engines refuse it.

use std::io;
use std::path::Path;

use rustix::fs::FileType;

use crate::spec::NodeType;

/// What a device node on the host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNode {
    /// Block, character or pipe.
    pub node_type: NodeType,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Permission bits.
    pub file_mode: u32,
}

/// Looks at device nodes.
pub trait HostNodes {
    /// What the node at `path` is.
    ///
    /// # Errors
    /// There is nothing, it cannot be looked at, or it is no device node.
    fn node(&self, path: &Path) -> io::Result<HostNode>;
}

/// The nodes of the host that the process runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealNodes;

impl HostNodes for RealNodes {
    fn node(&self, path: &Path) -> io::Result<HostNode> {
        let stat = rustix::fs::lstat(path)?;
        let node_type = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => NodeType::Block,
            FileType::CharacterDevice => NodeType::Character,
            FileType::Fifo => NodeType::Fifo,
            FileType::Symlink => {
                return Err(io::Error::other("it is a link; name the device node itself"));
            }
            _ => return Err(io::Error::other("it is not a device node")),
        };
        Ok(HostNode {
            node_type,
            major: rustix::fs::major(stat.st_rdev),
            minor: rustix::fs::minor(stat.st_rdev),
            file_mode: stat.st_mode & 0o7777,
        })
    }
}
