"""Eight threads measure, balance, edit and train at once; each gets what one thread alone gets.

`GONIO_THREADS_SECONDS` is the duration (60); `make soak` takes half an hour.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import VERBS, seeded
from gonio import init
from gonio import parametrizations as P

SECONDS = float(os.environ.get("GONIO_THREADS_SECONDS", "60"))
THREADS = 8
NETWORK, X = VERBS[0].model(), VERBS[0].inputs()


def made(number: int) -> nn.Module:
    """A network of its own for each call; a copy, because torch's own initialisation reads the global generator."""
    model = copy.deepcopy(NETWORK).eval()
    gonio.init_(model, init.he_, seed=number, gain=1.0)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.reset_parameters()
    return model


def measured(number: int) -> Any:
    found = gonio.measure(made(number), batch=X).to_dict()
    found.pop("created", None)
    return found


def balanced(number: int) -> Any:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    gonio.init_(model, init.he_, seed=number, gain=1.0)
    edited = gonio.balance_(model, example=seeded(4, 6))
    weights = [p.detach().clone() for p in model.parameters()]
    edited.undo_()
    return [*weights, *(p.detach().clone() for p in model.parameters())]


def edited(number: int) -> Any:
    model = made(number)
    edits = [gonio.parametrize_(model, P.WeightNorm()), gonio.fold_(model, example=X)]
    outputs = [model(X).detach()]
    for edit in reversed(edits):
        edit.undo_()
    return [*outputs, model(X).detach()]


def trained(number: int) -> Any:
    model = made(number).train()
    penalty = gonio.Penalty(model, [(nn.Conv2d, gonio.regularizers.Orthogonality(1e-2))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(X).square().mean() + penalty()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


WORK: dict[str, Callable[[int], Any]] = {
    "measure": measured,
    "balance": balanced,
    "edit": edited,
    "train": trained,
}


def equal(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b)) if isinstance(a, list) else a == b


def at_once(work: dict[str, Callable[[int], Any]], expected: dict[str, list[Any]], seconds: float) -> Counter[str]:
    """How often each piece of work was done by the threads; the first that differs or raises is raised."""
    done: Counter[str] = Counter()
    failures: list[BaseException] = []
    end = time.monotonic() + seconds

    def worker(offset: int) -> None:
        step = offset
        while time.monotonic() < end and not failures:
            name, number = list(work)[step % len(work)], step // len(work) % len(expected[next(iter(work))])
            try:
                if not equal(work[name](number), expected[name][number]):
                    raise AssertionError(f"{name} of network {number} differs from that of one thread")
            except BaseException as error:
                failures.append(error)
            done[name] += 1
            step += 1

    threads = [threading.Thread(target=worker, args=(offset,)) for offset in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if failures:
        raise failures[0]
    return done


def alone(work: dict[str, Callable[[int], Any]], networks: int) -> dict[str, list[Any]]:
    return {name: [function(number) for number in range(networks)] for name, function in work.items()}


@pytest.mark.slow
def test_threads_get_what_one_thread_gets() -> None:
    done = at_once(WORK, alone(WORK, 4), SECONDS)
    assert min(done[name] for name in WORK) >= THREADS, done


def test_a_difference_between_threads_is_found() -> None:
    """Negative control: work that reads a global number which others change."""
    shared = [0]

    def racing(number: int) -> Any:
        shared[0] += 1
        return shared[0] > 1 and number

    with pytest.raises(AssertionError, match="differs from that of one thread"):
        at_once({"racing": racing}, {"racing": [0, -1]}, 5)
