"""Mixtures of experts: which expert computes is decided by the tokens, so by rank and step."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import BATCH, LENGTH, Architecture, ints, tokens

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
_SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}


def _causal(model: str, **more: Any) -> Architecture:
    return Architecture(f"{model}ForCausalLM", {**_BASE, **more}, tokens())


MIXTURES: dict[str, Architecture] = {
    "Mixtral": _causal("Mixtral", num_local_experts=4, output_router_logits=True),
    "Qwen2-MoE": _causal("Qwen2Moe", **_SPARSE, shared_expert_intermediate_size=16),
    "Qwen3-MoE": _causal("Qwen3Moe", **_SPARSE, head_dim=8),
    "DeepSeek-V2": _causal("DeepseekV2", **_LATENT),
    "DeepSeek-V3": _causal("DeepseekV3", **_LATENT),
    "GLM 4 MoE": _causal("Glm4Moe", **{**_LATENT, "num_key_value_heads": 1, "head_dim": 8}),
    "ERNIE 4.5 MoE": _causal("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "PhiMoE": _causal("Phimoe", num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "OLMoE": _causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "gpt-oss": _causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "Granite MoE": _causal("GraniteMoe", num_local_experts=4),
    "Llama 4": _causal(
        "Llama4", num_local_experts=4, intermediate_size_mlp=32, head_dim=8, attention_chunk_size=4, use_qk_norm=True
    ),
    "JetMoE": _causal("JetMoe", kv_channels=8, num_local_experts=4, num_key_value_heads=1, num_attention_heads=2),
    "Switch Transformers": Architecture(
        "SwitchTransformersForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 2,
            "num_experts": 4,
            "dropout_rate": 0.0,
            "router_jitter_noise": 0.0,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        tokens(),
    ),
    "NLLB-MoE": Architecture(
        "NllbMoeForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "num_experts": 4,
            "expert_capacity": 8,
            "moe_token_dropout": 0.0,
            "second_expert_policy": "all",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "use_cache": False,
        },
        {**tokens(), "decoder_input_ids": ints(BATCH, LENGTH)},
    ),
}
