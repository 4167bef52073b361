"""What the user says about state on disk: where, and how private. A value, a part of plans."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.errors import PlanError


@dataclass(frozen=True)
class Spill:
    """Where state on disk goes.

    Attributes:
        paths: folders; with several, state is striped over them, so that their disks work at once.
        encrypt: what is on disk is encrypted with a key that only this process has, in memory; takes `cryptography`.
        allow_visible: on a file system that has no unnamed files, take one with a name, which is removed at once.
    """

    paths: tuple[str, ...]
    encrypt: bool = False
    allow_visible: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.paths, tuple) or not self.paths or not all(isinstance(p, str) and p for p in self.paths):
            raise PlanError(f"state on disk: paths {self.paths!r} must be a tuple of one folder or more, as strings")
        if len(set(self.paths)) < len(self.paths):
            raise PlanError(f"state on disk: paths {self.paths!r} name a folder twice; name each disk once")
        for name, value in (("encrypt", self.encrypt), ("allow_visible", self.allow_visible)):
            if not isinstance(value, bool):
                raise PlanError(f"state on disk: {name} {value!r} must be True or False")
