"""JSON and HJSON as people write configs: comments (`//`, `/* */`, `#`), trailing commas, and the line of every value.

One reader takes both: what HJSON adds (see `hjsontext`) is no JSON, so no text has two meanings. The standard parser
knows neither comments nor lines, and keeps the last of two equal keys in silence.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass
from typing import Any

from zeroshard.config.hjsontext import KEY, MULTIPLE, REST_OF_LINE, SINGLE, multi_line, single_quoted, unclear_part
from zeroshard.config.problems import Problems, dotted, show
from zeroshard.errors import ConfigError

MAX_DEPTH = 32
_MAX_NUMBER_LENGTH = 64

_BLANK = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"-?[A-Za-z_][\w-]*")
_ENDS = re.compile(r"[ \t]*(?=[,\]}\r\n#]|//|/\*|$)")
"""What may follow a number or a constant; else it is the beginning of a string without quotes."""
_CONSTANTS = {"true": True, "false": False, "null": None, "Infinity": float("inf"), "-Infinity": -float("inf")}
_WRONG_WORDS = {
    "True": "write true, JSON's spelling",
    "False": "write false, JSON's spelling",
    "None": "write null, JSON's spelling",
    "NaN": "no setting is NaN; write a number",
}

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Span:
    """Where a member of an object stands in the text: offsets, and those of the commas beside it (None: none is)."""

    key_start: int
    key_end: int
    value_start: int
    value_end: int
    comma_before: int | None
    comma_after: int | None


class JsonReader:
    """Reads one text into plain values; `lines` then gives the line of each value by its path, `spans` its place."""

    def __init__(self, text: str, label: str, problems: Problems) -> None:
        self._text = text
        self._at = 0
        self._label = label
        self._problems = problems
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[Path, int] = {}
        self.spans: dict[Path, Span] = {}

    def read(self) -> Any:
        """The value of the whole text. Raises `ConfigError` at the first thing that isn't JSON."""
        braces = not self._starts_with_member()
        value = self._value(()) if braces else self._object((), braces=False)
        self._skip_blank()
        if self._at < len(self._text):
            self._fail("the text goes on after the end of the config", "remove what follows or join it to the object")
        return value

    def _starts_with_member(self) -> bool:
        """Whether the text is an object without its braces, as HJSON allows for the outermost."""
        self._skip_blank()
        for pattern in (_STRING, SINGLE, KEY):
            key = pattern.match(self._text, self._at)
            if key is not None:
                after = _BLANK.match(self._text, key.end())
                return after is not None and self._text.startswith(":", after.end())
        return False

    def _line(self, at: int | None = None) -> int:
        return bisect.bisect_left(self._newlines, self._at if at is None else at) + 1

    def _fail(self, what: str, remedy: str) -> None:
        at_line = self._line()
        start = self._newlines[at_line - 2] + 1 if at_line > 1 else 0
        column = self._at - start + 1
        raise ConfigError(f"{self._label} line {at_line} column {column}: {what}; {remedy}")

    def _skip_blank(self) -> None:
        match = _BLANK.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        if self._text.startswith("/*", self._at):
            self._fail("a comment that opens with /* is never closed", "close it with */")

    def _peek(self) -> str:
        self._skip_blank()
        return self._text[self._at : self._at + 1]

    def _value(self, path: Path) -> Any:
        first = self._peek()
        self.lines[path] = self._line()
        if len(path) > MAX_DEPTH:
            self._fail(f"objects are nested deeper than {MAX_DEPTH}", "no setting lies so deep; check the brackets")
        if first == "{":
            return self._object(path)
        if first == "[":
            return self._array(path)
        if first in ('"', "'"):
            return self._string()
        return self._scalar()

    def _object(self, path: Path, *, braces: bool = True) -> dict[str, Any]:
        result: dict[str, Any] = {}
        closing = "}" if braces else ""
        self._at += len(closing)
        if not braces:
            self.lines[path] = self._line()
        before: int | None = None
        while self._peek() != closing:
            line, key_start = self._line(), self._at
            name = self._key()
            key_end = self._at
            where = (*path, name)
            if name in result:
                self._problems.add(
                    dotted(where),
                    f"{self._label} lines {self.lines[where]} and {line}",
                    "the key is given twice; keep one of the two",
                )
            if self._peek() != ":":
                self._fail(f"a colon is missing after {json.dumps(name)}", 'write "key": value')
            self._at += 1
            self._skip_blank()
            value_start = self._at
            value = self._value(where)
            self.lines[where] = line
            result[name] = value
            value_end = self._at
            after = self._comma_or(closing)
            self.spans[where] = Span(key_start, key_end, value_start, value_end, before, after)
            before = after
        self._at += len(closing)
        return result

    def _key(self) -> str:
        if self._peek() in ('"', "'"):
            return self._string()
        key = KEY.match(self._text, self._at)
        if key is None:
            self._expected_key()
        assert key is not None
        self._at = key.end()
        return key.group()

    def _expected_key(self) -> None:
        if self._at >= len(self._text):
            self._fail("the text ends inside an object", "close it with }")
        if self._text[self._at] == ",":
            self._fail("a comma without a value before it", "remove it")
        self._fail("a key is expected here", 'write keys in double quotes: "key": value')

    def _array(self, path: Path) -> list[Any]:
        result: list[Any] = []
        self._at += 1
        while self._peek() != "]":
            if self._at >= len(self._text):
                self._fail("the text ends inside a list", "close it with ]")
            result.append(self._value((*path, len(result))))
            self._comma_or("]")
        self._at += 1
        return result

    def _comma_or(self, closing: str) -> int | None:
        """Where the comma is that was passed; None where the closing bracket comes next, or the line ends."""
        ended = self._line()
        following = self._peek()
        if following == ",":
            self._at += 1
            return self._at - 1
        if following != closing:
            if not following:
                self._fail(f"the text ends before {closing}", f"close it with {closing}")
            if self._line() == ended:
                self._fail(
                    f"a comma or {closing or 'a line break'} is missing before this", "separate values by commas"
                )
            if following in ("}", "]"):
                self._fail(f"{following} closes what is not open", f"close with {closing}" if closing else "remove it")
        return None

    def _string(self) -> str:
        if self._text.startswith("'''", self._at):
            return self._multi_line()
        quote = self._text[self._at]
        match = (_STRING if quote == '"' else SINGLE).match(self._text, self._at)
        if match is None:
            self._fail("a string is not closed on its line", f"close it with {quote}")
        assert match is not None
        try:
            value = json.loads(match.group()) if quote == '"' else single_quoted(match.group())
        except json.JSONDecodeError as error:
            self._fail(f"a string can't be read: {error.msg}", "write a backslash as \\\\")
            raise
        self._at = match.end()
        return value

    def _multi_line(self) -> str:
        match = MULTIPLE.match(self._text, self._at)
        if match is None:
            self._fail("a string over several lines is never closed", "close it with '''")
        assert match is not None
        indentation = self._at - self._text.rfind("\n", 0, self._at) - 1
        self._at = match.end()
        return multi_line(match.group(1), indentation)

    def _scalar(self) -> Any:
        number = _NUMBER.match(self._text, self._at)
        if number is not None and _ENDS.match(self._text, number.end()):
            token = number.group()
            if len(token) > _MAX_NUMBER_LENGTH:
                self._fail(f"a number of {len(token)} characters", "no setting needs so many digits")
            self._at = number.end()
            return float(token) if any(mark in token for mark in ".eE") else int(token)
        word = _WORD.match(self._text, self._at)
        if word is not None and _ENDS.match(self._text, word.end()):
            name = word.group()
            if name in _CONSTANTS:
                self._at = word.end()
                return _CONSTANTS[name]
            if name in _WRONG_WORDS:
                self._fail(f"{name} is no JSON value", _WRONG_WORDS[name])
        if self._at >= len(self._text):
            self._fail("the text ends where a value is expected", "complete the config")
        return self._rest_of_line()

    def _rest_of_line(self) -> str:
        rest = REST_OF_LINE.match(self._text, self._at)
        if rest is None:
            self._fail("no value starts here", "write a number, a string, true, false, null, an object or a list")
        assert rest is not None
        value = rest.group().rstrip()
        unclear = unclear_part(value)
        if unclear is not None:
            self._fail(
                f"a string without quotes is the rest of its line, and {show(value)} holds {unclear}",
                "put strings in double quotes",
            )
        self._at += len(value)
        return value
