"""What `gonio.execution` says of torch's own state, and leaves as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from gonio.errors import InvalidArgumentError
from gonio.execution import one_thread


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_inside_torch_has_one_thread_and_afterwards_what_it_had() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_error_restores_the_number() -> None:
    with pytest.raises(InvalidArgumentError, match="inside"), one_thread():
        raise InvalidArgumentError("inside", "an error", "Go on.")
    assert torch.get_num_threads() == 3


def test_threads_that_overlap_leave_the_number_as_it_was() -> None:
    """Each begins before the last one ends, so that none but the first sees the usual number."""
    seen, last = [], threading.Barrier(4)

    def enter() -> None:
        for _ in range(50):
            with one_thread():
                last.wait(timeout=60)
                seen.append(torch.get_num_threads())
            last.wait(timeout=60)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(seen) == 200
    assert torch.get_num_threads() == 3
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
