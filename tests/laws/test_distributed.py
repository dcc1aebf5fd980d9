"""Law: two data-parallel processes equal one on the joined batch; a sharded module equals a whole one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from catalog import RegularizerCase, seeded
from laws.processes import CONTROLS, PENALTIES, PENALTY_CONTROL, alone, everything
from laws.support import MODULES, ModuleCase, assert_all_equal, assert_near, over
from ranks import WORLD, spawned

Found = list[dict[str, list[Tensor] | str]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of both processes, by law and case."""
    return spawned(everything, tmp_path_factory.mktemp("gloo"))


def penalised(case: RegularizerCase) -> list[Tensor]:
    """Value and gradient of a penalty of a whole weight."""
    weight = seeded(*case.shape).requires_grad_()
    value = case.make().value(weight)
    return [value.detach(), *torch.autograd.grad(value, [weight])]


def check(ranks: Found, key: str, expected: list[Tensor]) -> None:
    results = [rank[key] for rank in ranks]
    for result in results:
        assert not isinstance(result, str), f"{key} raised:\n{result}"
    assert_all_equal(results[1], results[0], f"{key}: rank 1 against rank 0")
    assert len(results[0]) == len(expected)
    for index, (a, e) in enumerate(zip(results[0], expected, strict=True)):
        assert_near(a, e, torch.float32, what=f"{key}, tensor {index}")


@over(MODULES)
def test_data_parallel(case: ModuleCase, ranks: Found) -> None:
    check(ranks, f"ddp {case.name}", alone(case))


@over(MODULES)
def test_sharded(case: ModuleCase, ranks: Found) -> None:
    check(ranks, f"fsdp {case.name}", alone(case))


@over(PENALTIES)
def test_penalty_of_a_sharded_weight(case: RegularizerCase, ranks: Found) -> None:
    check(ranks, f"fsdp {case.name}", penalised(case))


# --- negative controls ----------------------------------------------------------------------------


def test_the_laws_accept_a_plain_linear_layer(ranks: Found) -> None:
    check(ranks, "ddp Linear", alone(CONTROLS[0]))
    check(ranks, "fsdp Linear", alone(CONTROLS[0]))


def test_the_law_refuses_statistics_of_one_process(ranks: Found) -> None:
    with pytest.raises(AssertionError, match=r"ddp _BatchMean, tensor 0 differs"):
        check(ranks, "ddp _BatchMean", alone(CONTROLS[1]))


def test_the_law_refuses_the_norm_of_a_shard(ranks: Found) -> None:
    with pytest.raises(AssertionError, match=r"fsdp local: rank 1 against rank 0: tensor 0 differs"):
        check(ranks, "fsdp local", penalised(PENALTY_CONTROL))


def test_the_fixture_reports_errors() -> None:
    with pytest.raises(AssertionError, match="ddp x raised"):
        check([{"ddp x": "Traceback"}] * WORLD, "ddp x", [])
