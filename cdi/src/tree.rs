// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first document of a YAML (or JSON: every reader takes it for YAML) text, as a tree.
//!
//! Called by the parser only. Refuses duplicate keys, keys that are no scalars, aliases to their own
//! surroundings, and what would cost out of proportion: nesting that no spec has, and aliases that blow up.

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Parser, ScalarStyle, ScanError, StrInput, Tag};

use crate::scalar::{Scalar, resolve_plain, resolve_tagged};

/// A spec is six levels deep; what is deeper can only be an error.
const MAX_DEPTH: usize = 64;
/// Bound of what anchors and aliases may add to a document, in bytes of memory.
const MAX_COPIED_WEIGHT: usize = 16 << 20;

/// A node with its content.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tree {
    Scalar(Scalar),
    List(Vec<Tree>),
    /// Keys are unique in what is read.
    Map(Vec<(String, Tree)>),
}

impl Tree {
    /// What the node is, in the words of an error.
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            Self::Scalar(scalar) => scalar.describe(),
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }

    /// True for a document that says nothing.
    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Self::Scalar(Scalar::Null))
    }

    /// The later of two values for one field, as other readers take them: null changes nothing, the
    /// entries of objects add up, everything else replaces.
    pub(crate) fn followed_by(self, later: Self) -> Self {
        match (self, later) {
            (earlier, Self::Scalar(Scalar::Null)) => earlier,
            (Self::Map(mut entries), Self::Map(more)) => {
                entries.extend(more);
                Self::Map(entries)
            }
            (_, later) => later,
        }
    }

    fn weight(&self) -> usize {
        let content = match self {
            Self::Scalar(Scalar::Text(text)) => text.len(),
            Self::Scalar(_) => 0,
            Self::List(items) => items.iter().map(Self::weight).sum(),
            Self::Map(entries) => entries.iter().map(|(key, value)| key.len() + value.weight()).sum(),
        };
        content + size_of::<Self>()
    }
}

/// Why there is no tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreeError {
    /// 1-based; 0 if unknown.
    pub(crate) line: usize,
    pub(crate) message: String,
}

/// Reads the first document; none if there is no content at all.
pub(crate) fn first_document(text: &str) -> Result<Option<Tree>, TreeError> {
    let options = granit_parser::options! {
        emit_comments: false,
        block_scalar_eof_without_line_feed: true,
        bom_inside_document_as_content: true,
    };
    let mut parser: Parser<'_, StrInput<'_>> = Parser::new_from_str_with_options(text, options);
    let mut builder = Builder::default();
    while let Some(next) = parser.next_event() {
        let (event, span) = next.map_err(scan_error)?;
        let at_line = |message| TreeError { line: span.start.line(), message };
        let done = builder.take(event).map_err(at_line)?;
        if let Some(tree) = done {
            parser.next_event().transpose().map_err(scan_error)?;
            return Ok(Some(tree));
        }
    }
    Ok(None)
}

#[expect(clippy::needless_pass_by_value, reason = "the signature that map_err calls")]
fn scan_error(error: ScanError) -> TreeError {
    TreeError { line: error.marker().line(), message: error.info() }
}

/// A collection that is not complete yet.
struct Open {
    anchor: usize,
    content: Content,
}

enum Content {
    List(Vec<Tree>),
    Map { entries: Vec<(String, Tree)>, keys: HashSet<String>, key: Option<Key> },
}

enum Key {
    Name(String),
    /// `<<`: the value's own entries belong here.
    Merge,
}

#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    anchors: HashMap<usize, Tree>,
    copied_weight: usize,
}

