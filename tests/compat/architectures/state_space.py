"""State spaces, linear recurrences, and mixtures of them with attention."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import Architecture, tokens

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
_MAMBA2: dict[str, Any] = {
    "mamba_d_state": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}


def _causal(model: str, base: dict[str, Any] = _BASE, **more: Any) -> Architecture:
    return Architecture(f"{model}ForCausalLM", {**base, **more}, tokens())


STATE_SPACE: dict[str, Architecture] = {
    "Mamba": _causal("Mamba", _MAMBA, use_cache=False),
    "Mamba-2": _causal(
        "Mamba2", _MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=4, use_cache=False, pad_token_id=0
    ),
    "Falcon Mamba": _causal("FalconMamba", _MAMBA, use_cache=False),
    "Jamba": _causal(
        "Jamba",
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "Bamba": _causal("Bamba", **_MAMBA2, attn_layer_indices=[1]),
    "Falcon-H1": _causal("FalconH1", **_MAMBA2, mamba_d_ssm=32, head_dim=8),
    "Zamba": _causal(
        "Zamba",
        num_hidden_layers=4,
        attention_hidden_size=32,
        attention_head_dim=16,
        n_mamba_heads=2,
        mamba_dt_rank=2,
        mamba_d_state=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        use_mamba_kernels=False,
    ),
    "Zamba 2": _causal(
        "Zamba2",
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=8,
        mamba_ngroups=1,
        chunk_size=4,
        use_mem_rope=False,
        num_key_value_heads=2,
    ),
    "RecurrentGemma": _causal("RecurrentGemma", lru_width=16, attention_window_size=4, num_hidden_layers=3),
    "RWKV": _causal("Rwkv", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 32}),
    "xLSTM": _causal(
        "xLSTM", {"vocab_size": 64, "hidden_size": 16, "num_blocks": 2, "num_heads": 2}, chunk_size=4, use_cache=False
    ),
    "Qwen3-Next": _causal(
        "Qwen3Next",
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Nemotron-H": _causal(
        "NemotronH",
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=4,
        head_dim=8,
        layers_block_type=["mamba", "attention", "moe"],
        num_hidden_layers=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "LFM2": _causal("Lfm2", layer_types=["conv", "full_attention"]),
    "Granite MoE hybrid": _causal(
        "GraniteMoeHybrid",
        **_MAMBA2,
        num_local_experts=4,
        shared_intermediate_size=16,
        layer_types=["mamba", "attention"],
    ),
}
