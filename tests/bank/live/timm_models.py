"""Models of timm: a member of each family, narrow and short where its constructor allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bank.live.case import Case, Made
from catalog import seeded
from foreign import timm

_VIT: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32}
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 2, 2, 4), "img_size": 64}
_DIMS: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
_RESNET: dict[str, Any] = {"channels": (8, 16, 24, 32)}

# name -> size of the images, options of the constructor
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"test_{name}": (64, {}) for name in ("byobnet", "convnext", "convnext2", "convnext3", "efficientnet")},
    **{f"test_{name}": (64, {}) for name in ("efficientnet_evos", "efficientnet_gn", "efficientnet_ln", "mambaout")},
    **{f"test_{name}": (64, {}) for name in ("nfnet", "resnet")},
    **{f"test_{name}": (64, {"img_size": 64}) for name in ("coatnet", "maxvit", "vit", "vit2", "vit3", "vit4", "vit_relpos")},
    "beit_base_patch16_224": (32, _VIT),
    "cait_xxs24_224": (32, _VIT),
    "convit_tiny": (32, {**_VIT, "embed_dim": 8}),
    "convnext_atto": (64, _DIMS),
    "convnextv2_atto": (64, _DIMS),
    "crossvit_tiny_240": (240, {"embed_dim": (16, 32), "depth": ((1, 1, 0),), "num_heads": (2, 2)}),
    "cs3darknet_focus_s": (64, {}),
    "davit_tiny": (64, {"embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 1, 1)}),
    "deit_tiny_distilled_patch16_224": (32, _VIT),
    "densenet121": (64, {"growth_rate": 4, "block_config": (2, 2, 2, 2)}),
    "dpn48b": (64, {"num_init_features": 10, "k_r": 16, "groups": 4, "k_sec": (1, 1, 1, 1), "inc_sec": (4, 4, 4, 4)}),
    "edgenext_xx_small": (64, {}),
    "efficientvit_b0": (64, {"widths": (8, 8, 16, 16, 32), "head_widths": (32, 32)}),
    "efficientvit_m0": (64, {"img_size": 64, "embed_dim": (16, 32, 48), "depth": (1, 1, 1), "num_heads": (2, 2, 3)}),
    "efficientvim_m1": (64, {"embed_dim": (16, 24, 32), "depths": (1, 1, 1)}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "fasternet_t0": (64, {"embed_dim": 8, "depths": (1, 1, 1, 1), "feature_dim": 32}),
    "fastvit_t8": (64, {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)}),
    "ghostnet_050": (64, {}),
    "hiera_tiny_224": (64, {"img_size": 64, "embed_dim": 8, "stages": (1, 1, 1, 1), "num_heads": 1}),
    "iformer_t": (64, {}),
    "inception_next_atto": (64, {"depths": (1, 1, 1, 1), "dims": (16, 16, 24, 32)}),
    "lcnet_035": (64, {}),
    "levit_128s": (64, {"img_size": 64, "embed_dim": (16, 24, 32), "num_heads": (1, 2, 2), "depth": (1, 1, 1), "key_dim": 8}),
    "mnasnet_small": (64, {}),
    "mobilenetv2_035": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilevit_xxs": (64, {}),
    "pit_ti_224": (64, {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 4)}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)}),
    "regnetx_002": (64, {}),
    "repvit_m1": (64, {"embed_dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1)}),
    "resnet18": (64, _RESNET),
    "resnetv2_18": (64, {"channels": (16, 32, 32, 64), "stem_chs": 16}),
    "rexnet_100": (64, {"width_mult": 0.35, "initial_chs": 8, "final_chs": 32}),
    "skresnet18": (64, {**_RESNET, "channels": (16, 32, 32, 64)}),
    "starnet_s050": (64, {}),
    "swiftformer_xs": (64, {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32)}),
    "swin_tiny_patch4_window7_224": (64, {**_FOUR, "window_size": 4}),
    "swinv2_tiny_window8_256": (64, {**_FOUR, "window_size": 4}),
    "swinv2_cr_tiny_224": (64, {**_FOUR, "window_size": 2}),
    "tnt_s_legacy_patch16_224": (32, {"img_size": 32, "embed_dim": 16, "inner_dim": 8, "num_heads_inner": 2, "num_heads_outer": 2, "depth": 2}),
    "twins_svt_small": (64, {"img_size": 64, "embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 1, 1)}),
    "visformer_tiny": (32, {"img_size": 32, "init_channels": 8, "embed_dim": 16, "depth": (1, 1, 1), "num_heads": 2}),
    "vit_tiny_patch16_224": (32, _VIT),
    "vit_srelpos_small_patch16_224": (32, _VIT),
    "ese_vovnet19b_slim_dw": (64, {}),
    "xcit_nano_12_p8_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}),
}  # fmt: skip


def made(name: str, size: int, options: dict[str, Any]) -> Callable[[], Made]:
    def make() -> Made:
        return timm().create_model(name, pretrained=False, num_classes=5, **options), seeded(2, 3, size, size)

    return make


# Findings that are true of a fresh model: its last layer is zero.
_ZERO_LAST = {"hiera_tiny_224": ("G407",)}
CASES = [Case(name, "timm", made(name, *row), findings=_ZERO_LAST.get(name, ())) for name, row in MODELS.items()]
