"""Writes `docs/config.md` from the key table and the models, so that the page can't say other than the code does.

python docs/generate_config_reference.py           write the page
python docs/generate_config_reference.py --check   fail if the page is not what would be written
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zeroshard.config.components import (
    OPTIMIZERS,
    SCHEDULERS,
    TYPE_ALIASES,
    UNBUILT_OPTIMIZERS,
)
from zeroshard.config.keys import Key, Status, key_table, kind_in_words
from zeroshard.config.models import Section

PAGE = Path(__file__).with_name("config.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_config_reference.py. Change that, the key table or the models, not this page. -->

zeroshard reads DeepSpeed's JSON config. `zeroshard config explain FILE --world-size N` prints the settings that a file
gives and those that follow from it, each with its value, the origin of the value, and what is done with it; with
`--defaults`, also the settings at their defaults; with `--all`, every known key. `zeroshard config check FILE` only
checks the file. `zeroshard config migrate FILE` shows how deprecated keys are replaced, and with `--write` replaces
them; comments and layout stay. `zeroshard config schema` prints a JSON Schema for editors. From Python:

```python
from zeroshard.config import load_config

config = load_config("ds.json", world_size=8)
config.zero.stage, config.batch.micro, config.origins["zero_optimization.stage"]
```

## How a config is read

- The source is a dict, the path of a file, or text: JSON or HJSON, whatever the file is called. So comments (`//`,
  `/* */`, `#`), trailing commas, keys and strings without quotes, and line breaks instead of commas are allowed. A
  string without quotes is the rest of its line; one with a comma, a bracket or a comment is refused, since it is
  ambiguous. A duplicate key is an error. `null` is the same as leaving the key out, except for parameters of optimizers
  and schedules, where it is a value.
- `5e8` is a whole number, and `1` and `0` are `true` and `false`. `"true"` is not `true`, and `"3"` is not `3`.
- All mistakes are reported together, each with its JSON path, its line and what to do.
- An unknown key is an error that names the nearest known key, also when the key is right but at the wrong level.
- Every DeepSpeed key is known, and has a status:

| status | meaning |
|---|---|
| obeyed | It does what it says. |
| no effect | Accepted at any value of its type, for the given reason. The result of training is as wanted. |
| not built yet | Accepted at the values shown, which leave the feature off. Any other value is refused by name. |
| will not be built | Refused unless it is switched off. |
| deprecated | Sets another key, with a warning. |

## The batch

`train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x world size. Any one or two of
them give the rest; `gradient_accumulation_steps` alone is not enough. If all three are given and disagree, the error
shows the numbers and where each comes from.

## "auto" and the script's arguments

`load_config(..., overrides={...})` takes the values of the script's arguments, nested or keyed by JSON path. They fill
keys that are absent or `"auto"`. A different value written in the config is an error that shows both. On the command
line `--set PATH=VALUE` is such an argument: `zeroshard config check ds.json --set bf16.enabled=true`. Without an
override, `"auto"` is resolved so:

- the batch numbers are derived from each other;
- sizes, thresholds, dtypes, `gradient_clipping`, `overlap_step`, `steps_per_print` and keys without effect take their
  default;
- `betas`, `eps`, `weight_decay`, `momentum`, `warmup_min_lr` and `warmup_type` take their default;
- `scheduler.params.warmup_max_lr` becomes null, which is the rate that the optimizer has;
- `bf16.enabled` is false if `fp16.enabled` is true, and the other way round;
- if `"auto"` is one of the key's values, it is that value.

Anything else is an error that names the key.

## Common misunderstandings

- Bucket sizes and bounds count elements, not bytes: `5e8` is 1 GB in bf16.
- `gradient_clipping` is 1.0 when it is not given; write 0 to switch it off.
- `Adam` uses decoupled weight decay, like AdamW, unless `adam_w_mode` is false. DeepSpeed does the same.
- `DeepSpeedCPUAdam` and `FusedAdam` are accepted as names for Adam, and `Cosine` for WarmupCosineLR.
- `torch_adam` only changes a default: with decoupled decay, `weight_decay` is 0.01 if it is not given, as in torch's
  AdamW, which DeepSpeed uses then. The plan chooses the kernel.
- `tensor_parallel.tp_size` and `pipeline_parallel.pp_size` are known, although DeepSpeed ignores them or knows them
  under another name.
- An optimizer or schedule that the script gives replaces the one in the config, with a warning.
- Two precisions at once are an error.
"""


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != text:
            print(f"{PAGE.name} is out of date: run python docs/generate_config_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_key_sections(), *_component_sections()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _key_sections() -> Iterator[str]:
    table = key_table()
    rows = {status: sorted(table.with_status(status), key=lambda key: key.path) for status in Status}
    yield "## Keys that are obeyed\n\n" + _table(
        ["key", "type", "default", "meaning"],
        ([_named(key), kind_in_words(key.kind), _default(key), key.note] for key in rows[Status.OBEYED]),
    )
    yield "## Keys that are not built yet\n\n" + _table(
        ["key", "accepted at", "feature"],
        ([_named(key), _inert(key), key.note] for key in rows[Status.INERT_ONLY]),
    )
    yield "## Keys without effect\n\n" + _table(
        ["key", "type", "why"],
        ([_named(key), kind_in_words(key.kind), key.note] for key in rows[Status.ACCEPTED]),
    )
    yield "## Keys that will not be built\n\n" + _table(
        ["key", "accepted at", "feature"],
        ([_named(key), _inert(key), key.note] for key in rows[Status.REMOVED]),
    )
    yield "## Deprecated keys\n\n" + _table(
        ["key", "write"], ([_named(key), _code(key.note)] for key in rows[Status.DEPRECATED])
    )


def _component_sections() -> Iterator[str]:
    yield "## Optimizers\n"
    yield from (_component(name, model) for name, model in OPTIMIZERS.items())
    yield f"Not built yet: {', '.join(UNBUILT_OPTIMIZERS)}.\n"
    yield "## Schedules\n"
    yield from (_component(name, model) for name, model in SCHEDULERS.items())


def _component(name: str, model: type[Section]) -> str:
    also = [alias for alias, target in TYPE_ALIASES.items() if target == name]
    heading = f"### {name}{' (also ' + ', '.join(also) + ')' if also else ''}"
    rows = (
        [_code(field), "required" if info.is_required() else _code(json.dumps(info.default))]
        for field, info in model.model_fields.items()
    )
    return f"{heading}\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n" + _table(["parameter", "default"], rows)


def _table(headings: list[str], rows: Iterable[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _named(key: Key) -> str:
    aliases = "".join(f", also {_code(alias)}" for alias in key.aliases)
    return _code(key.path) + aliases


def _default(key: Key) -> str:
    return "none" if key.default is None else _code(json.dumps(key.default))


def _inert(key: Key) -> str:
    shown: list[Any] = [_code(json.dumps(value)) for value in key.inert]
    if key.path == "data_parallel_size":
        return "the world size"
    if not shown:
        return "absent" if key.kind != "section" else 'absent or `{"enabled": false}`'
    return ", ".join(shown)


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
