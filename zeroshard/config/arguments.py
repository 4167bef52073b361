"""The command-line arguments that scripts for DeepSpeed take: `--deepspeed --deepspeed_config file`."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, and return it."""
    group = parser.add_argument_group("ZeRO", "The config of the engine")
    group.add_argument("--deepspeed", action="store_true", help="Train with ZeRO.")
    group.add_argument("--deepspeed_config", type=str, default=None, help="The config, a JSON file.")
    return parser
