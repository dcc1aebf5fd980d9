"""The configurations beside a checkpoint: what they say of its model, of how it is quantised, and of its adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gonio.measuring.reading.entry import USUAL_PADDING

CONFIGURATIONS = ("config.json", "adapter_config.json", "quantize_config.json", "quant_config.json")
"""What is read of the files beside a checkpoint; the last two are of older tools."""
LARGEST_JSON = 1 << 20  # bytes, of a configuration; those of large models have some thousands
_QUANTISATION = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's


@dataclass(frozen=True)
class Configurations:
    """What the configurations in a file's folder say; empty for a state dict.

    Attributes:
        config: of the model, as `config.json` has it. `adapter`: of its adapters, as `adapter_config.json` has it.
        quantisation: how the model is quantised, by a key of `config.json` or by a file of older tools.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    quantisation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def in_folder(cls, folder: Path) -> Configurations:
        """Those beside a checkpoint."""
        config, adapter, *older = (_small_json(folder / name) for name in CONFIGURATIONS)
        found = next((config[key] for key in _QUANTISATION if config.get(key)), None)
        quantisation = found if isinstance(found, dict) else next((each for each in older if each), {})
        return cls(config, adapter, quantisation)

    @property
    def with_text(self) -> Mapping[str, Any]:
        """The model's, with those of the text model of several modalities where it says nothing itself."""
        text = self.config.get("text_config")
        return {**text, **self.config} if isinstance(text, dict) else self.config

    @property
    def padding(self) -> tuple[int, ...]:
        """The row of padding in embeddings that is named, or the usual ones."""
        row = self.with_text.get("pad_token_id")
        return (row,) if isinstance(row, int) and row >= 0 else USUAL_PADDING

    @property
    def vocabulary(self) -> int | None:
        """The rows of the tables of tokens; None where it is not said."""
        rows = self.with_text.get("vocab_size")
        return rows if isinstance(rows, int) else None


def _small_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; an empty one if there is no such file, or if it holds anything else."""
    try:
        small = path.is_file() and path.stat().st_size <= LARGEST_JSON
        content = json.loads(path.read_text(encoding="utf-8")) if small else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
