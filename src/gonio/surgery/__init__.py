"""Change a model by rules: choose modules with `where`, edit them, undo the edit exactly."""

from gonio.editing.edit import Change, Edit, Edited, UndoError
from gonio.editing.where import (
    Everything,
    OfType,
    Path,
    Predicate,
    Regex,
    Selector,
    Site,
    Where,
    as_selector,
    select,
    sites,
)
from gonio.surgery.anatomy import anatomy
from gonio.surgery.balance import balance_
from gonio.surgery.blocks import Anatomy, Attention, Mlp
from gonio.surgery.calibrate import calibrate_
from gonio.surgery.equivalent import Deviation, equivalent, generated_example
from gonio.surgery.even_out import even_out_
from gonio.surgery.fold import fold_
from gonio.surgery.gradually import Conversion, convert_gradually_
from gonio.surgery.graph import activation_after, followed_by_norm
from gonio.surgery.init import init_
from gonio.surgery.lsuv import lsuv_
from gonio.surgery.match_statistics import match_statistics_
from gonio.surgery.parametrize import parametrize_
from gonio.surgery.qk_norm import QKNorm, qk_norm
from gonio.surgery.recording import Part
from gonio.surgery.recycle import recycle_
from gonio.surgery.rotate import rotate_
from gonio.surgery.shrink import shrink_change_, shrink_intruders_
from gonio.surgery.swap import swap_

__all__ = [
    "Anatomy",
    "Attention",
    "Change",
    "Conversion",
    "Deviation",
    "Edit",
    "Edited",
    "Everything",
    "Mlp",
    "OfType",
    "Part",
    "Path",
    "Predicate",
    "QKNorm",
    "Regex",
    "Selector",
    "Site",
    "UndoError",
    "Where",
    "activation_after",
    "anatomy",
    "as_selector",
    "balance_",
    "calibrate_",
    "convert_gradually_",
    "equivalent",
    "even_out_",
    "fold_",
    "followed_by_norm",
    "generated_example",
    "init_",
    "lsuv_",
    "match_statistics_",
    "parametrize_",
    "qk_norm",
    "recycle_",
    "rotate_",
    "select",
    "shrink_change_",
    "shrink_intruders_",
    "sites",
    "swap_",
]
__dir__ = __all__.copy  # the public names alone
