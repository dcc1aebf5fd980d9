"""Settings of single layers in the configuration of a quantisation: `dynamic`, as GPTQModel and vLLM read it.

A key is a regular expression for the beginning of a layer's path, behind `+:` or nothing, and its value are settings
that replace those of the whole model; behind `-:` it names layers that are not quantised. The first key that matches a
path decides.

References: GPTQModel, README, "Dynamic quantization"; vLLM, `quantization/utils/gptq_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gonio.measuring.reading.patterns import Budget, Pattern

_METHODS = ("", "gptq", "awq")  # whose configurations have settings of this kind
_STEPS = 10**8  # of all matches of a file: tens of thousands of layers, and some tens of patterns


class Overrides:
    """The settings of each layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = config.get("dynamic") if str(config.get("quant_method") or "") in _METHODS else None
        self._given: Any = found or {}
        self._model = {key: value for key, value in config.items() if key != "dynamic"} if self._given else config
        self._patterns: dict[str, Pattern | str] = {}
        self._known: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._budget = Budget(_STEPS)

    def of(self, path: str) -> tuple[Mapping[str, Any], str]:
        """The settings of a layer, and why its weights are not computed; empty if they can be."""
        if path not in self._known:
            try:
                self._known[path] = self._first(path)
            except ValueError as error:
                self._known[path] = (self._model, f"the configuration of its quantisation (dynamic): {error}")
        return self._known[path]

    def _first(self, path: str) -> tuple[Mapping[str, Any], str]:
        if not isinstance(self._given, dict):
            raise ValueError("it is no object")
        for key, settings in self._given.items():
            left_out, pattern = key.startswith("-:"), key.removeprefix("-:" if key.startswith("-:") else "+:")
            if not self._pattern(pattern).matches(path, self._budget):
                continue
            if left_out:
                raise ValueError(f"{key[:60]!r} leaves its layer out of the quantisation")
            if not isinstance(settings, dict):
                raise ValueError(f"the settings of {key[:60]!r} are no object")
            return {**self._model, **settings}, ""
        return self._model, ""

    def _pattern(self, text: str) -> Pattern:
        if text not in self._patterns:
            try:
                self._patterns[text] = made = Pattern(text)
            except ValueError as error:
                self._patterns[text] = str(error)
            else:
                self._budget.spend(made.steps)
        found = self._patterns[text]
        if isinstance(found, str):
            raise ValueError(found)
        return found
