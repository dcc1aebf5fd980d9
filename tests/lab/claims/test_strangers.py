"""Claims by strangers: files with mistakes, packages that ship claims, and claims that change after their runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.shell import invoke
from gonio.errors import ClaimError, InvalidArgumentError, PlanChangedError, RecipeError, UnknownNameError
from gonio.lab.claims import CHOICE_SEEDS, Claim, ClaimOptions, as_data, from_data, load_claim, plan_claim, try_claims
from gonio.lab.claims.claim import read_claim
from gonio.lab.running.measures import measures
from gonio.lab.showing.claims import claim_explanation, claimed_text
from gonio.lab.tasks import resolve

ARMS = [{"name": "plain"}, {"name": "method", "recipe": {"init": [{"where": "type:Linear", "use": "he_"}]}}]
PENALTY = {"penalty": [{"where": "type:Linear", "use": "Orthogonality", "strength": "{dose}"}]}
SMALL = {"name": "deep-mlp", "depth": 2, "width": 16}
BASE: dict[str, Any] = {"name": "mine", "claim": "It is better.", "source": "A paper.", "fair": {"floor": 60.0}}


def claim(*, setting: Any = None, **fields: Any) -> Claim:
    quick = {"model": SMALL, "training": {"epochs": 1}, "arms": ARMS, "seeds": 3, **(setting or {})}
    return read_claim({**BASE, **fields, "quick": quick}, origin="mine.yaml")


FORMS = [
    ({"arms": None}, r"quick\.arms: None, but expected a list of arms"),
    ({"arms": "he"}, r"quick\.arms: 'he', but expected a list of arms"),
    ({"arms": {"name": "a"}}, r"quick\.arms: .*, but expected a list of arms"),
    ({"contrast": ["plain", "method"]}, r"quick\.contrast: .*, but expected a mapping of arms to factors"),
    ({"contrast": None}, r"quick\.contrast: None, but expected a mapping"),
    ({"contrast": {"plain": -1, "*": True}}, r"quick\.contrast: \* names the arm plain, which has a factor already"),
    ({"contrast": {"m*": 1, "method": 2, "plain": -2}}, "method names the arm method, which has a factor already"),
    ({"contrast": {"plain": True}}, r"quick\.contrast\.plain: True, but expected a number"),
    ({"arms": [*ARMS, {"name": "d", "doses": None}]}, r"quick\.arms\.2\.doses: None, but expected a list of numbers"),
    ({"arms": [*ARMS, {"name": "d", "doses": "0.1"}]}, r"quick\.arms\.2\.doses: '0\.1', but expected a list"),
    ({"arms": [*ARMS, {"name": "d", "doses": ["x"]}]}, r"quick\.arms\.2\.doses\.0: 'x', but expected a number"),
    ({"arms": [*ARMS, {"name": "d", "doses": []}]}, r"quick\.arms\.2\.doses: it is empty"),
    ({"arms": [*ARMS, {"doses": [1.0]}]}, r"quick\.arms\.2\.name: it is missing"),
    ({"grid": 5}, r"quick\.grid: 5, but expected a mapping with series, levels and recipe"),
    ({"grid": {"series": ["a"]}}, r"quick\.grid\.levels: it is missing"),
    ({"grid": {"series": "abc", "levels": [1], "recipe": {}}}, r"quick\.grid\.series: 'abc', but expected a list"),
    ({"grid": {"series": [1], "levels": [1], "recipe": {}}}, r"quick\.grid\.series\.0: 1, but expected a name"),
    ({"grid": {"series": ["a"], "levels": 5, "recipe": {}}}, r"quick\.grid\.levels: 5, but expected a list"),
    ({"arms": [ARMS[0]]}, r"quick: an experiment with one arm needs a contrast"),
]


@pytest.mark.parametrize(("setting", "told"), FORMS)
def test_a_part_of_another_form_is_named_by_its_place(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ClaimError, match=told) as caught:
        claim(setting=setting)
    assert "Error:" not in str(caught.value)  # no words of Python


@pytest.mark.parametrize("recipe", ["mine.yaml", "/etc/hostname", "../mine"])
def test_a_recipe_of_a_claim_is_no_file(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("name: mine\ninit:\n  - {where: 'type:Linear', use: he_}\n")
    with pytest.raises(ClaimError, match="quick: there is no recipe named"):
        claim(setting={"arms": [ARMS[0], {"name": "b", "recipe": recipe}]})


def test_a_blank_reason_is_none() -> None:
    assert claim(fair={"floor": 60.0, "untuned": "  "}).fair.untuned == ""


@pytest.mark.parametrize("epochs", [0, -1])
def test_an_epoch_is_counted_from_one(epochs: int) -> None:
    with pytest.raises(ClaimError, match="option 'epochs' of the measure 'loss_after' is greater than 0"):
        claim(measure="loss_after", options={"epochs": epochs})


# --- the score that a claim is about ----------------------------------------------------------------------

OTHER = """
import torch
from torch import nn
from gonio.lab import Split, Task, TrainingConfig
from gonio.lab.tasks import Metric

