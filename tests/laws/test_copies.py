"""Law: state dict, deepcopy, pickle and torch.save give back the same member."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog import PARAMETRIZATIONS, REGULARIZERS, seeded
from laws.support import MODULES, ModuleCase, assert_all_equal, control, law, over, reloaded, run, trainable


def used(case: ModuleCase) -> nn.Module:
    """A module after one training step, so that no state has its initial value."""
    module = case.make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    output = module(seeded(*case.shape))
    (output * seeded(*output.shape, seed=7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "nested deepcopy": lambda m: copy.deepcopy(copy.deepcopy(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": partial(reloaded, weights_only=False),
}


def check_copy(case: ModuleCase, how: str) -> None:
    module = used(case)
    twin = COPIES[how](module)
    assert type(twin) is type(module), f"{how}: {type(module).__name__} became {type(twin).__name__}"
    assert list(twin.state_dict()) == list(module.state_dict()), f"{how}: other keys"
    shared = {t.data_ptr() for t in module.parameters()} & {t.data_ptr() for t in twin.parameters()}
    assert not shared, f"{how}: the copy shares storage with the original"
    for training in (True, False):
        module.train(training), twin.train(training)
        x = seeded(*case.shape, seed=3)
        assert_all_equal(run(twin, x), run(module, x), how)


def check_independence(case: ModuleCase) -> None:
    """Changing a copy leaves the original alone."""
    module = used(case).eval()
    x = seeded(*case.shape, seed=3)
    expected = run(module, x)
    twin = copy.deepcopy(module).train()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    twin(x)
    assert_all_equal(run(module, x), expected, "original after its copy changed")


def check_state_dict(case: ModuleCase) -> None:
    module = used(case)
    fresh = case.make()
    parameters = list(fresh.parameters())
    fresh.load_state_dict(reloaded(module.state_dict()), strict=True)
    kept = all(a is b for a, b in zip(parameters, fresh.parameters(), strict=True))
    assert kept, "loading replaced a Parameter"
    for training in (True, False):
        module.train(training), fresh.train(training)
        x = seeded(*case.shape, seed=3)
        assert_all_equal(run(fresh, x), run(module, x), "loaded state dict")
    assert len(trainable(fresh)) == len(trainable(module)), "loading changed requires_grad"


def check_value_object(member: Any, *, equal: bool) -> None:
    """A template survives copying, and is equal to its copy where it is a value."""
    for name in ("deepcopy", "pickle"):
        twin = COPIES[name](member)
        assert type(twin) is type(member), f"{name}: {type(member).__name__} became {type(twin).__name__}"
        assert repr(twin) == repr(member), f"{name}: {member!r} became {twin!r}"
        assert not equal or (twin == member and hash(twin) == hash(member)), f"{name}: not equal to its copy"


@pytest.mark.parametrize("how", COPIES)
@over(MODULES)
def test_copy_is_the_same(case: ModuleCase, how: str) -> None:
    check_copy(case, how)


test_copy_is_independent = law(check_independence, MODULES)
test_state_dict_round_trip = law(check_state_dict, MODULES)
test_regularizer_is_a_value = law(lambda case: check_value_object(case.make(), equal=True), REGULARIZERS)
test_parametrization_template_copies = law(lambda case: check_value_object(case.make(), equal=False), PARAMETRIZATIONS)

# --- negative controls ----------------------------------------------------------------------------


class _Forgetful(nn.Linear):
    """Keeps a state that neither a buffer nor a parameter holds."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(x)


class _Sharing(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = type(self)(self.in_features, self.out_features)
        twin._parameters = self._parameters
        return twin


def _Injected(*sizes: int) -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(*sizes))


def test_the_laws_accept_a_plain_linear_layer() -> None:
    for how in COPIES:
        check_copy(control(), how)
    check_independence(control())
    check_state_dict(control())


def test_the_law_refuses_state_outside_the_state_dict() -> None:
    with pytest.raises(AssertionError, match="loaded state dict: tensor 0 differs"):
        check_state_dict(control(_Forgetful))


def test_the_laws_refuse_a_shared_copy() -> None:
    with pytest.raises(AssertionError, match="shares storage"):
        check_copy(control(_Sharing), "deepcopy")
    with pytest.raises(AssertionError, match="original after its copy changed"):
        check_independence(control(_Sharing))


def test_the_law_refuses_injected_classes() -> None:
    """torch's own parametrized modules do not pickle."""
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        check_copy(control(_Injected), "pickle")
