// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines for the user on standard error. A line stays a line, whatever is in it.

use alloc::string::String;
use core::fmt::{self, Write};

use crate::sys::write_to_stderr;

const MAX_LINE_BYTES: usize = 2000;

/// Writes `lighter-ane: ` and the text.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    write_to_stderr(formed(text).as_bytes());
}

fn formed(text: fmt::Arguments<'_>) -> String {
    let mut line = String::from("lighter-ane: ");
    let mut body = String::new();
    // Writing to a string does not fail.
    let _ = body.write_fmt(text);
    line.extend(body.chars().map(|char| if char.is_control() { ' ' } else { char }).take(MAX_LINE_BYTES));
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line() {
        assert_eq!(formed(format_args!("a\nb{}", 'c')), "lighter-ane: a bc\n");
        assert_eq!(formed(format_args!("{}", "x".repeat(5000))).len(), 13 + MAX_LINE_BYTES + 1);
    }
}
