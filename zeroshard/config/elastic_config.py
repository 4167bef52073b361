"""The `elasticity` section of a config: the batch triple for a number of ranks, and which numbers there may be."""

from __future__ import annotations

from zeroshard.config.batch import NAMES, Given
from zeroshard.config.document import Source, read_document
from zeroshard.config.elasticity import ElasticBatch, ElasticRange, elastic_batch
from zeroshard.config.entries import gather_entries
from zeroshard.config.keys import key_table
from zeroshard.config.models import ElasticitySection
from zeroshard.config.problems import Problems, show
from zeroshard.config.resolved import BatchConfig
from zeroshard.errors import ConfigError

_SECTION = "elasticity"
_SHOWN = 12


def elastic_triple(
    section: ElasticitySection, given: dict[str, Given], world_size: int, problems: Problems
) -> tuple[BatchConfig, dict[str, str]]:
    """The triple for so many ranks and where it comes from; problems if it can't be had."""
    if not section.ignore_non_elastic_batch_info:
        for name, entry in given.items():
            what = (
                f"is {entry.value}, but {_SECTION}.enabled is true and decides it; remove one of the two, or set "
                f"{_SECTION}.ignore_non_elastic_batch_info to true"
            )
            problems.add(name, entry.origin, what)
    found = batch_of(section)
    if found is None:
        problems.add(_SECTION, "", _no_batch(section))
        return BatchConfig(1, 1, 1), {}
    if world_size not in found.sizes:
        what = (
            f"does not allow {world_size} ranks; its batch of {found.train} allows {_listed(found.sizes, world_size)}"
        )
        problems.add(_SECTION, "", what)
        return BatchConfig(1, 1, 1), {}
    micro = found.micro_batch(world_size)
    origin = f"{_SECTION}: for {world_size} of {len(found.sizes)} allowed numbers of ranks"
    return BatchConfig(found.train, micro, found.train // (micro * world_size)), dict.fromkeys(NAMES, origin)


def elastic_sizes(source: Source) -> tuple[int, ...]:
    """The numbers of ranks that the `elasticity` section of a config allows, smallest first.

    Raises:
        ConfigError: the config can't be read, or its section is not enabled or allows none.
    """
    problems = Problems()
    entries = gather_entries(read_document(source, problems), None, key_table(), problems)
    problems.raise_if_any()
    prefix = f"{_SECTION}."
    values = {path.removeprefix(prefix): entry.value for path, entry in entries.items() if path.startswith(prefix)}
    try:
        section = ElasticitySection.model_validate(
            {k: v for k, v in values.items() if k in ElasticitySection.model_fields}
        )
    except ValueError as error:
        raise ConfigError(f"{_SECTION}: {error}") from error
    if not section.enabled:
        raise ConfigError(f"{_SECTION}.enabled is not true; the section says which numbers of ranks there may be")
    found = batch_of(section)
    if found is None:
        raise ConfigError(f"{_SECTION}: {_no_batch(section)}")
    return found.sizes


def _no_batch(section: ElasticitySection) -> str:
    return (
        f"allows no batch: no multiple of {_listed(section.micro_batch_sizes)} fits on {section.min_gpus} to "
        f"{section.max_gpus} ranks within max_train_batch_size {section.max_train_batch_size}"
    )


def batch_of(section: ElasticitySection) -> ElasticBatch | None:
    """The batch of a section with the numbers of ranks that it allows; None where it allows none."""
    wanted = ElasticRange(
        batch=section.max_train_batch_size,
        micro=section.micro_batch_sizes,
        low=section.min_gpus,
        high=section.max_gpus,
        ranks_per_node=section.num_gpus_per_node if section.version >= 0.2 else 1,
        prefer_larger=section.prefer_larger_batch,
    )
    return elastic_batch(wanted)


def _listed(sizes: tuple[int, ...], near: int = 0) -> str:
    """Some of the numbers: those around `near`."""
    below = [size for size in sizes if size <= near][-_SHOWN // 2 :]
    above = [size for size in sizes if size > near][: _SHOWN - len(below)]
    shown = ", ".join(show(size) for size in (*below, *above))
    return shown if len(below) + len(above) == len(sizes) else f"{shown} and others"
