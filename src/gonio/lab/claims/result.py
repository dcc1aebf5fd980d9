"""What was found for claims: scores, verdicts, and both as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gonio.lab.claims.claim import CHOICE_SEEDS, Claim, Experiment, families, read_claim
from gonio.lab.claims.fairness import Runs, chosen, mean_score, noise, obstacle
from gonio.lab.judging.statistics import VERDICTS, Evidence, contrasts, judge
from gonio.lab.running.measures import measures
from gonio.messages import Message, counted, joined, say

SCHEMA = "gonio.claims/1"
# What the verdicts of the engine are called in a scope; in the field they keep their names.
_SEEN = {"reproduced": "seen", "contradicted": "opposite seen", "no useful effect": "not seen"}
WORDS: Mapping[str, Mapping[str, str]] = {
    "identity": {"reproduced": "holds", "contradicted": "fails", "no useful effect": "fails"},
    "mechanism": _SEEN,
    "small": _SEEN,
    "field": {},
}


@dataclass(frozen=True)
class ClaimResult:
    """One claim as it was tried.

    Attributes:
        evidence: the decisive contrast of each judged seed, and what follows from it within the claim's family.
        full: whether it was the full experiment. plan: hash of the study's plan; empty if it was not tried.
        runs: every score. missing, failed, diverged: numbers of runs.
        refused: how many of the failed ones gonio refused.
        seconds: CPU seconds of all runs. planned: how many runs there are.
        histograms: angles of each arm between filters, pooled over layers and seeds, in bins of 2 degrees.
        versions: of the packages of the runs, and `device`, the GPU that they computed on.
        command: repeats the claim. own: `task` and `model` of the user, where they replaced the claim's.
        history: one entry for each time that seeds were added after results existed.
    """

    claim: Claim
    evidence: Evidence
    full: bool = False
    plan: str = ""
    task: str = ""
    model: str = ""
    runs: Runs = field(default_factory=Runs)
    seconds: float = 0.0
    planned: int = 0
    missing: int = 0
    failed: int = 0
    refused: int = 0
    diverged: int = 0
    histograms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    own: Mapping[str, str] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()

    @property
    def verdict(self) -> str:
        """The engine's verdict in the words of the claim's scope, e.g. `seen` for `reproduced`."""
        return WORDS[self.claim.scope].get(self.evidence.verdict, self.evidence.verdict)

    @property
    def setting(self) -> Experiment | None:
        """The experiment; None if the claim was not tried."""
        return self.claim.setting(full=self.full) if self.plan else None

    @property
    def scores(self) -> Mapping[str, Mapping[int, float]]:
        """Of each arm, by seed; a diverged run has the worst score."""
        return self.runs.scores

    @property
    def contrast(self) -> Mapping[str, float]:
        """Factor of each arm in the number that is tested, the chosen dose for an arm with doses."""
        if self.setting is None:
            return {}
        picked = chosen(self.claim, self.setting, self.runs)
        return {picked.get(side, side): weight for side, weight in self.setting.decisive.items()}

    @property
    def unit(self) -> str:
        """Of the scores."""
        return self.evidence.unit

    @property
    def measured(self) -> str:
        """What the scores are, in one sentence; empty if the claim was not tried."""
        return measures()[self.claim.measure].summary if self.plan else ""

    @property
    def values(self) -> Mapping[int, float]:
        """The decisive contrast, by judged seed."""
        scores = {(arm, seed): score for arm, of in self.scores.items() for seed, score in of.items()}
        seeds = sorted({seed for _, seed in scores} - {*CHOICE_SEEDS})
        return contrasts(scores, self.contrast, seeds) if self.setting else {}

    @property
    def judged_seeds(self) -> ClaimResult:
        """The same result without the runs that choose a dose."""
        kept = [
            {arm: {seed: score for seed, score in of.items() if seed not in CHOICE_SEEDS} for arm, of in found.items()}
            for found in (self.runs.scores, self.runs.reached)
        ]
        return replace(self, runs=replace(self.runs, scores=kept[0], reached=kept[1]))

    def mean(self, arm: str) -> float | None:
        """Mean score of an arm over the judged seeds."""
        return mean_score(self.runs.scores, arm)


@dataclass(frozen=True)
class ClaimResults:
    """All claims of one run.

    Attributes:
        versions: of the packages. command: repeats the run.
    """

    results: tuple[ClaimResult, ...]
    versions: Mapping[str, str]
    command: str

    @property
    def tried(self) -> tuple[ClaimResult, ...]:
        """The claims with an experiment."""
        return tuple(found for found in self.results if found.evidence.verdict != "not tried")

    @property
    def headline(self) -> str:
        """How many claims ended with each verdict, scope by scope, in one sentence."""
        if not self.tried:
            return say("No claim was tried.")
        claims = counted(len(self.tried), "claim")
        return say("{claims} tried on this machine: {tally}", claims=claims, tally=tally(self.tried))


def tally(found: Sequence[ClaimResult]) -> Message:
    """The verdicts by scope, e.g. `identities: 3 hold; small scope: 1 seen, 1 undecided`."""
    parts = []
    names = {
        "identity": say("identities"),
        "mechanism": say("mechanisms"),
        "small": say("small scope"),
        "field": say("field scope"),
    }
    for scope, name in names.items():
        of = [one for one in found if one.claim.scope == scope]
        order = {WORDS[scope].get(verdict, verdict): None for verdict in VERDICTS}
        counts = Counter(one.verdict for one in of)
        plural = {"holds": "hold", "fails": "fail"}
        named = {word: Message(plural.get(word, word) if counts[word] > 1 else word, word) for word in order}
        verdicts = [say("{n} {what}", n=counts[word], what=said) for word, said in named.items() if counts[word]]
        parts += [say("{scope}: {verdicts}", scope=name, verdicts=joined(verdicts))] if of else []
    return joined(parts, "; ")


def judged(found: Sequence[ClaimResult]) -> tuple[ClaimResult, ...]:
    """The results with verdicts, each corrected within its own family; identities are not corrected."""
    member = {claim: name for name, of in families().items() for claim in of}
    evidence = {
        at: Evidence(
            values=tuple(one.values.values()), direction=one.claim.direction, sesoi=one.claim.sesoi, unit=one.runs.unit,
            obstacle=obstacle(one.claim, one.setting, one.runs), noise=noise(one.setting, one.runs),
        )
        for at, one in enumerate(found)
        if one.setting is not None
    }  # fmt: skip
    groups: dict[str, list[int]] = {}
    for at in evidence:
        name = found[at].claim.name
        groups.setdefault(member.get(name, f"{at} {name}"), []).append(at)
    for family, members in groups.items():
        size = len(families().get(family, ()))
        exact = all(found[at].claim.scope == "identity" for at in members)
        verdicts = judge([evidence[at] for at in members], size=size, exact=exact)
        evidence |= dict(zip(members, verdicts, strict=True))
    return tuple(
        replace(one, evidence=_with_looks(evidence[at], one.history)) if one.plan else one
        for at, one in enumerate(found)
    )


def _with_looks(seen: Evidence, history: Sequence[Mapping[str, Any]]) -> Evidence:
    """The evidence with a remark on seeds that were added after results existed."""
    looks = [
        say(
            "After {runs} the number of seeds was raised by {n}: the p value does not account for this second look.",
            runs=counted(int(change["finished"]), "run"), n=len(change["seeds"]),
        )
        for change in history if change["seeds"]
    ]  # fmt: skip
    return replace(seen, reason=joined([seen.reason, *looks], " ")) if looks else seen


def not_tried(claim: Claim, reason: str) -> ClaimResult:
    """The result of a claim without runs."""
    return ClaimResult(
        claim,
        Evidence(values=(), direction=claim.direction, sesoi=claim.sesoi, unit="", verdict="not tried", reason=reason),
    )


# --- as data ----------------------------------------------------------------------------------------------


def as_data(found: ClaimResults) -> dict[str, Any]:
    """The results as JSON-able data, each number of a run included.

    Example:
        >>> found = gonio.lab.claims.judge_claims([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder")
        >>> gonio.lab.claims.as_data(found)["claims"][0]["evidence"]["verdict"]
        'not tried'
    """
    claims = []
    for one in found.results:
        content = one.claim.model_dump(mode="json", exclude_defaults=True)
        claims.append({"verdict": one.verdict, **asdict(replace(one, claim=None)), "claim": content})  # type: ignore[arg-type]
    return {"schema": SCHEMA, "command": found.command, "versions": dict(found.versions), "claims": claims}


def from_data(data: Mapping[str, Any]) -> ClaimResults:
    """The inverse of :func:`as_data`, also after JSON has made text of the seeds; judged anew by the rules of now.

    Example:
        >>> found = gonio.lab.claims.judge_claims([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder")
        >>> gonio.lab.claims.from_data(gonio.lab.claims.as_data(found)) == found
        True
    """
    return ClaimResults(judged([_result(row) for row in data["claims"]]), data["versions"], data["command"])


def _result(row: Mapping[str, Any]) -> ClaimResult:
    """One stored claim before it is judged."""
    claim = read_claim(row["claim"], origin=str(row["claim"].get("name")))
    if not row["plan"]:
        return not_tried(claim, row["evidence"]["reason"])
    read = {"claim", "evidence", "runs", "history"}
    known = {each.name: row[each.name] for each in fields(ClaimResult) if each.name in row.keys() - read}
    return replace(not_tried(claim, ""), runs=Runs.of(row["runs"]), history=tuple(row.get("history", ())), **known)
