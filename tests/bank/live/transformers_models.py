"""Models of transformers: a member of each family from a tiny configuration, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bank.live.case import Case, Made
from catalog import seeded
from foreign import transformers

TOKENS = torch.arange(12).reshape(2, 6) % 7 + 3
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **_ENDS}
_BERT = {**_COMMON, "intermediate_size": 24, "max_position_embeddings": 20}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "use_cache": False, "head_dim": 8}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_IMAGE |= {"image_size": 16, "patch_size": 4, "num_channels": 3}
_SEQ = {"vocab_size": 24, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
_SEQ |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 20}
_SEQ |= {"use_cache": False, "decoder_start_token_id": 2, **_ENDS}
_SPEECH = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SPEECH |= {"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
_SPEECH |= {
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
_STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_channels": 3}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}

Options = dict[str, Any]
Inputs = Callable[[], Any]


def text() -> Any:
    return {"input_ids": TOKENS}


def pair() -> Any:
    return {"input_ids": TOKENS, "decoder_input_ids": TOKENS}


def image(size: int = 16) -> Inputs:
    return lambda: {"pixel_values": seeded(2, 3, size, size)}


def waves() -> Any:
    return {"input_values": seeded(2, 400)}


# name -> model, configuration, options, input
MODELS: dict[str, tuple[str, str, Options, Inputs]] = {
    "BERT": ("BertModel", "BertConfig", _BERT, text),
    "BERT, masked": ("BertForMaskedLM", "BertConfig", _BERT, text),
    "RoBERTa": ("RobertaModel", "RobertaConfig", _BERT, text),
    "ALBERT": ("AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 8}, text),
    "ELECTRA": ("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 8}, text),
    "DeBERTa v2": ("DebertaV2Model", "DebertaV2Config", {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, text),
    "DistilBERT": ("DistilBertModel", "DistilBertConfig", {"vocab_size": 24, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20}, text),
    "MPNet": ("MPNetModel", "MPNetConfig", _BERT, text),
    "FNet": ("FNetModel", "FNetConfig", {**_BERT, "tpu_short_seq_length": 6}, text),
    "ModernBERT": ("ModernBertModel", "ModernBertConfig", {**_BERT, "cls_token_id": 1, "sep_token_id": 2, "attn_implementation": "eager"}, text),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "use_cache": False, **_ENDS}, text),
    "GPT-J": ("GPTJModel", "GPTJConfig", {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 20, "use_cache": False, **_ENDS}, text),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BERT, "use_cache": False}, text),
    "GPT-Neo": ("GPTNeoModel", "GPTNeoConfig", {"vocab_size": 24, "hidden_size": 16, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 2, "max_position_embeddings": 20, "use_cache": False, **_ENDS}, text),
    "OPT": ("OPTForCausalLM", "OPTConfig", {**_COMMON, "ffn_dim": 24, "max_position_embeddings": 20, "word_embed_proj_dim": 8, "use_cache": False}, text),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 24, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False, **_ENDS}, text),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {**_COMMON, "use_cache": False}, text),
    "MPT": ("MptForCausalLM", "MptConfig", {"vocab_size": 24, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 20, "use_cache": False}, text),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, text),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}, text),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA, text),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, **_MOE}, text),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, text),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, text),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_LLAMA, **_MOE}, text),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", _LLAMA, text),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**_LLAMA, "attn_implementation": "eager"}, text),
    "Phi": ("PhiForCausalLM", "PhiConfig", {**_BERT, "use_cache": False}, text),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA, text),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA, text),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", _LLAMA, text),
    "Cohere": ("CohereForCausalLM", "CohereConfig", _LLAMA, text),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", _LLAMA, text),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**_LLAMA, **_MOE}, text),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_BERT, "num_key_value_heads": 2, "use_cache": False, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 12}, text),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 24, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False, **_ENDS}, text),
    "Mamba 2": ("Mamba2ForCausalLM", "Mamba2Config", {"vocab_size": 24, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1, "use_cache": False, **_ENDS}, text),
    "RWKV": ("RwkvModel", "RwkvConfig", {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "use_cache": False, **_ENDS}, text),
    "LFM2": ("Lfm2ForCausalLM", "Lfm2Config", {**_LLAMA, "layer_types": ["conv", "full_attention"]}, text),
    "T5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "use_cache": False, "decoder_start_token_id": 0}, pair),
    "BART": ("BartModel", "BartConfig", _SEQ, pair),
    "Marian": ("MarianMTModel", "MarianConfig", _SEQ, pair),
    "Pegasus": ("PegasusModel", "PegasusConfig", _SEQ, pair),
    "Whisper": ("WhisperModel", "WhisperConfig", {**_SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20, "suppress_tokens": None, "begin_suppress_tokens": None}, lambda: {"input_features": seeded(2, 8, 20), "decoder_input_ids": TOKENS}),
    "wav2vec 2.0": ("Wav2Vec2Model", "Wav2Vec2Config", _SPEECH, waves),
    "wav2vec 2.0, layer norms": ("Wav2Vec2Model", "Wav2Vec2Config", {**_SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True}, waves),
    "HuBERT": ("HubertModel", "HubertConfig", _SPEECH, waves),
    "WavLM": ("WavLMModel", "WavLMConfig", {**_SPEECH, "num_buckets": 8, "max_bucket_distance": 16}, waves),
    "Conformer": ("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", {**_SPEECH, "conv_depthwise_kernel_size": 3}, waves),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**_IMAGE, "num_labels": 4}, image()),
    "DeiT": ("DeiTModel", "DeiTConfig", _IMAGE, image()),
    "BEiT": ("BeitModel", "BeitConfig", _IMAGE, image()),
    "DINOv2": ("Dinov2Model", "Dinov2Config", _IMAGE, image()),
    "SigLIP vision": ("SiglipVisionModel", "SiglipVisionConfig", _IMAGE, image()),
    "CLIP vision": ("CLIPVisionModel", "CLIPVisionConfig", _IMAGE, image()),
    "CLIP": ("CLIPModel", "CLIPConfig", {"text_config": _BERT, "vision_config": _IMAGE, "projection_dim": 8}, lambda: {**text(), **image()()}),
    "Swin": ("SwinModel", "SwinConfig", _SWIN, image(32)),
    "Swin v2": ("Swinv2Model", "Swinv2Config", _SWIN, image(32)),
    "ConvNeXt": ("ConvNextModel", "ConvNextConfig", {"num_stages": 2, **_STAGES}, image(32)),
    "ConvNeXt V2": ("ConvNextV2Model", "ConvNextV2Config", {"num_stages": 2, **_STAGES}, image(32)),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "layer_type": "basic", **_STAGES}, image(32)),
    "RegNet": ("RegNetModel", "RegNetConfig", {"embedding_size": 8, "groups_width": 8, **_STAGES}, image(32)),
    "SegFormer": ("SegformerModel", "SegformerConfig", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8}, image(32)),
    "PoolFormer": ("PoolFormerModel", "PoolFormerConfig", {"depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "num_encoder_blocks": 2, "mlp_ratio": 2.0}, image(32)),
    "MobileNet V2": ("MobileNetV2Model", "MobileNetV2Config", {"depth_multiplier": 0.35}, image(32)),
    "LeViT": ("LevitModel", "LevitConfig", {"image_size": 64, "hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 1, 1], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, image(64)),
    "ViTMAE": ("ViTMAEModel", "ViTMAEConfig", {**_IMAGE, "mask_ratio": 0.5}, image()),
    "time series": ("PatchTSTModel", "PatchTSTConfig", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24}, lambda: {"past_values": seeded(2, 16, 2)}),
}  # fmt: skip


def made(model: str, config: str, options: Options, inputs: Inputs) -> Callable[[], Made]:
    def make() -> Made:
        library = transformers()
        options_of = dict(options)
        attention = options_of.pop("attn_implementation", "eager")
        made_config = getattr(library, config)(**options_of)
        made_config._attn_implementation = attention
        made_config._experts_implementation = "eager"  # the grouped kernel takes no float64
        return getattr(library, model)(made_config), inputs()

    return make


# The norms of transformers compute in float32 whatever the weights are.
CASES = [Case(name, "transformers", made(*row), 1e-5) for name, row in MODELS.items()]
