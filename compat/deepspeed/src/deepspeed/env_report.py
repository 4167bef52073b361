"""The `ds_report` command: `zeroshard doctor`."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def cli_main() -> None:
    """Say which versions answer, what this machine has, and how fast its links are."""
    import platform
    import sys
    from pathlib import Path

    import torch

    import zeroshard
    from deepspeed._version import VERSION
    from zeroshard.launch.cli import main

    print(f"deepspeed {VERSION}: zeroshard under DeepSpeed's import name")
    print(f"zeroshard {zeroshard.__version__} in {Path(zeroshard.__file__).parent}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    sys.argv[1:1] = ["doctor"]
    main()
