"""What scripts call on a transformers model that is sharded: at stage 3 each gives what it gives on a plain model, or
is refused in words. `ZEROSHARD_HF_TESTS=1`.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need
from zeroshard.errors import UsageError

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("peft", "transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
]

TOKENS = torch.arange(3, 11)[None].repeat(2, 1)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _plain(tied: bool) -> Any:
    return tiny.model(tie_word_embeddings=tied)


def _sharded(model: Any) -> Any:
    import deepspeed

    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def _steps(model: Any, engine: Any) -> list[float]:
    """Losses of two steps; without an engine torch's own."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if engine is None else engine
    for _ in range(2):
        loss = (model if engine is None else engine)(input_ids=TOKENS, labels=TOKENS).loss
        if engine is None:
            loss.backward()
        else:
            engine.backward(loss)
        optimizer.step()
        model.zero_grad()
        losses.append(round(loss.item(), 5))
    return losses


def _generated(model: Any, _: Any) -> object:
    return model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False).tolist()


def _counted(model: Any, _: Any) -> object:
    from transformers.trainer_pt_utils import get_model_param_count

    of_trainer = get_model_param_count(model, trainable_only=True)
    return model.num_parameters(), model.num_parameters(only_trainable=True, exclude_embeddings=True), of_trainer


def _embeddings(model: Any, engine: Any) -> object:
    given, returned = model.get_input_embeddings(), model.get_output_embeddings()
    hidden = given(TOKENS)
    return tuple(given.weight.shape), tuple(returned.weight.shape), hidden.tolist(), model.device.type, model.dtype


def _tied_again(model: Any, engine: Any) -> object:
    model.tie_weights()
    return _steps(model, engine), model.lm_head.weight is model.model.embed_tokens.weight


def _checkpointed(model: Any, engine: Any) -> object:
    losses = []
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        losses.append(_steps(model, engine))
    model.gradient_checkpointing_disable()
    return [*losses, _steps(model, engine)]


def _evaluated(model: Any, engine: Any) -> object:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits.tolist()
    model.train()
    return logits


RIGHT: tuple[Callable[[Any, Any], object], ...] = (
    _generated,
    _counted,
    _embeddings,
    _tied_again,
    _checkpointed,
    _evaluated,
)
REFUSED: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "resize": (lambda model, _: model.resize_token_embeddings(140), "are not here"),
    "set_input_embeddings": (
        lambda model, engine: (model.set_input_embeddings(nn.Embedding(128, 16)), _steps(model, engine)),
        "'model.embed_tokens.weight' was added or replaced after the model was sharded",
    ),
    "_init_weights": (lambda model, _: model.apply(model._init_weights), "are not here"),
    "half": (lambda model, _: model.half(), "are not here"),
    "save_pretrained": (
        lambda model, _: model.save_pretrained(tempfile.mkdtemp()),
        "To save weights, call trainer.save_model()",
    ),
    "deepcopy": (lambda model, _: copy.deepcopy(model), "can't be copied or pickled"),
}


def _calls(rank: int, world: int, folder: str) -> None:
    for tied in (False, True):
        for call in RIGHT:
            model = _plain(tied)
            found, expected = call(model, _sharded(model)), call(_plain(tied), None)
            assert found == expected, f"{call.__name__}, tied {tied}: {found}, not {expected}"
        for name, (call, words) in REFUSED.items():
            model = _plain(tied)
            engine = _sharded(model)
            said = "nothing"
            try:
                call(model, engine)
            except UsageError as error:
                said = str(error)
            writes_nothing = name == "save_pretrained" and rank != 0
            assert writes_nothing or words in said, f"{name}, tied {tied}: {said}"
        _saves(rank, str(Path(folder, str(tied))), tied)
    _merges()


def _saves(rank: int, folder: str, tied: bool) -> None:
    """Saved while it is gathered, read whole, and read under zero.Init, where it trains as the plain one."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    model = _plain(tied)
    _sharded(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if rank == 0:
            model.save_pretrained(folder)
    dist.barrier()
    expected = _steps(_plain(tied), None)
    assert _steps(AutoModelForCausalLM.from_pretrained(folder), None) == expected
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        again = AutoModelForCausalLM.from_pretrained(folder)
    assert _steps(again, _sharded(again)) == expected


def _merges() -> None:
    """Adapters are merged while all is gathered; outside it is refused."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(0)
        settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(_plain(tied=False), settings)

    expected = {name: value.clone() for name, value in adapted().merge_and_unload().named_parameters()}
    model = adapted()
    _sharded(model)
    assert model.get_nb_trainable_parameters() == adapted().get_nb_trainable_parameters()
    with pytest.raises(UsageError, match="are not here"):
        model.merge_and_unload()
    model = adapted()
    _sharded(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        merged = {name: value.clone() for name, value in model.merge_and_unload().named_parameters()}
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], expected[name], atol=1e-6) for name in expected)


def test_calls_on_a_sharded_model_give_what_they_give_on_a_plain_one_or_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _calls, str(tmp_path), timeout=300.0)
