"""Each rule finds its case, is silent beside it, and has a measured rate of false alarms; suppression."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.measuring import Measurements, Suppression, check, explain, measure
from gonio.measuring.findings.rules import (
    ADVICE,
    LEVELS,
    RULES,
    WEIGHT_RULES,
    findings_by,
    measured_rates,
    rule_texts,
)
from gonio.measuring.reading.entry import NOTES
from html_reader import Page
from references.measuring import CASES, weight


def codes(tensor: Tensor | dict[str, Tensor]) -> list[str]:
    state = tensor if isinstance(tensor, dict) else {"w.weight": tensor}
    return [finding.code for finding in measure(state).findings]


@pytest.mark.parametrize("code", WEIGHT_RULES)
def test_a_rule_finds_its_case_and_not_the_one_beside_it(code: str) -> None:
    sick, well = CASES[code]
    assert code in codes(sick)
    assert code not in codes(well)


def test_rules_ask_for_marks_and_read_no_sentences() -> None:
    """A note may be a text of another library, as the remarks of a user's parametrization are."""
    (row,) = measure({"e.running_var": torch.ones(4)}).tensors
    notes = (NOTES["no variance"], "the exponent is negative")
    assert not findings_by(WEIGHT_RULES, [(replace(row, notes=notes), "e")])
    marked = replace(row, marks=("no variance",), negative_variances=2)
    assert [f.code for f in findings_by(WEIGHT_RULES, [(marked, "e")])] == ["G105", "G107"]
    state = {"n.running_var": torch.tensor([0.5, -1.0]), "o.running_var": torch.zeros(3)}
    found = measure(state)
    assert [(t.marks, t.negative_variances) for t in found.tensors] == [((), 1), (("no variance",), 0)]
    assert {f.found for f in found.findings} == {"1 running variance is negative", NOTES["no variance"]}


def test_marks_of_tables_are_told_by_notes_too() -> None:
    table = nn.Embedding(20, 8, padding_idx=0)
    constant = nn.Embedding(20, 8)
    nn.init.ones_(constant.weight)
    frozen = nn.Embedding(20, 8).requires_grad_(False)
    found = measure(nn.ModuleList([table, constant, frozen]))
    assert [t.marks for t in found.tensors] == [("table", "padding"), ("table", "constant"), ("table", "fixed")]
    assert all(t.notes for t in found.tensors)


UNMEASURED = {code for code, text in rule_texts().items() if not text.calibrated}


@pytest.mark.parametrize("code", RULES)
def test_every_rule_is_explained_with_its_rate(code: str) -> None:
    text, rule = explain(code.lower()), rule_texts()[code]
    assert text.startswith(f"{code} ({rule.level}): {rule.title}")
    for said in (rule.means, rule.do, rule.source, rule.exact or rule.chance):
        assert said
        assert said in text
    counted = r"\d+ of \d+ tensors in \d+ of \d+ "
    measured = rf"{counted}randomly initialised models; .*\. {counted}trained networks; .* %"
    of_cases = r"\d+ of \d+ (changes|pairs|healthy) .*; the true rate is below .* %"
    measured = measured if code in measured_rates()["random"]["rules"] else of_cases
    measured = "not measured" if code in UNMEASURED else measured
    assert re.search(f"False alarms: {'none by construction' if rule.exact else measured}", text)
    assert rule.level in LEVELS
    assert re.fullmatch(r"G\d{3}", code)
    assert rule_texts().keys() == RULES.keys()


@pytest.mark.parametrize(("sample", "models"), [("random", 3000), ("trained", 100)])
def test_the_measured_rates_are_low_and_from_enough_models(sample: str, models: int) -> None:
    rates = measured_rates()[sample]
    judging = {code for code, rule in {**WEIGHT_RULES, **ADVICE}.items() if not rule.text.exact}
    assert set(rates["rules"]) == judging - UNMEASURED - set(measured_rates()["cases"])
    assert rates["models"] >= models
    if sample == "random":
        assert all(seen["models_upper"] < 0.01 for seen in rates["rules"].values())


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
    assert found[1].found == "1 of 6,400 values is NaN or infinite, the first at [3, 4]"


def test_the_padding_row_of_an_embedding_is_no_dead_filter() -> None:
    assert not measure(nn.Embedding(20, 6, padding_idx=3)).findings
    two = nn.Embedding(20, 6, padding_idx=3)
    with torch.no_grad():
        two.weight[7] = 0
    assert [f.code for f in measure(two).findings] == ["G102"]


@pytest.mark.parametrize(("kind", "level"), [(nn.Embedding, "info"), (nn.EmbeddingBag, "info"), (nn.Linear, "warn")])
def test_new_tokens_that_start_from_one_vector_are_a_remark(kind: type[nn.Module], level: str) -> None:
    """As a vocabulary grows in transformers: the new rows are the mean of the others."""
    table = kind(40, 24) if kind is not nn.Linear else nn.Linear(24, 40)
    with torch.no_grad():
        table.weight[30:] = table.weight[:30].mean(0)
    found = measure(nn.Sequential(table, nn.Linear(24, 8))).findings
    assert [f.level for f in found if f.code == "G203"] == [level]


def test_pairs_that_are_proportional_are_named_once() -> None:
    copied = weight(40, 64, 0)
    copied[[7, 9]] = copied[[3, 3]]  # three pairs
    assert codes(copied) == ["G203"]
    copied[20] = copied[3] + 0.01 * weight(40, 64, 1)[0]  # near to all three of them
    said = {finding.code: finding.found for finding in measure({"w.weight": copied}).findings}
    assert said.keys() == {"G203", "G202"}
    assert said["G202"].startswith("3 of 780 pairs of filters have an absolute cosine of 0.95 or more, beside the")
    alone = weight(40, 64, 0)
    alone[20] = alone[3] + 0.01 * weight(40, 64, 1)[0]
    assert codes(alone) == ["G202"]


