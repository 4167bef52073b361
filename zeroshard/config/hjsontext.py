"""What HJSON adds to JSON: keys and strings without quotes, strings in single quotes, and strings over several lines.

    optimizer: {                 a key without quotes ends at its colon
      type: AdamW                a string without quotes is the rest of its line
    }
    note: '''                    a string over several lines loses the indentation of its opening quotes
      first
      second
      '''

Where HJSON takes a comment, a comma or a bracket for a part of such a string, the writer nearly always meant otherwise;
so these are refused here, and quotes settle it. The library `hjson` was rejected as a dependency: it knows no lines,
keeps the last of two equal keys, and reads `lr: 1e-3, # small` as a string.
"""

from __future__ import annotations

import json
import re

KEY = re.compile(r"[^\s,:\[\]{}\"'#/][^\s,:\[\]{}\"'#]*(?=[ \t]*:)")
"""A key without quotes, up to the colon."""
REST_OF_LINE = re.compile(r"[^\s,:\[\]{}\"'][^\r\n]*")
"""A string without quotes."""
SINGLE = re.compile(r"'(?!'')(?:[^'\\\x00-\x1f]|\\.)*'")
MULTIPLE = re.compile(r"'''(.*?)'''", re.DOTALL)
_UNCLEAR = re.compile(r"[,\[\]{}\"]|(?:^|(?<=\s))(?:#|//|/\*)|:(?=\s|$)")


def unclear_part(text: str) -> str | None:
    """What in a string without quotes may have been meant as something else; None where nothing may."""
    found = _UNCLEAR.search(text)
    return None if found is None else found.group()


def single_quoted(token: str) -> str:
    """The value of a string in single quotes. Raises `json.JSONDecodeError` for a wrong escape."""
    inner = re.sub(r"\\.|\"", lambda found: {'"': '\\"', "\\'": "'"}.get(found.group(), found.group()), token[1:-1])
    return json.loads(f'"{inner}"')


def multi_line(content: str, indentation: int) -> str:
    """The value between triple quotes: without the first and the last line break, and indented by so much less."""
    lines = content.replace("\r\n", "\n").split("\n")
    if len(lines) > 1 and not lines[0].strip():
        lines = lines[1:]
    if len(lines) > 1 and not lines[-1].strip():
        lines = lines[:-1]
    return "\n".join(re.sub(rf"^[ \t]{{0,{indentation}}}", "", line) for line in lines)
