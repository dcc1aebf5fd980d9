"""Data of one's own: the same in every run, refused with the reason, or noted."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from gonio.lab import Split, StudyPlan, Task, make_plan, make_script_plan
from gonio.lab.running.cost import measure_costs
from gonio.lab.tasks import resolve
from lab.plans import OWN, TINY, recorded


def tiny(**changes: Any) -> Task:
    return replace(resolve(f"{TINY}:task"), **changes)


def planned(name: str, recipes: tuple[str, ...] = ()) -> StudyPlan:
    return make_plan(recipes, task=f"{__file__}:{name}", seeds=1)


# --- the same data in every process --------------------------------------------------------------------


def split_at_random() -> Task:
    """The usual way to split a data set, which draws from the global generator."""
    kept = tiny(augment=None).train
    every = TensorDataset(kept.inputs, kept.targets)
    train, validation, test = random_split(every, [17, 8, 8])
    return tiny(augment=None, train=train, validation=validation, test=test)


def noisy_split() -> Task:
    kept = tiny().train
    noise = np.random.randn() + random.random() + torch.rand(())  # noqa: NPY002
    return tiny(train=Split(kept.inputs + noise, kept.targets))


@pytest.mark.parametrize("name", ["split_at_random", "noisy_split"])
def test_a_factory_that_draws_from_global_generators_gives_every_process_the_same_data(name: str) -> None:
    plan = planned(name)
    before = torch.get_rng_state()
    random.seed(5)
    assert resolve(plan.task).digest() == plan.data
    assert torch.equal(before, torch.get_rng_state())
    assert recorded(plan, plan.baseline).status == "finished"


def unseeded_split() -> Task:
    kept = tiny().train
    return tiny(train=Split(kept.inputs + float(np.random.default_rng().normal()), kept.targets))


def test_a_run_on_other_data_than_the_plans_is_refused() -> None:
    plan = planned("unseeded_split", ("orthogonal-init",))
    record = recorded(plan, plan.baseline)
    assert record.refused
    assert "must give them again; found other data. Restore the files" in str(record.error)
    with pytest.raises(ValueError, match="found other data"):
        measure_costs(plan, plan.recipes[1:])


def test_a_file_that_is_edited_while_its_study_runs_is_refused(tmp_path: Path) -> None:
    net, script = tmp_path / "net.py", tmp_path / "script_of_own.py"
    net.write_text(Path(TINY).read_text())
    script.write_text(Path(OWN).read_text())
    plans = [make_plan([], task=f"{TINY}:task", model=f"{net}:model", seeds=1),
             make_script_plan([], script=f"{script}:score_of_seed", seeds=1)]  # fmt: skip
    assert [recorded(plan, plan.baseline).status for plan in plans] == ["finished", "finished"]
    for path in (net, script):
        path.write_text(path.read_text() + "\n# another learning rate\n")
    for plan, path in zip(plans, (net, script), strict=True):
        record = recorded(plan, plan.baseline)
        assert record.refused
        assert f"found another content of {path}:" in str(record.error)
