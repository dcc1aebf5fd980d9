"""Law: declared invariances hold, declared sensitivities show, and a penalty is 0 where it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog import LAYERS, REGULARIZERS, LayerCase, RegularizerCase, seeded
from laws.support import assert_near, clone, law, over, perturbed
from tolerances import close

CHANGE = 1e-3  # a sensitivity moves the result by more than this part of its size: far above rounding


def outputs(case: LayerCase, kind: str) -> list[tuple[str, Tensor, Tensor]]:
    """(name, output, output after the change) of each invariance or sensitivity, in float64."""
    layer = perturbed(case.make()).double()
    x = seeded(*case.shape, dtype=torch.float64)
    found = []
    for name, change in getattr(case, kind).items():
        changed, y = change(clone(layer), x.clone())
        found.append((name, clone(layer)(x), changed(y)))
    return found


def values(case: RegularizerCase, kind: str) -> list[tuple[str, Tensor, Tensor]]:
    x = seeded(*case.shape, dtype=torch.float64)
    value = case.make().value
    return [(name, value(x), value(change(x.clone()))) for name, change in getattr(case, kind).items()]


def check_equal(pairs: list[tuple[str, Tensor, Tensor]]) -> None:
    for name, before, after in pairs:
        assert_near(after, before, torch.float64, what=f"invariance {name!r}")


def check_different(pairs: list[tuple[str, Tensor, Tensor]]) -> None:
    for name, before, after in pairs:
        if before.shape != after.shape:
            continue
        moved = float(((after - before).abs().max() / before.abs().max().clamp_min(1e-12)).detach())
        assert moved > CHANGE, f"sensitivity {name!r} moved the result by {moved:.2g} of its size only"


def check_zero(case: RegularizerCase) -> None:
    value = case.make().value(case.zero_at())
    assert abs(float(value)) <= close(torch.float64)["atol"], f"value {float(value):.3g} where 0 is declared"


test_layer_invariances = law(lambda case: check_equal(outputs(case, "invariances")), LAYERS)
test_layer_sensitivities = law(lambda case: check_different(outputs(case, "sensitivities")), LAYERS)
test_regularizer_invariances = law(lambda case: check_equal(values(case, "invariances")), REGULARIZERS)
test_regularizer_sensitivities = law(lambda case: check_different(values(case, "sensitivities")), REGULARIZERS)
test_regularizer_zero = law(check_zero, [case for case in REGULARIZERS if case.zero_at])


@over([*LAYERS, *REGULARIZERS])
def test_every_member_declares_both_signs(case: Any) -> None:
    """An invariance without a sensitivity would be satisfied by a constant."""
    assert case.invariances, f"{case.name} declares no invariance"
    assert case.sensitivities, f"{case.name} declares no sensitivity"


# --- negative controls ----------------------------------------------------------------------------


class _Squares:
    def value(self, x: Tensor) -> Tensor:
        return x.square().sum()


CASE = RegularizerCase(
    name="squares",
    make=_Squares,
    shape=(3, 4),
    reference=lambda x: x.square().sum(),
    invariances={"rows in another order": lambda x: x.flip(0)},
    sensitivities={"scale": lambda x: 2 * x},
    zero_at=lambda: torch.ones(3, 4, dtype=torch.float64),
)


def test_the_law_refuses_a_false_invariance() -> None:
    check_equal(values(CASE, "invariances"))
    with pytest.raises(AssertionError, match="invariance 'scale' differs"):
        check_equal(values(CASE, "sensitivities"))


def test_the_law_refuses_a_false_sensitivity() -> None:
    check_different(values(CASE, "sensitivities"))
    with pytest.raises(AssertionError, match="sensitivity 'rows in another order' moved"):
        check_different(values(CASE, "invariances"))


def test_the_law_refuses_a_false_zero() -> None:
    with pytest.raises(AssertionError, match="value 12 where 0 is declared"):
        check_zero(CASE)


def test_the_law_refuses_a_false_invariance_of_a_layer() -> None:
    case = LayerCase(
        name="linear",
        make=lambda: nn.Linear(4, 3),
        shape=(2, 4),
        reference=lambda m, x: m(x),
        invariances={"scale of the input": lambda m, x: (m, 2 * x)},
    )
    with pytest.raises(AssertionError, match="scale of the input"):
        check_equal(outputs(case, "invariances"))