def split(seed):
    draw = torch.Generator().manual_seed(seed)
    targets = torch.arange(40) % 2
    return Split(targets[:, None] + torch.randn(40, 3, generator=draw), targets)

def task(metric):
    return Task(name="other", train=split(0), validation=split(1), test=split(2), model="deep-mlp",
                sizes={"num_classes": 2}, sesoi=1.0, metric=metric,
                training=TrainingConfig(epochs=1, batch_size=10, lr=0.1))

def right(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())

def error(): return task(Metric("error", lambda o, t: 100 - 100 * right(o, t), "min", "%"))
def share(): return task(Metric("accuracy", right))
def percent(): return task(Metric("balanced accuracy", lambda o, t: 100 * right(o, t), "max", "%"))
def net(num_classes): return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "other.py").write_text(OTHER)
    return str(tmp_path / "other.py")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "error",
            "accuracy is computed from a score in % of which larger is better; found .* of which smaller is better",
        ),
        ("share", "accuracy is computed from a score in % .*; found the score of other, accuracy, without a unit"),
    ],
)
def test_a_claim_is_tried_on_a_task_with_its_score_alone(own: str, name: str, told: str) -> None:
    options = ClaimOptions(task=f"{own}:{name}", model=f"{own}:net")
    with pytest.raises(InvalidArgumentError, match=told):
        plan_claim(claim(), options)
    assert plan_claim(claim(), ClaimOptions(task=f"{own}:percent", model=f"{own}:net")).direction == "max"


def test_bits_of_a_classifier_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="mine: bits_per_byte is computed from a score in bits"):
        plan_claim(claim(measure="bits_per_byte", direction="smaller", fair={"ceiling": 4.0}))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"measure": "angle_spread", "fair": {"ceiling": 60.0}}, "fair.ceiling is a bound of scores of which smaller"),
        ({"measure": "int4_cost", "fair": {"floor": 1.0}}, "int4_cost is computed from a score of which smaller"),
    ],
)
def test_a_bound_is_on_the_side_of_the_score(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        plan_claim(claim(**fields))


def test_every_score_of_a_task_is_that_of_a_built_in_one() -> None:
    tasks = [resolve(name).metric for name in ("digits", "bytes", "digits-gan", "digits-vae")]
    known = {(metric.unit, metric.direction) for metric in tasks}
    assert {spec.scored for spec in measures().values() if spec.kind == "task"} == known


# --- names and seeds --------------------------------------------------------------------------------------


def test_seeds_that_choose_a_dose_are_not_judged() -> None:
    with pytest.raises(InvalidArgumentError, match=f"seeds of mine .* choose a dose.*; found {CHOICE_SEEDS[0]}"):
        plan_claim(claim(), ClaimOptions(first_seed=CHOICE_SEEDS[0] - 1))


def test_a_claim_of_ones_own_takes_no_name_of_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({**BASE, "name": "som-spread", "not_tried": "later"}))
    with pytest.raises(ClaimError, match="som-spread is one of the catalogue"):
        load_claim(tmp_path / "mine.yaml")


