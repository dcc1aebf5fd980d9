"""Whether `fit_of` finds what every architecture of transformers, at its defaults, writes and lacks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from foreign import transformers
from gonio.measuring.reading.fitting import Shapes, fit_of, shapes_of

pytestmark = pytest.mark.slow

_NUMBERED = re.compile(r"\.\d+\.")
_MOST = 12_000  # tensors; larger ones are of the same kinds and take half of the time
QUIET = {"seamless_m4t", "seamless_m4t_v2"}  # the class states that such tensors may be missing


def written(model: nn.Module) -> Shapes:
    """The names and shapes that `save_pretrained` would write; it joins and parts tensors, and leaves out tied ones."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    first: dict[int, str] = {}
    kept = {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}
    return shapes_of(revert_weight_conversion(model, {name: tensor.detach() for name, tensor in kept.items()}))


def models() -> Iterator[tuple[str, nn.Module]]:
    t = transformers()
    for name, kind in t.CONFIG_MAPPING.items():
        try:
            config = kind()
            make = t.AutoModelForCausalLM if kind in t.MODEL_FOR_CAUSAL_LM_MAPPING else t.AutoModel
            with torch.device("meta"), warnings.catch_warnings(action="ignore"):
                model = make.from_config(config)
        except Exception:  # parts of other models, and models that have no default
            continue
        yield name, model


def test_what_is_written_fits_and_what_is_lost_is_named() -> None:
    tried, unfit, missed, unseen = 0, {}, {}, {}
    for name, model in models():
        shapes = written(model)
        if len(shapes) > _MOST:
            continue
        tried += 1
        found = fit_of(model, shapes)
        if not found.whole:
            unfit[name] = found.refused or str(found.said)
        matrices = [key for key, shape in shapes.items() if shape and len(shape) == 2 and _NUMBERED.search(key)]
        if len(matrices) < 3:
            continue
        lost, odd = matrices[len(matrices) // 2], matrices[-1]
        damaged = {key: shape for key, shape in shapes.items() if key != lost} | {odd: (3, 5), "mine.weight": (2,)}
        found = fit_of(model, damaged)
        if not (found.missing or found.reshaped.keys() - {odd}):
            missed[name] = lost
        if not found.reshaped or found.unknown != ("mine.weight",):
            unseen[name] = found.refused or str(found.said)
    assert tried > 400
    assert not unfit
    assert missed.keys() == QUIET, missed
    assert not unseen
