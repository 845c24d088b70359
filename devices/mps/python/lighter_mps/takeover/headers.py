# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which virtual methods does a C++ class declare, and in which order?

The order of a class's virtual methods is the order of its vtable, and torch changes it from release to release. The wheel
carries the headers its libraries were compiled from, so they are read instead of a guess. Called by `layouts`.

This is no C++ compiler: it knows one class with at most one base, without conditional compilation in its body and without
operators among its virtual methods, and refuses anything else with `HeaderError` rather than to return an order that may be wrong.
"""

import re

DESTRUCTOR = "~"

_COMMENT = re.compile(r"//(?:\\\n|[^\n])*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)(?:\\\n|[^\n])*", re.M)
_TOKEN = re.compile(r"\[\[|\]\]|::|->|~?[A-Za-z_]\w*|\d[\w.']*|[^\s\w]")
_CONDITION = "__lighter_condition__"

# What may stand between the parameters of a method and its body or semicolon.
_AFTER_PARAMETERS = frozenset(("const", "volatile", "noexcept", "override", "final", "throw", "try", "&", "->", "=", "{", ";", "[["))
_OPENERS = {"(": ")", "{": "}", "[": "]", "[[": "]]"}


class HeaderError(Exception):
    """The header cannot be read as a list of virtual methods; the text says why."""


class Method:
    """One method declared with the word `virtual`; a destructor's name is `~`."""

    __slots__ = ("name", "overrides")

    def __init__(self, name: str, overrides: bool):
        self.name = name
        self.overrides = overrides

    def __repr__(self) -> str:
        return f"Method({self.name!r}, {self.overrides!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and (self.name, self.overrides) == (other.name, other.overrides)


class Class:
    """A class as far as its vtable goes: its base's name (or none) and its virtual methods in the order of their declaration."""

    __slots__ = ("name", "base", "methods")

    def __init__(self, name: str, base: "str | None", methods: "list[Method]"):
        self.name = name
        self.base = base
        self.methods = methods


def parse(source: str, name: str) -> Class:
    """The class `name` as `source` defines it."""
    tokens = _tokens(source)
    start, base = _definition(tokens, name)
    return Class(name, base, [m for m in map(_method, _members(tokens, start, name)) if m])


def order(*chain: Class) -> "list[str]":
    """The names in a vtable's slots, from the class without a base down to the most derived one.

    The Itanium C++ ABI, which every Linux compiler follows, gives a virtual destructor two slots, here named `~` and `~delete`.
    """
    slots: "list[str]" = []
    parent = None
    for cls in chain:
        if cls.base != parent:
            raise HeaderError(f"class {cls.name} has the base {cls.base}, not {parent}")
        inherited = frozenset(slots)
        for method in cls.methods:
            if method.name in inherited:
                # The same name without `override` may be an override or an overload with a slot of its own.
                if not method.overrides and method.name != DESTRUCTOR:
                    raise HeaderError(f"{cls.name}::{method.name} hides or overrides {parent}'s, and does not say which")
            elif method.overrides:
                raise HeaderError(f"{cls.name}::{method.name} overrides a method that {parent} does not have")
            else:
                slots += [DESTRUCTOR, DESTRUCTOR + "delete"] if method.name == DESTRUCTOR else [method.name]
        parent = cls.name
    return slots


def _tokens(source: str) -> "list[str]":
    # A comment becomes a space, a literal a 0: neither may be taken for code.
    source = _COMMENT.sub(lambda m: " " if m[0].startswith("/") else " 0 ", source)
    source = _DIRECTIVE.sub(lambda m: f" {_CONDITION} " if m[1] in ("if", "ifdef", "ifndef", "elif", "else", "endif") else " ", source)
    return _TOKEN.findall(source)


