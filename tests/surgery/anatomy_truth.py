"""The attention of models of timm and transformers, written down from their source: the rows of the last head.

A row is (path of the block, rotary, normed, query, key, value, output); heads and their size follow from `heads`.
"""

from __future__ import annotations

from dataclasses import dataclass

_BERT = ("query", "key", "value")
_PROJ = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Truth:
    """What is true of one block, of the last head and its keys and values."""

    path: str
    heads: int
    kv_heads: int
    size: int
    query: str
    key: str
    value: str
    output: str
    rotary: str | None = ""
    normed: bool = False
    shared: str = ""


def _separate(
    path: str,
    layers: tuple[str, str, str],
    output: str,
    *,
    heads: int = 2,
    kv: int | None = None,
    size: int = 8,
    rotary: str | None = "",
    normed: bool = False,
) -> Truth:
    """Three layers whose heads follow each other."""
    kv = heads if kv is None else kv
    inside = f"{path}." if path else ""
    q, k, v = (f"{inside}{name}.weight" for name in layers)
    last, of_kv = f"[{heads * size - size}:{heads * size}]", f"[{kv * size - size}:{kv * size}]"
    columns = f".weight[:, {heads * size - size}:{heads * size}]"
    return Truth(path, heads, kv, size, q + last, k + of_kv, v + of_kv, output + columns, rotary, normed)


def _fused(
    path: str,
    layer: str = "qkv",
    output: str = "proj",
    *,
    heads: int = 2,
    size: int = 8,
    order: tuple[int, int, int] = (0, 1, 2),
    by_head: bool = False,
    rotary: str | None = "",
    normed: bool = False,
) -> Truth:
    """One layer: all queries, then all keys, then all values; or the three of each head one after the other."""
    width = heads * size
    starts = [3 * (width - size) + n * size if by_head else n * width + width - size for n in order]
    q, k, v = (f"{path}.{layer}.weight[{start}:{start + size}]" for start in starts)
    return Truth(
        path, heads, heads, size, q, k, v, f"{path}.{output}.weight[:, {width - size}:{width}]", rotary, normed
    )


def _decoder(path: str = "model.layers.0.self_attn", *, normed: bool = False, rotary: str = "half") -> Truth:
    return _separate(path, _PROJ, f"{path}.o_proj", kv=1, rotary=rotary, normed=normed)


def _bart(path: str = "encoder.layers.0.self_attn") -> Truth:
    return _separate(path, _PROJ, f"{path}.out_proj")


def _vit(path: str) -> Truth:
    return _separate(path, _PROJ, f"{path}.o_proj")


def _bert(path: str = "encoder.layer.0.attention") -> Truth:
    return _separate(f"{path}.self", _BERT, f"{path}.output.dense")


_GPT = "transformer.h.0.attn"
_MLA = "model.layers.0.self_attn"
_T5 = "encoder.block.0.layer.0.SelfAttention"
_ALBERT = "encoder.albert_layer_groups.0.albert_layers.0.attention"
_DEBERTA = "encoder.layer.0.attention"

