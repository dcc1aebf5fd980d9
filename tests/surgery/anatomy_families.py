"""More families of transformers: tiny models, and all heads of all their attention blocks, written from their source.

A row of a table is a configuration with the layout of its heads: where they begin, and how far they are apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bank.live.transformers_models import image, made, pair, text
from catalog import seeded


@dataclass(frozen=True)
class Rows:
    """Rows of a weight, or columns: of head h those from `start` + h·`step` on, each `apart` from the one before."""

    tensor: str
    start: int = 0
    step: int = 8
    size: int = 8
    dim: int = 0
    apart: int = 1

    def of(self, head: int, path: str = "") -> str:
        """What `str(Part)` says of the rows of a head."""
        first = self.start + head * self.step
        ranges = [f"{first}:{first + self.size}"]
        if self.apart > 1:
            ranges = [f"{row}:{row + 1}" for row in range(first, first + self.size * self.apart, self.apart)]
        return f"{path}{self.tensor}[{':, ' * self.dim}{', '.join(ranges)}]"


@dataclass(frozen=True)
class Layout:
    """The heads of attention blocks; the names of `query`, `key`, `value` and `output` are relative to `path`.

    Attributes:
        path: the module that multiplies queries and keys, with {} for the number of a layer.
        layers: those numbers.
        up: how many parts of the path the names of weights leave out.
    """

    path: str
    query: Rows
    key: Rows
    value: Rows
    output: Rows
    heads: int = 4
    kv_heads: int = 4
    rotary: str = ""
    normed: bool = False
    shared: str = ""
    layers: tuple[int, ...] = (0, 1)
    up: int = 0

    def blocks(self) -> dict[str, dict[str, Any]]:
        """By path what is true of a block."""
        return {path: self._block(path) for path in map(self.path.format, self.layers)}

    def _block(self, path: str) -> dict[str, Any]:
        parts = path.split(".")
        inside = "".join(f"{part}." for part in parts[: len(parts) - self.up])
        each, of_kv = range(self.heads), range(self.kv_heads)
        return {
            "heads": (self.heads, self.kv_heads, self.query.size),
            "query": [self.query.of(h, inside) for h in each],
            "key": [self.key.of(h, inside) for h in of_kv],
            "value": [self.value.of(h, inside) for h in of_kv],
            "output": [self.output.of(h, inside) for h in each],
            "groups": tuple(h * self.kv_heads // self.heads for h in each),
            "positions": (self.rotary, self.normed),
            "shared": self.shared and inside + self.shared,
        }


def separate(path: str, names: tuple[str, ...], output: str, *, size: int = 8, up: int = 0, **more: Any) -> Layout:
    """Three layers, heads one after the other."""
    q, k, v = (Rows(f"{name}.weight", 0, size, size) for name in names)
    return Layout(path, q, k, v, Rows(f"{output}.weight", 0, size, size, 1), up=up, **more)


def fused(
    path: str, layer: str = "qkv", output: str = "proj", *, heads: int = 4, size: int = 8, by_head: bool = False,
    start: int = 0, up: int = 0, **more: Any,
) -> Layout:  # fmt: skip
    """One layer: all queries, keys, values; or those of each head one after the other."""
    step, apart = (3 * size, size) if by_head else (size, heads * size)
    q, k, v = (Rows(f"{layer}.weight", start + n * apart, step, size) for n in range(3))
    return Layout(path, q, k, v, Rows(f"{output}.weight", 0, size, size, 1), heads, heads, up=up, **more)


_PROJ, _BERT_NAMES = ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")


def _decoder(path: str = "model.layers.{}.self_attn", rotary: str = "half", **more: Any) -> Layout:
    return separate(path, _PROJ, "o_proj", kv_heads=2, rotary=rotary, **more)


def _bert(path: str = "encoder.layer.{}.attention.self", **more: Any) -> Layout:
    return separate(path, tuple(f"self.{name}" for name in _BERT_NAMES), "output.dense", up=1, **more)


def _nested(path: str) -> Layout:
    """A module `attention` in one of the same name."""
    return separate(path, tuple(f"attention.{name}" for name in _BERT_NAMES), "output.dense", up=1)


def _bart(path: str, **more: Any) -> Layout:
    return separate(path, _PROJ, "out_proj", **more)


def _both(start: str = "") -> tuple[Layout, ...]:
    parts = ("encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn")
    return tuple(_bart(start + part, layers=(0,)) for part in parts)


def _t5() -> tuple[Layout, ...]:
    parts = ("encoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.0.SelfAttention",
             "decoder.block.{}.layer.1.EncDecAttention")  # fmt: skip
    return tuple(separate(path, ("q", "k", "v"), "o", layers=(0,)) for path in parts)


def _vit(path: str, **more: Any) -> Layout:
    return separate(path, _PROJ, "o_proj", **more)


def _latent(rotary: str, query: str) -> Layout:
    """Keys and values of a latent: 4 rows of a key, then 6 of a value, and 2 rotated rows of all keys."""
    return Layout(
        "model.layers.{}.self_attn", Rows(f"{query}.weight", 0, 6, 6), Rows("kv_b_proj.weight", 0, 10, 4),
        Rows("kv_b_proj.weight", 4, 10, 6), Rows("o_proj.weight", 0, 6, 6, 1), rotary=rotary,
        shared="kv_a_proj_with_mqa.weight[8:10]",
    )  # fmt: skip


_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_ENDS}
_BERT = {**_COMMON, "intermediate_size": 24, "max_position_embeddings": 20}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "use_cache": False, "head_dim": 8}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DEEP = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 12,
         "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 6}
_GPT = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20, **_ENDS}
_IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_IMAGE |= {"image_size": 16, "patch_size": 4, "num_channels": 3}
_SEQ = {"vocab_size": 24, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
_SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 20}
_SEQ |= {"use_cache": False, "decoder_start_token_id": 2, **_ENDS}
_T5 = {"vocab_size": 24, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4, "use_cache": False}
_T5 |= {"decoder_start_token_id": 0}
_SPEECH = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SPEECH |= {"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
_SPEECH |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
_SPEECH |= {"apply_spec_augment": False}
_MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}


def _video(frames: int) -> Callable[[], Any]:
    return lambda: {"pixel_values": seeded(2, frames, 3, 16, 16)}


def _waves() -> Any:
    return {"input_values": seeded(2, 400)}


Row = tuple[str, str, dict[str, Any], Callable[[], Any], tuple[Layout, ...]]


def _causal(name: str, options: dict[str, Any], *layouts: Layout, config: str = "") -> Row:
    return f"{name}ForCausalLM", f"{config or name}Config", options, text, layouts or (_decoder(),)


def _encoder(name: str, options: dict[str, Any], *layouts: Layout) -> Row:
    return f"{name}Model", f"{name}Config", options, text, layouts or (_bert(),)


_PLAIN_DECODERS = ("Olmo", "Starcoder2", "Ministral", "SmolLM3", "SeedOss", "Arcee", "BitNet", "VaultGemma", "Cwm")
_NORMED_DECODERS = ("Exaone4", "Apertus", "HunYuanDenseV1", "NanoChat", "Olmo3")
_SEQUENCES = ("MBart", "Blenderbot", "M2M100", "PLBart")
_PAIRED_DECODERS = ("Glm", "Glm4", "Cohere2", "Helium", "Ernie4_5")

FAMILIES: dict[str, Row] = {
    **{name: _causal(name, _LLAMA) for name in _PLAIN_DECODERS},
    **{name: _causal(name, _LLAMA, _decoder(normed=True)) for name in _NORMED_DECODERS},
    **{name: _causal(name, _LLAMA, _decoder(rotary="pairs")) for name in _PAIRED_DECODERS},
    "OlMoE": _causal("Olmoe", {**_LLAMA, **_MOE}, _decoder(normed=True)),
    "Qwen2 MoE": _causal("Qwen2Moe", {**_LLAMA, **_MOE, "shared_expert_intermediate_size": 12}),
    "PhiMoE": _causal("Phimoe", {**_LLAMA, **_MOE}),
    "Granite MoE": _causal("GraniteMoe", {**_LLAMA, **_MOE}),
    "GLM-4 MoE": _causal("Glm4Moe", {**_LLAMA, **_DEEP}),
    "dots.1": _causal("Dots1", {**_LLAMA, **_DEEP}, _decoder(normed=True)),
    "Gemma 3": _causal("Gemma3", _LLAMA, _decoder(normed=True), config="Gemma3Text"),
    "Nemotron": _causal("Nemotron", _LLAMA),
    "DBRX": ("DbrxForCausalLM", "DbrxConfig", {
        "vocab_size": 24, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 20, "use_cache": False,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 12, "moe_num_experts": 4},
    }, text, (Layout(
        "transformer.blocks.{}.norm_attn_norm.attn", Rows("Wqkv.weight"), Rows("Wqkv.weight", 32),
        Rows("Wqkv.weight", 48), Rows("out_proj.weight", dim=1), kv_heads=2, rotary="half",
    ),)),
    "DeepSeek V2": _causal("DeepseekV2", {**_BERT, **_DEEP, **_MLA, "num_key_value_heads": 4, "use_cache": False},
                           _latent("pairs", "q_b_proj")),
    "MiniCPM3": _causal("MiniCPM3", {**_BERT, **_MLA, "num_key_value_heads": 4, "use_cache": False,
                                     "q_lora_rank": None}, _latent("pairs", "q_proj")),  # two rotated entries: one pair
    "MiniMax": _causal("MiniMax", {**_LLAMA, **_MOE, "layer_types": ["linear_attention", "full_attention"],
                                   "block_size": 4}, _decoder(layers=(1,))),
    "Bamba": _causal("Bamba", {**_LLAMA, **_MAMBA, "attn_layer_indices": [1], "mamba_n_heads": 4,
                               "mamba_chunk_size": 4}, _decoder(layers=(1,))),
    "Jamba": _causal("Jamba", {**_LLAMA, **_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                               "use_mamba_kernels": False, "mamba_dt_rank": 4}, _decoder(rotary="", layers=(1,))),
    "Persimmon": _causal("Persimmon", {**_BERT, "use_cache": False}, fused(
        "model.layers.{}.self_attn", "query_key_value", "dense", by_head=True, rotary="half", normed=True)),
    "GPT-NeoX Japanese": _causal("GPTNeoXJapanese", {**_BERT, "use_cache": False}, fused(
        "gpt_neox_japanese.layers.{}.attention", "query_key_value", "dense", by_head=True, rotary="half")),
    # four parts of a head each: queries, values, keys
    "CodeGen": _causal("CodeGen", {**_GPT, "n_ctx": 20, "rotary_dim": 4, "use_cache": False}, Layout(
        "transformer.h.{}.attn", Rows("qkv_proj.weight", 0, 24), Rows("qkv_proj.weight", 16, 24),
        Rows("qkv_proj.weight", 8, 24), Rows("out_proj.weight", dim=1), rotary="pairs")),
    "GPT-BigCode": _causal("GPTBigCode", {**_GPT, "use_cache": False}, Layout(
        "transformer.h.{}.attn", Rows("c_attn.weight"), Rows("c_attn.weight", 32), Rows("c_attn.weight", 40),
        Rows("c_proj.weight", dim=1), kv_heads=1)),
    "GPT": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", _GPT, text, (Layout(
        "transformer.h.{}.attn", *(Rows("c_attn.weight", n, dim=1) for n in (0, 32, 64)), Rows("c_proj.weight")),)),
    "ImageGPT": ("ImageGPTModel", "ImageGPTConfig", {**_GPT, "use_cache": False}, text, (Layout(
        "h.{}.attn", *(Rows("c_attn.weight", n, dim=1) for n in (0, 32, 64)), Rows("c_proj.weight")),)),
    "XGLM": _causal("XGLM", {"vocab_size": 24, "d_model": 32, "ffn_dim": 24, "num_layers": 2, "attention_heads": 4,
                             "max_position_embeddings": 20, "use_cache": False, **_ENDS},
                    _bart("model.layers.{}.self_attn")),
    "BioGPT": _causal("BioGpt", {**_BERT, "use_cache": False}, _bart("biogpt.layers.{}.self_attn")),
    "CTRL": ("CTRLLMHeadModel", "CTRLConfig", {**_GPT, "dff": 24, "use_cache": False}, text, (separate(
        "transformer.h.{}.multi_head_attention", ("Wq", "Wk", "Wv"), "dense"),)),
    "ModernBERT decoder": _causal("ModernBertDecoder", {**_BERT, "use_cache": False, "cls_token_id": 1,
                                                        "sep_token_id": 2},
                                  separate("model.layers.{}.attn", _PROJ, "Wo", rotary="half")),
    "EuroBERT": _encoder("EuroBert", _LLAMA, _decoder("layers.{}.self_attn")),
    "Nomic BERT": _encoder("NomicBert", _BERT, _vit("layers.{}.self_attn", rotary="half")),
    **{name: _encoder(name, _BERT) for name in ("MegatronBert", "Ernie", "Data2VecText", "IBert", "LayoutLM")},
    **{name: _encoder(name, _BERT) for name in ("XLMRoberta", "XLMRobertaXL", "Splinter", "RobertaPreLayerNorm")},
    "BigBird": _encoder("BigBird", {**_BERT, "attention_type": "original_full"}),
    "RoFormer": _encoder("RoFormer", _BERT, _bert(rotary="pairs")),
    "ESM": _encoder("Esm", {**_BERT, "position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False},
                    _bert(rotary="half")),
    "RemBERT": _encoder("RemBert", {**_BERT, "input_embedding_size": 8, "output_embedding_size": 8}),
    "MobileBERT": _encoder("MobileBert", {**_BERT, "embedding_size": 8, "intra_bottleneck_size": 16},
                           separate("encoder.layer.{}.attention.self", tuple(f"self.{n}" for n in _BERT_NAMES),
                                     "output.dense", size=4, up=1)),
    "SqueezeBERT": _encoder("SqueezeBert", {**_BERT, "embedding_size": 32}, separate(
        "encoder.layers.{}.attention.matmul_qk", tuple(f"attention.{n}" for n in _BERT_NAMES), "post_attention.conv1d",
        up=2)),
    "XLM": _encoder("XLM", {"vocab_size": 24, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 20,
                            **_ENDS}, separate("attentions.{}", ("q_lin", "k_lin", "v_lin"), "out_lin")),
    **{name: (f"{name}Model", f"{name}Config", _SEQ, pair, _both()) for name in _SEQUENCES},
    "Speech2Text": ("Speech2TextModel", "Speech2TextConfig", {
        **_SEQ, "input_feat_per_channel": 8, "input_channels": 1, "num_conv_layers": 1, "conv_kernel_sizes": (3,),
        "conv_channels": 16, "max_source_positions": 20, "max_target_positions": 20,
    }, lambda: {"input_features": seeded(2, 20, 8), "decoder_input_ids": pair()["input_ids"]}, _both()),
    "TrOCR": _causal("TrOCR", {k: v for k, v in _SEQ.items() if not k.startswith("encoder")},
                     _bart("model.decoder.layers.{}.self_attn", layers=(0,))),
    "UMT5": ("UMT5Model", "UMT5Config", _T5, pair, _t5()),
    "Switch": ("SwitchTransformersModel", "SwitchTransformersConfig",
               {**_T5, "num_decoder_layers": 1, "num_experts": 2, "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 1}, pair, _t5()),
    "DINOv2, registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", _IMAGE, image(),
                          (_vit("encoder.layer.{}.attention"),)),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", _IMAGE, image(),
               (_vit("model.layer.{}.attention", rotary="half"),)),
    "ViT-MSN": ("ViTMSNModel", "ViTMSNConfig", _IMAGE, image(), (_vit("layers.{}.attention"),)),
    "I-JEPA": ("IJepaModel", "IJepaConfig", _IMAGE, image(), (_vit("layers.{}.attention"),)),
    "YOLOS": ("YolosModel", "YolosConfig", {**_IMAGE, "image_size": [16, 16], "num_detection_tokens": 3}, image(),
              (_nested("encoder.layer.{}.attention.attention"),)),
    "DPT": ("DPTModel", "DPTConfig", _IMAGE, image(), (_nested("encoder.layer.{}.attention.attention"),)),
    "VideoMAE": ("VideoMAEModel", "VideoMAEConfig", {**_IMAGE, "num_frames": 4}, _video(4),
                 (_nested("encoder.layer.{}.attention.attention"),)),
    "ViViT": ("VivitModel", "VivitConfig", {**_IMAGE, "num_frames": 4, "tubelet_size": [2, 4, 4]}, _video(4),
              (_vit("layers.{}.attention"),)),
    "TimeSformer": ("TimesformerModel", "TimesformerConfig", {**_IMAGE, "num_frames": 2}, _video(2), tuple(
        fused(f"encoder.layer.{{}}.{kind}.attention", "attention.qkv", "output.dense", up=1)
        for kind in ("attention", "temporal_attention"))),
    "PVT": ("PvtModel", "PvtConfig", {
        "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [32, 32],
        "num_attention_heads": [4, 4], "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2],
        "mlp_ratios": [2, 2],
    }, image(32), (_bert("encoder.block.{}.0.attention.self"),)),
    "PVT v2": ("PvtV2Model", "PvtV2Config", {
        "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [32, 32],
        "num_attention_heads": [4, 4], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2],
        "mlp_ratios": [2, 2],
    }, image(32), (separate("encoder.layers.{}.blocks.0.attention", _BERT_NAMES, "proj"),)),
    "CvT": ("CvtModel", "CvtConfig", {
        "embed_dim": [32] * 3, "num_heads": [4] * 3, "depth": [1, 2, 3],
    }, image(64), tuple(
        separate(f"encoder.stages.{stage}.layers.{{}}.attention.attention",
                 tuple(f"attention.projection_{name}" for name in _BERT_NAMES), "output.dense", up=1,
                 layers=tuple(range(stage + 1))) for stage in range(3))),
    "Hiera": ("HieraModel", "HieraConfig", {
        "embed_dim": 32, "image_size": (32, 32), "depths": [1, 1], "num_heads": [4, 8], "num_query_pool": 1,
        "masked_unit_size": (4, 4), "masked_unit_attention": (True, False),
    }, image(32), (
        fused("encoder.stages.{}.layers.0.attn", "qkv", "proj", layers=(0,)),
        Layout("encoder.stages.{}.layers.0.attn", *(Rows("qkv.weight", n) for n in (0, 64, 128)),
               Rows("proj.weight", dim=1), 8, 8, layers=(1,)))),
    "SEW": ("SEWModel", "SEWConfig", {**_SPEECH, "squeeze_factor": 1}, _waves, (_bart("encoder.layers.{}.attention"),)),
    "UniSpeech": ("UniSpeechModel", "UniSpeechConfig", _SPEECH, _waves, (_bart("encoder.layers.{}.attention"),)),
    "AST": ("ASTModel", "ASTConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "patch_size": 4,
        "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8,
    }, lambda: {"input_values": seeded(2, 16, 8)}, (_vit("layers.{}.attention"),)),
    "w2v-BERT": ("Wav2Vec2BertModel", "Wav2Vec2BertConfig", {
        **{k: v for k, v in _COMMON.items() if k != "vocab_size"}, "intermediate_size": 24,
        "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "apply_spec_augment": False,
    }, lambda: {"input_features": seeded(2, 12, 8)}, (separate(
        "encoder.layers.{}.self_attn", ("linear_q", "linear_k", "linear_v"), "linear_out"),)),
}  # fmt: skip
MAKE = {name: made(*row[:4]) for name, row in FAMILIES.items()}
QUICK = ("CodeGen", "GPT-BigCode", "GPT")
