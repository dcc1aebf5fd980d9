"""The configurations beside a checkpoint: what they say of its model, of how it is quantised, and of its adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gonio.measuring.reading.entry import USUAL_PADDING
from gonio.measuring.reading.opened import Problem, damaged
from gonio.measuring.reading.shards import of_one_part
from gonio.surgery.stated import HEADS, LAYERS

CONFIGURATIONS = ("config.json", "adapter_config.json", "quantize_config.json", "quant_config.json")
"""What is read of the files beside a checkpoint; the last two are of older tools."""
LARGEST_JSON = 1 << 22  # bytes, of a configuration; names of 21,843 classes take about 2 MB
_QUANTISATION = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's

_OF_LAYERS = ("layer", "block", "depth")


@dataclass(frozen=True)
class Configurations:
    """What the configurations in a file's folder say; empty for a state dict.

    Attributes:
        config: of the model, as `config.json` has it. `adapter`: of its adapters, as `adapter_config.json` has it.
        quantisation: how the model is quantised, by a key of `config.json` or by a file of older tools.
        problems: those that are there and cannot be read.
        whole: whether the checkpoint is the whole model that they describe, as one of several parts is not.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    quantisation: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    whole: bool = True

    @classmethod
    def beside(cls, files: Sequence[Path]) -> Configurations:
        """Those beside the first of a checkpoint's files, or in it if it is a folder; none without files."""
        if not files:
            return cls()
        folder = files[0] if files[0].is_dir() else files[0].parent
        problems: list[Problem] = []
        config, adapter, *older = (_small_json(folder / name, problems) for name in CONFIGURATIONS)
        found = next((config[key] for key in _QUANTISATION if config.get(key)), None)
        quantisation = found if isinstance(found, dict) else next((each for each in older if each), {})
        return cls(config, adapter, quantisation, tuple(problems), whole=len(files) > 1 or not of_one_part(files[0]))

    @property
    def with_text(self) -> Mapping[str, Any]:
        """The model's, with those of the text model of several modalities where it says nothing itself."""
        text = self.config.get("text_config")
        return {**text, **self.config} if isinstance(text, dict) else self.config

    @property
    def layers(self) -> int | None:
        """The blocks of the whole checkpoint, of a model that has heads of attention; None where they are not said."""
        return stated_in(self.with_text, LAYERS) if self.whole and stated_in(self.with_text, HEADS) else None

    @property
    def padding(self) -> tuple[int, ...]:
        """The row of padding in embeddings that is named, or the usual ones."""
        row = self.with_text.get("pad_token_id")
        return (row,) if isinstance(row, int) and row >= 0 else USUAL_PADDING

    @property
    def vocabulary(self) -> int | None:
        """The rows of the tables of tokens; None where it is not said."""
        return stated_in(self.with_text, ("vocab_size",))

    @property
    def of_transformers(self) -> bool:
        """Whether they name the class of a model of transformers, which loads tensors by its own names alone."""
        return bool(self._architectures)

    @property
    def causal(self) -> bool:
        """Whether the checkpoint is all of a model whose class `config.json` names …ForCausalLM, as of transformers."""
        named = self._architectures
        return self.whole and len(named) == 1 and str(named[0]).endswith("ForCausalLM")

    @property
    def _architectures(self) -> list[Any]:
        named = self.config.get("architectures")
        return named if isinstance(named, list) else []

    @property
    def numbers(self) -> set[int]:
        """All whole numbers under a name that says layer, block or depth, and the lengths of all lists."""
        found: set[int] = set()
        left: list[tuple[str, Any]] = [("", self.config)]
        while left:
            name, value = left.pop()
            found |= {value} if type(value) is int and any(word in name for word in _OF_LAYERS) else set()
            found |= {len(value)} if isinstance(value, list) else set()
            left += value.items() if isinstance(value, dict) else ()
        return found

    @property
    def tables(self) -> int:
        """The tables of tokens of a whole language model of transformers: 2 with one of its own for outputs, else 1.

        0 of other models, which may have any number.
        """
        if not self.causal:
            return 0
        return 2 if self.with_text.get("tie_word_embeddings") is False else 1


def stated_in(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The first of these entries of a configuration that is a whole number."""
    return next((config[name] for name in names if type(config.get(name)) is int), None)


def _small_json(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """The object in a JSON file; an empty one, with its problem, where there is a file that cannot be read."""
    try:
        if not path.is_file():
            return {}
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"{path.stat().st_size} bytes, more than any configuration has")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(Problem("G701", path.name, damaged(path, error).found))
        return {}
    return content if isinstance(content, dict) else {}
