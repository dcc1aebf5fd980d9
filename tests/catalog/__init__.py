"""The catalogue: every member of the library with one valid construction.

The law tests in `tests/laws/` loop over these lists, so a new method enters by adding one entry and
inherits every law that applies to its kind (DESIGN, "Laws"). A method's entry stands beside its formula in float64.
"""

from catalog import decoupled, norms
from catalog.cases import InitCase, LayerCase, ParametrizationCase, RegularizerCase, VerbCase, seeded
from catalog.inits import INITS
from catalog.parametrizations import PARAMETRIZATIONS
from catalog.regularizers import REGULARIZERS
from catalog.verbs import VERBS

LAYERS = [*decoupled.LAYERS, *norms.LAYERS]

__all__ = [
    "INITS",
    "LAYERS",
    "PARAMETRIZATIONS",
    "REGULARIZERS",
    "VERBS",
    "InitCase",
    "LayerCase",
    "ParametrizationCase",
    "RegularizerCase",
    "VerbCase",
    "seeded",
]