def test_two_claims_of_one_name_are_not_tried_in_one_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="two claims with the name mine"):
        try_claims([claim(), claim(sesoi=2.0)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_claim_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a file.yaml"
    file.write_text(json.dumps(claim().model_dump(mode="json", exclude_defaults=True)))
    plan = plan_claim(load_claim(file), ClaimOptions(sources={"mine": str(file)}))
    assert plan.command == f"gonio reproduce '{file}'"
    assert f"try it: gonio reproduce '{file}'" in claim_explanation(load_claim(file), str(file)).splitlines()


# --- after the runs ---------------------------------------------------------------------------------------

IDENTITY: dict[str, Any] = {"measure": "penalty_change", "direction": "larger", "sesoi": 0.5, "scope": "identity"}
ALONE = {"arms": [{"name": "trained"}], "contrast": {"trained": 1.0}}
TWO = {"arms": [{"name": "trained"}, {"name": "redrawn", "redraw": True}], "contrast": {"trained": 1.0}}


def test_the_terms_of_a_verdict_are_fixed_before_the_runs(tmp_path: Path) -> None:
    first = try_claims([claim(setting=TWO, **IDENTITY)], tmp_path)
    before = (tmp_path / "mine" / "claim.json").read_text()
    for changed, key in (({"direction": "same"}, "direction is larger in the study and same in the command"),
                         ({"fair": {"floor": 1.0}}, r"fair\.floor is 60\.0 in the study and 1\.0"),
                         ({"sesoi": 0.1}, r"sesoi is 0\.5 in the study and 0\.1")):  # fmt: skip
        with pytest.raises(PlanChangedError, match=key):
            try_claims([claim(setting=TWO, **{**IDENTITY, **changed})], tmp_path)
    with pytest.raises(PlanChangedError, match=r"contrast is \+1 trained in the study and \+1 redrawn"):
        try_claims([claim(setting={**TWO, "contrast": {"redrawn": 1.0}}, **IDENTITY)], tmp_path)
    assert (tmp_path / "mine" / "claim.json").read_text() == before
    again = try_claims([claim(setting=TWO, **IDENTITY, differs="Said better.")], tmp_path)
    assert again.results[0].evidence == first.results[0].evidence


def test_seeds_that_are_added_after_a_look_are_told(tmp_path: Path) -> None:
    mine = claim(setting=ALONE, **IDENTITY)
    first = try_claims([mine], tmp_path)
    assert "look" not in first.results[0].evidence.reason
    found = try_claims([mine], tmp_path, options=ClaimOptions(seeds=4))
    told = "After 3 runs the number of seeds was raised by 1: the p value does not account for this second look."
    assert found.results[0].evidence.reason.endswith(told)
    assert from_data(json.loads(json.dumps(as_data(found)))) == found


# --- packages ---------------------------------------------------------------------------------------------


def packed(site: Path, name: str, points: str, files: dict[str, bytes]) -> None:
    """An installed package with files and entry points, which may not be imported."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise RuntimeError('it was imported')")
    for file, content in files.items():
        (site / name / file).write_bytes(content)
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[gonio.claims]\n{points}\n")


def content(name: str) -> bytes:
    return json.dumps(claim(name=name).model_dump(mode="json", exclude_defaults=True)).encode()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packed(tmp_path, "paper_one", "one = paper_one\ntwice = paper_one",
           {"faster.yaml": content("faster"), "longer.yml": content("longer"), "latin.yaml": "é".encode("latin-1"),
            "bomb.yaml": b"a: &a [1]\nb: [*a]\n", "taken.yaml": content("som-spread")})  # fmt: skip
    packed(tmp_path, "paper_two", "twice = paper_two\nlost = no_package.claims\nfunction = paper_two:claims",
           {"faster.yaml": content("faster")})  # fmt: skip
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_every_claim_of_a_package_is_listed_by_what_a_command_calls_it(site: Path) -> None:
    listed = invoke("reproduce", "--list")
    assert listed.exit_code == 0
    for name in ("one:faster", "one:longer", "som-spread"):
        assert f" {name} " in listed.stdout
    for told in (
        "one:latin is left out",
        "one:bomb is left out",
        "one:taken is left out",
        "twice:faster is left out",
        "lost = no_package.claims of gonio.claims leads to no claims",
        "function = paper_two:claims",
    ):
        assert told in " ".join(listed.stderr.split())  # fmt: skip


def test_a_claim_of_two_packages_is_none_of_them(site: Path) -> None:
    assert load_claim("one:faster").name == "faster"
    with pytest.raises(InvalidArgumentError, match=r"twice:faster must be a claim of one package; found .*paper_one"):
        load_claim("twice:faster")
    with pytest.raises(RecipeError, match=r"paper_one.*bomb\.yaml:1: the anchor &a is not allowed"):
        load_claim("one:bomb")
    with pytest.raises(UnknownNameError, match="one:slower"):
        load_claim("one:slower")


@pytest.mark.parametrize(
    ("fields", "told"),
    [({}, "at least 1 point."), ({"measure": "angle_spread", "sesoi": 0.5}, "at least 0.5 degrees."),
     ({"setting": ALONE, **IDENTITY}, "at least 0.5 %.")],
)  # fmt: skip
def test_the_smallest_effect_has_its_unit(fields: dict[str, Any], told: str) -> None:
    assert claimed_text(claim(**fields)).endswith(told)
