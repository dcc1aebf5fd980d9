"""The sentence with which results begin agrees with their findings, in a terminal, on a page and in exports."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gonio
from catalog import seeded
from gonio.measuring.findings.rules import RULES, Finding, first_of, verdict
from html_reader import Page

AB = {"A": (4, 24), "B": (16, 4)}


def found(level: str, path: str) -> Finding:
    return Finding("G000", level, path, "", "", "")


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ([], "No findings in 3 layers."),
        ([("error", "a")], "1 error in 1 of 3 layers."),
        ([("error", "a"), ("warn", "a"), ("warn", "b")], "1 error and 2 warnings in 2 of 3 layers."),
        ([("warn", ""), ("info", "d")], "1 warning and 1 remark in 1 other tensor and the model as a whole."),
        (
            [("error", "a"), ("warn", "d"), ("info", "e"), ("info", "")],
            "1 error, 1 warning and 2 remarks in 1 of 3 layers, 2 other tensors and the model as a whole.",
        ),
    ],
)
def test_sentences(findings: list[tuple[str, str]], said: str) -> None:
    assert verdict([found(*each) for each in findings], ["a", "b", "c"]) == said


def test_what_is_neither_a_layer_nor_a_tensor_is_a_place() -> None:
    cut, bias = found("error", "model-00002-of-00003.safetensors"), found("warn", "a.bias")
    assert verdict([cut], ["a"], tensors=["a", "a.bias"]) == "1 error in 1 other place."
    assert verdict([cut], [], tensors=["a.bias"]) == "1 error in 1 place."
    both = "1 error and 1 warning in 1 other tensor and 1 other place."
    assert verdict([cut, bias], ["a"], tensors=["a", "a.bias"]) == both


def test_factors_of_adapters_are_no_layers() -> None:
    state = {f"a.{i}.lora_{part}.weight": seeded(*size) for i in range(2) for part, size in AB.items()}
    assert gonio.measure(state).verdict == "No findings in 6 weights."


def test_nothing_but_vectors() -> None:
    assert gonio.measure({"bias": torch.tensor([float("nan")])}).verdict == "1 error in 1 tensor."


def base() -> dict[str, Tensor]:
    return {f"layers.{i}.weight": seeded(16, 12, seed=i) for i in range(3)}


def test_measurements() -> None:
    broken = base()
    broken["layers.1.weight"][:8] = 0
    measured = gonio.measure(broken)
    assert measured.verdict == "1 warning in 1 of 3 layers."
    assert str(measured).splitlines()[1] == measured.verdict
    assert measured.verdict in Page(measured.to_html()).text
    assert measured.headline in Page(measured.to_html()).text
    assert measured.to_dict()["verdict"] == measured.verdict
    assert measured.verdict in measured.to_markdown()


def test_differences() -> None:
    after = {name: value * (1 + 0.01 * i) for i, (name, value) in enumerate(base().items())}
    moved = gonio.measure(base(), after)
    assert moved.verdict == "2 of 3 tensors changed, by 0.01 to 0.02 of the norm. 1 remark in the model as a whole."
    assert gonio.measure(base(), base()).verdict == "Nothing changed: 3 tensors equal."
    fewer = {name: value for name, value in base().items() if name != "layers.1.weight"}
    assert gonio.measure(base(), fewer).verdict == "2 of 3 tensors are equal, 1 not compared."
    broken = base()
    broken["layers.0.weight"][0, 0] = torch.nan
    assert gonio.measure(base(), broken).verdict == "2 of 3 tensors are equal. 1 error in 1 of 3 tensors."
    for shown in (" ".join(str(moved).split()), Page(moved.to_html()).text, moved.to_markdown()):
        assert moved.verdict in shown
    other = gonio.measure({"a.weight": torch.eye(3)}, {"a.weight": torch.eye(4)})
    assert other.verdict == "Nothing could be compared."


def test_changes() -> None:
    shift = {name: 0.1 * seeded(16, 12, seed=9 + i) for i, name in enumerate(base())}
    one, two = ({name: value + k * shift[name] for name, value in base().items()} for k in (1, -1))
    both = gonio.measure(base(), one, two)
    assert both.verdict.startswith("2 changes: cosine −1.000, by chance 0 ± 0.042; their mean keeps 0% of their norm. ")
    for shown in (" ".join(str(both).split()), Page(both.to_html()).text, both.to_markdown()):
        assert both.verdict in shown


def test_the_headline_of_a_page_names_the_layers_and_the_first_finding() -> None:
    state = {f"layer{i}.weight": torch.randn(8, 20, generator=torch.Generator().manual_seed(i)) for i in range(6)}
    assert gonio.measure(state).headline == gonio.measure(state).verdict == "No findings in 6 layers."
    for i in range(1, 5):
        state[f"layer{i}.weight"][2] = 0
    state["layer5.weight"][0, 0] = torch.nan
    found = gonio.measure(state)
    assert found.headline == (
        f"{found.verdict} In layer5, layer1, layer2 and 2 more; the first is G001: {RULES['G001'].text.title}."
    )
    assert first_of([Finding("G405", "info", "", "", "", "")]).startswith("The first is G405: ")
