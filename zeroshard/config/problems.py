"""Everything wrong with a config, gathered and reported at once.

A problem names the JSON path, the place it was written at, what is wrong and what to do. Rejected: raising at the first
one, which makes a user with five typos start five jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroshard.errors import ConfigError

_PLAIN_NAME = re.compile(r"[A-Za-z_][\w-]*|\*", re.ASCII)
_SHOWN_LENGTH = 72
_MOST = 50
"""Problems that are told; the rest are counted. A file of another kind can have a problem on every line."""


@dataclass
class Problems:
    """The problems found so far, in the order found."""

    messages: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    untold: int = 0

    @property
    def full(self) -> bool:
        """Whether further problems are only counted."""
        return len(self.messages) >= _MOST

    def add(self, path: str, origin: str, what: str) -> None:
        """Record that `path`, written at `origin` (empty if nowhere), is wrong as `what` says."""
        place = f"{path or 'the config'} ({origin})" if origin else path or "the config"
        message = f"{place}: {what}"
        if message in self.messages:
            return
        if self.full:
            self.untold += 1
        else:
            self.messages.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def raise_if_any(self) -> None:
        if self.untold:
            raise ConfigError(*self.messages, f"{self.untold} more problems, which are told when these are mended")
        if self.messages:
            raise ConfigError(*self.messages)


def dotted(parts: Sequence[str | int]) -> str:
    """A JSON path as people write it: `optimizer.params.betas[0]`; odd names are quoted: `["a b"]`."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_NAME.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part)}]"
    return text


def show(value: Any) -> str:
    """A value as JSON, in ASCII and cut short, for a message."""
    text = json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + "..."
