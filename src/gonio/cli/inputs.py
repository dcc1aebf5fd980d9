"""What the command line's words stand for."""

from __future__ import annotations

from torch import nn

from gonio import models
from gonio.errors import GonioError, NotApplicableError

__all__ = ["build_model"]


def build_model(spec: str) -> nn.Module:
    """A model with random weights from `timm:NAME`, `torchvision:NAME`, a built-in name or `file.py:factory`.

    Raises:
        NotApplicableError: if the user's own code raises anything.
    """
    try:
        return models.resolve(spec)()
    except (GonioError, OSError):
        raise
    except Exception as error:  # the file is the user's: whatever it raises is their input
        why = f"it raised {type(error).__name__}: {error}"
        raise NotApplicableError("a model", spec, why, "Correct the function, or name another model.") from error
