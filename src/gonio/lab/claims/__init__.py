"""What papers claim about these methods, as data, and the experiments that test it on your machine."""

from gonio.lab.claims.claim import SEEDS, Arm, Claim, Setting, claim_names, load_claim, load_claims
from gonio.lab.claims.experiment import Choice, Finding, Findings, as_data, findings, from_data, plan_claim, try_claims
from gonio.lab.judging.verdict import VERDICTS, Evidence, Judgement, judge

__all__ = [
    "SEEDS",
    "VERDICTS",
    "Arm",
    "Choice",
    "Claim",
    "Evidence",
    "Finding",
    "Findings",
    "Judgement",
    "Setting",
    "as_data",
    "claim_names",
    "findings",
    "from_data",
    "judge",
    "load_claim",
    "load_claims",
    "plan_claim",
    "try_claims",
]
__dir__ = __all__.copy  # the public names alone
