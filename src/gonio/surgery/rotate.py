"""`rotate_`: turn the values of attention heads and the residual stream by orthogonal matrices, function unchanged."""

from __future__ import annotations

from collections.abc import Collection
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.where import refuse_shards, unwrapped
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.messages import joined, say
from gonio.seeding import generator
from gonio.surgery.equivalent import SAME_OUTPUTS, SameFunction, or_coarser
from gonio.surgery.turns import STREAM, VALUES, Turn, random_turn, turns_of


def rotate_(
    model: nn.Module,
    what: Collection[Literal["values", "stream"]] = ("values", "stream"),
    *,
    example: Any = None,
    turn: Literal["hadamard", "random"] = "hadamard",
    seed: int = 0,
) -> Edited:
    r"""Turn channels of a transformer by orthogonal matrices Q, so that the function is the same and outliers spread.

    * `values`: for each head of values, :math:`W_v' = QW_v`, :math:`b_v' = Qb_v`, :math:`W_o' = W_oQ^\top` for all
      heads that share it. A softmax only averages values, whatever the positions.
    * `stream`: the channels that layers and embeddings write by sums and that layers read through norms,
      :math:`E' = EQ^\top`, :math:`W_\text{in}' = W_\text{in}Q^\top`, :math:`W_\text{out}' = QW_\text{out}`,
      :math:`b_\text{out}' = Qb_\text{out}`. An RMSNorm whose gain is one number does not see a turn; a LayerNorm does
      not see one with :math:`Q\mathbf 1 = \mathbf 1`, which keeps means; the shift of a norm turns, too. Gains that
      differ between channels are merged into the layers first: ``gonio.fold_(model, gains=True)``.

    An entry of a turned weight is a weighted sum of many entries, so a single large channel is spread over all, and
    with it the step of rounding to integers (:func:`gonio.geometry.quantization_error`) falls. It rises where weights
    were flatter than normal numbers: compare, and `.undo_()`.

    Both are found by running the model, and each turn is tried with random matrices before: the outputs must stay. What
    is written or read by other means, such as an activation, a gain, a sinusoid or an output, stays; notes give the
    reasons. The function is the same in evaluation mode; dropout in the stream makes it another one in training.

    Args:
        what: which of the two.
        example: an input of at least two tokens on which the model runs; None for one that is made from the model's
            first layer, if that can be done.
        turn: `hadamard`, a Hadamard matrix with random signs (sizes :math:`2^k(q + 1)` with q = 0 or a prime
            :math:`4m + 3`); of other sizes, and to keep means, it is `random`, uniformly random (Haar).
        seed: of the random numbers.

    Raises:
        InvalidArgumentError: for other words in `what` or `turn`.
        NotApplicableError: if nothing can turn, with the reasons; if there is no example; if the model is sharded; or
            if the outputs changed by more than rounding (1e-12 of the largest output in float64, 1e-5 in float32, or
            what the types make in which the model computes); the model is restored.

    Example:
        >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> print(gonio.rotate_(block, ("values",)))
        rotate_: 2 modules
          self_attn           in_proj_weight, in_proj_bias turned by 2 Hadamard matrices of 4
          self_attn.out_proj  weight turned by 2 Hadamard matrices of 4

    References: S. Ashkboos et al., "QuaRot: outlier-free 4-bit inference in rotated LLMs", NeurIPS 2024, section 4.
        https://arxiv.org/abs/2404.00456. The same, "SliceGPT", ICLR 2024, section 3.1 (the stream). R. Paley, "On
        orthogonal matrices", J. Math. Phys. 12, 1933 (Hadamard matrices).
    Differs: no matrix multiplies activations while the model runs, and a LayerNorm stays one.
    """
    unknown = [str(each) for each in what if each not in (VALUES, STREAM)]
    if isinstance(what, str) or unknown or not what:
        raise InvalidArgumentError(
            f"rotate_ turns {VALUES!r}, {STREAM!r}, or both", repr(what), "Pass a tuple of them."
        )
    if turn not in ("hadamard", "random"):
        raise InvalidArgumentError('rotate_ takes turn="hadamard" or "random"', repr(turn), "Choose one.")
    refuse_shards(model, "rotate_")
    same = SameFunction(model, example)
    if same.input is None:
        why = say("what can turn is found by running the model, and {why}", why=same.why)
        raise NotApplicableError("rotate_", "", why, "Pass example=.", action="turn")
    edit = Edit(model, "rotate_")
    for parameter in model.parameters():
        if parameter.is_inference():  # what can turn is found with gradients
            edit.refuse_unwritable(parameter)
    found = turns_of(unwrapped(model), same.input, frozenset(what))
    if not found.able:
        left = [
            say("{paths} stay{s}: {why}", paths=name, s="s" * (" values " not in name), why=why)
            for name, why in found.stay.items()
        ]
        reasons = joined(left, "; ")
        none = say("it has no attention, and no stream that a norm reads")
        raise NotApplicableError("rotate_", "", reasons or none, "Leave this model as it is.", action="turn")
    random = generator(seed, "rotate_")
    with edit, torch.no_grad():
        said: dict[str, dict[str, list[str]]] = {}
        for each in found.able:
            matrices = [_matrix(each, turn, random) for _ in each.slots]
            for name in each.tensors:
                parameter = found.parameters[name]
                edit.set_data_(parameter, each.turned(name, parameter, matrices).to(parameter.dtype))
                path, _, own = name.rpartition(".")
                said.setdefault(path, {}).setdefault(_words(each, turn), []).append(own)
        for path, by in said.items():
            done = [
                say("{names} turned by {words}", names=", ".join(names), words=words) for words, names in by.items()
            ]
            edit.changed(path, joined(done, "; "))
        edit.note_stays(found.stay)
        same.check_(edit, "turn", or_coarser(SAME_OUTPUTS, found.eps), 0.1)
    return edit.done()