TRANSFORMERS: dict[str, Truth] = {
    "BERT": _bert(),
    "BERT, masked": _bert("bert.encoder.layer.0.attention"),
    "RoBERTa": _bert(),
    "ELECTRA": _bert(),
    "ALBERT": _separate(_ALBERT, _BERT, f"{_ALBERT}.dense"),
    "DeBERTa v2": _separate(f"{_DEBERTA}.self", ("query_proj", "key_proj", "value_proj"), f"{_DEBERTA}.output.dense"),
    "DistilBERT": _separate(
        "transformer.layer.0.attention", ("q_lin", "k_lin", "v_lin"), "transformer.layer.0.attention.out_lin"
    ),
    "MPNet": _separate("encoder.layer.0.attention.attn", ("q", "k", "v"), "encoder.layer.0.attention.attn.o"),
    "ModernBERT": _fused("layers.0.attn", "Wqkv", "Wo", rotary="half"),
    "GPT-2": Truth(
        _GPT, 2, 2, 8, f"{_GPT}.c_attn.weight[:, 8:16]", f"{_GPT}.c_attn.weight[:, 24:32]",
        f"{_GPT}.c_attn.weight[:, 40:48]", f"{_GPT}.c_proj.weight[8:16]",
    ),
    "GPT-J": _separate("h.0.attn", _PROJ, "h.0.attn.out_proj", rotary="pairs"),
    # two rotated entries: one pair
    "GPT-NeoX": _fused("gpt_neox.layers.0.attention", "query_key_value", "dense", by_head=True, rotary="pairs"),
    "GPT-Neo": _separate("h.0.attn.attention", _PROJ, "h.0.attn.attention.out_proj"),
    "OPT": _bart("model.decoder.layers.0.self_attn"),
    "BLOOM": _fused("transformer.h.0.self_attention", "query_key_value", "dense", by_head=True),
    "Falcon": Truth(
        "transformer.h.0.self_attention", 2, 1, 8,
        *(f"transformer.h.0.self_attention.query_key_value.weight[{n}:{n + 8}]" for n in (8, 16, 24)),
        "transformer.h.0.self_attention.dense.weight[:, 8:16]", "half",
    ),
    "MPT": _fused("transformer.blocks.0.attn", "Wqkv", "out_proj"),
    **dict.fromkeys(("Llama", "Llama, tied", "Mistral", "Mixtral", "Qwen2", "Gemma", "Gemma 2", "Granite"), _decoder()),
    **dict.fromkeys(("Qwen3", "Qwen3 MoE", "OLMo 2"), _decoder(normed=True)),
    "gpt-oss": _decoder(),
    "Cohere": _decoder(rotary="pairs"),
    "StableLM": _decoder(rotary="pairs"),  # two rotated entries: one pair
    "Phi": _separate(_MLA, _PROJ, f"{_MLA}.dense", rotary="half"),
    "Phi-3": Truth(
        _MLA, 2, 1, 8, *(f"{_MLA}.qkv_proj.weight[{n}:{n + 8}]" for n in (8, 16, 24)), f"{_MLA}.o_proj.weight[:, 8:16]",
        "half",
    ),
    "DeepSeek V3": Truth(
        _MLA, 2, 2, 8, f"{_MLA}.q_b_proj.weight[8:16]", f"{_MLA}.kv_b_proj.weight[12:16]",
        f"{_MLA}.kv_b_proj.weight[16:24]", f"{_MLA}.o_proj.weight[:, 8:16]", "pairs", False,
        f"{_MLA}.kv_a_proj_with_mqa.weight[8:12]",
    ),
    "LFM2": _separate(
        "model.layers.1.self_attn", _PROJ, "model.layers.1.self_attn.out_proj", kv=1, rotary="half", normed=True
    ),
    "T5": _separate(_T5, ("q", "k", "v"), f"{_T5}.o"),
    "BART": _bart("decoder.layers.0.encoder_attn"),
    "Marian": _bart("model.encoder.layers.0.self_attn"),
    "Pegasus": _bart(),
    "Whisper": _bart(),
    "wav2vec 2.0": _bart("encoder.layers.0.attention"),
    "HuBERT": _bart("encoder.layers.0.attention"),
    "WavLM": _bart("encoder.layers.0.attention"),
    "Conformer": _separate(
        "encoder.layers.0.self_attn", ("linear_q", "linear_k", "linear_v"), "encoder.layers.0.self_attn.linear_out"
    ),
    "ViT": _vit("vit.layers.0.attention"),
    "DeiT": _vit("layers.0.attention"),
    "BEiT": _vit("layers.0.attention"),
    "DINOv2": _vit("encoder.layer.0.attention"),
    "ViTMAE": _vit("layers.0.attention"),
    "SigLIP vision": _bart(),
    "CLIP vision": _bart(),
    "CLIP": _bart("text_model.encoder.layers.1.self_attn"),
    "Swin": _vit("encoder.layers.1.blocks.0.attention"),
    "Swin v2": _separate(
        "encoder.layers.1.blocks.0.attention.self", _BERT, "encoder.layers.1.blocks.0.attention.output.dense",
        normed=True,
    ),
    "SegFormer": _vit("stages.1.blocks.0.attention"),
    "time series": _bart(),
}  # fmt: skip
# Models without attention: Fourier transforms, state spaces, recurrences, convolutions.
WITHOUT = (
    "FNet", "Mamba", "Mamba 2", "RWKV", "ConvNeXt", "ConvNeXt V2", "ResNet", "RegNet", "PoolFormer", "MobileNet V2",
)  # fmt: skip

_XVIT = "blocks.0.fusion.0.attn"
_TNT = "blocks.0.attn_in"
_POOL = "attn_pool"
_PVT = "stages.3.blocks.0.attn"
_GPSA = "blocks.0.attn"
_LEVIT = "stages.1.blocks.0.attn"
_DOWN = "stages.1.downsample.attn_downsample"
_CLASS = "blocks_token_only.0.attn"

