"""Settings of single layers (`dynamic`), and the patterns that name the layers."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gonio import check
from gonio.measuring import difference, measure
from gonio.measuring.changes.sources import base_entries, values_of
from gonio.measuring.reading.patterns import Budget, Pattern

RNG = np.random.default_rng(0)
PATTERNS = [
    *("", "a", "a|b", "^a$", "$^", "(a|b)*c", "a{2,3}b?", "a{0}b", "(?:a|)+$", "[^a]b", r"\d+\.\w", ".*b.*", "(?!a)b*"),
    *("^(?!.*c)a", "(?=ab)a", "a*?b", "(a?){3}c", "(^a|b)c", "a$b", "(?:a*)*b", r"\.", "[a-c1]{2}", "(?:ab|a)b$"),
]
REFUSED = [
    *("a**", "^*", "a*+", "a{2}{3}", "a{3,1}", "[z-a]", "[]a]", "[a", "(a", "a)", "*", "(?i)a", "(?P<n>a)", "(?<=a)b"),
    *(r"\1", r"\bz", "[a--b]", "(?!a)b|c", "a\\", "x" * 2000, "(" * 200 + "a" + ")" * 200, "((((a{99}){99}){99}){99})"),
]


@pytest.mark.parametrize("text", PATTERNS)
def test_a_pattern_matches_what_the_module_re_matches(text: str) -> None:
    made, draw = Pattern(text), random.Random(0)
    for _ in range(100):
        word = "".join(draw.choice("abc1.") for _ in range(draw.randint(0, 6)))
        assert made.matches(word, Budget(100_000)) == bool(re.match(text, word)), word


@pytest.mark.parametrize("text", REFUSED)
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not understood"):
        Pattern(text)


@pytest.mark.parametrize("text", ["(a*)*b", "(a|a)*b", "(.*a){20}b", "(?!(a+)+c)(a?){90}b"])
def test_steps_are_bounded_where_those_of_re_are_not(text: str) -> None:
    began = time.process_time()
    assert not Pattern(text).matches("a" * 2000, Budget(10**7))
    assert time.process_time() - began < 20  # re would take for ever
    with pytest.raises(ValueError, match="too many steps"):
        Pattern(text).matches("a" * 2000, Budget(100))


# --- files of GPTQModel ---------------------------------------------------------------------------------------------


def words(codes: np.ndarray, bits: int) -> Tensor:
    """Codes along the last axis as one stream of bits for each row, the lowest bits first."""
    made = []
    for row in codes:
        stream = sum(int(code) << (bits * place) for place, code in enumerate(row))
        made.append([stream >> (32 * word) & 0xFFFFFFFF for word in range(len(row) * bits // 32)])
    return torch.tensor(np.array(made, dtype=np.uint32).view(np.int32))


def layer(path: str, bits: int, size: int, *, order: bool = True, columns: int = 96) -> tuple[dict[str, Tensor], Any]:
    """The tensors of one layer as GPTQModel writes them, in the first version, and its weight in float64."""
    rows, groups = 32, -(-columns // size)
    codes, zeros = RNG.integers(0, 2**bits, (rows, columns)), RNG.integers(1, 2**bits, (groups, rows))
    scales = RNG.uniform(0.5, 1, (groups, rows)).astype(np.float32)
    group = np.arange(columns) // size
    group = RNG.permutation(group) if order else group
    state = {f"{path}.qweight": words(codes, bits).mT.contiguous(), f"{path}.qzeros": words(zeros - 1, bits)}
    state[f"{path}.scales"] = torch.tensor(scales)
    if order:
        state[f"{path}.g_idx"] = torch.tensor(group, dtype=torch.int32)
    values = (codes - zeros[group].T) * scales[group].T.astype(float)
    return state, torch.tensor(values)


BASE = {
    "quant_method": "gptq",
    "method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "checkpoint_format": "gptq",
}


def written(folder: Path, state: dict[str, Tensor], dynamic: Any, *, beside: str = "config.json", **more: Any) -> Path:
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    about = {**BASE, **more, "dynamic": dynamic}
    content = {"quantization_config": about} if beside == "config.json" else about
    (folder / beside).write_text(json.dumps(content))
    return folder


SETTINGS = {
    r"-:.*\.2\..*": {},
    r"+:.*\.1\..*gate.*": {"bits": 8, "group_size": 48},
    r".*\.(?:1|3)\..*": {"bits": 3, "group_size": 64, "desc_act": False, "mse": 2.4},
    "lm_head": {"bits": 2, "group_size": -1},
}


@pytest.mark.parametrize("beside", ["config.json", "quantize_config.json"])
@pytest.mark.parametrize("order", [True, False])
def test_each_layer_is_read_with_its_own_settings(beside: str, order: bool, tmp_path: Path) -> None:
    made = {
        "m.0.up": layer("m.0.up", 4, 32, order=order),
        "m.1.gate_proj": layer("m.1.gate_proj", 8, 48, order=order),
        "m.1.up": layer("m.1.up", 3, 64, order=order),  # the last group has fewer inputs
        "m.3.up": layer("m.3.up", 3, 64, order=order, columns=160),
        "lm_head": layer("lm_head", 2, 96, order=order),
    }
    plain = {"m.2.up.weight": torch.randn(32, 96), "m.2.norm.weight": torch.ones(96)}
    state = {**plain, **{name: tensor for tensors, _ in made.values() for name, tensor in tensors.items()}}
    folder = written(tmp_path, state, SETTINGS, beside=beside)
    held = base_entries(folder)
    for path, (_, expected) in made.items():
        values = values_of(held[f"{path}.weight"], "")
        assert isinstance(values, Tensor), values
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-9)
    rows = measure(folder)
    assert rows["m.1.up"].frobenius == pytest.approx(float(made["m.1.up"][1].norm()), rel=1e-6)
    assert rows["m.2.up"].status == "measured"
    assert {row.name: row.reason for row in rows.values() if row.status == "skipped"} == {}
    assert check(folder).intact
    assert {row.status for row in difference(folder, folder).values()} == {"equal"}


WRONG: dict[str, tuple[Any, str]] = {
    "left out": ({"-:m.*": {}}, "leaves its layer out of the quantisation"),
    "other bits": ({"m": {"bits": 8}}, "its configuration states 8 bits"),
    "no bits": ({"m": {"bits": 0}}, "its configuration states 0 bits"),
    "bits of text": ({"m": {"bits": "4 bits"}}, "its configuration states '4 bits' bits"),
    "other groups": ({"m": {"group_size": 16}}, "its 3 groups are not of the 16 inputs"),
    "groups of nothing": ({"m": {"group_size": 0}}, "its 3 groups are not of the 0 inputs"),
    "one group": ({"m": {"group_size": -1}}, "its configuration states one group"),
    "no settings": ({"m": 8}, "the settings of 'm' are no object"),
    "a list": ([1], "it is no object"),
    "an unknown setting": ({"m": {"rotation": "hadamard"}}, "a key that is not understood: rotation"),
    "another packing": ({"m": {"pack_dtype": "int64"}}, "the pack_dtype int64"),
    "a pattern that is none": ({"(": {}}, "the pattern '(' is not understood"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_do_not_fit_are_the_reason(name: str, tmp_path: Path) -> None:
    dynamic, said = WRONG[name]
    folder = written(tmp_path, {**layer("m.up", 4, 32)[0], "n.weight": torch.eye(3)}, dynamic)
    row = measure(folder)["m.up"]
    assert (row.status, said in row.reason) == ("skipped", True), row.reason
    assert check(folder).intact


def test_many_patterns_of_a_hostile_file_take_a_bounded_time(tmp_path: Path) -> None:
    dynamic = {f"(?:(?:){{99}}){{49}}x{number}": {} for number in range(20_000)}
    folder = written(tmp_path, {f"m.{i}.{k}": v for i in range(3) for k, v in layer("u", 4, 32)[0].items()}, dynamic)
    began = time.process_time()
    row = measure(folder)["m.0.u"]
    assert time.process_time() - began < 60
    assert (row.status, "too many steps" in row.reason) == ("skipped", True), row.reason


def test_an_earlier_pattern_decides_before_one_that_is_not_understood(tmp_path: Path) -> None:
    folder = written(tmp_path, layer("m.up", 4, 32)[0], {"m": {}, "(": {}})
    assert measure(folder)["m.up"].status == "measured"


def test_settings_of_another_method_are_not_guessed(tmp_path: Path) -> None:
    codes = {"m.weight": torch.randn(8, 8).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(1)}
    folder = written(tmp_path, codes, {"m": {"bits": 8}}, quant_method="fp8", method=None, format=None)
    assert "a key that is not understood: dynamic" in measure(folder)["m"].reason


DAMAGED: dict[str, tuple[str, Tensor, str]] = {
    "a group beyond the last": ("g_idx", torch.full((96,), 3, dtype=torch.int32), "g_idx names one of 3 groups"),
    "a negative group": ("g_idx", torch.full((96,), -1, dtype=torch.int32), "g_idx names one of 3 groups"),
    "zero points of another shape": ("qzeros", torch.ones(3, 5, dtype=torch.int32), "its zero points do not fit"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_parts_are_named(name: str, tmp_path: Path) -> None:
    last, tensor, said = DAMAGED[name]
    folder = written(tmp_path, {**layer("m.up", 4, 32)[0], f"m.up.{last}": tensor}, {})
    row = measure(folder)["m.up"]
    assert (row.status, said in row.reason) == ("skipped", True), row.reason
