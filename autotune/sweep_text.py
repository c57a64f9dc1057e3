"""Reads the text of a sweep file: plain data, and the place of every key and value in it.

Scalars are read by the core schema of YAML 1.2, as editors do: `1e-3` is a number, a date is text. What versions of YAML read in
different ways (`no`, `010`) is refused in words, and so are tags, names given twice, and files so large or so deep that nobody wrote
them. Anchors, aliases and merge keys work. JSON is YAML too.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError, nearest

MOST_BYTES = 1_000_000
MOST_VALUES = 20_000  # aliases counted each time
DEEPEST = 40

Steps = tuple[Any, ...]  # the keys and list positions that lead to a value


@dataclass(frozen=True)
class Place:
    """Where a value stands (`line`, `column`) and its key (a list item: the same), from 1; a scalar as it is `written`."""

    line: int
    column: int
    key_line: int
    key_column: int
    written: str | None = None


Places = Mapping[Steps, Place]


def read_text(path: Path) -> str:
    """The text of a file: UTF-8, with or without a byte-order mark. Raises `ConfigError` for one that is missing or no such text."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        near = nearest(path.name, [p.name for p in path.parent.glob("*") if p.suffix in (".yaml", ".yml", ".json")])
        raise ConfigError("sweep", "the sweep file must exist", str(path), near) from error
    except IsADirectoryError as error:
        raise ConfigError("sweep", "the sweep file must be a file", f"the folder {path}", "Name the file in it.") from error
    except OSError as error:
        raise ConfigError("sweep", "the sweep file must be readable", f"{path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(path.name, f"a sweep file must have at most {MOST_BYTES:,} bytes", "more", "Is it a file of another kind?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ConfigError(path.name, "the sweep file must be UTF-8 text", "UTF-16", "Save it as UTF-8.") from error
        before = content[: error.start]
        where = f"{path.name}:{before.count(10) + 1}:{error.start - before.rfind(10)}"
        raise ConfigError(where, "the sweep file must be UTF-8 text", f"the byte 0x{content[error.start]:02x}", "Save it as UTF-8.") from error


def read_yaml(text: str, source: str) -> tuple[Any, Places]:
    """Return the plain data that the text holds and the place of everything in it; the whole text stands at `()`.

    `source` names the text in messages. Raises `ConfigError` with line and column.
    """
    try:
        loader = _Loader(text, source)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{source}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        character = f"the character U+{ord(text[error.position]):04X}"
        raise ConfigError(where, "the sweep file must hold characters that can be seen", character, "Is it a file of another kind?") from error
    except yaml.MarkedYAMLError as error:
        raise _in_words(error, source, text) from error
    if node is None:
        return None, {}
    builder = _Builder(source)
    return builder.build(node, (), (1, 1)), builder.places


def where(places: Places, source: str, steps: Steps, *, key: bool = False) -> str:
    """`sweep.yaml:12:5` for the nearest known place on the way to a value (or its key); just the source where none is known."""
    for length in range(len(steps), 0, -1):
        place = places.get(steps[:length])
        if place is not None:
            at_key = key and length == len(steps)
            return f"{source}:{place.key_line}:{place.key_column}" if at_key else f"{source}:{place.line}:{place.column}"
    return source


def write_yaml(data: Any) -> str:
    """Plain data as text that `read_yaml` reads back exactly, keys in their order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this reader, or one of another version of YAML, would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out."""
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NUMBER.fullmatch(text) or _INTEGER.fullmatch(text) or _ZERO_FIRST.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


# ---------------------------------------------------------------------------------------------------------------- the tree


class _Loader(yaml.BaseLoader):
    """Composes a text into nodes, within bounds."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self._source, self._depth, self._nodes = source, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node. Raises `ConfigError` for tags, and for what is too deep or too much."""
        event = self.peek_event()  # type: ignore[no-untyped-call] # the stubs leave it open
        place = f"{self._source}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
        tag = getattr(event, "tag", None)
        if tag:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(place, "values must stand without YAML tags", shown, "Take the tag away; a text that begins with ! needs quotes.")
        if isinstance(event, yaml.ScalarEvent) and event.anchor and not event.value and not event.style:
            raise ConfigError(place, "a text that begins with & must stand in quotes", f"&{event.anchor} with nothing after it")
        self._nodes += 1
        self._depth += 1
        if self._nodes > MOST_VALUES:
            raise ConfigError(place, f"a sweep file must hold at most {MOST_VALUES:,} values", "more", "Is it a file of another kind?")
        if self._depth > DEEPEST:
            raise ConfigError(place, f"values must be nested at most {DEEPEST} deep", "more", "Is it a file of another kind?")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Builder:
    """Turns nodes into plain data and notes the place of each."""

    def __init__(self, source: str) -> None:
        self.places: dict[Steps, Place] = {}
        self._source = source
        self._open: set[int] = set()
        self._built = 0

    def build(self, node: yaml.Node, steps: Steps, key: tuple[int, int] | None = None) -> Any:
        """The value of a node, reached by `steps`; `key` is the line and column of its key."""
        line, column = _at(node)
        key_line, key_column = key or (line, column)
        written = node.value if isinstance(node, yaml.ScalarNode) else None
        self.places[steps] = Place(line, column, key_line, key_column, written)
        self._built += 1
        if self._built > MOST_VALUES:
            raise self._refusal(node, f"a sweep file must hold at most {MOST_VALUES:,} values, aliases counted each time", "more")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise self._refusal(node, "no value may hold itself", "an alias to a value from inside it")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*steps, number)) for number, item in enumerate(node.value)]
            found: dict[Any, Any] = {}
            for name, (key_node, value) in self._entries(node).items():
                found[name] = self.build(value, (*steps, name), _at(key_node))
            return found
        finally:
            self._open.discard(id(node))

    def _entries(self, node: yaml.Node) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """Entries of a mapping, merged ones (`<<`) first; its own replace them."""
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        seen: dict[tuple[type, Any], yaml.Node] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._refusal(key_node, "a key must be one word", "a list or a mapping", "A text that begins with [ or { needs quotes.")
            if key_node.value == "<<" and not key_node.style:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode) or source is node or id(source) in self._open:
                        raise self._refusal(key_node, "<< must be followed by an alias of another mapping, or a list of them", "something else")
                    self._open.add(id(source))
                    self._built += len(source.value)
                    if self._built > MOST_VALUES:
                        raise self._refusal(key_node, f"a sweep file must hold at most {MOST_VALUES:,} values, aliases counted each time", "more")
                    for name, entry in self._entries(source).items():
                        merged.setdefault(name, entry)
                    self._open.discard(id(source))
                continue
            name = self._scalar(key_node)
            first = seen.setdefault((type(name), name), key_node)
            if first is not key_node:
                lines = f"{key_node.value!r} again, first on line {first.start_mark.line + 1}"
                raise self._refusal(key_node, "a key must stand once", lines, "Take one of them away.")
            own[name] = (key_node, value)
        return {**merged, **own}

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        """A scalar's value: text when quoted, else by the core schema of YAML 1.2."""
        text = str(node.value)
        filled = re.search(r"\$\{[^{}]*\}", text)
        if filled:
            do = "Write the value itself, or have another program write the file."
            raise self._refusal(node, "values are taken as they are written: nothing is filled in from the environment", repr(filled[0]), do)
        if node.style:
            return self._whole_characters(node, text)
        if text in _NULL:
            return None
        if text in _TRUTH:
            return _TRUTH[text]
        if text.lower() in _WORDS and text in (text.lower(), text.title(), text.upper()):
            truth = "true" if _WORDS[text.lower()] else "false"
            raise self._refusal(node, f"{text} must be written as {truth}, or as '{text}' in quotes for the word", f"{text} without quotes")
        if _ZERO_FIRST.fullmatch(text):
            plain = text.replace("_", "").lstrip("-+0") or "0"
            raise self._refusal(node, "a number must not begin with 0", text, f"Write {plain}, or '{text}' in quotes for text.")
        if _INTEGER.fullmatch(text):
            return self._integer(node, text)
        if _NUMBER.fullmatch(text):
            number = float(text)
            if not math.isfinite(number):
                raise self._refusal(node, "a number must be finite", text)
            return number
        if _NOT_FINITE.fullmatch(text):
            raise self._refusal(node, "a number must be finite", text)
        return self._whole_characters(node, text)

    def _integer(self, node: yaml.ScalarNode, text: str) -> int:
        if len(text) > sys.int_info.str_digits_check_threshold:
            raise self._refusal(node, "a whole number must have fewer digits", f"{len(text)} of them")
        return int(text, 0)

    def _whole_characters(self, node: yaml.ScalarNode, text: str) -> str:
        """JSON writes characters beyond U+FFFF as two halves; halves alone are no text."""
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            raise self._refusal(node, "a text must hold whole characters", "half of a surrogate pair") from error

    def _refusal(self, node: yaml.Node, must: str, got: str, do: str = "") -> ConfigError:
        line, column = _at(node)
        return ConfigError(f"{self._source}:{line}:{column}", must, got, do)


