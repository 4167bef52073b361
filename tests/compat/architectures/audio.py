"""Audio: from waves and from spectrograms."""

from __future__ import annotations

from typing import Any

from tests.compat.architectures.case import BATCH, LENGTH, Architecture, floats, ints

_WAVE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": [8, 8],
    "conv_kernel": [5, 3],
    "conv_stride": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "feat_extract_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "ctc_loss_reduction": "mean",
    "pad_token_id": 0,
}
_HEARD: dict[str, Any] = {"input_values": floats(BATCH, 160), "labels": ints(BATCH, 4, below=16)}
_WHISPER: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def _ctc(model: str, **more: Any) -> Architecture:
    return Architecture(f"{model}ForCTC", {**_WAVE, **more}, _HEARD)


AUDIO: dict[str, Architecture] = {
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        {
            **_WHISPER,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        {"input_features": floats(BATCH, 8, 16), "labels": ints(BATCH, LENGTH)},
    ),
    "Wav2Vec2": _ctc("Wav2Vec2"),
    "Wav2Vec2, stable layer norm": _ctc("Wav2Vec2", do_stable_layer_norm=True, feat_extract_norm="layer"),
    "HuBERT": _ctc("Hubert"),
    "WavLM": _ctc("WavLM", num_buckets=8, max_bucket_distance=16),
    "UniSpeech": _ctc("UniSpeech"),
    "UniSpeech-SAT": _ctc("UniSpeechSat"),
    "Data2Vec audio": _ctc("Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=3),
    "SEW": _ctc("SEW", squeeze_factor=2),
    "SEW-D": _ctc("SEWD", squeeze_factor=2, max_position_embeddings=32, position_buckets=8),
    "Wav2Vec2 Conformer": _ctc(
        "Wav2Vec2Conformer",
        position_embeddings_type="relative",
        conv_depthwise_kernel_size=3,
        conformer_conv_dropout=0.0,
    ),
    "Wav2Vec2-BERT": Architecture(
        "Wav2Vec2BertForCTC",
        {
            **_WAVE,
            "feature_projection_input_dim": 8,
            "conv_depthwise_kernel_size": 3,
            "conformer_conv_dropout": 0.0,
            "left_max_position_embeddings": 8,
            "right_max_position_embeddings": 4,
        },
        {"input_features": floats(BATCH, 16, 8), "labels": ints(BATCH, 4, below=16)},
    ),
    "Audio Spectrogram Transformer": Architecture(
        "ASTForAudioClassification",
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 16,
            "num_mel_bins": 8,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        {"input_values": floats(BATCH, 16, 8), "labels": ints(BATCH, below=2, start=0)},
    ),
    "Speech2Text": Architecture(
        "Speech2TextForConditionalGeneration",
        {
            **_WHISPER,
            "input_feat_per_channel": 8,
            "input_channels": 1,
            "num_conv_layers": 2,
            "conv_kernel_sizes": [3, 3],
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
        {"input_features": floats(BATCH, 16, 8), "labels": ints(BATCH, LENGTH)},
    ),
    "Moonshine": Architecture(
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
        {"input_values": floats(BATCH, 1600), "labels": ints(BATCH, LENGTH)},
    ),
    "SpeechT5": Architecture(
        "SpeechT5ForSpeechToText",
        {
            **_WAVE,
            "vocab_size": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "positional_dropout": 0.0,
            "max_speech_positions": 64,
            "max_text_positions": 32,
            "encoder_max_relative_position": 8,
            "decoder_start_token_id": 2,
            "use_cache": False,
        },
        {"input_values": floats(BATCH, 160), "labels": ints(BATCH, LENGTH)},
    ),
}
