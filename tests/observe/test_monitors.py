"""The monitors of the config write what each step did, with DeepSpeed's names, on rank 0 and nowhere else."""

from __future__ import annotations

import csv
import gc
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from tests.test_initialize import CONFIG, build, loss_of, start, train
from zeroshard.errors import ConfigError, ZeroShardWarning
from zeroshard.observe.monitor import EventMonitor, Written
from zeroshard.observe.writers.csv_files import CsvFiles


def rows(folder: Path, name: str) -> list[list[str]]:
    with (folder / f"Train_Samples_{name}.csv").open(newline="") as file:
        return list(csv.reader(file))


def column(folder: Path, name: str) -> list[float]:
    return [float(value) for _, value in rows(folder, name)[1:]]


def _monitored(rank: int, world: int, folder: str) -> list[float]:
    """Three steps of two micro-batches; the loss of each micro-batch on this rank."""
    monitored = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/of_{rank}", "job_name": "job"}}
    engine, _ = start({**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}, **monitored})
    losses = []
    for step in range(3):
        for micro in range(2):
            loss = loss_of(engine, step, micro, rank)
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
    assert engine.monitor.enabled
    engine.monitor.write_events([("Mine/accuracy", torch.tensor(0.5), engine.global_samples)])
    engine.destroy()
    return losses


def test_rank_0_writes_a_line_per_step_with_the_mean_loss_of_its_micro_batches(tmp_path: Path) -> None:
    losses, _ = run_ranks(2, _monitored, str(tmp_path))
    folder = tmp_path / "of_0" / "job"
    loss = rows(folder, "train_loss")
    assert loss[0] == ["step", "train_loss"]
    assert [samples for samples, _ in loss[1:]] == ["16", "32", "48"], "4 samples, 2 micro-batches, 2 ranks"
    means = [(losses[2 * step] + losses[2 * step + 1]) / 2 for step in range(3)]
    assert column(folder, "train_loss") == pytest.approx(means, rel=1e-6)
    assert column(folder, "lr") == [0.01] * 3
    assert column(folder, "skipped_steps") == [0.0] * 3
    assert all(norm > 0 for norm in column(folder, "grad_norm"))
    assert all(rate > 0 for rate in column(folder, "samples_per_second"))
    assert (folder / "Mine_accuracy.csv").read_text().split() == ["step,accuracy", "48,0.5"]
    assert not (folder / "Train_Samples_loss_scale.csv").exists(), "there is none in fp32"
    assert not (folder / "Train_Samples_elapsed_time_ms_step.csv").exists(), "wall_clock_breakdown asks for it"
    assert not (tmp_path / "of_1").exists()


def test_the_rate_is_that_of_the_step_and_a_skipped_one_shows_in_scale_and_count(tmp_path: Path) -> None:
    warmup = {"warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"}
    config = {
        **CONFIG,
        "wall_clock_breakdown": True,
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path)},
    }
    engine, _ = start(config)
    rates = []
    for step in range(3):
        loss = loss_of(engine, step)
        engine.backward(loss * float("inf") if step == 1 else loss)
        rates.append(engine.get_lr()[0])
        engine.step()
    engine.destroy()
    folder = tmp_path / "DeepSpeedJobName"
    assert column(folder, "lr") == rates
    assert column(folder, "loss_scale") == [256.0, 256.0, 128.0]
    assert column(folder, "skipped_steps") == [0.0, 1.0, 1.0]
    for part in ("forward", "backward", "step"):
        assert len(column(folder, f"elapsed_time_ms_{part}")) == 3


def test_a_run_that_goes_on_adds_to_the_files(tmp_path: Path) -> None:
    for samples in (8, 16):
        files = CsvFiles(tmp_path / "job")
        files.write([("Train/Samples/train_loss", 2.5, samples)])
        assert rows(tmp_path / "job", "train_loss")[-1] == [str(samples), "2.5"], "before the file is closed"
        files.close()
    assert rows(tmp_path / "job", "train_loss") == [["step", "train_loss"], ["8", "2.5"], ["16", "2.5"]]