def test_few_or_short_filters_raise_no_alarm() -> None:
    for shape in ((1, 5), (2, 3), (8, 1), (8, 2), (300, 3)):
        for seed in range(20):
            assert codes(weight(*shape, seed)) == [], shape


def model() -> nn.ModuleList:
    """A zero layer, a zero head of two layers, and a batch norm that reads batches of one sample."""
    head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    made = nn.ModuleList([nn.Linear(6, 4), nn.BatchNorm1d(4), head])
    for layer in (made[0], *head):
        nn.init.zeros_(layer.weight)
    return made


def found(ignore: tuple[str, ...] = (), *per_layer: tuple[str, tuple[str, ...]]) -> Measurements:
    made = model()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 6)), batch_size=2)
    return Suppression(ignore, per_layer, "gonio.toml").applied(measure(made, loader=loader), made)


def places(measured: Measurements) -> list[tuple[str, str]]:
    return [(f.code, f.path) for f in measured.findings]


EVERYTHING = [("G401", ""), ("G101", "0"), ("G101", "2.0"), ("G101", "2.1")]


@pytest.mark.parametrize(
    ("ignore", "per_layer", "left"),
    [
        ((), [], EVERYTHING),
        (("G101",), [], [("G401", "")]),
        (("g101", "G401"), [], []),
        ((), [("2.*", ("G101",))], EVERYTHING[:2]),
        ((), [("re:[02]", ("G101",))], [("G401", ""), *EVERYTHING[2:]]),
        ((), [("type:Linear", ("G101",))], [("G401", "")]),
        ((), [("type:Conv2d", ("G101",))], EVERYTHING),
        ((), [("*", ("G101", "G401"))], [("G401", "")]),  # the model as a whole is no layer
        (("G301",), [("0", ("G102",))], EVERYTHING),
    ],
)
def test_what_is_suppressed_is_no_finding(ignore: tuple[str, ...], per_layer: list, left: list) -> None:
    measured = found(ignore, *per_layer)
    assert places(measured) == left
    assert measured.suppressed is not None
    dropped = [(f.code, f.path) for f in measured.suppressed.findings]
    assert sorted([*left, *dropped]) == sorted(EVERYTHING)


def test_every_output_counts_what_is_suppressed_and_names_what_matches_nothing() -> None:
    measured = found(("G101", "G405"), ("2.*", ("G101", "G102")), ("hed.*", ("G101",)))
    count = "3 findings suppressed by gonio.toml"
    unmatched = "Not found, though gonio.toml suppresses it: G405, G102 for 2.*, G101 for hed.*."
    page = Page(measured.to_html()).text
    for shown in (str(measured), measured.to_markdown().replace("\\", ""), page):
        assert count in shown
        assert unmatched in " ".join(shown.split())
    assert "2.1: every value is 0" in page
    read = json.loads(measured.to_json())
    assert read["suppressed"]["by"] == "gonio.toml"
    assert [f["path"] for f in read["suppressed"]["findings"]] == ["0", "2.0", "2.1"]
    assert read["suppressed"]["unmatched"] == ["G405", "G102 for 2.*", "G101 for hed.*"]
    assert len(read["findings"]) == 1
    assert json.loads(measure(model()).to_json())["suppressed"] is None
    assert "suppressed" not in str(measure(model()))


def test_a_checkpoint_has_paths_but_no_types() -> None:
    state = {"head.weight": torch.zeros(3, 3), "head.bias": torch.tensor([float("nan")])}
    quiet = Suppression(per_layer=[("head", ("G101", "G001"))]).applied(measure(state))
    assert quiet.findings == ()
    assert len(Suppression(per_layer=[("head.bias", ("G001",))]).applied(measure(state)).findings) == 1
    typed = Suppression(per_layer=[("type:Linear", ("G101",))]).applied(measure(state))
    assert len(typed.findings) == 2
    assert typed.suppressed is not None
    assert typed.suppressed.unmatched == ("G101 for type:Linear",)


def test_a_code_or_selector_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"named 'G999'\. `gonio list rules` shows all codes\."):
        explain("G999")
    with pytest.raises(UnknownNameError, match=r"no rule named 'G10'\. Did you mean G"):
        Suppression(("G10",))
    with pytest.raises(UnknownNameError, match="no rule named 'E501'"):
        Suppression(per_layer=[("head", ("E501",))])
    with pytest.raises(InvalidArgumentError, match="regular expression"):
        Suppression(per_layer=[("re:(", ("G101",))])


def test_a_matrix_far_from_its_siblings_is_found_as_by_a_check() -> None:
    """The two commands that a reader tries first agree."""
    state = {f"layers.{i}.down.weight": weight(seed=i) * (100 if i == 3 else 1) for i in range(6)}
    found = measure(state).findings
    assert [(f.code, f.path) for f in found] == [("G709", "layers.3.down")]
    assert found == check(state).findings
    del state["layers.3.down.weight"]
    assert measure(state).findings == ()


def test_factors_of_adapters_are_compared_with_those_of_other_layers() -> None:
    state = {f"layers.{i}.down.lora_{part}.weight": weight(seed=i)[:8] for i in range(6) for part in "AB"}
    state["layers.3.down.lora_A.weight"] *= 100
    state["layers.4.down.lora_B.weight"].zero_()  # not trained, unlike the others
    state = {k: v.T.contiguous() if "lora_B" in k else v for k, v in state.items()}
    found = {f.path: f.level for f in measure(state).findings if f.code == "G709"}
    assert found == {"layers.3.down.lora_A": "warn", "layers.4.down.lora_B": "warn"}
