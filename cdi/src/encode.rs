// SPDX-License-Identifier: MIT OR Apache-2.0
//! A spec as the JSON text that is written to disk.
//!
//! Engines read spec files with a YAML reader, which refuses or folds some characters that JSON allows
//! unescaped in strings; here those are escaped, so that a text arrives as it was meant.

use std::io::{self, Write};

use serde::Serialize as _;
use serde_json::ser::{CharEscape, Formatter, PrettyFormatter, Serializer};

use crate::spec::Spec;

impl Spec {
    /// The content of this spec's file: indented JSON, the same bytes for the same spec.
    ///
    /// # Errors
    /// None is known; encoding is fallible by its signature.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = Vec::new();
        let formatter = ReadableByYaml(PrettyFormatter::new());
        self.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}

/// Indented JSON with every character escaped that a YAML reader would not take as itself.
struct ReadableByYaml(PrettyFormatter<'static>);

/// True for what YAML does not count as printable, for its line breaks beyond ASCII, and for byte order marks.
fn must_escape(c: char) -> bool {
    matches!(c, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

macro_rules! delegate {
    ($($method:ident($($argument:ident: $kind:ty),*)),+ $(,)?) => {
        $(fn $method<W: ?Sized + Write>(&mut self, writer: &mut W $(, $argument: $kind)*) -> io::Result<()> {
            self.0.$method(writer $(, $argument)*)
        })+
    };
}

impl Formatter for ReadableByYaml {
    delegate! {
        begin_array(), end_array(), begin_array_value(first: bool), end_array_value(),
        begin_object(), end_object(), begin_object_key(first: bool), begin_object_value(), end_object_value(),
        write_char_escape(escape: CharEscape),
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut rest = fragment;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| must_escape(*c)) {
            let (before, from) = rest.split_at(at);
            writer.write_all(before.as_bytes())?;
            write!(writer, "\\u{:04x}", u32::from(c))?;
            rest = from.strip_prefix(c).unwrap_or_default();
        }
        writer.write_all(rest.as_bytes())
    }
}
