"""What is wrong with a section elasticity, by DeepSpeed's names."""

from __future__ import annotations

from deepspeed._exports import lazy
from zeroshard.errors import ConfigError

__getattr__, __dir__ = lazy(__name__, {})


class ElasticityError(ConfigError):
    """The section can't be obeyed."""


class ElasticityConfigError(ElasticityError):
    """A value of the section is missing or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The section does not allow so many ranks."""
