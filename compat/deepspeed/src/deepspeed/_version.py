"""The versions: of this package, and the one that libraries compare with what they need of DeepSpeed."""

from __future__ import annotations

PACKAGE_VERSION = "0.1.0"
VERSION = "0.19.6+zeroshard"
"""The release whose interface is answered, with a local part that says who answers."""
PARTS = (0, 19, 6)
"""That release in numbers: major, minor, patch."""
GIT = "unknown"
"""The commit and branch that it was built from: a wheel does not say."""