impl Builder {
    /// Takes one event; returns the document's tree when it is complete.
    fn take(&mut self, event: Event<'_>) -> Result<Option<Tree>, String> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let plain = style == ScalarStyle::Plain && tag.is_none();
                let tree = Tree::Scalar(scalar(&text, style, tag.as_deref())?);
                self.complete(tree, anchor, plain && text == "<<")
            }
            Event::SequenceStart(_, anchor, _) => self.push(anchor, Content::List(Vec::new())),
            Event::MappingStart(_, anchor, _) => {
                self.push(anchor, Content::Map { entries: Vec::new(), keys: HashSet::new(), key: None })
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(Open { anchor, content: Content::List(items) }) => {
                    self.complete(Tree::List(items), anchor, false)
                }
                Some(Open { anchor, content: Content::Map { entries, .. } }) => {
                    self.complete(Tree::Map(entries), anchor, false)
                }
                None => Err("an end without a beginning".to_owned()),
            },
            Event::Alias(id) => {
                let tree = self.anchors.get(&id).cloned().ok_or("an alias refers to what contains it")?;
                self.count_copy(&tree)?;
                self.complete(tree, 0, false)
            }
            // Its scalars would mean something else, so other readers refuse it too.
            Event::DocumentStart(_, Some(version)) if (version.major, version.minor) != (1, 1) => {
                Err(format!("the document declares YAML {}.{}, specs are 1.1", version.major, version.minor))
            }
            _ => Ok(None),
        }
    }

    fn push(&mut self, anchor: usize, content: Content) -> Result<Option<Tree>, String> {
        if self.open.len() >= MAX_DEPTH {
            return Err(format!("nested deeper than {MAX_DEPTH} levels"));
        }
        if let Some(Open { content: Content::Map { key: None, .. }, .. }) = self.open.last() {
            return Err("a key is neither text nor a number".to_owned());
        }
        self.open.push(Open { anchor, content });
        Ok(None)
    }

    fn count_copy(&mut self, tree: &Tree) -> Result<(), String> {
        self.copied_weight += tree.weight();
        if self.copied_weight > MAX_COPIED_WEIGHT {
            return Err("anchors and aliases expand to too much".to_owned());
        }
        Ok(())
    }

    /// Puts a complete node where it belongs; returns it if it is the whole document.
    fn complete(&mut self, tree: Tree, anchor: usize, is_merge: bool) -> Result<Option<Tree>, String> {
        if anchor != 0 {
            self.count_copy(&tree)?;
            self.anchors.insert(anchor, tree.clone());
        }
        match self.open.last_mut().map(|open| &mut open.content) {
            None => return Ok(Some(tree)),
            Some(Content::List(items)) => items.push(tree),
            Some(Content::Map { entries, keys, key }) => match key.take() {
                None if is_merge => *key = Some(Key::Merge),
                None => *key = Some(Key::Name(key_text(tree)?)),
                Some(Key::Name(name)) => insert(entries, keys, name, tree)?,
                Some(Key::Merge) => merge(entries, keys, tree)?,
            },
        }
        Ok(None)
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Result<Scalar, String> {
    let Some(tag) = tag else {
        let plain = style == ScalarStyle::Plain;
        return Ok(if plain { resolve_plain(text) } else { Scalar::Text(text.to_owned()) });
    };
    match tag.core_suffix() {
        Some(core @ ("bool" | "float" | "int" | "null" | "str")) => {
            resolve_tagged(core, text).ok_or_else(|| format!("{text:?} does not fit its tag !!{core}"))
        }
        // Base64 under a tag has no place in a spec, and reading it as its own text would be wrong.
        _ if tag.suffix_in_namespace("tag:yaml.org,2002:").is_some_and(|suffix| suffix == "binary") => {
            Err("the tag !!binary is not supported".to_owned())
        }
        _ => Ok(Scalar::Text(text.to_owned())),
    }
}

fn key_text(tree: Tree) -> Result<String, String> {
    match tree {
        Tree::Scalar(scalar @ (Scalar::Bool(_) | Scalar::Int(_) | Scalar::Float(_) | Scalar::Text(_))) => {
            scalar.into_text().ok_or_else(|| "a key is null".to_owned())
        }
        other => Err(format!("a key is {}", other.describe())),
    }
}

fn insert(
    entries: &mut Vec<(String, Tree)>,
    keys: &mut HashSet<String>,
    name: String,
    value: Tree,
) -> Result<(), String> {
    if !keys.insert(name.clone()) {
        return Err(format!("the key {name:?} appears twice"));
    }
    entries.push((name, value));
    Ok(())
}

/// `<<`: other readers of specs refuse a key that is set both here and there, so no order matters.
fn merge(entries: &mut Vec<(String, Tree)>, keys: &mut HashSet<String>, value: Tree) -> Result<(), String> {
    match value {
        Tree::Map(other) => {
            other.into_iter().try_for_each(|(name, value)| insert(entries, keys, name, value))
        }
        Tree::List(items) if items.iter().all(|item| matches!(item, Tree::Map(_))) => {
            items.into_iter().try_for_each(|item| merge(entries, keys, item))
        }
        other => Err(format!("<< takes an object or a list of objects, not {}", other.describe())),
    }
}
