"""What papers claim about these methods, as data, and the experiments that test it on your machine."""

from gonio.lab.claims.claim import SEEDS, Arm, Claim, Experiment, claim_names, load_claim, load_claims
from gonio.lab.claims.experiment import (
    ClaimOptions,
    ClaimResult,
    ClaimResults,
    as_data,
    from_data,
    judge_claims,
    plan_claim,
    try_claims,
)
from gonio.lab.judging.statistics import VERDICTS, Evidence, judge

__all__ = [
    "SEEDS",
    "VERDICTS",
    "Arm",
    "Claim",
    "ClaimOptions",
    "ClaimResult",
    "ClaimResults",
    "Evidence",
    "Experiment",
    "as_data",
    "claim_names",
    "from_data",
    "judge",
    "judge_claims",
    "load_claim",
    "load_claims",
    "plan_claim",
    "try_claims",
]
__dir__ = __all__.copy  # the public names alone
