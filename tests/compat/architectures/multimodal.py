"""Text with images or with sound, and series over time."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.architectures.case import BATCH, LENGTH, Architecture, floats, ints, ones, pixels, tokens

_QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_EYE: dict[str, Any] = {**_SIZES, "image_size": 32, "patch_size": 8, "attention_dropout": 0.0}
_TEXT: dict[str, Any] = {
    **_SIZES,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": 1, "use_cache": False}
_BERT: dict[str, Any] = {**_SIZES, **_QUIET, "vocab_size": 64, "max_position_embeddings": 32}
_BOTH: dict[str, Any] = {"input_ids": ints(BATCH, LENGTH), **pixels(labels=False)}
_IMAGE_TOKEN = 60


def _prompt(images: int, length: int, marker: int = _IMAGE_TOKEN) -> Any:
    """Token numbers of which the first `images` stand for an image."""

    def draw(generator: torch.Generator) -> torch.Tensor:
        numbers = torch.randint(3, marker, (BATCH, length), generator=generator)
        numbers[:, :images] = marker
        return numbers

    return draw


def _seen(images: int) -> dict[str, Any]:
    length = images + 4
    return {"input_ids": _prompt(images, length), "labels": ints(BATCH, length), **pixels(labels=False)}


MULTIMODAL: dict[str, Architecture] = {
    "CLIP": Architecture(
        "CLIPModel", {"text_config": _TEXT, "vision_config": _EYE, "projection_dim": 16}, {**_BOTH, "return_loss": True}
    ),
    "CLIP vision": Architecture("CLIPVisionModelWithProjection", {**_EYE, "projection_dim": 8}, pixels(labels=False)),
    "SigLIP": Architecture(
        "SiglipModel", {"text_config": _TEXT, "vision_config": _EYE}, {**_BOTH, "return_loss": True}
    ),
    "SigLIP classifier": Architecture("SiglipForImageClassification", {"vision_config": _EYE}, pixels()),
    "SigLIP 2": Architecture(
        "Siglip2Model",
        {"text_config": _TEXT, "vision_config": {**_SIZES, "num_patches": 16, "patch_size": 8}},
        {
            "input_ids": ints(BATCH, LENGTH),
            "pixel_values": floats(BATCH, 16, 192),
            "pixel_attention_mask": ones(BATCH, 16),
            "spatial_shapes": lambda generator: torch.tensor([[4, 4]] * BATCH),
            "return_loss": True,
        },
    ),
    "ALIGN": Architecture(
        "AlignModel",
        {
            "text_config": _BERT,
            "vision_config": {
                "image_size": 32,
                "width_coefficient": 0.25,
                "depth_coefficient": 0.25,
                "hidden_dim": 64,
                "drop_connect_rate": 0.0,
            },
            "projection_dim": 80,
        },
        {**_BOTH, "return_loss": True},
    ),
    "AltCLIP": Architecture(
        "AltCLIPModel",
        {"text_config": {**_BERT, "project_dim": 16}, "vision_config": _EYE, "projection_dim": 16},
        {**_BOTH, "return_loss": True},
    ),
    "Chinese CLIP": Architecture(
        "ChineseCLIPModel",
        {"text_config": _BERT, "vision_config": _EYE, "projection_dim": 16},
        {**_BOTH, "return_loss": True},
    ),
    "X-CLIP": Architecture(
        "XCLIPModel",
        {
            "text_config": _TEXT,
            "vision_config": {
                **_EYE,
                "mit_hidden_size": 16,
                "mit_intermediate_size": 32,
                "mit_num_hidden_layers": 1,
                "mit_num_attention_heads": 2,
                "num_frames": 2,
                "drop_path_rate": 0.0,
            },
            "projection_dim": 16,
            "prompt_layers": 1,
            "prompt_num_attention_heads": 2,
            "prompt_attention_dropout": 0.0,
        },
        {"input_ids": ints(BATCH, LENGTH), "pixel_values": floats(BATCH, 2, 3, 32, 32), "return_loss": True},
    ),
    "BLIP": Architecture(
        "BlipForConditionalGeneration",
        {"text_config": {**_TEXT, **_QUIET}, "vision_config": _EYE, "projection_dim": 16},
        {**tokens(), **pixels(labels=False)},
    ),
    "BLIP-2": Architecture(
        "Blip2ForConditionalGeneration",
        {
            "vision_config": _EYE,
            "qformer_config": {**_BERT, "encoder_hidden_size": 16, "cross_attention_frequency": 1},
            "text_config": {
                "model_type": "opt",
                **_TEXT,
                "ffn_dim": 32,
                "word_embed_proj_dim": 16,
                "dropout": 0.0,
                "use_cache": False,
            },
            "num_query_tokens": 4,
            "image_token_index": _IMAGE_TOKEN,
        },
        _seen(4),
    ),
    "ViLT": Architecture(
        "ViltForQuestionAnswering",
        {**_BERT, "image_size": 32, "patch_size": 8, "num_labels": 3, "max_image_length": -1},
        {**_BOTH, "labels": floats(BATCH, 3)},
    ),
    "FLAVA": Architecture(
        "FlavaModel",
        {
            "text_config": _BERT,
            "image_config": {**_SIZES, **_QUIET, "image_size": 32, "patch_size": 8},
            "multimodal_config": {**_SIZES, **_QUIET},
            "hidden_size": 16,
            "projection_dim": 16,
        },
        _BOTH,
    ),
    "GIT": Architecture(
        "GitForCausalLM", {**_BERT, "vision_config": _EYE, "use_cache": False}, {**tokens(), **pixels(labels=False)}
    ),
    "CLIPSeg": Architecture(
        "CLIPSegForImageSegmentation",
        {
            "text_config": _TEXT,
            "vision_config": _EYE,
            "projection_dim": 16,
            "extract_layers": [0, 1],
            "reduce_dim": 8,
            "decoder_num_attention_heads": 2,
            "decoder_attention_dropout": 0.0,
            "decoder_intermediate_size": 16,
        },
        {**_BOTH, "labels": floats(BATCH, 32, 32)},
    ),
    "OWL-ViT": Architecture(
        "OwlViTForObjectDetection",
        {"text_config": {**_TEXT, "max_position_embeddings": LENGTH}, "vision_config": _EYE, "projection_dim": 16},
        _BOTH,
    ),
    "LLaVA": Architecture(
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **_EYE},
            "text_config": {"model_type": "llama", **_DECODER},
            "image_token_index": _IMAGE_TOKEN,
            "vision_feature_layer": -1,
        },
        _seen(16),
    ),
    "PaliGemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_EYE, "vision_use_head": False},
            "text_config": {"model_type": "gemma", **_DECODER, "head_dim": 8},
            "image_token_index": _IMAGE_TOKEN,
            "projection_dim": 16,
        },
        {**_seen(16), "token_type_ids": ones(BATCH, 20)},
    ),
    "Gemma 3 with images": Architecture(
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_EYE, "vision_use_head": False},
            "text_config": {"model_type": "gemma3_text", **_DECODER, "head_dim": 8, "sliding_window": 8},
            "image_token_index": _IMAGE_TOKEN,
            "mm_tokens_per_image": 4,
        },
        {**_seen(4), "token_type_ids": lambda generator: torch.tensor([[1] * 4 + [0] * 4] * BATCH)},
    ),
    "Qwen2-VL": Architecture(
        "Qwen2VLForConditionalGeneration",
        {
            "vision_config": {
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            "text_config": {
                **_DECODER,
                "rope_parameters": {
                    "type": "default",
                    "rope_type": "default",
                    "mrope_section": [2, 1, 1],
                    "rope_theta": 1e4,
                },
            },
            "image_token_id": _IMAGE_TOKEN,
            "vision_start_token_id": 61,
            "video_token_id": 62,
        },
        {
            "input_ids": _prompt(4, 8),
            "labels": ints(BATCH, 8),
            "pixel_values": floats(BATCH * 16, 96),
            "image_grid_thw": lambda generator: torch.tensor([[1, 4, 4]] * BATCH),
            "mm_token_type_ids": lambda generator: torch.tensor([[1] * 4 + [0] * 4] * BATCH),
        },
    ),
    "Qwen2.5-VL": Architecture(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 32,
                "out_hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            "text_config": {
                **_DECODER,
                "rope_parameters": {
                    "type": "default",
                    "rope_type": "default",
                    "mrope_section": [2, 1, 1],
                    "rope_theta": 1e4,
                },
            },
            "image_token_id": _IMAGE_TOKEN,
            "vision_start_token_id": 61,
            "video_token_id": 62,
        },
        {
            "input_ids": _prompt(4, 8),
            "labels": ints(BATCH, 8),
            "pixel_values": floats(BATCH * 16, 96),
            "image_grid_thw": lambda generator: torch.tensor([[1, 4, 4]] * BATCH),
            "mm_token_type_ids": lambda generator: torch.tensor([[1] * 4 + [0] * 4] * BATCH),
        },
    ),
    "Idefics3": Architecture(
        "Idefics3ForConditionalGeneration",
        {
            "vision_config": _EYE,
            "text_config": {"model_type": "llama", **_DECODER},
            "scale_factor": 2,
            "image_token_id": _IMAGE_TOKEN,
        },
        {
            "input_ids": _prompt(4, 8),
            "labels": ints(BATCH, 8),
            "pixel_values": floats(BATCH, 1, 3, 32, 32),
        },
    ),
    "InternVL": Architecture(
        "InternVLForConditionalGeneration",
        {
            "vision_config": {**_EYE, "image_size": [32, 32], "patch_size": [8, 8]},
            "text_config": {"model_type": "qwen2", **_DECODER},
            "image_token_id": _IMAGE_TOKEN,
            "image_seq_length": 4,
        },
        _seen(4),
    ),
    "Pix2Struct": Architecture(
        "Pix2StructForConditionalGeneration",
        {
            "vision_config": {
                **_SIZES,
                "d_ff": 32,
                "d_kv": 8,
                "patch_embed_hidden_size": 48,
                "seq_len": 16,
                "dropout_rate": 0.0,
            },
            "text_config": {
                "vocab_size": 64,
                "hidden_size": 16,
                "d_kv": 8,
                "d_ff": 32,
                "num_layers": 2,
                "num_heads": 2,
                "dropout_rate": 0.0,
                "use_cache": False,
            },
        },
        {
            "flattened_patches": lambda generator: torch.cat(
                [torch.ones(BATCH, 4, 2), torch.randn(BATCH, 4, 48, generator=generator)], dim=-1
            ),
            "labels": ints(BATCH, LENGTH),
        },
    ),
    "VisualBERT": Architecture(
        "VisualBertForPreTraining",
        {**_BERT, "visual_embedding_dim": 8},
        {
            "input_ids": ints(BATCH, 4),
            "visual_embeds": floats(BATCH, 4, 8),
            "visual_attention_mask": ones(BATCH, 4),
            "attention_mask": ones(BATCH, 4),
            "labels": ints(BATCH, 8),
        },
    ),
    "LXMERT": Architecture(
        "LxmertModel",
        {
            **_BERT,
            "visual_feat_dim": 8,
            "l_layers": 1,
            "x_layers": 1,
            "r_layers": 1,
            "num_qa_labels": 3,
        },
        {"input_ids": ints(BATCH, LENGTH), "visual_feats": floats(BATCH, 4, 8), "visual_pos": floats(BATCH, 4, 4)},
    ),
    "BridgeTower": Architecture(
        "BridgeTowerModel",
        {
            **_SIZES,
            "hidden_size": 64,
            "text_config": {**_BERT, "hidden_size": 64},
            "vision_config": {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "image_size": 32,
                "patch_size": 8,
                "hidden_dropout_prob": 0.0,
            },
        },
        _BOTH,
    ),
    "CLAP": Architecture(
        "ClapModel",
        {
            "text_config": {**_BERT, "pad_token_id": 1},
            "audio_config": {
                "window_size": 2,
                "num_mel_bins": 8,
                "spec_size": 16,
                "patch_size": 2,
                "patch_stride": [2, 2],
                "patch_embeds_hidden_size": 8,
                "num_classes": 2,
                "hidden_size": 16,
                "depths": [1, 1],
                "num_attention_heads": [1, 2],
                **_QUIET,
                "drop_path_rate": 0.0,
                "enable_fusion": False,
            },
            "projection_dim": 16,
        },
        {"input_ids": ints(BATCH, LENGTH), "input_features": floats(BATCH, 1, 32, 8), "return_loss": True},
    ),
    "Decision Transformer": Architecture(
        "DecisionTransformerModel",
        {
            "state_dim": 4,
            "act_dim": 2,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "max_ep_len": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        {
            "states": floats(BATCH, LENGTH, 4),
            "actions": floats(BATCH, LENGTH, 2),
            "rewards": floats(BATCH, LENGTH, 1),
            "returns_to_go": floats(BATCH, LENGTH, 1),
            "timesteps": ints(BATCH, LENGTH, below=32),
            "attention_mask": ones(BATCH, LENGTH),
        },
    ),
    "PatchTST": Architecture(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "prediction_length": 4,
            "attention_dropout": 0.0,
            "ff_dropout": 0.0,
            "head_dropout": 0.0,
            "path_dropout": 0.0,
            "positional_dropout": 0.0,
        },
        {"past_values": floats(BATCH, 16, 2), "future_values": floats(BATCH, 4, 2)},
    ),
}
