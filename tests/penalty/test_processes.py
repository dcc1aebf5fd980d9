"""A batch over several processes equals the joined batch in one; sharded weights equal whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gonio import Penalty
from gonio import regularizers as R
from penalty.processes import RULES, batch, everything, network, train
from ranks import WORLD, spawned
from tolerances import close

pytestmark = pytest.mark.slow
Found = list[dict[str, list[Tensor] | str]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return spawned(everything, tmp_path_factory.mktemp("gloo"))


def check(ranks: Found, key: str, expected: list[Tensor]) -> None:
    for rank in ranks:
        found = rank[key]
        assert not isinstance(found, str), f"{key} raised:\n{found}"
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e, **close(torch.float64))


WAYS = {f"{way} {name}": rule for way in ("ddp", "fsdp") for name, rule in RULES.items()}
WAYS |= {f"fsdp add {name}": rule for name, rule in RULES.items() if isinstance(rule, R.WeightRegularizer)}


@pytest.mark.parametrize("key", WAYS)
def test_several_processes_equal_one(key: str, ranks: Found) -> None:
    """Data parallel on the joined batch; sharded, in the loss or added (E9: a shard's norm is not the weight's)."""
    check(ranks, key, train(network(), WAYS[key], batch()))


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
