"""A base for sections of configs as pydantic models: no unknown keys, aliases, and keys that others replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from deepspeed._exports import lazy
from zeroshard.errors import UsageError

__getattr__, __dir__ = lazy(__name__, {})


class DeepSpeedConfigModel(BaseModel):
    """A section. A field whose `json_schema_extra` says `deprecated` hands its value to its `new_param`.

    `new_param_fn` of the same dict turns the value into that of the new one; with `set_new_param` false the value is
    not handed on.

    Args:
        strict: False drops values that are None or "auto", for which the defaults stand.

    Raises:
        ValidationError: an unknown key or a value of the wrong type.
        UsageError: a key and the one that replaces it are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {name: value for name, value in data.items() if value != "auto" or name == "replace_method"}
        super().__init__(**data)
        for name in list(self.model_fields_set):
            extra = type(self).model_fields[name].json_schema_extra
            if isinstance(extra, Mapping) and extra.get("deprecated"):
                self._hand_on(name, extra)

    def _hand_on(self, name: str, extra: Mapping[str, Any]) -> None:
        new = extra.get("new_param", "")
        if not new or not extra.get("set_new_param", True):
            return
        if new in self.model_fields_set:
            raise UsageError(f"{name} and {new}, which replaces it, are both given; leave out {name}")
        change: Callable[[Any], Any] = extra.get("new_param_fn", lambda value: value)
        setattr(self, new, change(getattr(self, name)))
