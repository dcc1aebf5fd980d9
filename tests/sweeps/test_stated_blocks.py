"""The number of blocks that a configuration states, on every architecture of transformers at its defaults."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foreign import transformers
from gonio.measuring.reading.configurations import Configurations
from gonio.measuring.reading.order import fewer_blocks

pytestmark = pytest.mark.slow

LARGER = ["hrm_text"]  # its number counts how often blocks run


def architectures(folder: Path) -> Iterator[tuple[str, list[str], int]]:
    """The architecture, the names of its tensors and the stated number of blocks, where there is one."""
    t = transformers()
    for name, kind in t.CONFIG_MAPPING.items():
        try:
            config = kind()
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                names = list(t.AutoModel.from_config(config).state_dict())
        except Exception:  # parts of other models, and models that have no default
            continue
        config.save_pretrained(folder)
        stated = Configurations.beside([folder]).layers
        (folder / "config.json").unlink()
        if stated is not None:
            yield name, names, stated


def test_intact_models_are_not_named_and_shortened_ones_are(tmp_path: Path) -> None:
    named, shortened, missed = [], [], []
    for name, names, stated in architectures(tmp_path):
        named += [name] if list(fewer_blocks(names, stated)) else []
        last = re.compile(rf"[^0-9]*\.{stated - 1}\.")
        rest = [each for each in names if not last.match(each)]
        if stated > 2 and len(rest) < len(names):  # the last block of a list is lost
            shortened.append(name)
            missed += [] if list(fewer_blocks(rest, stated)) else [name]
    assert named == LARGER
    assert len(shortened) > 300
    assert len(missed) < len(shortened) / 5, missed  # a second list of as many blocks, or blocks that differ
