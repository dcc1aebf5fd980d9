"""The angles between a layer's filters as its outputs show them, beside what the weights say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gonio.geometry import angles, layout_of, matrix_view
from gonio.regularizers import SelfOrthogonality
from gonio.seeding import generator

__all__ = ["MOST_FILTERS", "off_right_angle"]

MOST_FILTERS = 2048  # in a group: their angles are a matrix
SAMPLES = 4096
RIGHT = 90.0

# Signs as sharp as they come: with the γ of 10 that training needs small deviations from 90° read 6 to 8 % too large.
_READING = SelfOrthogonality(1.0, mean_ratio=0.0, gamma=1e3, standardize=True, samples=SAMPLES)
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def off_right_angle(module: nn.Module, output: Tensor) -> tuple[float | None, float | None]:
    r"""Root mean square of :math:`90° - \theta_{ij}` over pairs of filters: read off the outputs, and exact.

    The first is 90° · √(mean of ϑ²), freed of what the finite sample adds, with ϑ the agreement in sign that
    :class:`gonio.regularizers.SelfOrthogonality` penalises. The two agree where inputs are uniform in direction.
    None for layers that are not linear, of one filter, or of more than :data:`MOST_FILTERS` per group.
    """
    weight = getattr(module, "weight", None)
    if not (isinstance(module, _KINDS) and isinstance(weight, Tensor) and weight.is_floating_point()):
        return None, None
    layout = layout_of(module)
    filters = matrix_view(weight, layout)
    count = filters.shape[1]
    x = _channels_second(output, module)
    samples = min(SAMPLES, x.numel() // max(1, x.shape[1]))
    readable = samples >= 3 and x.shape[1] == layout.groups * count and bool(torch.isfinite(x).all())
    if not 2 <= count <= MOST_FILTERS or not readable:
        return None, None
    spread = _READING.value(x.float(), groups=layout.groups, generator=generator(0, "measure", "samples"))
    read = RIGHT * float(_READING.debias(spread, samples).clamp_min(0).sqrt())
    off = ~torch.eye(count, dtype=torch.bool, device=filters.device)
    exact = (angles(filters).rad2deg() - RIGHT)[:, off]
    return read, float(exact.square().mean().sqrt())


def _channels_second(output: Tensor, module: nn.Module) -> Tensor:
    if isinstance(module, nn.Linear):
        return output.reshape(-1, output.shape[-1])
    spatial = len(module.kernel_size)  # type: ignore[arg-type]
    return output if output.ndim == spatial + 2 else output.unsqueeze(0)
