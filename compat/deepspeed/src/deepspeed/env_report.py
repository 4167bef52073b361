"""The `ds_report` command: `zeroshard doctor`."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def cli_main() -> None:
    """Say what this machine has, and how fast its links are."""
    import sys

    from deepspeed._version import VERSION
    from zeroshard.launch.cli import main

    print(f"deepspeed {VERSION}: zeroshard under DeepSpeed's import name")
    sys.argv[1:1] = ["doctor"]
    main()
