// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device's full name, `lighter.sh/<kind>=<name>`, as the hook gets it in its arguments and the engine records it.
//!
//! Refuses other vendors, unknown kinds and names that CDI does not allow.

use std::fmt;
use std::str::FromStr;

use lighter_wire::Kind;
use serde::{Deserialize, Serialize};

/// The vendor part of lighter's CDI kinds.
pub const VENDOR: &str = "lighter.sh";

const MAX_NAME_BYTES: usize = 128;

/// One device of lighter by its full CDI name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct DeviceName {
    kind: Kind,
    name: String,
}

impl DeviceName {
    /// Which of the four devices.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The part after `=`: `all`, or one engine's.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VENDOR}/{}={}", self.kind, self.name)
    }
}

impl From<DeviceName> for String {
    fn from(device: DeviceName) -> Self {
        device.to_string()
    }
}

impl TryFrom<String> for DeviceName {
    type Error = BadDeviceName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// A text that is no device of lighter.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no device of lighter: {cause}; the form is lighter.sh/metal=all")]
pub struct BadDeviceName {
    text: String,
    cause: &'static str,
}

impl FromStr for DeviceName {
    type Err = BadDeviceName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = |cause| BadDeviceName { text: text.chars().take(MAX_NAME_BYTES).collect(), cause };
        let (kind, name) = text.split_once('=').ok_or_else(|| bad("there is no ="))?;
        let class = kind
            .strip_prefix(VENDOR)
            .and_then(|rest| rest.strip_prefix('/'))
            .ok_or_else(|| bad("the vendor is another one"))?;
        let kind = class.parse().map_err(|_| bad("the kind is none of gpu, metal, ane, mps"))?;
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(bad("the name after = is empty or too long"));
        }
        let ends_well = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let all_allowed =
            name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':'));
        if !all_allowed || !ends_well(name.chars().next()) || !ends_well(name.chars().last()) {
            return Err(bad("the name after = has characters that CDI does not allow there"));
        }
        Ok(Self { kind, name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_full_name_is_parsed_and_printed_alike() {
        let device: DeviceName = "lighter.sh/metal=all".parse().unwrap();
        assert_eq!((device.kind(), device.name()), (Kind::Metal, "all"));
        assert_eq!(device.to_string(), "lighter.sh/metal=all");
    }

    #[test]
    fn other_names_are_refused_with_the_cause() {
        for (text, cause) in [
            ("metal", "no ="),
            ("nvidia.com/gpu=all", "vendor"),
            ("lighter.shx/gpu=all", "vendor"),
            ("lighter.sh/video=all", "kind"),
            ("lighter.sh/gpu=", "empty"),
            ("lighter.sh/gpu=a b", "characters"),
            ("lighter.sh/gpu=-a", "characters"),
            ("lighter.sh/gpu=../x", "characters"),
        ] {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.contains(cause), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_printed_back(text in ".{0,200}") {
            if let Ok(device) = text.parse::<DeviceName>() {
                prop_assert_eq!(device.to_string(), text);
            }
        }
    }
}
