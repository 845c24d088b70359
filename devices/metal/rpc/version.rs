// SPDX-License-Identifier: MIT OR Apache-2.0
//! Protocol majors and what differs between them.
//!
//! A client refuses a server whose major is not its own or whose minor is above its own, so the answer is
//! `MAJOR.0.0`: only the major has to be found out.

/// A major that this server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Major(u8);

/// A major that this server does not speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the client speaks ggml RPC protocol {major}, this server {oldest} to {newest}: {remedy}",
    oldest = Major::OLDEST,
    newest = Major::NEWEST,
    remedy = self.remedy()
)]
pub struct UnknownMajor {
    /// The major.
    pub major: u8,
}

impl UnknownMajor {
    fn remedy(self) -> &'static str {
        if self.major > Major::NEWEST {
            "update lighter, or use an image with an older llama.cpp"
        } else {
            "use an image with a newer llama.cpp"
        }
    }
}

impl Major {
    /// The oldest that is served: ggml 0.9.1.
    pub const OLDEST: u8 = 2;
    /// The newest that is served: ggml 0.27.
    pub const NEWEST: u8 = 8;

    /// Takes a number as a major.
    ///
    /// # Errors
    /// When it is none that this server speaks.
    pub fn new(major: u8) -> Result<Self, UnknownMajor> {
        if (Self::OLDEST..=Self::NEWEST).contains(&major) {
            Ok(Self(major))
        } else {
            Err(UnknownMajor { major })
        }
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }

    /// Bytes of the device number that leads most requests.
    #[must_use]
    pub fn device_bytes(self) -> usize {
        if self.0 >= 3 { 4 } else { 0 }
    }

    /// Whether a computed graph is answered.
    #[must_use]
    pub fn answers_graph(self) -> bool {
        self.0 < 3
    }

    /// Whether freeing, clearing, filling and initialising are answered.
    #[must_use]
    pub fn answers_changes(self) -> bool {
        self.0 < 6
    }

    /// Whether a hello carries the transport's abilities.
    #[must_use]
    pub fn hello_has_abilities(self) -> bool {
        self.0 >= 4
    }

    /// Whether graph records may hold how often each tensor is used; zero everywhere means that they do not.
    #[must_use]
    pub fn may_send_use_counts(self) -> bool {
        self.0 >= 5
    }

    /// Bytes of the flag that says whether an upload is worth keeping.
    #[must_use]
    pub fn keep_flag_bytes(self) -> usize {
        usize::from(self.0 >= 7)
    }

    /// Whether graphs are named and several are kept.
    #[must_use]
    pub fn names_graphs(self) -> bool {
        self.0 >= 8
    }
}

/// Which major a stream is served with, and what speaks against the hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The major.
    pub major: Major,
    /// The hint was one whose hello has another size, so it was not followed.
    pub hint_refuted: bool,
}

/// Chooses the major from the hint and the size of the hello's body.
///
/// Without a hint the size tells two groups apart; of each the newest is the likeliest, since distributions
/// and releases move on together.
///
/// # Errors
/// When the hint is a major that this server does not speak.
pub fn choose_major(hint: Option<u8>, hello_bytes: u64) -> Result<Choice, UnknownMajor> {
    let has_abilities = hello_bytes != 0;
    let likeliest = Major(if has_abilities { Major::NEWEST } else { 3 });
    let Some(hint) = hint else { return Ok(Choice { major: likeliest, hint_refuted: false }) };
    let major = Major::new(hint)?;
    if major.hello_has_abilities() == has_abilities {
        Ok(Choice { major, hint_refuted: false })
    } else {
        Ok(Choice { major: likeliest, hint_refuted: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_decides_where_the_hello_agrees() {
        assert_eq!(choose_major(Some(5), 24).unwrap(), Choice { major: Major(5), hint_refuted: false });
        assert_eq!(choose_major(Some(2), 0).unwrap(), Choice { major: Major(2), hint_refuted: false });
        assert_eq!(choose_major(Some(8), 0).unwrap(), Choice { major: Major(3), hint_refuted: true });
        assert_eq!(choose_major(Some(3), 24).unwrap(), Choice { major: Major(8), hint_refuted: true });
    }

    #[test]
    fn without_a_hint_the_hello_decides() {
        assert_eq!(choose_major(None, 0).unwrap().major.number(), 3);
        assert_eq!(choose_major(None, 24).unwrap().major.number(), 8);
    }

    #[test]
    fn an_unknown_major_is_refused_with_the_fix() {
        let newer = choose_major(Some(9), 24).unwrap_err().to_string();
        assert!(newer.contains("protocol 9") && newer.contains("update lighter"), "{newer}");
        let older = choose_major(Some(1), 0).unwrap_err().to_string();
        assert!(older.contains("newer llama.cpp"), "{older}");
    }
}
