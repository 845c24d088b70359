// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors and strangers' words as one line of a log, an answer or a report.

/// Most characters of a stranger's words in one line.
const MAX_WORDS: usize = 300;

/// An error and what caused it, in one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// A stranger's words, short and without what steers a terminal.
pub(crate) fn cut(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strangers_words_are_short_and_steer_nothing() {
        assert_eq!(cut("a\u{1b}[31mred\n"), "a[31mred");
        assert_eq!(cut(&"x".repeat(1000)).len(), MAX_WORDS);
    }

    #[test]
    fn every_cause_is_told() {
        let cause = std::io::Error::other("the disk is full");
        let error = std::io::Error::other(Wrapped(cause));
        assert_eq!(with_causes(&error), "cannot write: the disk is full");
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write")]
    struct Wrapped(#[source] std::io::Error);
}
