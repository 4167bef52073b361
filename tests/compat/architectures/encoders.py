"""Encoders of text, of characters and of proteins, and the Perceiver."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import BATCH, LENGTH, Architecture, ints, ones, tokens

_QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    **_QUIET,
}
_FEW_CLASSES: dict[str, Any] = {"input_ids": ints(BATCH, LENGTH), "labels": ints(BATCH, below=2, start=0)}


def _masked(model: str, length: int = LENGTH, **more: Any) -> Architecture:
    return Architecture(f"{model}ForMaskedLM", {**_BASE, **more}, tokens(length))


ENCODERS: dict[str, Architecture] = {
    "BERT": _masked("Bert"),
    "BERT, both heads": Architecture(
        "BertForPreTraining", _BASE, {**tokens(), "next_sentence_label": ints(BATCH, below=2, start=0)}
    ),
    "RoBERTa": _masked("Roberta"),
    "XLM-RoBERTa": Architecture("XLMRobertaForSequenceClassification", _BASE, _FEW_CLASSES),
    "ALBERT": _masked("Albert", embedding_size=8),
    "ELECTRA": _masked("Electra", embedding_size=8),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM",
        {
            "vocab_size": 64,
            "dim": 16,
            "hidden_dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        tokens(),
    ),
    "DeBERTa": _masked("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DeBERTa-v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4),
    "MPNet": _masked("MPNet"),
    "BigBird": _masked("BigBird", attention_type="original_full"),
    "Longformer": _masked("Longformer", attention_window=[4, 4]),
    "Reformer": Architecture(
        "ReformerForMaskedLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "feed_forward_size": 32,
            "num_attention_heads": 2,
            "attention_head_size": 8,
            "attn_layers": ["local", "local"],
            "local_attn_chunk_length": 4,
            "axial_pos_shape": [2, 4],
            "axial_pos_embds_dim": [8, 8],
            "max_position_embeddings": 8,
            "is_decoder": False,
            "hidden_dropout_prob": 0.0,
            "local_attention_probs_dropout_prob": 0.0,
        },
        tokens(),
    ),
    "FNet": _masked("FNet"),
    "Funnel": Architecture(
        "FunnelForMaskedLM",
        {
            "vocab_size": 64,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        tokens(),
    ),
    "ConvBERT": _masked("ConvBert", embedding_size=16, head_ratio=1, conv_kernel_size=3),
    "MobileBERT": _masked("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "SqueezeBERT": _masked("SqueezeBert", embedding_size=16, q_groups=1, intermediate_groups=2),
    "Nyströmformer": _masked("Nystromformer", segment_means_seq_len=8, num_landmarks=4, conv_kernel_size=3),
    "RoFormer": _masked("RoFormer", embedding_size=16),
    "RemBERT": _masked("RemBert", input_embedding_size=8, output_embedding_size=8),
    "ModernBERT": _masked(
        "ModernBert", pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=4
    ),
    "XLNet": Architecture(
        "XLNetLMHeadModel",
        {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "dropout": 0.0},
        tokens(),
    ),
    "XLM": Architecture(
        "XLMWithLMHeadModel",
        {
            "vocab_size": 64,
            "n_words": 64,
            "emb_dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        tokens(),
    ),
    "CANINE": Architecture(
        "CanineForSequenceClassification",
        {
            **{name: value for name, value in _BASE.items() if name != "vocab_size"},
            "type_vocab_size": 16,
            "max_position_embeddings": 64,
            "local_transformer_stride": 8,
            "num_hash_buckets": 64,
            "downsampling_rate": 4,
        },
        {"input_ids": ints(BATCH, 32), "labels": ints(BATCH, below=2, start=0)},
    ),
    "LayoutLM": Architecture(
        "LayoutLMForMaskedLM",
        {**_BASE, "max_2d_position_embeddings": 16},
        {**tokens(), "bbox": lambda generator: ints(BATCH, LENGTH, 1, below=8)(generator).repeat(1, 1, 4)},
    ),
    "ESM": _masked("Esm", pad_token_id=0, mask_token_id=3, position_embedding_type="rotary"),
    "Perceiver": Architecture(
        "PerceiverForMaskedLM",
        {
            "vocab_size": 64,
            "num_latents": 4,
            "d_latents": 16,
            "d_model": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "qk_channels": 16,
            "v_channels": 16,
            "max_position_embeddings": 8,
            "attention_probs_dropout_prob": 0.0,
        },
        {"inputs": ints(BATCH, LENGTH), "labels": ints(BATCH, LENGTH), "attention_mask": ones(BATCH, LENGTH)},
    ),
}