_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS = {"yes": True, "on": True, "no": False, "off": False}  # of YAML 1.1; plain words since 1.2
_ZERO_FIRST = re.compile(r"[-+]?0[0-9_]+")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def _at(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


# ---------------------------------------------------------------------------------------------------------------- in words


def _in_words(error: yaml.MarkedYAMLError, source: str, text: str) -> ConfigError:
    """What is wrong with a text that is no YAML, and the mend where it is one of the usual traps."""
    problem, context = error.problem or "a syntax error", error.context or ""
    mark = error.problem_mark or error.context_mark
    opened = error.context_mark
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    found = line[mark.column : mark.column + 1] if mark else ""

    def say(must: str, got: str, do: str = "", *, at: yaml.Mark | None = mark) -> ConfigError:
        return ConfigError(f"{source}:{at.line + 1}:{at.column + 1}" if at else source, must, got, do)

    if "'\\t' that cannot start" in problem:
        return say("lines must be indented with spaces", "a tab")
    if "that cannot start any token" in problem:
        return say(f"a text that begins with {found} must stand in quotes", repr(line[mark.column :].strip()[:40]) if mark else found)
    if "undefined alias" in problem:
        name = problem.split("'")[1]
        return say("a text that begins with * must stand in quotes", f"*{name}, an alias of nothing", f"Write '*{name}'.")
    if "an alias" in context or "an anchor" in context:
        sign = "*" if "alias" in context else "&"
        return say(f"a text that begins with {sign} must stand in quotes", repr(line[opened.column :].strip()[:40]) if opened else sign, at=opened)
    if "mapping values are not allowed" in problem:
        return say("a text with ': ' in it must stand in quotes, and a key must begin a line", repr(line.strip()[:60]))
    if "could not find expected ':'" in problem:
        shown = text.splitlines()[opened.line].strip()[:60] if opened else ""
        return say("a key must be followed by ': ' and its value", repr(shown), at=opened)
    if "block scalar" in context:
        return say("a text that begins with > or | must stand in quotes", repr(line.strip()[:60]), at=opened)
    if "quoted scalar" in context and "end of stream" in problem:
        return say("a quoted text must end with its quote", "none up to the end of the file", at=opened)
    if "flow sequence" in context or "flow mapping" in context:
        pair = "[ ]" if "sequence" in context else "{ }"
        return say(
            f"what stands in {pair} must be closed, with commas between", f"{_token(problem)} on line {mark.line + 1}" if mark else "", at=opened
        )
    if "block end" in problem or "block mapping" in context or "block collection" in context:
        return say("keys of one mapping, and items of one list, must begin in the same column", repr(line.strip()[:60]))
    if "single document" in context:
        return say("a sweep file must hold one document", "a second one after ---")
    return say("the sweep file must be valid YAML", problem)


def _token(problem: str) -> str:
    found = re.search(r"but (?:got|found) '(.+)'$", problem)
    if not found:
        return problem
    return {"<stream end>": "the end of the file", "<block mapping start>": "a new key"}.get(found[1], f"'{found[1]}'")
