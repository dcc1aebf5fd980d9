"""More families of timm: small models, and all heads of all their attention blocks, written down from their source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bank.live.case import Made
from bank.live.timm_models import made
from catalog import seeded
from foreign import timm
from surgery.anatomy_families import Layout, Rows, fused, separate

_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4}
_VIT32 = {**_VIT, "img_size": 32}
_BLOCKS = "blocks.{}.attn"


def _stages(path: str, widths: tuple[int, ...], heads: tuple[int, ...], **more: Any) -> tuple[Layout, ...]:
    """One fused block in each stage."""
    rows = enumerate(zip(widths, heads, strict=True))
    return tuple(fused(path, heads=h, size=width // h, layers=(n,), **more) for n, (width, h) in rows if h)


def _ratio(path: str, heads: int, key: int, value: int, **more: Any) -> Layout:
    """Heads one after the other, with values of another size."""
    step = 2 * key + value
    q, k = Rows("qkv.weight", 0, step, key), Rows("qkv.weight", key, step, key)
    v, output = Rows("qkv.weight", 2 * key, step, value), Rows("proj.weight", 0, value, value, 1)
    return Layout(path, q, k, v, output, heads, heads, **more)


def _single(stage: int, width: int) -> Layout:
    """SHViT: one head on some of the channels, which a batch norm follows."""
    q, k, v = (Rows("qkv.c.weight", start, 0, size) for start, size in ((0, 16), (16, 16), (32, width)))
    path = f"stages.{stage}.blocks.0.mixer.m"
    return Layout(path, q, k, v, Rows("proj.1.c.weight", 0, 0, width, 1), 1, 1, normed=True, layers=(0,))


def _bottleneck(path: str, width: int) -> Layout:
    q, k, v = (Rows("self_attn.qkv.weight", n * width, width // 4, width // 4) for n in range(3))
    output = Rows("conv3_1x1.conv.weight", 0, width // 4, width // 4, 1)
    return Layout(path, q, k, v, output, up=1, layers=(0,))


def _halo(path: str, width: int) -> Layout:
    """Keys and values of each of 8 heads one after the other."""
    size = width // 8
    k, v = (Rows("self_attn.kv.weight", n * size, 2 * size, size) for n in range(2))
    q, output = Rows("self_attn.q.weight", 0, size, size), Rows("conv3_1x1.conv.weight", 0, size, size, 1)
    return Layout(path, q, k, v, output, 8, 8, up=1, layers=(0,))


def _multi_query(stage: int, blocks: tuple[int, ...]) -> Layout:
    q, k, v = (Rows(f"{name}.proj.weight", 0, 64, 64) for name in ("query", "key", "value"))
    path = f"blocks.{stage}.{{}}.attn"
    return Layout(path, q, k, v, Rows("output.proj.weight", 0, 64, 64, 1), kv_heads=1, layers=blocks)


# name -> size of the images, options of the constructor, layouts
FAMILIES: dict[str, tuple[int, dict[str, Any], tuple[Layout, ...]]] = {
    "botnet26t_256": (64, {"img_size": 64}, (
        _bottleneck("stages.2.1.self_attn", 256), _bottleneck("stages.3.0.self_attn", 512),
        _bottleneck("stages.3.1.self_attn", 512))),
    "caformer_s18": (64, {}, _stages(
        "stages.{}.blocks.0.token_mixer", (8, 16, 64, 128), (0, 0, 2, 4))),
    "deit3_small_patch16_224": (32, _VIT32, (fused(_BLOCKS),)),
    "efficientformer_l1": (224, {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 2)}, (
        _ratio("stages.3.blocks.2.token_mixer", 8, 32, 128, layers=(0,)),)),
    "fastvit_sa12": (64, {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 64)}, (
        fused("stages.3.blocks.0.token_mixer", heads=2, size=32, layers=(0,)),)),
    "gcvit_xxtiny": (64, {}, _stages(
        "stages.{}.blocks.0.attn", (16, 32, 64, 128), (2, 4, 4, 8))),
    "halonet26t": (256, {}, (
        _halo("stages.2.1.self_attn", 256), _halo("stages.3.0.self_attn", 512), _halo("stages.3.1.self_attn", 512))),
    "mobilenetv4_hybrid_medium": (64, {}, (_multi_query(2, (4, 6, 8, 10)), _multi_query(3, (8, 10, 12, 14)))),
    "naflexvit_base_patch16_gap": (32, _VIT, (fused(_BLOCKS),)),
    # the channels of an output are those of all heads, one after the other
    "nest_tiny": (32, {}, (
        Layout("levels.{}.transformer_encoder.0.attn", *(Rows("qkv.weight", n) for n in (0, 32, 64)),
               Rows("proj.weight", 0, 1, 8, 1, apart=4), layers=(0, 1, 2)),)),
    "nextvit_small": (64, {"depths": (1, 1, 5, 1)}, tuple(
        separate(f"stages.{path}.e_mhsa", ("q", "k", "v"), "proj", size=32, heads=n, kv_heads=n, layers=(0,))
        for path, n in (("1.blocks.0", 6), ("2.blocks.4", 12), ("3.blocks.0", 24)))),
    "resnet50_clip": (64, {}, (
        separate("head", ("q", "k", "v"), "proj", size=64, heads=32, kv_heads=32, layers=(0,)),)),
    "sam2_hiera_tiny": (64, {"embed_dim": 16, "stages": (1, 1, 1, 2), "global_att_blocks": (4,)}, _stages(
        "blocks.{}.attn", (16, 32, 64, 128, 128), (1, 2, 4, 8, 8))),
    "samvit_base_patch16": (32, _VIT32, (fused(_BLOCKS),)),
    "shvit_s1": (128, {"embed_dim": (32, 48, 64), "partial_dim": (8, 16, 16), "depth": (1, 1, 1)}, (
        _single(1, 16), _single(2, 16))),
    "tiny_vit_5m_224": (64, {
        "embed_dims": (8, 32, 32, 32), "num_heads": (1, 4, 4, 4), "depths": (1, 1, 1, 1), "window_sizes": (7, 4, 4, 2),
    }, (fused("stages.{}.blocks.0.attn", by_head=True, layers=(1, 2, 3)),)),
    "vit_small_patch16_18x2_224": (32, _VIT32, tuple(
        fused(f"blocks.{{}}.attns.{n}.attn") for n in range(2))),
    "vit_tiny_r_s16_p8_224": (32, _VIT32, (fused(_BLOCKS),)),
    "vitamin_small_224": (64, {"img_size": 64, "depth": 2}, (fused(_BLOCKS, heads=6, size=64),)),
    "volo_d1_224": (64, {}, (fused("network.{}.0.attn", layers=(2, 3, 4)), Layout(
                        "post_network.{}.attn", Rows("q.weight"), Rows("kv.weight"), Rows("kv.weight", 32),
                        Rows("proj.weight", dim=1)))),
}  # fmt: skip


_NARROW = {"num_classes": 5, "depths": (1, 1, 1, 1)}
# what the functions of timm fix, by their classes
_OF_CLASSES: dict[str, Callable[[Any], nn.Module]] = {
    "caformer_s18": lambda models: models.metaformer.MetaFormer(
        dims=(8, 16, 64, 128), token_mixers=[models.metaformer.SepConv] * 2 + [models.metaformer.Attention] * 2,
        norm_layers=[models.metaformer.LayerNorm2dNoBias] * 2 + [models.metaformer.LayerNormNoBias] * 2, **_NARROW),
    "gcvit_xxtiny": lambda models: models.gcvit.GlobalContextVit(
        img_size=64, embed_dim=16, num_heads=(2, 4, 4, 8), **_NARROW),
    "nest_tiny": lambda models: models.nest.Nest(
        img_size=32, embed_dims=(32, 32, 32), num_heads=(4, 4, 4), depths=(1, 1, 1), num_classes=5),
    "volo_d1_224": lambda models: models.volo.VOLO(
        (1, 1, 1, 1), img_size=64, embed_dims=[32] * 4, num_heads=[4] * 4, num_classes=5),
}  # fmt: skip


def _made(name: str) -> Callable[[], Made]:
    """A model in which batch norms have the statistics of the input, so that deep layers get signals."""
    size, options, _ = FAMILIES[name]

    def make() -> Made:
        if name in _OF_CLASSES:
            model, x = _OF_CLASSES[name](timm().models), seeded(2, 3, size, size)
        else:
            model, x = made(name, size, options)()
        for norm in (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            norm.momentum = 1.0
        with torch.no_grad():
            model.train()(x)
        return model.eval(), x

    return make


MAKE = {name: _made(name) for name in FAMILIES}
