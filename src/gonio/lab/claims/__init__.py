"""What papers claim about these methods, as data, and the experiments that test it on your machine."""

from gonio.lab.claims.claim import (
    CHOICE_SEEDS,
    SCOPES,
    SEEDS,
    Arm,
    Claim,
    Experiment,
    Fair,
    claim_names,
    families,
    load_claim,
    load_claims,
    recorded,
    shipped_files,
    useless_entry_points,
)
from gonio.lab.claims.experiment import ClaimOptions, claims_in, judge_claims, plan_claim, try_claims
from gonio.lab.claims.fairness import Runs
from gonio.lab.claims.result import ClaimResult, ClaimResults, as_data, from_data, tally
from gonio.lab.judging.statistics import VERDICTS, Evidence, judge

__all__ = [
    "CHOICE_SEEDS",
    "SCOPES",
    "SEEDS",
    "VERDICTS",
    "Arm",
    "Claim",
    "ClaimOptions",
    "ClaimResult",
    "ClaimResults",
    "Evidence",
    "Experiment",
    "Fair",
    "Runs",
    "as_data",
    "claim_names",
    "claims_in",
    "families",
    "from_data",
    "judge",
    "judge_claims",
    "load_claim",
    "load_claims",
    "plan_claim",
    "recorded",
    "shipped_files",
    "tally",
    "try_claims",
    "useless_entry_points",
]
__dir__ = __all__.copy  # the public names alone
