// SPDX-License-Identifier: MIT OR Apache-2.0
//! CDI versions, and the lowest one that a spec's content needs.
//!
//! An engine drops a whole file whose version it does not know, so a producer declares the lowest version
//! that fits (`Spec::lowest_version`), and a reader refuses a file whose content is newer than it says.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::spec::{ContainerEdits, Spec};

/// A released version of the CDI specification, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Version {
    /// 0.1.0: known, accepted by no library in use.
    V0_1_0,
    /// 0.2.0: known, accepted by no library in use.
    V0_2_0,
    /// 0.3.0: the oldest accepted.
    V0_3_0,
    /// 0.4.0: mount types.
    V0_4_0,
    /// 0.5.0: device node host paths, device names that start with a digit.
    V0_5_0,
    /// 0.6.0: annotations, dots in a class.
    V0_6_0,
    /// 0.7.0: Intel RDT, additional group ids.
    V0_7_0,
    /// 0.8.0: nothing new in files.
    V0_8_0,
    /// 1.0.0: nothing new in files.
    V1_0_0,
    /// 1.1.0: network devices, RDT schemata and monitoring.
    V1_1_0,
}

/// The text is no released CDI version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown cdiVersion {0:?}, known are {known}", known = known_versions())]
pub struct VersionError(String);

impl Version {
    /// All versions, oldest first.
    pub const ALL: [Self; 10] = [
        Self::V0_1_0,
        Self::V0_2_0,
        Self::V0_3_0,
        Self::V0_4_0,
        Self::V0_5_0,
        Self::V0_6_0,
        Self::V0_7_0,
        Self::V0_8_0,
        Self::V1_0_0,
        Self::V1_1_0,
    ];

    /// The oldest version that readers accept.
    pub const OLDEST_ACCEPTED: Self = Self::V0_3_0;

    /// The version as it stands in a file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_4_0 => "0.4.0",
            Self::V0_5_0 => "0.5.0",
            Self::V0_6_0 => "0.6.0",
            Self::V0_7_0 => "0.7.0",
            Self::V0_8_0 => "0.8.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

impl FromStr for Version {
    type Err = VersionError;

    /// Takes one leading `v`, as other readers do.
    fn from_str(text: &str) -> Result<Self, VersionError> {
        let bare = text.strip_prefix('v').unwrap_or(text);
        Self::ALL
            .into_iter()
            .find(|version| version.as_str() == bare)
            .ok_or_else(|| VersionError(text.to_owned()))
    }
}

impl TryFrom<String> for Version {
    type Error = VersionError;

    fn try_from(text: String) -> Result<Self, VersionError> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.as_str().to_owned()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn known_versions() -> String {
    let accepted = Version::ALL.iter().filter(|version| **version >= Version::OLDEST_ACCEPTED);
    accepted.map(|version| version.as_str()).collect::<Vec<_>>().join(", ")
}

/// The lowest version whose readers understand everything in `spec`; the declared version plays no part.
pub(crate) fn lowest(spec: &Spec) -> Version {
    let of_devices = spec.devices.iter().map(|device| {
        let starts_with_digit = device.name.as_str().starts_with(|c: char| c.is_ascii_digit());
        [(starts_with_digit, Version::V0_5_0), (!device.annotations.is_empty(), Version::V0_6_0)]
            .into_iter()
            .filter_map(|(used, version)| used.then_some(version))
            .fold(lowest_of_edits(&device.container_edits), Version::max)
    });
    let of_kind = if spec.kind.class().as_str().contains('.') || !spec.annotations.is_empty() {
        Version::V0_6_0
    } else {
        Version::OLDEST_ACCEPTED
    };
    of_devices.fold(of_kind.max(lowest_of_edits(&spec.container_edits)), Version::max)
}

fn lowest_of_edits(edits: &ContainerEdits) -> Version {
    let rdt = edits.intel_rdt.as_ref();
    [
        (edits.mounts.iter().any(|mount| mount.fs_type.is_some()), Version::V0_4_0),
        (edits.device_nodes.iter().any(|node| node.host_path.is_some()), Version::V0_5_0),
        (rdt.is_some() || !edits.additional_gids.is_empty(), Version::V0_7_0),
        // An empty list of schemata is a request too, and older readers do not know the key.
        (rdt.is_some_and(|rdt| rdt.schemata.is_some() || rdt.enable_monitoring), Version::V1_1_0),
        (!edits.net_devices.is_empty(), Version::V1_1_0),
    ]
    .into_iter()
    .filter_map(|(used, version)| used.then_some(version))
    .fold(Version::OLDEST_ACCEPTED, Version::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_leading_v_is_taken_and_nothing_else() {
        assert_eq!("v0.6.0".parse::<Version>(), Ok(Version::V0_6_0));
        for bad in ["vv0.6.0", "V0.6.0", "0.6", "1.2.0", "1.1.0-rc1", "", "v", " 1.1.0"] {
            assert!(bad.parse::<Version>().is_err(), "{bad}");
        }
    }

    #[test]
    fn every_version_reads_back() {
        for version in Version::ALL {
            assert_eq!(version.as_str().parse::<Version>(), Ok(version));
        }
    }
}
