"""Law: nothing draws from a global generator, so that recipes that share a seed share every other draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from catalog import PARAMETRIZATIONS, REGULARIZERS, VERBS, ParametrizationCase, RegularizerCase, VerbCase, seeded
from gonio import parametrizations as P
from laws.support import MODULES, ModuleCase, differentiate, global_states, over, perturbed, run


def check_isolated(work: Callable[[], object]) -> None:
    before = global_states()
    work()
    for name, state in global_states().items():
        assert state == before[name], f"the global generator of {name} moved"


@over(MODULES)
def test_module(case: ModuleCase) -> None:
    module = case.make()
    check_isolated(lambda: run(module, seeded(*case.shape)))


@over(REGULARIZERS)
def test_regularizer(case: RegularizerCase) -> None:
    x = seeded(*case.shape).requires_grad_()
    check_isolated(lambda: differentiate(case.make().value(x), [x]))


@over(PARAMETRIZATIONS)
def test_attaching(case: ParametrizationCase) -> None:
    layer, template = perturbed(case.layer()), case.make()
    check_isolated(lambda: P.attach(layer, "weight", template))


@over(VERBS)
def test_verb(case: VerbCase) -> None:
    model = case.model()
    check_isolated(lambda: case.apply(model).undo_())


def test_the_law_refuses_a_draw() -> None:
    check_isolated(lambda: torch.rand(1, generator=torch.Generator()))
    with pytest.raises(AssertionError, match="the global generator of torch moved"):
        check_isolated(lambda: nn.Linear(2, 2))
