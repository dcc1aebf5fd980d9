"""Sums over windows against convolutions with ones and their gradients."""

from __future__ import annotations

import pytest
import torch

from catalog import seeded
from gonio.nn.box import box_spread, box_sum
from tolerances import exact

OPTIONS = (  # kernel, stride, padding, dilation
    ([1], [1], [0], [1]),
    ([4], [3], [2], [1]),
    ([3, 3], [1, 1], [1, 1], [1, 1]),
    ([7, 2], [2, 1], [3, 0], [1, 3]),
    ([2, 3, 1], [2, 1, 3], [1, 2, 0], [1, 2, 1]),
)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), OPTIONS)
def test_the_sum_over_windows_and_its_transpose(
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    size = [7, 9, 5][: len(kernel)]
    x = seeded(2, 3, *size, dtype=torch.float64).requires_grad_()
    before = x.detach().clone()
    ones = torch.ones(3, 1, *kernel, dtype=torch.float64)
    none = [0] * len(kernel)
    expected = torch.convolution(x, ones, None, stride, padding, dilation, False, none, 3)
    found = box_sum(x, kernel, stride, padding, dilation)
    torch.testing.assert_close(found, expected, **exact(torch.float64))
    grad = seeded(*expected.shape, dtype=torch.float64)
    by_x, again = (torch.autograd.grad(value, x, grad)[0] for value in (expected, found))
    torch.testing.assert_close(again, by_x, **exact(torch.float64))
    spread = box_spread(grad, size, kernel, stride, padding, dilation)
    torch.testing.assert_close(spread, by_x, **exact(torch.float64))
    with torch.inference_mode():  # where views do not say that they are some
        torch.testing.assert_close(box_sum(x.detach(), kernel, stride, padding, dilation), expected.detach())
    assert torch.equal(x.detach(), before)
