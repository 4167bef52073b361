"""docs/config.md is what the table and the models say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zeroshard.config.keys import key_table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    script = DOCS / "generate_config_reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_key() -> None:
    text = (DOCS / "config.md").read_text(encoding="utf-8")
    assert [path for path in key_table().keys if f"`{path}`" not in text] == []
