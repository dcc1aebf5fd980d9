"""What a configuration states of blocks and tables, on every architecture of transformers at its defaults."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from foreign import transformers
from gonio.measuring.reading.configurations import Configurations
from gonio.measuring.reading.order import gaps_in_blocks, turned_in_blocks
from gonio.measuring.reading.stated import numbered, two_values, unlike_stated
from gonio.surgery.stated import LAYERS

pytestmark = pytest.mark.slow

LARGER = ["hrm_text"]  # its number counts how often blocks run
APART = ["bigbird_pegasus"]  # it has two tables, and states one
Shapes = dict[str, tuple[int, ...]]
Zoo = list[tuple[str, Shapes, dict[str, str], Configurations]]


def architectures(folder: Path) -> Iterator[tuple[str, Shapes, dict[str, str], Configurations]]:
    """The architecture, the shapes of its tensors, the name of what each is, and its configuration.

    As a language model where it is one.
    """
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
        first: dict[int, str] = {}
        own = {key: first.setdefault(id(each), key) for key, each in model.named_parameters(remove_duplicate=False)}
        yield (
            name,
            {key: tuple(value.shape) for key, value in model.state_dict().items()},
            own,
            Configurations.beside([folder]),
        )
        (folder / "config.json").unlink()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return list(architectures(tmp_path_factory.mktemp("zoo")))


def test_intact_models_are_not_named_and_those_that_lack_a_part_are(zoo: Zoo) -> None:
    named, shortened, missed, headless, unseen, apart = [], [], [], [], [], []
    for name, shapes, own, beside in zoo:
        named += [name] if unlike_stated(shapes, [], beside) or [*gaps_in_blocks(shapes)] else []
        apart += [name] if [*two_values(shapes, {key: ("", one) for key, one in own.items()}, beside)] else []
        last = re.compile(rf"[^0-9]*\.{(beside.layers or 0) - 1}\.")
        rest = {key: shape for key, shape in shapes.items() if not last.match(key)}
        if (beside.layers or 0) > 2 and len(rest) < len(shapes):  # the last block of a list is lost
            shortened.append(name)
            missed += [] if unlike_stated(rest, [], beside) else [name]
        if beside.tables == 2 and "lm_head.weight" in shapes:
            headless.append(name)
            rest = {key: shape for key, shape in shapes.items() if key != "lm_head.weight"}
            unseen += [] if unlike_stated(rest, [], beside) else [name]
    assert named == LARGER
    assert apart == APART
    assert len(shortened) > 300
    assert len(missed) < len(shortened) / 5, missed  # a second list of as many blocks, or blocks that differ
    assert len(headless) > 60
    assert len(unseen) < len(headless) / 5, unseen  # other matrices have a side as long as the vocabulary


def test_a_block_between_others_that_is_lost_and_one_that_is_not_stated_are_found(zoo: Zoo) -> None:
    lost, missed, longer, unseen = [], [], [], []
    for name, shapes, _, beside in zoo:
        path, blocks = max(numbered(shapes).items(), key=lambda each: len(each[1]), default=("", {}))
        if len(blocks) > 4 and min(map(len, blocks.values())) >= 4:
            lost.append(name)
            middle = ".".join((*filter(None, [path]), str(len(blocks) // 2), ""))
            rest = {key: shape for key, shape in shapes.items() if not key.startswith(middle)}
            missed += [] if [*gaps_in_blocks(rest)] else [name]
        if beside.causal and (stated := beside.layers or 0) > 2:
            longer.append(name)
            config = {
                key: value - 1 if key in LAYERS and value == stated else value for key, value in beside.config.items()
            }
            kept = {key: value for key, value in config.items() if not isinstance(value, list) or len(value) != stated}
            unseen += (
                [] if unlike_stated(shapes, [], Configurations({**kept, "architectures": ["AForCausalLM"]})) else [name]
            )
    assert len(lost) > 300
    assert len(missed) < len(lost) / 4, missed  # blocks of several kinds
    assert len(longer) > 100
    assert len(unseen) < len(longer) / 4, unseen  # the same number is stated twice, or blocks of several kinds


def test_adapters_of_any_layers_lack_none(zoo: Zoo) -> None:
    choices, named = 0, []
    for name, shapes, _, _ in zoo:
        linear = [
            key.removesuffix(".weight") for key, shape in shapes.items() if key.endswith(".weight") and len(shape) == 2
        ]
        times = Counter(path.rpartition(".")[2] for path in linear)
        targets = [each for each, count in times.items() if count >= 4 and not each.isdecimal()][:12]
        for chosen in (*combinations(targets, 2), targets):
            adapted = [path for path in linear if path.rpartition(".")[2] in chosen]
            factors = dict.fromkeys(f"{path}.lora_{part}.weight" for path in adapted for part in "AB")
            choices += 1
            named += [(name, chosen)] if [*gaps_in_blocks(factors)] else []
    assert choices > 10_000
    assert not named


def test_no_architecture_has_a_matrix_that_is_called_transposed(zoo: Zoo) -> None:
    assert {name: list(found) for name, shapes, _, _ in zoo if (found := dict(turned_in_blocks(shapes)))} == {}