def _matrix(turn: Turn, kind: str, random: torch.Generator) -> Tensor:
    plain = None if turn.keeps_mean or kind == "random" else hadamard(turn.size)
    if plain is None:
        return random_turn(turn.size, random, keeps_mean=turn.keeps_mean)
    signs = 2.0 * torch.randint(0, 2, (turn.size,), generator=random, dtype=torch.float64, device="cpu") - 1
    return plain * signs * turn.size**-0.5


def _words(turn: Turn, kind: str) -> str:
    """What a matrix is, for the table of changes."""
    many, size = len(turn.slots), turn.size
    if turn.keeps_mean:
        one = say("a random matrix that keeps means of {size}", size=size)
        return one if many == 1 else say("{many} random matrices that keep means of {size}", many=many, size=size)
    if kind == "hadamard" and hadamard(size) is not None:
        one = say("a Hadamard matrix of {size}", size=size)
        return one if many == 1 else say("{many} Hadamard matrices of {size}", many=many, size=size)
    one = say("a random matrix of {size}", size=size)
    return one if many == 1 else say("{many} random matrices of {size}", many=many, size=size)


def hadamard(size: int) -> Tensor | None:
    """A square matrix of ±1 with orthogonal rows, after Sylvester and Paley; None where these give none.

    Example:
        >>> from gonio.surgery.rotate import hadamard
        >>> h = hadamard(12)
        >>> torch.equal(h @ h.T, 12 * torch.eye(12, dtype=h.dtype))
        True
    """
    for doublings in reversed(range(size.bit_length())):
        base, rest = divmod(size, 2**doublings)
        if rest == 0 and (first := _paley(base)) is not None:
            for _ in range(doublings):
                first = torch.cat([torch.cat([first, first], 1), torch.cat([first, -first], 1)])
            return first
    return None


def _paley(size: int) -> Tensor | None:
    """Of size 1, or 1 + a prime 4m + 3: I + S with the skew matrix of quadratic residues."""
    prime = size - 1
    if prime == 0:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    if prime % 4 != 3 or any(prime % n == 0 for n in range(2, isqrt(prime) + 1)):
        return None
    residue = torch.full((prime,), -1.0, dtype=torch.float64, device="cpu")
    residue[torch.arange(1, prime, device="cpu").square() % prime] = 1
    residue[0] = 0
    found = torch.eye(size, dtype=torch.float64, device="cpu")
    found[0, 1:], found[1:, 0] = 1, -1
    place = torch.arange(prime, device="cpu")
    found[1:, 1:] += residue[(place[:, None] - place) % prime]
    return found