def _definition(tokens: "list[str]", name: str) -> "tuple[int, str | None]":
    """Where the body of the class begins, and its base."""
    for at, token in enumerate(tokens):
        if token != name or not _is_class_key(tokens, at):
            continue
        at += 1
        if at < len(tokens) and tokens[at] == "final":
            at += 1
        if at < len(tokens) and tokens[at] == "{":
            return at + 1, None
        if at < len(tokens) and tokens[at] == ":":
            end = at + 1
            while end < len(tokens) and tokens[end] not in ("{", ";"):
                end += 1
            bases = [t for t in tokens[at + 1:end] if t not in ("public", "protected", "private")]
            if "," in bases or "<" in bases or "virtual" in bases or not bases:
                raise HeaderError(f"class {name} has bases that are not one plain class: {' '.join(bases)}")
            return end + 1, bases[-1]
    raise HeaderError(f"no class {name} in it")


def _is_class_key(tokens: "list[str]", at: int) -> bool:
    """Does `struct` or `class` stand before, with only export macros and attributes between?"""
    at -= 1
    while at >= 0 and (re.fullmatch(r"[A-Z_][A-Z0-9_]*|0|\d+|\w+", tokens[at]) or tokens[at] in ("(", ")", "[[", "]]", "::")):
        if tokens[at] in ("struct", "class"):
            return at == 0 or tokens[at - 1] not in ("friend", "enum")
        at -= 1
    return False


def _members(tokens: "list[str]", at: int, name: str) -> "list[list[str]]":
    """The declarations of the body that begins at `at`, each without its own body."""
    members: "list[list[str]]" = []
    member: "list[str]" = []
    while at < len(tokens):
        token = tokens[at]
        if token == "}":
            return members
        if token == _CONDITION:
            raise HeaderError(f"class {name} has conditional compilation in its body")
        if token == ";":
            members.append(member)
            member = []
            at += 1
        elif token in _OPENERS:
            end = _closing(tokens, at, name)
            if token == "{":
                # A body ends a method; after a nested class or an initialiser a `;` follows, and an empty member does no harm.
                members.append(member + ["{"])
                member = []
            else:
                member += tokens[at:end]
            at = end
        else:
            member.append(token)
            at += 1
    raise HeaderError(f"class {name} has no end")


def _closing(tokens: "list[str]", at: int, name: str) -> int:
    """The place after the bracket that closes the one at `at`."""
    wanted = [_OPENERS[tokens[at]]]
    at += 1
    while at < len(tokens):
        token = tokens[at]
        if token == _CONDITION:
            raise HeaderError(f"class {name} has conditional compilation in its body")
        # `a[b[0]]` also ends in two brackets, and a lambda's `[` may follow another.
        if token == "]]" and wanted[-1] == "]":
            if len(wanted) < 2 or wanted[-2] != "]":
                raise HeaderError(f"class {name} has brackets that do not match")
            wanted.pop()
            wanted.pop()
        elif token == wanted[-1]:
            wanted.pop()
        elif token in _OPENERS:
            wanted.append(_OPENERS[token])
        elif token in (")", "}", "]", "]]"):
            raise HeaderError(f"class {name} has brackets that do not match")
        at += 1
        if not wanted:
            return at
    raise HeaderError(f"class {name} has no end")


def _method(member: "list[str]") -> "Method | None":
    """The virtual method that a declaration declares, if it is one."""
    if "virtual" not in member:
        return None
    rest = member[member.index("virtual") + 1:]
    if "operator" in rest:
        raise HeaderError("a virtual operator: " + " ".join(rest))
    angle = 0
    at = 0
    while at < len(rest):
        token = rest[at]
        if token == "<":
            angle += 1
        elif token == ">":
            angle -= 1
        elif token == "(" or token == "[[":
            end = _closing(rest, at, "?")
            after = rest[end] if end < len(rest) else ";"
            # `MACRO(x) int f()`: the first parentheses are those of the method only if what follows can follow a method.
            if token == "(" and angle == 0 and after in _AFTER_PARAMETERS:
                name = rest[at - 1] if at else ""
                if not re.fullmatch(r"~?[A-Za-z_]\w*", name):
                    break
                tail = rest[end:]
                return Method(DESTRUCTOR if name.startswith("~") else name, "override" in tail or "final" in tail)
            at = end
            continue
        at += 1
    raise HeaderError("a virtual method without a name: " + " ".join(rest))
