"""Encoders with decoders, of text."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import BATCH, LENGTH, Architecture, ints, tokens

_T5: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
_BART: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "use_cache": False,
}
_GEMMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 4,
    "dropout_rate": 0.0,
    "use_cache": False,
}


def _t5(model: str, **more: Any) -> Architecture:
    return Architecture(f"{model}ForConditionalGeneration", {**_T5, **more}, tokens())


def _bart(model: str, **more: Any) -> Architecture:
    return Architecture(model, {**_BART, **more}, tokens())


ENCODER_DECODERS: dict[str, Architecture] = {
    "T5": _t5("T5"),
    "T5 v1.1": _t5("T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mT5": _t5("MT5"),
    "UMT5": _t5("UMT5"),
    "LongT5": _t5("LongT5", local_radius=2, encoder_attention_type="transient-global", global_block_size=2),
    "T5Gemma": Architecture(
        "T5GemmaForConditionalGeneration",
        {
            "encoder": _GEMMA,
            "decoder": {**_GEMMA, "cross_attention_hidden_size": 16},
            "vocab_size": 64,
            "dropout_rate": 0.0,
        },
        {**tokens(), "decoder_input_ids": ints(BATCH, LENGTH)},
    ),
    "BART": _bart("BartForConditionalGeneration"),
    "mBART": _bart("MBartForConditionalGeneration"),
    "Pegasus": _bart("PegasusForConditionalGeneration"),
    "PEGASUS-X": _bart("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    "Marian": _bart("MarianMTModel"),
    "M2M100": _bart("M2M100ForConditionalGeneration"),
    "Blenderbot": _bart("BlenderbotForConditionalGeneration"),
    "PLBart": _bart("PLBartForConditionalGeneration"),
    "LED": _bart(
        "LEDForConditionalGeneration",
        attention_window=[4, 4],
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "BigBird-Pegasus": _bart("BigBirdPegasusForConditionalGeneration", attention_type="original_full"),
    "ProphetNet": Architecture(
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "max_position_embeddings": 32,
            "num_buckets": 4,
            "relative_max_distance": 8,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
        tokens(),
    ),
    "FSMT": Architecture(
        "FSMTForConditionalGeneration",
        {**_BART, "langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64},
        tokens(),
    ),
}
