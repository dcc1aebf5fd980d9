"""`gonio measure` on an architecture of timm: shapes on the meta device, figures with random weights.

`python -m sweeps.timm_sweep meta` and `… weights` go through every architecture.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import gonio
from foreign import timm
from gonio.measuring import Measurements

MOST_PARAMETERS = 30_000_000


def build(name: str, device: str) -> nn.Module:
    """The architecture with torch's and timm's own initialisation."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = timm().create_model(name, pretrained=False)
    return model


def on_meta(name: str) -> dict[str, Any]:
    """Shapes and layouts of a model without memory; one whose constructor reads values is built in memory."""
    try:
        model = build(name, "meta")
    except (RuntimeError, NotImplementedError) as error:
        built = f"in memory, because on meta: {type(error).__name__}: {str(error).splitlines()[0]}"
        model = build(name, "cpu").to("meta")
    else:
        built = "on meta"
    measured = gonio.measure(model)
    _check(measured, model)
    weights = [t for t in measured.values() if len(t.shape) >= 2 and t.name.endswith("weight")]
    laid_out = [t for t in weights if t.filters is not None or "tied" in t.reason]
    return {"built": built, "weights": len(weights), "laid out": len(laid_out), **_size(measured)}


def with_weights(name: str, *, most: int = MOST_PARAMETERS) -> dict[str, Any]:
    """Every figure of a model with random weights, unless it has more than `most`."""
    shapes = build(name, "meta")
    parameters = sum(p.numel() for p in shapes.parameters())
    if parameters > most:
        return {"outcome": f"left out: {parameters} parameters"}
    model = build(name, "cpu")
    start = time.perf_counter()
    measured = gonio.measure(model)
    seconds = round(time.perf_counter() - start, 2)
    _check(measured, model)
    skipped = [t.path for t in measured.values() if t.status == "skipped" and "tied" not in t.reason]
    findings = dict(Counter(finding.code for finding in measured.findings))
    return {"seconds": seconds, "skipped": skipped, "findings": findings, **_size(measured)}


def _check(measured: Measurements, model: nn.Module) -> None:
    """Every tensor has a row with figures or a reason, and the whole can be shown."""
    named, state = {t.name for t in measured.values()}, model.state_dict(keep_vars=True)
    seen = {id(tensor) for name, tensor in state.items() if name in named}  # a shared layer has several names
    missing = [name for name, tensor in state.items() if name not in named and id(tensor) not in seen]
    assert not missing, f"no row for {missing[:5]}"
    assert all(t.status == "measured" or t.reason for t in measured.values()), "a row without figures and reason"
    assert str(measured)
    assert measured.coverage


def _size(measured: Measurements) -> dict[str, int]:
    return {
        "tensors": len(measured),
        "layers": len(measured.layers),
        "entries": sum(t.entries for t in measured.values()),
    }
