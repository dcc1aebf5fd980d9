"""Signs that gradients hide a weakness instead of there being none."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

__all__ = ["masking_signs"]

_FLAT = 10.0  # percent of right answers without a gradient
_FAR = 10.0  # percent that remain right at the largest distance, at which an attack may change everything


def masking_signs(found: Mapping[str, Any], *, examples: int) -> list[str]:
    """One sentence for each sign; an empty list is no proof.

    A strong attack that sees the model must do no worse than a weak one, one that does not see it, noise, or
    the same attack from further away or with smoothed gradients. Where it does, its failure says something
    about the gradients and not about the model.

    Args:
        found: what :func:`gonio.compare.robustness.robustness` measured, in percent.
        examples: that were attacked; two of them are within chance.

    Example:
        >>> from gonio.compare.masking import masking_signs
        >>> clean = {"clean": 95.0, "noise": 94.0, "fgsm": 40.0, "pgd": 20.0, "smoothed": 20.5, "zero_gradients": 0.0}
        >>> masking_signs({**clean, "radii": [{"epsilon": 0.1, "accuracy": 5.0}]}, examples=200)
        []
        >>> masking_signs({**clean, "pgd": 60.0, "radii": []}, examples=200)[0]
        'one step (FGSM) misleads more than many (PGD): 40 % against 60 % remain right'

    References:
        A. Athalye, N. Carlini and D. Wagner, "Obfuscated gradients give a false sense of security", 2018,
        §3.1; N. Carlini et al., "On evaluating adversarial robustness", 2019, §4.
    """
    slack = 200.0 / examples
    signs = [
        f"{what}: {found[name]:.0f} % against {found['pgd']:.0f} % remain right"
        for name, what in _WEAKER.items()
        if name in found and found[name] < found["pgd"] - slack
    ]
    if found["zero_gradients"] > _FLAT:
        signs.append(f"{found['zero_gradients']:.0f} % of the right answers have a gradient of exactly 0")
    return signs + _by_distance(found["radii"], slack)


_WEAKER = {
    "fgsm": "one step (FGSM) misleads more than many (PGD)",
    "transfer": "examples made for another model mislead more than those made for this one (PGD)",
    "noise": "random noise misleads more than PGD",
    "smoothed": "smoothed gradients mislead more than the model's own (PGD)",
}


def _by_distance(radii: list[Mapping[str, float]], slack: float) -> list[str]:
    rising = [(a, b) for a, b in pairwise(radii) if b["accuracy"] > a["accuracy"] + slack]
    signs = [
        f"going further helps the model: {far['accuracy']:.0f} % remain right at distance {far['epsilon']:g}, "
        f"{near['accuracy']:.0f} % at {near['epsilon']:g}"
        for near, far in rising
    ]
    if radii and radii[-1]["accuracy"] > _FAR:
        signs.append(
            f"PGD fails even from far away: {radii[-1]['accuracy']:.0f} % remain right at {radii[-1]['epsilon']:g}"
        )
    return signs
