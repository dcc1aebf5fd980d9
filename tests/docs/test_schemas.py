"""Each exported document is valid by its JSON Schema, and has no key that docs/json.md does not list."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gonio
from catalog import seeded
from cli.shell import invoke
from docs.pages import builder_of
from gonio.lab import showing
from gonio.lab.claims import as_data, judge_claims, load_claim
from gonio.lab.judging.results import Amount, TimeToScore
from gonio.lab.showing.exports import MULTI_TASK_FORMATS
from gonio.measuring import Suppression, TensorMeasurement, changes, difference, measure, outline, widths

BUILDER = builder_of("build_schemas")
SCHEMAS: dict[str, dict[str, Any]] = {one["title"]: one for one in BUILDER.schemas().values()}
SHOWN = {field.name for field in fields(TensorMeasurement) if field.metadata.get("column")}  # need no line of the page


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without room for further keys."""
    made = copy.deepcopy(schema)
    for part in (made, *made.get("$defs", {}).values()):
        part["additionalProperties"] = False
    if "tensors" in made.get("$defs", {}):  # of a measurement
        made["$defs"]["tensors"]["properties"] |= {
            name: {} for name in SHOWN - {*made["$defs"]["tensors"]["properties"]}
        }
    return made


def conforms(document: str) -> dict[str, Any]:
    """The document, which is strict JSON and what its schema says."""
    read: dict[str, Any] = json.loads(document, parse_constant=pytest.fail)
    schema = strict(SCHEMAS[read["schema"]])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(read)
    return read


def broken() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].weight[1] = 1
    return model


def everything() -> str:
    """A measurement in which every object of the schema has a member, and figures of every kind."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), gonio.nn.SwitchableNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)),
    )
    x = torch.randn(16, 3, 8, 8)
    model(x)
    with torch.no_grad():
        model.register_buffer("spare", torch.full((2,), float("nan")))  # takes no part in the signal
        model[9].weight[0] = 0
        model[9].weight[1] = 0
    found = measure(model, batch=x, extra_figures=("operator_norm",))
    return Suppression(ignore=("G102", "G405")).applied(found, model).to_json()


def of_widths() -> str:
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    return widths(lambda n: nn.Sequential(nn.Linear(4, n), nn.Linear(n, 3)), (8, 32), batch, seeds=2).to_json()


def of_difference() -> str:
    before, after = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, n)) for n in (2, 3))
    return difference(before, after).to_json()


def of_changes() -> str:
    base = {"h.0.fc.weight": seeded(30, 40), "h.1.fc.weight": seeded(20, 30, seed=1)}
    tuned = (
        {name: weight + 0.1 * seeded(*weight.shape, seed=seed) for name, weight in base.items()} for seed in (7, 8)
    )
    return changes(base, *tuned).to_json()


def of_outline() -> str:
    return outline(broken()).to_json()


def of_certificate() -> str:
    return json.dumps(gonio.certify(broken(), seeded(2, 4)).to_dict())


def of_treatment() -> str:
    return json.dumps(gonio.doctor(broken(), batch=seeded(8, 4)).to_dict())


def of_results() -> str:
    study = showing.example()
    figures: dict[str, Any] = {"improvement": 0.9, "parameters": Amount(100.0, 110.0), "flops": Amount(2e6, 3e6)}
    figures["reach"] = TimeToScore(n=8, reached=7, ratio=1.2)
    return showing.to_json(replace(study, effects=tuple(replace(effect, **figures) for effect in study.effects)))


def of_claims() -> str:
    return json.dumps(as_data(judge_claims([load_claim("bn-imagenet")], "no-folder")))


MADE: dict[str, Callable[[], str]] = {
    "measurements": everything,
    "widths": of_widths,
    "difference": of_difference,
    "changes": of_changes,
    "outline": of_outline,
    "certificate": of_certificate,
    "treatment": of_treatment,
    "results": of_results,
    "claims": of_claims,
}


@pytest.mark.parametrize("kind", MADE)
def test_a_document_is_what_its_schema_says(kind: str) -> None:
    assert conforms(MADE[kind]())["schema"] == f"gonio.{kind}/1"


def test_a_check_and_its_fingerprints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.randn(4, 40), "b": torch.full((2,), float("nan")), "c": torch.zeros(3)}, path)
    invoke("check", str(path), "--json", str(tmp_path / "check.json"), "--save", str(tmp_path / "prints.json"))
    assert conforms((tmp_path / "check.json").read_text(encoding="utf-8"))["intact"] is False
    assert set(conforms((tmp_path / "prints.json").read_text(encoding="utf-8"))["tensors"]) == {"a.weight", "b", "c"}


def test_several_checks_are_a_list_of_documents(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in paths:
        save_file({"a.weight": torch.ones(4, 4)}, path)
    invoke("check", *map(str, paths), "--json", str(tmp_path / "check.json"))
    several = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert [conforms(json.dumps(one))["schema"] for one in several] == ["gonio.check/1"] * 2


def test_the_costs_of_steps(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    invoke("cost", "muon", "self-orthogonality-1d", "--model", "digits-cnn", "--batch", "2x1x8x8", "--seconds", "0",
           "--json", str(file))  # fmt: skip
    rows = conforms(file.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["baseline", "the same again", "muon", "self-orthogonality-1d"]
    assert [bool(row["reason"]) for row in rows] == [False, False, False, True]


def test_the_committed_claims_are_a_document() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "claims" / "full.json"
    assert conforms(path.read_text(encoding="utf-8"))["claims"]


def test_studies_taken_together() -> None:
    one = showing.example()
    other = replace(one, plan=replace(one.plan, task="another"))
    found = MULTI_TASK_FORMATS["json"](gonio.lab.across([one, other]))
    assert conforms(found)["recipes"]


def test_every_document_has_a_test() -> None:
    assert {*SCHEMAS} == {f"gonio.{kind}/1" for kind in (*MADE, "check", "fingerprint", "across", "cost")}


def test_the_files_are_those_of_the_page() -> None:
    for name, schema in BUILDER.schemas().items():
        assert json.loads((BUILDER.FOLDER / name).read_text(encoding="utf-8")) == schema, name
    assert {path.name for path in BUILDER.FOLDER.iterdir()} == {*BUILDER.schemas()}


def test_every_figure_occurs_in_the_example() -> None:
    """Or else a wrong type in the table would not be seen."""
    found = conforms(everything())
    for name in ("tensors", "signals"):
        keys = SCHEMAS["gonio.measurements/1"]["$defs"][name]["properties"]
        assert not {key for key in keys if all(row[key] is None for row in found[name])}
    for part in ("findings", "scale", "suppressed"):
        assert found[part]
    effects = conforms(of_results())["effects"]
    assert not [key for key in effects[0] if all(effect[key] is None for effect in effects)]
    (shares,) = found["mixtures"].values()
    assert all(sum(share.values()) == pytest.approx(1) for share in shares.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("findings"), "'findings' is a required property"),
        (lambda d: d.update(more=1), "'more' was unexpected"),
        (lambda d: d.update(notes=[1]), "1 is not of type 'string'"),
        (lambda d: d["findings"][0].pop("found"), "'found' is a required property"),
        (lambda d: d["tensors"][0].update(filters=1.5), "1.5 is not valid under any"),
        (lambda d: d["tensors"][0].update(angle_histogram=[0]), "is not valid under any"),
    ],
)
def test_a_document_that_differs_is_refused(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    document = conforms(everything())
    change(document)
    with pytest.raises(jsonschema.ValidationError, match=said):
        conforms(json.dumps(document))
