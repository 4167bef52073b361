"""Vision: transformers, convolutions, pyramids, detection, segmentation and video."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import BATCH, Architecture, floats, ints, pixels

_QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    **_QUIET,
}
_SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2, 1],
    "num_heads": [1, 2, 2],
    "window_size": 4,
    **_QUIET,
}
_BACKBONE: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
    "layer_type": "basic",
}
_DETR: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 4,
    "num_labels": 3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": _BACKBONE,
    "auxiliary_loss": False,
}


def _classifier(model: str, settings: dict[str, Any], side: int = 32, **more: Any) -> Architecture:
    return Architecture(f"{model}ForImageClassification", {**settings, **more}, pixels(side))


VISION: dict[str, Architecture] = {
    "ViT": _classifier("ViT", _VIT),
    "DeiT": _classifier("DeiT", _VIT),
    "BEiT": _classifier("Beit", _VIT, use_relative_position_bias=True, layer_scale_init_value=0.1),
    "Data2Vec vision": _classifier("Data2VecVision", _VIT, use_shared_relative_position_bias=True),
    "DINOv2": _classifier("Dinov2", _VIT),
    "DINOv2 with registers": _classifier("Dinov2WithRegisters", _VIT, num_register_tokens=2),
    "DINOv3 ViT": Architecture("DINOv3ViTModel", {**_VIT, "num_register_tokens": 2}, pixels(labels=False)),
    "I-JEPA": _classifier("IJepa", _VIT),
    "ViT-MSN": _classifier("ViTMSN", _VIT),
    "ViT-MAE": Architecture(
        "ViTMAEForPreTraining",
        {
            **_VIT,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        {**pixels(labels=False), "noise": floats(BATCH, 16)},
    ),
    "Hiera": _classifier(
        "Hiera",
        {
            "image_size": [32, 32],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
            "drop_path_rate": 0.0,
        },
    ),
    "Swin": _classifier("Swin", _SWIN),
    "Swin v2": _classifier("Swinv2", _SWIN),
    "ConvNeXt": _classifier("ConvNext", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}),
    "ConvNeXt v2": _classifier("ConvNextV2", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}),
    "ResNet": _classifier("ResNet", {k: v for k, v in _BACKBONE.items() if k not in ("model_type", "out_features")}),
    "RegNet": _classifier(
        "RegNet", {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 4}
    ),
    "PVT": _classifier(
        "Pvt",
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "patch_sizes": [4, 2, 2, 2],
            "strides": [4, 2, 2, 2],
            "sequence_reduction_ratios": [2, 2, 1, 1],
            **_QUIET,
        },
    ),
    "PoolFormer": _classifier(
        "PoolFormer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "mlp_ratio": 2.0, "drop_path_rate": 0.0}
    ),
    "CvT": _classifier(
        "Cvt",
        {
            "embed_dim": [8, 16, 16],
            "depth": [1, 2, 3],
            "num_heads": [1, 2, 2],
            "patch_sizes": [7, 3, 3],
            "patch_stride": [4, 2, 2],
            "patch_padding": [2, 1, 1],
            "drop_rate": [0.0, 0.0, 0.0],
            "attention_drop_rate": [0.0, 0.0, 0.0],
            "drop_path_rate": [0.0, 0.0, 0.0],
            "mlp_ratio": [2.0, 2.0, 2.0],
            "qkv_bias": [True, True, True],
            "cls_token": [False, True, True],
            "qkv_projection_method": ["dw_bn", "dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3, 3],
            "padding_kv": [1, 1, 1],
            "stride_kv": [2, 2, 2],
            "padding_q": [1, 1, 1],
            "stride_q": [1, 1, 1],
        },
    ),
    "FocalNet": _classifier(
        "FocalNet",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            **_QUIET,
        },
    ),
    "BiT": _classifier(
        "Bit", {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_groups": 2}
    ),
    "MobileNet v2": _classifier(
        "MobileNetV2", {"image_size": 32, "depth_multiplier": 0.25, "classifier_dropout_prob": 0.0}
    ),
    "MobileViT": _classifier(
        "MobileViT",
        {
            "image_size": 32,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 8],
            "num_attention_heads": 2,
            "hidden_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.0,
        },
        side=64,
    ),
    "LeViT": _classifier(
        "Levit",
        {
            "image_size": 64,
            "num_attention_heads": [1, 2],
            "hidden_sizes": [16, 16],
            "depths": [1, 1],
            "key_dim": [8, 8],
            "attention_ratio": [2, 2],
            "mlp_ratio": [2, 2],
            "down_ops": [["Subsample", 8, 2, 4, 2, 2], [""]],
            "drop_path_rate": 0,
        },
        side=64,
    ),
    "EfficientNet": _classifier(
        "EfficientNet",
        {
            "image_size": 32,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "drop_connect_rate": 0.0,
            "dropout_rate": 0.0,
        },
    ),
    "ImageGPT": Architecture(
        "ImageGPTForImageClassification",
        {
            "vocab_size": 64,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        {"input_ids": ints(BATCH, 8), "labels": ints(BATCH, below=2, start=0)},
    ),
    "SegFormer": Architecture(
        "SegformerForSemanticSegmentation",
        {
            "num_labels": 3,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
            "classifier_dropout_prob": 0.0,
            **_QUIET,
        },
        {**pixels(labels=False), "labels": ints(BATCH, 32, 32, below=3, start=0)},
    ),
    "DPT": Architecture(
        "DPTForDepthEstimation",
        {
            **_VIT,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [4, 4, 8, 8],
            "fusion_hidden_size": 8,
            "is_hybrid": False,
        },
        pixels(labels=False),
    ),
    "DETR": Architecture("DetrForObjectDetection", _DETR, pixels(labels=False)),
    "Conditional DETR": Architecture("ConditionalDetrForObjectDetection", _DETR, pixels(labels=False)),
    "DAB-DETR": Architecture(
        "DabDetrForObjectDetection", {**_DETR, "hidden_size": 16, "num_attention_heads": 2}, pixels(labels=False)
    ),
    "Deformable DETR": Architecture(
        "DeformableDetrForObjectDetection",
        {
            **_DETR,
            "d_model": 32,
            "num_feature_levels": 2,
            "backbone_config": {**_BACKBONE, "out_features": ["stage3", "stage4"]},
        },
        pixels(labels=False),
    ),
    "Table Transformer": Architecture("TableTransformerForObjectDetection", _DETR, pixels(labels=False)),
    "YOLOS": Architecture(
        "YolosForObjectDetection",
        {**_VIT, "image_size": [32, 32], "num_detection_tokens": 4, "num_labels": 3, "auxiliary_loss": False},
        pixels(labels=False),
    ),
    "VideoMAE": Architecture(
        "VideoMAEForVideoClassification",
        {**_VIT, "num_frames": 4, "tubelet_size": 2},
        {"pixel_values": floats(BATCH, 4, 3, 32, 32), "labels": ints(BATCH, below=2, start=0)},
    ),
    "TimeSformer": Architecture(
        "TimesformerForVideoClassification",
        {**_VIT, "num_frames": 4, "drop_path_rate": 0},
        {"pixel_values": floats(BATCH, 4, 3, 32, 32), "labels": ints(BATCH, below=2, start=0)},
    ),
    "SAM": Architecture(
        "SamModel",
        {
            "vision_config": {
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "mlp_dim": 32,
                "global_attn_indexes": [1],
                "window_size": 2,
                "num_pos_feats": 4,
            },
            "prompt_encoder_config": {"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            "mask_decoder_config": {
                "hidden_size": 8,
                "mlp_dim": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 8,
            },
        },
        {**pixels(labels=False), "input_points": floats(BATCH, 1, 1, 2)},
    ),
}
