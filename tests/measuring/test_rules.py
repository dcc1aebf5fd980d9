"""Each rule finds what it looks for, stays silent beside it, and has a measured rate of false alarms."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gonio.errors import UnknownNameError
from gonio.measuring import explain, measure
from gonio.measuring.findings.finding import LEVELS
from gonio.measuring.findings.rules import RULES, WEIGHT_RULES, measured_rates


def weight(n: int = 64, d: int = 100, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def with_(change: Callable[[Tensor], object]) -> Tensor:
    made = weight()
    change(made)
    return made


# code → (a weight it must find, a weight beside it on which it must stay silent)
CASES: dict[str, tuple[Tensor, Tensor]] = {
    "G001": (with_(lambda w: w[3].__setitem__(4, float("nan"))), weight()),
    "G101": (torch.zeros(8, 9), weight()),
    "G102": (with_(lambda w: w[5].zero_()), with_(lambda w: w[5].mul_(0.1))),
    "G103": (with_(lambda w: w[5].mul_(1e-4)), with_(lambda w: w[5].mul_(0.01))),
    "G104": (with_(lambda w: w[5].mul_(20)), with_(lambda w: w[5].mul_(5))),
    "G201": (weight() + 2, weight() + 0.2),
    "G202": (with_(lambda w: w[5].copy_(-2 * w[6])), with_(lambda w: w[5].add_(w[6]))),
    "G301": (weight() + 3, weight() + 0.05),
}


def codes(tensor: Tensor) -> list[str]:
    return [finding.code for finding in measure({"w.weight": tensor}).findings]


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(WEIGHT_RULES)


@pytest.mark.parametrize("code", WEIGHT_RULES)
def test_a_rule_finds_its_case_and_not_the_one_beside_it(code: str) -> None:
    sick, well = CASES[code]
    assert code in codes(sick)
    assert code not in codes(well)


@pytest.mark.parametrize("code", RULES)
def test_every_rule_is_explained_with_its_rate(code: str) -> None:
    text = explain(code.lower())
    rule = RULES[code]
    assert text.startswith(f"{code} ({rule.level}): {rule.title}")
    for said in (rule.means, rule.do, rule.source, rule.chance if code in WEIGHT_RULES else rule.exact):
        assert said
        assert said in text
    counted = r"\d+ of \d+ tensors in \d+ of \d+ "
    measured = rf"{counted}randomly initialised models; .*\. {counted}trained networks; .* %"
    assert re.search(f"False alarms: {measured if code in WEIGHT_RULES else 'none by construction'}", text)
    assert rule.level in LEVELS
    assert re.fullmatch(r"G\d{3}", code)


@pytest.mark.parametrize(("sample", "models"), [("random", 3000), ("trained", 100)])
def test_the_measured_rates_are_low_and_from_enough_models(sample: str, models: int) -> None:
    rates = measured_rates()[sample]
    assert set(rates["rules"]) == {code for code, rule in RULES.items() if not rule.exact} == set(WEIGHT_RULES)
    assert rates["models"] >= models
    if sample == "random":
        assert all(seen["models_upper"] < 0.01 for seen in rates["rules"].values())


def test_an_unknown_rule_names_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match="no rule named 'G999'"):
        explain("G999")


def test_errors_come_before_warnings_and_warnings_before_remarks() -> None:
    state = {
        "a.weight": torch.zeros(4, 4),
        "b.weight": CASES["G104"][0],
        "c": torch.tensor([float("inf"), 1.0]),
        "d.weight": CASES["G001"][0],
    }
    found = measure(state).findings
    assert [(f.level, f.code, f.path) for f in found] == [
        ("error", "G001", "c"),
        ("error", "G001", "d"),
        ("warn", "G104", "b"),
        ("warn", "G301", "b"),
        ("info", "G101", "a"),
    ]
    assert found[1].found == "1 of 6400 values are NaN or infinite, the first at [3, 4]"


def test_the_padding_row_of_an_embedding_is_no_dead_filter() -> None:
    assert not measure(nn.Embedding(20, 6, padding_idx=3)).findings
    two = nn.Embedding(20, 6, padding_idx=3)
    with torch.no_grad():
        two.weight[7] = 0
    assert [f.code for f in measure(two).findings] == ["G102"]


def test_few_or_short_filters_raise_no_alarm() -> None:
    for shape in ((1, 5), (2, 3), (8, 1), (8, 2), (300, 3)):
        for seed in range(20):
            assert codes(weight(*shape, seed)) == [], shape
