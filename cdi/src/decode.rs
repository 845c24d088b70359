// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes a tree into serde types, with the coercions that readers of specs agree on.
//!
//! Called by the parser only. A field of text takes numbers and truth values; null leaves a field as it is
//! by default; keys match fields regardless of case. Refuses numbers that do not fit. Errors say where:
//! `devices[0].name`.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use crate::scalar::Scalar;
use crate::tree::Tree;

/// Where decoding failed and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecodeError {
    /// Innermost step first.
    steps: Vec<String>,
    message: String,
}

impl DecodeError {
    fn inside(mut self, step: String) -> Self {
        self.steps.push(step);
        self
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().rev().enumerate() {
            let separator = if index == 0 || step.starts_with('[') { "" } else { "." };
            write!(f, "{separator}{step}")?;
        }
        let separator = if self.steps.is_empty() { "" } else { ": " };
        write!(f, "{separator}{}", self.message)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self { steps: Vec::new(), message: message.to_string() }
    }
}

/// Decodes `tree`.
pub(crate) fn decode<'de, T: de::Deserialize<'de>>(tree: Tree) -> Result<T, DecodeError> {
    T::deserialize(Decoder(tree))
}

struct Decoder(Tree);

fn wanted<T>(what: &str, found: &Tree) -> Result<T, DecodeError> {
    Err(de::Error::custom(format_args!("expected {what}, found {}", found.describe())))
}

/// A whole number from any scalar that denotes one; null leaves zero.
fn whole<N>(tree: &Tree) -> Result<N, DecodeError>
where
    N: TryFrom<i128>,
{
    let value = match tree {
        Tree::Scalar(Scalar::Null) => 0,
        Tree::Scalar(Scalar::Int(value)) => i128::from(*value),
        Tree::Scalar(Scalar::Uint(value)) => i128::from(*value),
        // By way of the shortest text, which is how other readers hand it on.
        Tree::Scalar(Scalar::Float(value)) if value.fract() == 0.0 && value.abs() < 1e21 => {
            value.to_string().parse().map_err(de::Error::custom)?
        }
        other => return wanted("a whole number", other),
    };
    N::try_from(value).map_err(|_| de::Error::custom(format_args!("the number {value} is out of range")))
}

macro_rules! whole_numbers {
    ($($method:ident $visit:ident),+ $(,)?) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
            visitor.$visit(whole(&self.0)?)
        })+
    };
}

impl<'de> de::Deserializer<'de> for Decoder {
    type Error = DecodeError;

    whole_numbers! {
        deserialize_i8 visit_i8, deserialize_i16 visit_i16, deserialize_i32 visit_i32, deserialize_i64 visit_i64,
        deserialize_u8 visit_u8, deserialize_u16 visit_u16, deserialize_u32 visit_u32, deserialize_u64 visit_u64,
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.0 {
            Tree::Scalar(Scalar::Null) => visitor.visit_bool(false),
            Tree::Scalar(Scalar::Bool(value)) => visitor.visit_bool(value),
            other => wanted("true or false", &other),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.0 {
            Tree::Scalar(scalar) => visitor.visit_string(scalar.into_text().unwrap_or_default()),
            other => wanted("text", &other),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_string(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.0 {
            Tree::Scalar(Scalar::Null) => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.0 {
            Tree::Scalar(Scalar::Null) => visitor.visit_seq(Items::new(Vec::new())),
            Tree::List(items) => visitor.visit_seq(Items::new(items)),
            other => wanted("a list", &other),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_map(Entries::new(entries(self.0)?))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        let mut given = entries(self.0)?;
        // Of keys that differ in case only, the later in this order counts.
        given.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut canonical: Vec<(String, Tree)> = Vec::new();
        for (key, value) in given {
            let field = fields.iter().find(|field| **field == key);
            let field = field.or_else(|| fields.iter().find(|field| field.eq_ignore_ascii_case(&key)));
            let Some(field) = field else { return Err(de::Error::unknown_field(&key, fields)) };
            match canonical.iter().position(|(taken, _)| taken == field) {
                Some(index) => {
                    let (_, earlier) = canonical.swap_remove(index);
                    canonical.push(((*field).to_owned(), earlier.followed_by(value)));
                }
                None => canonical.push(((*field).to_owned(), value)),
            }
        }
        visitor.visit_map(Entries::new(canonical))
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.0 {
            Tree::Scalar(Scalar::Null) => visitor.visit_unit(),
            Tree::Scalar(Scalar::Bool(value)) => visitor.visit_bool(value),
            Tree::Scalar(Scalar::Int(value)) => visitor.visit_i64(value),
            Tree::Scalar(Scalar::Uint(value)) => visitor.visit_u64(value),
            Tree::Scalar(Scalar::Float(value)) => visitor.visit_f64(value),
            Tree::Scalar(Scalar::Text(text)) => visitor.visit_string(text),
            Tree::List(_) => self.deserialize_seq(visitor),
            Tree::Map(_) => self.deserialize_map(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        i128 u128 f32 f64 char bytes byte_buf unit unit_struct newtype_struct tuple tuple_struct enum
        identifier ignored_any
    }
}

fn entries(tree: Tree) -> Result<Vec<(String, Tree)>, DecodeError> {
    match tree {
        Tree::Scalar(Scalar::Null) => Ok(Vec::new()),
        Tree::Map(entries) => Ok(entries),
        other => wanted("an object", &other),
    }
}

struct Items {
    items: std::vec::IntoIter<Tree>,
    index: usize,
}

impl Items {
    fn new(items: Vec<Tree>) -> Self {
        Self { items: items.into_iter(), index: 0 }
    }
}

impl<'de> SeqAccess<'de> for Items {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        let Some(item) = self.items.next() else { return Ok(None) };
        let index = self.index;
        self.index += 1;
        seed.deserialize(Decoder(item)).map(Some).map_err(|error| error.inside(format!("[{index}]")))
    }
}

struct Entries {
    entries: std::vec::IntoIter<(String, Tree)>,
    value: Option<(String, Tree)>,
}

impl Entries {
    fn new(entries: Vec<(String, Tree)>) -> Self {
        Self { entries: entries.into_iter(), value: None }
    }
}

impl<'de> MapAccess<'de> for Entries {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        let Some((key, value)) = self.entries.next() else { return Ok(None) };
        let deserializer: StrDeserializer<'_, DecodeError> = key.as_str().into_deserializer();
        let result = seed.deserialize(deserializer)?;
        self.value = Some((key, value));
        Ok(Some(result))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, DecodeError> {
        let Some((key, value)) = self.value.take() else {
            return Err(de::Error::custom("a value was asked for before its key"));
        };
        seed.deserialize(Decoder(value)).map_err(|error| error.inside(key))
    }
}
