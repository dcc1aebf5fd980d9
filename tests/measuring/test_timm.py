"""Architectures of timm, of one family each: shapes on the meta device, and figures of a small one."""

from __future__ import annotations

import pytest

from foreign import timm
from sweeps.measure_timm import on_meta, with_weights

timm()

SAMPLE = (
    *("beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224", "coat_lite_tiny", "convit_tiny", "convnext_atto"),
    *("crossvit_tiny_240", "cspresnet50", "darknet17", "deit_tiny_patch16_224", "densenet121", "dla34", "dpn48b"),
    *("efficientnet_b0", "efficientvit_b0", "eva02_tiny_patch14_224", "focalnet_tiny_srf", "ghostnet_050"),
    *("hrnet_w18_small", "levit_128s", "maxvit_rmlp_pico_rw_256", "mixer_s16_224", "mobilenetv3_small_050"),
    *("nfnet_l0", "poolformer_s12", "regnetx_002", "res2net50_14w_8s", "resnet18", "swin_tiny_patch4_window7_224"),
    *("vgg11", "xcit_nano_12_p8_224"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_shapes_and_layouts_of_an_architecture(name: str) -> None:
    found = on_meta(name)
    assert found["weights"] == found["laid out"] > 0
    assert found["entries"] > 10_000


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet_gn"])
def test_figures_of_a_small_architecture(name: str) -> None:
    found = with_weights(name)
    assert not found["skipped"]
    assert found["layers"] > 5
    assert "G001" not in found["findings"]
