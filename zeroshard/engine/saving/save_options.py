"""How an engine saves checkpoints, as its config says. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.engine.saving.tags import TagValidation


@dataclass(frozen=True)
class SaveOptions:
    """How checkpoints are saved: in the background, how many are kept (None: all), and where SIGTERM saves one.

    `tag_validation` says what is done where ranks give different tags, `encryption_key` where the key of encrypted ones
    is (None: they are in the clear), and `audit` begins a log of what is done with them. `raises` says whether a
    save that fails is an error, or a warning. `remote` is a URL to which they are copied. `signing_key` says where the
    key is that signs them (None: they are not signed), and `signed_by` has the public keys of which one must have
    signed what is loaded (None: those of the environment).
    """

    background: bool = False
    keep: int | None = None
    directory: str | None = None
    tag_validation: TagValidation = "Warn"
    encryption_key: str | None = None
    audit: bool = False
    raises: bool = True
    remote: str | None = None
    signing_key: str | None = None
    signed_by: tuple[str, ...] | None = None
