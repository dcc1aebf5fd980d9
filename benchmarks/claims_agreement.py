"""Do the verdicts on claims agree between disjoint sets of seeds, and is the control ever reproduced?

    python -m benchmarks.claims_agreement quick [--jobs J] [-o FOLDER]      all quick claims on five sets of seeds
    python -m benchmarks.claims_agreement control [--jobs J] [-o FOLDER]    the control on twenty sets of seeds

Each set is a run of `gonio reproduce --first-seed …` in a folder of its own, so an interrupted command goes on where it
stopped. The verdicts are written to benchmarks/results/claims_agreement.json, where each part keeps the other.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gonio.lab.claims import Claim, ClaimOptions, ClaimResults, load_claim, load_claims, try_claims
from gonio.lab.plan import installed_versions

RESULT = Path(__file__).with_name("results") / "claims_agreement.json"


@dataclass(frozen=True)
class Part:
    """Claims that are tried on several sets of seeds.

    Attributes:
        first_seeds: of each set; a set has as many seeds as the claim says.
    """

    claims: tuple[Claim, ...]
    first_seeds: tuple[int, ...]


def parts() -> Mapping[str, Part]:
    """The two parts by name."""
    quick = tuple(claim for claim in load_claims() if claim.budget == "quick")
    return {
        "quick": Part(quick, (0, 100, 200, 300, 400)),
        "control": Part((load_claim("nothing-helps"),), tuple(range(1000, 21_000, 1000))),
    }


def tried(part: Part, folder: Path, *, jobs: int | None) -> list[tuple[int, ClaimResults]]:
    """The findings on each set of seeds, judged on its own as a run of the command is."""
    found = []
    for first in part.first_seeds:
        options = ClaimOptions(first_seed=first)
        found.append((first, try_claims(part.claims, folder / str(first), options=options, jobs=jobs)))
        print(f"seeds from {first}: {found[-1][1].headline}", flush=True)
    return found


def table(found: Sequence[tuple[int, ClaimResults]]) -> dict[str, Any]:
    """Of each claim the verdict and the mean effect on each set of seeds, and whether all verdicts agree."""
    claims: dict[str, Any] = {}
    for first, findings in found:
        for one in findings.results:
            row = claims.setdefault(one.claim.name, {"verdicts": {}, "means": {}})
            row["verdicts"][str(first)] = one.verdict
            row["means"][str(first)] = one.evidence.mean
    for row in claims.values():
        row["counts"] = dict(Counter(row["verdicts"].values()))
        row["agree"] = len(row["counts"]) == 1
    return claims


def write(name: str, claims: Mapping[str, Any], path: Path = RESULT) -> None:
    """Put one part into the file; the other stays."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    data[name] = {"claims": claims, "versions": dict(installed_versions())}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims_agreement", description=__doc__)
    parser.add_argument("part", choices=list(parts()))
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core by default")
    parser.add_argument("-o", "--output", type=Path, default=Path("claims-agreement"), help="folder of the studies")
    given = parser.parse_args(arguments)
    claims = table(tried(parts()[given.part], given.output / given.part, jobs=given.jobs))
    write(given.part, claims)
    for name, row in claims.items():
        print(f"{name}: {', '.join(f'{count} {verdict}' for verdict, count in row['counts'].items())}")


if __name__ == "__main__":
    main()
