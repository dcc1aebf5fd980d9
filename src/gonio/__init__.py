"""Measure and control the norms and angles of neural-network weights.

Names are loaded when they are first used, so that `import gonio` and the command line's `--help` do
not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gonio import (
        compare,
        geometry,
        init,
        integrations,
        models,
        nn,
        parametrizations,
        recipes,
        regularizers,
        report,
        surgery,
    )
    from gonio.errors import GonioError
    from gonio.measuring import Measurements
    from gonio.measuring.measure import measure
    from gonio.measuring.tracker import Tracker
    from gonio.penalty import Penalty, param_groups
    from gonio.recipes import Recipe
    from gonio.surgery import (
        Edited,
        OfType,
        Path,
        Regex,
        balance_,
        calibrate_,
        fold_,
        init_,
        lsuv_,
        parametrize_,
        swap_,
    )
    from gonio.surgery.equivalent import equivalent

_HOME = {
    "Edited": "gonio.surgery",
    "GonioError": "gonio.errors",
    "Measurements": "gonio.measuring",
    "OfType": "gonio.surgery",
    "Path": "gonio.surgery",
    "Penalty": "gonio.penalty",
    "Recipe": "gonio.recipes",
    "Regex": "gonio.surgery",
    "Tracker": "gonio.measuring",
    "balance_": "gonio.surgery",
    "calibrate_": "gonio.surgery",
    "equivalent": "gonio.surgery",
    "lsuv_": "gonio.surgery",
    "fold_": "gonio.surgery",
    "init_": "gonio.surgery",
    "measure": "gonio.measuring",
    "param_groups": "gonio.penalty",
    "parametrize_": "gonio.surgery",
    "swap_": "gonio.surgery",
}
_PACKAGES = (
    "compare",
    "geometry",
    "init",
    "integrations",
    "measuring",
    "models",
    "nn",
    "parametrizations",
    "recipes",
    "regularizers",
    "report",
    "surgery",
)

__all__ = [
    "Edited",
    "GonioError",
    "Measurements",
    "OfType",
    "Path",
    "Penalty",
    "Recipe",
    "Regex",
    "Tracker",
    "__version__",
    "balance_",
    "calibrate_",
    "compare",
    "equivalent",
    "fold_",
    "geometry",
    "init",
    "init_",
    "integrations",
    "lsuv_",
    "measure",
    "measuring",
    "models",
    "nn",
    "param_groups",
    "parametrizations",
    "parametrize_",
    "recipes",
    "regularizers",
    "report",
    "surgery",
    "swap_",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"gonio.{name}")
    else:
        raise AttributeError(f"module 'gonio' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
