// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an unquoted YAML scalar means: null, truth value, number or text.
//!
//! The rules are those of YAML 1.1 as the engines' library applies them (`yes` is true, `0660` is octal,
//! `08` is a float), because a spec must mean here what it means to an engine.

/// A scalar with its meaning.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scalar {
    Null,
    Bool(bool),
    Int(i64),
    /// Only what does not fit in `Int`.
    Uint(u64),
    Float(f64),
    Text(String),
}

impl Scalar {
    /// The text that a field or key of text gets from this scalar; none from null.
    pub(crate) fn into_text(self) -> Option<String> {
        match self {
            Self::Null => None,
            Self::Bool(value) => Some(value.to_string()),
            Self::Int(value) => Some(value.to_string()),
            Self::Uint(value) => Some(value.to_string()),
            Self::Float(value) => Some(float_text(value)),
            Self::Text(text) => Some(text),
        }
    }

    /// What the scalar is, in the words of an error.
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Uint(_) => "a whole number",
            Self::Float(_) => "a number with a fraction or too many digits",
            Self::Text(_) => "text",
        }
    }
}

/// Resolves an unquoted scalar without a tag.
pub(crate) fn resolve_plain(text: &str) -> Scalar {
    if let Some(word) = word(text) {
        return word;
    }
    match text.as_bytes().first() {
        Some(b'0'..=b'9' | b'+' | b'-') => {
            // Underscores between digits are decoration.
            let digits = text.replace('_', "");
            integer(&digits).or_else(|| float(&digits))
        }
        Some(b'.') => float(text),
        _ => None,
    }
    .unwrap_or_else(|| Scalar::Text(text.to_owned()))
}

/// Resolves a scalar with a core tag (`bool`, `int`, `float`, `null`, `str`); none if they do not agree.
pub(crate) fn resolve_tagged(tag: &str, text: &str) -> Option<Scalar> {
    if tag == "str" {
        return Some(Scalar::Text(text.to_owned()));
    }
    match (tag, resolve_plain(text)) {
        ("null", Scalar::Null) => Some(Scalar::Null),
        ("bool", value @ Scalar::Bool(_)) | ("float", value @ Scalar::Float(_)) => Some(value),
        ("int", value @ (Scalar::Int(_) | Scalar::Uint(_))) => Some(value),
        #[expect(clippy::cast_precision_loss, reason = "the tag asks for a float")]
        ("float", Scalar::Int(value)) => Some(Scalar::Float(value as f64)),
        _ => None,
    }
}

fn word(text: &str) -> Option<Scalar> {
    Some(match text {
        "" | "~" | "null" | "Null" | "NULL" => Scalar::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            Scalar::Bool(true)
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            Scalar::Bool(false)
        }
        ".nan" | ".NaN" | ".NAN" => Scalar::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => Scalar::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => Scalar::Float(f64::NEG_INFINITY),
        _ => return None,
    })
}

/// A whole number with the usual prefixes; a leading zero alone means octal.
fn integer(text: &str) -> Option<Scalar> {
    let (negative, signed, magnitude) = match text.as_bytes().first() {
        Some(b'-') => (true, true, text.get(1..)?),
        Some(b'+') => (false, true, text.get(1..)?),
        _ => (false, false, text),
    };
    let (radix, digits) = match magnitude.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, magnitude.get(2..)?),
        [b'0', b'o' | b'O', ..] => (8, magnitude.get(2..)?),
        [b'0', b'b' | b'B', ..] => (2, magnitude.get(2..)?),
        [b'0', _, ..] => (8, magnitude.get(1..)?),
        _ => (10, magnitude),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return None;
    }
    let value = i128::from(u64::from_str_radix(digits, radix).ok()?);
    let value = if negative { -value } else { value };
    if let Ok(value) = i64::try_from(value) {
        return Some(Scalar::Int(value));
    }
    // Numbers above the signed range are read without a sign only.
    if signed { None } else { u64::try_from(value).ok().map(Scalar::Uint) }
}

/// A decimal number: digits, one point, an exponent. Hexadecimal floats and too large ones are text.
fn float(text: &str) -> Option<Scalar> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))),
        None => (unsigned, None),
    };
    let all_digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let shaped = all_digits(whole)
        && all_digits(fraction)
        && !(whole.is_empty() && fraction.is_empty())
        && exponent.is_none_or(|exponent| !exponent.is_empty() && all_digits(exponent));
    let value = if shaped { text.parse::<f64>().ok()? } else { return None };
    value.is_finite().then_some(Scalar::Float(value))
}

/// The text of a float where text is wanted: shortest form at single precision, exponents from 1e6 on.
fn float_text(value: f64) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "single precision is what readers agree on")]
    let single = value as f32;
    if single.is_nan() {
        return "NaN".to_owned();
    }
    if single.is_infinite() {
        return if single.is_sign_negative() { "-Inf" } else { "+Inf" }.to_owned();
    }
    let scientific = format!("{single:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..6).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{single}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let int = |text| match resolve_plain(text) {
            Scalar::Int(value) => Some(value),
            _ => None,
        };
        for (text, value) in [
            ("0", 0),
            ("-5", -5),
            ("+5", 5),
            ("0660", 432),
            ("0o660", 432),
            ("0x1F", 31),
            ("-0x1f", -31),
            ("0b11", 3),
            ("1_000", 1000),
            ("-9223372036854775808", i64::MIN),
        ] {
            assert_eq!(int(text), Some(value), "{text}");
        }
        assert_eq!(resolve_plain("18446744073709551615"), Scalar::Uint(u64::MAX));
        assert_eq!(resolve_plain("08"), Scalar::Float(8.0));
        assert_eq!(resolve_plain("1."), Scalar::Float(1.0));
        assert_eq!(resolve_plain("-.5e1"), Scalar::Float(-5.0));
        for text in ["1.1.0", "0x", "-", "1e", ".", "1e999", "2001-12-14", "--5", "0o8", "12:30", "+"] {
            assert_eq!(resolve_plain(text), Scalar::Text(text.to_owned()), "{text}");
        }
    }

    #[test]
    fn words() {
        assert_eq!(resolve_plain("yes"), Scalar::Bool(true));
        assert_eq!(resolve_plain("N"), Scalar::Bool(false));
        assert_eq!(resolve_plain("~"), Scalar::Null);
        assert_eq!(resolve_plain("yEs"), Scalar::Text("yEs".to_owned()));
    }

    #[test]
    fn tags_must_agree() {
        assert_eq!(resolve_tagged("str", "5"), Some(Scalar::Text("5".to_owned())));
        assert_eq!(resolve_tagged("float", "5"), Some(Scalar::Float(5.0)));
        assert_eq!(resolve_tagged("int", "x"), None);
        assert_eq!(resolve_tagged("bool", "5"), None);
    }

    #[test]
    fn floats_as_text() {
        let text = |text: &str| resolve_plain(text).into_text().unwrap();
        assert_eq!(text("1.10"), "1.1");
        assert_eq!(text("3.14159265358979"), "3.1415927");
        assert_eq!(text("08"), "8");
        assert_eq!(text("1e-7"), "1e-07");
        assert_eq!(text(".inf"), "+Inf");
    }
}
