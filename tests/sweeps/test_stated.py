"""What a configuration states of blocks and tables, on every architecture of transformers at its defaults."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foreign import transformers
from gonio.measuring.reading.configurations import Configurations
from gonio.measuring.reading.stated import less_than_stated

pytestmark = pytest.mark.slow

LARGER = ["hrm_text"]  # its number counts how often blocks run
Shapes = dict[str, tuple[int, ...]]


def architectures(folder: Path) -> Iterator[tuple[str, Shapes, Configurations]]:
    """The architecture, the shapes of its tensors and its configuration; as a language model where it is one."""
    t = transformers()
    for name, kind in t.CONFIG_MAPPING.items():
        try:
            config = kind()
            make = t.AutoModelForCausalLM if kind in t.MODEL_FOR_CAUSAL_LM_MAPPING else t.AutoModel
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = make.from_config(config)
        except Exception:  # parts of other models, and models that have no default
            continue
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        yield (
            name,
            {key: tuple(value.shape) for key, value in model.state_dict().items()},
            Configurations.beside([folder]),
        )
        (folder / "config.json").unlink()


def test_intact_models_are_not_named_and_those_that_lack_a_part_are(tmp_path: Path) -> None:
    named, shortened, missed, headless, unseen = [], [], [], [], []
    for name, shapes, beside in architectures(tmp_path):
        named += [name] if less_than_stated(shapes, [], beside) else []
        last = re.compile(rf"[^0-9]*\.{(beside.layers or 0) - 1}\.")
        rest = {key: shape for key, shape in shapes.items() if not last.match(key)}
        if (beside.layers or 0) > 2 and len(rest) < len(shapes):  # the last block of a list is lost
            shortened.append(name)
            missed += [] if less_than_stated(rest, [], beside) else [name]
        if beside.tables == 2 and "lm_head.weight" in shapes:
            headless.append(name)
            rest = {key: shape for key, shape in shapes.items() if key != "lm_head.weight"}
            unseen += [] if less_than_stated(rest, [], beside) else [name]
    assert named == LARGER
    assert len(shortened) > 300
    assert len(missed) < len(shortened) / 5, missed  # a second list of as many blocks, or blocks that differ
    assert len(headless) > 60
    assert len(unseen) < len(headless) / 5, unseen  # other matrices have a side as long as the vocabulary