def test_a_full_disk_ends_the_writer_and_not_the_training(tmp_path: Path) -> None:
    class Full:
        def write(self, events: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    class Kept:
        def __init__(self) -> None:
            self.seen: list[Written] = []

        def write(self, events: Any) -> None:
            self.seen += events

        def close(self) -> None: ...

    kept = Kept()
    monitor = EventMonitor([Full(), kept], enabled=True)
    with pytest.warns(ZeroShardWarning, match=r"Full of the monitor writes nothing from here on: .*No space left"):
        monitor.write_events([("a", 1, 1)])
    monitor.write_events([("a", 2, 2)])
    assert kept.seen == [("a", 1.0, 1), ("a", 2.0, 2)]
    folder = tmp_path / "file"
    folder.write_text("in the way")
    config = {**CONFIG, "csv_monitor": {"enabled": True, "output_path": str(folder)}}
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: .* can't be made"):
        start(config)


def test_a_server_that_is_gone_ends_its_writer_and_not_the_training() -> None:
    class Gone(Exception):
        pass

    class Server:
        def __init__(self, writes: bool) -> None:
            self.writes, self.closed = writes, 0

        def write(self, events: Any) -> None:
            if not self.writes:
                raise Gone

        def close(self) -> None:
            self.closed += 1
            raise Gone("nobody answers")

    gone, late = Server(writes=False), Server(writes=True)
    monitor = EventMonitor([gone, late], enabled=True)
    with pytest.warns(ZeroShardWarning, match="Server of the monitor writes nothing from here on: Gone"):
        monitor.write_events([("a", 1, 1)])
    monitor.write_events([("a", 2, 2)])
    with pytest.warns(ZeroShardWarning, match="Server of the monitor may have lost its last events: nobody answers"):
        monitor.close()
    assert (gone.closed, late.closed) == (1, 1)


def test_files_on_a_full_disk_are_closed_quietly(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to("/dev/full")
    monitor = EventMonitor([CsvFiles(tmp_path)], enabled=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitor.write_events([("a", 1, 1), ("b", 1, 1)])
        monitor.close()
        gc.collect()
    assert [str(one.message) for one in told] == [
        "CsvFiles of the monitor writes nothing from here on: [Errno 28] No space left on device"
    ]


def test_an_engine_that_is_asked_for_nothing_has_no_observer() -> None:
    engine, _ = start()
    assert engine._observer is None
    assert engine.monitor.enabled is False
    engine.monitor.write_events([("a", 1.0, 1)])
    with pytest.raises(zeroshard.errors.UsageError, match="steps_per_print"):
        engine.tput_timer  # noqa: B018
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("comet", "comet_ml", "comet_ml"),
        ("metrics", "prometheus_client", "prometheus-client"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_key_before_the_model_is_sharded(
    section: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    model = build()
    with pytest.raises(ConfigError, match=rf"{section}\.enabled: needs the package {package}.* pip install {package}"):
        zeroshard.initialize(model=model, config={**CONFIG, section: {"enabled": True}})
    engine, *_ = zeroshard.initialize(model=model, config=CONFIG)
    engine.destroy()


class _Service(ModuleType):
    """Stands for wandb and comet_ml, which only their owners' servers could test whole."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: dict[str, Any] = {}
        self.said: list[Any] = []
        self.name: str | None = None
        run = SimpleNamespace(
            log=lambda values, step: self.said.append((step, values)),
            log_metric=lambda name, value, step: self.said.append((step, {name: value})),
            set_name=lambda name: setattr(self, "name", name),
            finish=lambda: self.said.append("ended"),
            end=lambda: self.said.append("ended"),
        )
        self.init = self.start = lambda **asked: self.asked.update(asked) or run


def test_weights_and_biases_gets_the_values_of_a_step_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    service = _Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    asked = {"enabled": True, "project": "p", "group": "g", "team": "t"}
    engine, _ = start({**CONFIG, "wandb": asked})
    train(engine, 2)
    engine.destroy()
    assert service.asked == {"project": "p", "group": "g", "entity": "t"}
    (first, values), (second, _), ended = service.said
    assert (first, second, ended) == (4, 8, "ended")
    assert {"Train/Samples/train_loss", "Train/Samples/lr"} <= values.keys()


def test_comet_gets_each_value_again_after_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    service = _Service("comet_ml")
    monkeypatch.setitem(sys.modules, "comet_ml", service)
    asked = {"enabled": True, "samples_log_interval": 8, "project": "p", "experiment_name": "n", "online": False}
    engine, _ = start({**CONFIG, "comet": asked})
    train(engine, 4)
    engine.destroy()
    assert (service.asked, service.name) == ({"project": "p", "online": False}, "n")
    losses = [step for step, values in service.said[:-1] if "Train/Samples/train_loss" in values]
    assert (losses, service.said[-1]) == ([4, 12], "ended")


def test_tensorboard_reads_the_events_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine, _ = start({**CONFIG, "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    train(engine, 3)
    engine.destroy()
    read = EventAccumulator(str(tmp_path / "job"))
    read.Reload()
    assert [(event.step, event.value > 0) for event in read.Scalars("Train/Samples/train_loss")] == [
        (4, True),
        (8, True),
        (12, True),
    ]
