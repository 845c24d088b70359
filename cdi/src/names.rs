// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names: vendor, class, kind (`vendor/class`), device, and the qualified `vendor/class=device`.
//!
//! Used by the spec model and by everything that is given a name by a user or a file. Refuses what the
//! reference implementation refuses, and no more: the written spec's length limits are not checked by
//! any runtime, so a file that exceeds them is still a file that engines load.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid {what} {value:?}: {reason}")]
pub struct NameError {
    what: &'static str,
    value: String,
    reason: String,
}

impl NameError {
    fn new(what: &'static str, value: &str, reason: impl Into<String>) -> Self {
        Self { what, value: value.to_owned(), reason: reason.into() }
    }
}

/// Declares a checked text: private content, one parser, no way round it.
macro_rules! checked_name {
    ($(#[$doc:meta])* $name:ident, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                let check: fn(&str) -> Result<(), NameError> = $check;
                check(text)?;
                Ok(Self(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

checked_name!(
    /// The vendor of a kind, by convention a domain name: `lighter.sh`.
    Vendor,
    |text| check("vendor", text, |first| first.is_ascii_alphabetic(), "a letter", "_-.")
);
checked_name!(
    /// The class of a kind: `gpu`.
    Class,
    |text| check("class", text, |first| first.is_ascii_alphabetic(), "a letter", "_-.")
);
checked_name!(
    /// The name of one device within its kind: `all`, `0`, `0000:03:00.0`.
    DeviceName,
    |text| check("device name", text, |first| first.is_ascii_alphanumeric(), "a letter or digit", "_-.:")
);

/// `vendor/class`: what a spec file is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Kind {
    vendor: Vendor,
    class: Class,
}

impl Kind {
    /// Puts a kind together.
    #[must_use]
    pub fn new(vendor: Vendor, class: Class) -> Self {
        Self { vendor, class }
    }

    /// The part before the slash.
    #[must_use]
    pub fn vendor(&self) -> &Vendor {
        &self.vendor
    }

    /// The part after the slash.
    #[must_use]
    pub fn class(&self) -> &Class {
        &self.class
    }

    /// The qualified name of a device of this kind.
    #[must_use]
    pub fn device(&self, name: DeviceName) -> QualifiedName {
        QualifiedName { kind: self.clone(), device: name }
    }

    /// The file name that convention gives a spec of this kind: `vendor-class.json`.
    #[must_use]
    pub fn file_name(&self) -> String {
        format!("{}-{}.json", self.vendor, self.class)
    }
}

impl FromStr for Kind {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (vendor, class) = text
            .split_once('/')
            .ok_or_else(|| NameError::new("kind", text, "no slash between vendor and class"))?;
        Ok(Self { vendor: vendor.parse()?, class: class.parse()? })
    }
}

impl TryFrom<String> for Kind {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Kind> for String {
    fn from(kind: Kind) -> Self {
        kind.to_string()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

/// `vendor/class=device`: what a user asks an engine for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct QualifiedName {
    kind: Kind,
    device: DeviceName,
}

impl QualifiedName {
    /// The kind.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The device within the kind.
    #[must_use]
    pub fn device(&self) -> &DeviceName {
        &self.device
    }
}

impl FromStr for QualifiedName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (kind, device) = text
            .split_once('=')
            .ok_or_else(|| NameError::new("device", text, "not of the form vendor/class=name"))?;
        Ok(Self { kind: kind.parse()?, device: device.parse()? })
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.device)
    }
}

fn check(
    what: &'static str,
    text: &str,
    first_ok: fn(char) -> bool,
    first_words: &str,
    between: &str,
) -> Result<(), NameError> {
    let fail = |reason: String| Err(NameError::new(what, text, reason));
    let (Some(first), Some(last)) = (text.chars().next(), text.chars().next_back()) else {
        return fail("it is empty".to_owned());
    };
    if !first_ok(first) {
        return fail(format!("it must start with {first_words}"));
    }
    if let Some(bad) = text.chars().find(|&c| !c.is_ascii_alphanumeric() && !between.contains(c)) {
        return fail(format!("the character {bad:?} is not allowed"));
    }
    if !last.is_ascii_alphanumeric() {
        return fail("it must end with a letter or digit".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_character_is_a_name() {
        assert_eq!("a/d=0".parse::<QualifiedName>().unwrap().to_string(), "a/d=0");
    }

    #[test]
    fn the_first_separators_divide() {
        let name: QualifiedName = "acme.com/dev=0000:03:00.0".parse().unwrap();
        assert_eq!(name.kind().vendor().as_str(), "acme.com");
        assert_eq!(name.kind().class().as_str(), "dev");
        assert_eq!(name.device().as_str(), "0000:03:00.0");
        assert!("acme.com/dev=a=b".parse::<QualifiedName>().is_err());
        assert!("acme.com/dev/x=b".parse::<QualifiedName>().is_err());
    }

    #[test]
    fn refuses_what_engines_refuse() {
        for bad in ["", "/dev/null", "acme.com=a", "acme.com/dev=", "=a", "1a.com/dev=a", "acme.com/1d=a"] {
            assert!(bad.parse::<QualifiedName>().is_err(), "{bad}");
        }
        for bad in ["a-", ":a", "a b", "é", "aé", "a,b"] {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_error_names_the_value_and_the_cause() {
        let error = "acme.com/de$v".parse::<Kind>().unwrap_err();
        assert_eq!(error.to_string(), "invalid class \"de$v\": the character '$' is not allowed");
    }
}