TIMM: dict[str, Truth] = {
    "test_vit": _fused("blocks.0.attn", size=32),
    "test_vit2": _fused("blocks.7.attn", size=32),
    "test_vit3": Truth(
        _POOL, 3, 3, 32, f"{_POOL}.q.weight[64:96]", f"{_POOL}.kv.weight[64:96]", f"{_POOL}.kv.weight[160:192]",
        f"{_POOL}.proj.weight[:, 64:96]",
    ),
    "test_vit4": _fused("blocks.1.attn", heads=3, size=32),
    "test_vit_relpos": _fused("blocks.0.attn", heads=3, size=32),
    "test_coatnet": _fused("stages.2.blocks.1.attn", heads=3, size=32, by_head=True),
    "test_maxvit": _fused("stages.1.blocks.0.attn_block.attn", size=32, by_head=True),
    "beit_base_patch16_224": _fused("blocks.0.attn"),
    "cait_xxs24_224": _separate(_CLASS, ("q", "k", "v"), f"{_CLASS}.proj"),
    "convit_tiny": Truth(
        _GPSA, 2, 2, 8, f"{_GPSA}.qk.weight[8:16]", f"{_GPSA}.qk.weight[24:32]", f"{_GPSA}.v.weight[8:16]",
        f"{_GPSA}.proj.weight[:, 8:16]",
    ),
    "crossvit_tiny_240": _separate(_XVIT, ("wq", "wk", "wv"), f"{_XVIT}.proj", size=16),
    # channels attend: softmax(keysᵀ·values) multiplies the queries of the source
    "davit_tiny": _fused("stages.3.blocks.0.1.attn", heads=4, order=(1, 2, 0)),
    "deit_tiny_distilled_patch16_224": _fused("blocks.1.attn"),
    "edgenext_xx_small": _fused("stages.1.blocks.1.xca", heads=4, size=12, normed=True),
    "efficientvit_m0": Truth(
        "stages.0.blocks.0.mixer.m.attn", 1, 1, 16, "stages.0.blocks.0.mixer.m.attn.dws.0.conv.weight[0:16]",
        "stages.0.blocks.0.mixer.m.attn.qkvs.0.conv.weight[16:32]",
        "stages.0.blocks.0.mixer.m.attn.qkvs.0.conv.weight[32:40]",
        # a cascade: the next group reads it
        "stages.0.blocks.0.mixer.m.attn.qkvs.1.conv.weight[:, 0:8]", "", True,
    ),
    "eva02_tiny_patch14_224": _fused("blocks.0.attn", size=12, rotary="pairs"),
    "hiera_tiny_224": _fused("blocks.1.attn"),
    "levit_128s": Truth(
        _LEVIT, 2, 2, 8, *(f"{_LEVIT}.qkv.linear.weight[{a}:{b}]" for a, b in ((32, 40), (40, 48), (48, 64))),
        f"{_LEVIT}.proj.ln.linear.weight[:, 16:32]", "", True,
    ),
    "mobilevit_xxs": _fused("stages.2.1.transformer.0.attn", heads=4, size=16),
    "pit_ti_224": _fused("transformers.2.blocks.0.attn", heads=4),
    "pvt_v2_b0": Truth(
        _PVT, 4, 4, 8, f"{_PVT}.q.weight[24:32]", f"{_PVT}.kv.weight[24:32]", f"{_PVT}.kv.weight[56:64]",
        f"{_PVT}.proj.weight[:, 24:32]",
    ),
    "swin_tiny_patch4_window7_224": _fused("layers.1.blocks.0.attn", size=16),
    "swinv2_tiny_window8_256": _fused("layers.1.blocks.0.attn", size=16, normed=True),
    "swinv2_cr_tiny_224": _fused("stages.1.blocks.0.attn", size=16, normed=True),
    "tnt_s_legacy_patch16_224": Truth(
        _TNT, 2, 2, 4, f"{_TNT}.qk.weight[4:8]", f"{_TNT}.qk.weight[12:16]", f"{_TNT}.v.weight[4:8]",
        f"{_TNT}.proj.weight[:, 4:8]",
    ),
    "twins_svt_small": _fused("blocks.1.0.attn"),
    "visformer_tiny": _fused("stage2.0.attn"),
    "vit_tiny_patch16_224": _fused("blocks.0.attn"),
    "vit_srelpos_small_patch16_224": _fused("blocks.0.attn"),
    "xcit_nano_12_p8_224": _fused("blocks.0.attn", normed=True),
}  # fmt: skip
