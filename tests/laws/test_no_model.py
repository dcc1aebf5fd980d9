"""Law: a verb that is given no model says what it was given and what to do, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from catalog import VERBS
from gonio import regularizers as R
from gonio import surgery as S

_FIRST = {case.name.split()[0]: case for case in reversed(VERBS)}  # the first case of each verb
_LOAD = "Load it into its model first, with model.load_state_dict(…), and pass the model."
_NO_MODELS: dict[str, tuple[Any, str]] = {
    "a path": ("runs/best.pt", f"the path 'runs/best.pt'. {_LOAD}"),
    "a Path": (Path("best.pt"), f"the path 'best.pt'. {_LOAD}"),
    "a state dict": (nn.Linear(2, 2).state_dict(), f"a state dict or another mapping (OrderedDict). {_LOAD}"),
    "a dict": ({"weight": torch.zeros(2)}, f"a state dict or another mapping (dict). {_LOAD}"),
    "a class": (nn.Linear, "the class Linear. Make an instance first: Linear(…)."),
    "another class": (dict, "the class dict. Pass a torch.nn.Module."),
    "None": (None, "None. Pass a torch.nn.Module."),
    "a tensor": (torch.zeros(2, 2), "an object of the class Tensor. Pass a torch.nn.Module."),
    "a list": ([nn.Linear(2, 2)], "an object of the class list. Pass a torch.nn.Module."),
}


@pytest.mark.parametrize("given", _NO_MODELS)
@pytest.mark.parametrize("verb", _FIRST)
def test_verbs(verb: str, given: str) -> None:
    value, found = _NO_MODELS[given]
    name = "recipe laws" if verb == "apply_" else verb  # which its recipe names
    with pytest.raises(gonio.errors.InvalidArgumentError, match=rf"^{name}.* needs a model; found {re.escape(found)}$"):
        _FIRST[verb].apply(value)


_OTHERS: dict[str, Callable[[Any], Any]] = {
    "Penalty": lambda m: gonio.Penalty(m, [(None, R.ScaleShift(1e-4))]),
    "Tracker": gonio.Tracker,
    "param_groups": lambda m: gonio.param_groups(m, 0.1),
    "equivalent": lambda m: gonio.equivalent(nn.Linear(2, 2), m, example=torch.ones(1, 2)),
    "certify": lambda m: gonio.certify(m, example=torch.ones(1, 2)),
}


@pytest.mark.parametrize("given", _NO_MODELS)
@pytest.mark.parametrize("name", _OTHERS)
def test_what_takes_a_model(name: str, given: str) -> None:
    value, found = _NO_MODELS[given]
    with pytest.raises(gonio.errors.InvalidArgumentError, match=rf"^{name} needs a model; found {re.escape(found)}$"):
        _OTHERS[name](value)


def test_anatomy_takes_a_path_too() -> None:
    with pytest.raises(gonio.errors.InvalidArgumentError, match=r"^anatomy needs a model; found None\."):
        S.anatomy(None)


def test_a_number_for_the_optimizer() -> None:
    with pytest.raises(gonio.errors.InvalidArgumentError, match=r"^hold_ needs an optimizer; found 0\.1\. Pass"):
        gonio.hold_(nn.Linear(2, 2), 0.1)
