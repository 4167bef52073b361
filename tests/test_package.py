"""The package imports and says its version."""

import zeroshard


def test_version_is_a_release_number() -> None:
    assert zeroshard.__version__.count(".") == 2
