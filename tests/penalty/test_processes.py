"""A batch over two processes equals the joined batch in one; sharded weights equal whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import spawn

from gonio import Penalty
from gonio import regularizers as R
from penalty.processes import RULES, WORLD, batch, network, run_rank, train
from tolerances import close

pytestmark = pytest.mark.slow
Found = list[dict[str, list[Tensor] | str]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("gloo")
    spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def check(ranks: Found, key: str, expected: list[Tensor]) -> None:
    for rank in ranks:
        found = rank[key]
        assert not isinstance(found, str), f"{key} raised:\n{found}"
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e, **close(torch.float64))


@pytest.mark.parametrize("name", RULES)
def test_data_parallel_equals_the_joined_batch(name: str, ranks: Found) -> None:
    check(ranks, f"ddp {name}", train(network(), RULES[name], batch()))


@pytest.mark.parametrize("name", RULES)
def test_sharded_equals_whole(name: str, ranks: Found) -> None:
    """E9: the norm of a shard is not the norm of the weight."""
    check(ranks, f"fsdp {name}", train(network(), RULES[name], batch()))


@pytest.mark.parametrize("name", [n for n, rule in RULES.items() if isinstance(rule, R.WeightRegularizer)])
def test_added_gradients_of_sharded_weights(name: str, ranks: Found) -> None:
    check(ranks, f"fsdp add {name}", train(network(), RULES[name], batch()))


def test_a_penalty_built_before_the_wrapper(ranks: Found) -> None:
    model, x = network(), batch()
    penalty = Penalty(model, [(None, RULES["SelfOrthogonality"])])
    (model(x).square().mean() + penalty()).backward()
    check(ranks, "ddp later", [p.grad for p in model.parameters() if p.grad is not None])


def test_a_batch_of_one_process_is_not_the_joined_batch() -> None:
    """Negative control: what each process would read by itself."""
    rule = RULES["SelfOrthogonality"]
    joined, alone = (train(network(), rule, x)[0] for x in (batch(), batch().chunk(WORLD)[0]))
    assert not torch.isclose(joined, alone, rtol=1e-2)
