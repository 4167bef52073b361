"""Decoders of text, dense."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import Architecture, tokens

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_BASE, "num_key_value_heads": 1}
_GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _causal(model: str, base: dict[str, Any] = _GROUPED, **more: Any) -> Architecture:
    return Architecture(f"{model}ForCausalLM", {**base, **more}, tokens())


DECODERS: dict[str, Architecture] = {
    "Llama": _causal("Llama"),
    "Mistral": _causal("Mistral", sliding_window=4),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3", head_dim=8),
    "Gemma": _causal("Gemma", head_dim=8),
    "Gemma 2": _causal("Gemma2", head_dim=8, sliding_window=4),
    "Gemma 3": _causal("Gemma3", head_dim=8, sliding_window=4),
    "Phi": _causal("Phi", _BASE, resid_pdrop=0.0),
    "Phi-3": _causal("Phi3"),
    "OLMo": _causal("Olmo"),
    "OLMo 2": _causal("Olmo2"),
    "Cohere": _causal("Cohere"),
    "GLM": _causal("Glm", head_dim=8),
    "Granite": _causal("Granite"),
    "Nemotron": _causal("Nemotron"),
    "StableLM": _causal("StableLm"),
    "StarCoder 2": _causal("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    "SmolLM3": _causal("SmolLM3"),
    "Persimmon": _causal("Persimmon", _BASE),
    "DiffLlama": _causal("DiffLlama", {**_BASE, "num_key_value_heads": 2}),
    "Helium": _causal("Helium", head_dim=8),
    "EXAONE 4": _causal("Exaone4", sliding_window=4, sliding_window_pattern=2),
    "nanochat": _causal("NanoChat"),
    "GPT-NeoX": _causal("GPTNeoX", _BASE),
    "Falcon": _causal("Falcon", _BASE, alibi=False),
    "BLOOM": _causal("Bloom", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "MPT": _causal("Mpt", {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}),
    "GPTBigCode": _causal("GPTBigCode", {**_GPT2, **_NO_DROPOUT}),
    "GPT-J": _causal("GPTJ", {**_GPT2, **_NO_DROPOUT, "rotary_dim": 4}),
    "CodeGen": _causal("CodeGen", {**_GPT2, **_NO_DROPOUT, "n_head": 4, "rotary_dim": 4}),
    "GPT-Neo": _causal(
        "GPTNeo",
        _BASE,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "GPT-2": Architecture("GPT2LMHeadModel", {**_GPT2, **_NO_DROPOUT}, tokens()),
    "GPT": Architecture("OpenAIGPTLMHeadModel", {**_GPT2, **_NO_DROPOUT}, tokens()),
    "CTRL": Architecture("CTRLLMHeadModel", {**_GPT2, **_NO_DROPOUT, "dff": 32}, tokens()),
    "OPT": _causal("OPT", _BASE, ffn_dim=32, word_embed_proj_dim=8, dropout=0.0),
    "XGLM": _causal(
        "XGLM",
        {"vocab_size": 64, "d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2},
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    ),
    "BioGPT": _causal("BioGpt", _BASE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "ModernBERT decoder": _causal("ModernBertDecoder", _BASE, embedding_dropout=0.0, attention_dropout=0.0),
}
