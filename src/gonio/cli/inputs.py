"""What the command line's words stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gonio import models
from gonio.errors import GonioError, NotApplicableError
from gonio.models.user_code import is_user_code

__all__ = ["build_model", "users_code"]


def build_model(spec: str, **sizes: int) -> nn.Module:
    """A model with random weights, by the name that :func:`gonio.models.resolve` takes.

    Raises:
        NotApplicableError: if the user's own code raises anything.
    """
    with users_code(spec):
        return models.resolve(spec)(**sizes)


@contextmanager
def users_code(*specs: str | None) -> Iterator[None]:
    """Inside, an exception counts as input that is refused, if one of the specs names the user's own code.

    Raises:
        NotApplicableError: instead of what that code raised.
    """
    named = [spec for spec in specs if spec is not None and is_user_code(spec)]
    try:
        yield
    except (GonioError, OSError):
        raise
    except (Exception, SystemExit) as error:
        if not named:
            raise
        why = f"it raised {type(error).__name__}: {error}"
        raise NotApplicableError("your code", " and ".join(named), why, "Correct it.") from error
