"""The logits of attention while a model trains, in the forwards of the steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from gonio.editing.where import is_sharded, modules_at
from gonio.errors import NoMatchError, NotApplicableError
from gonio.measuring.figures.attention import HeadLogits, LogitStatistics, observers_of
from gonio.measuring.findings.model_rules import by_attention, one_token_heads
from gonio.messages import say
from gonio.surgery import anatomy
from gonio.surgery.observing import observing

ATTENTION = ("largest_logit", "entropy", "entropy_share", "one_token_heads")  # the columns of a CSV file, in this order
Figures = dict[str, float]


class AttentionFigures:
    """Observes the logits of a model from :meth:`begin_` to :meth:`take`.

    Args:
        example: an input, as :func:`gonio.surgery.anatomy` takes it.

    Attributes:
        left: by path, why the logits of an attention are not observed.

    Raises:
        NoMatchError: if no attention can be observed, with the reasons.
        NotApplicableError: for sharded parameters.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        if is_sharded(model):
            why, do = "its parameters are sharded", "Leave it out, or track a model with whole parameters."
            raise NotApplicableError("Tracker", "", why, do, action="find the attention of")
        self._modules = modules_at(model)
        self._found = anatomy(model, example=example)
        observers, self.left = observers_of(self._found, self._modules, training=True)
        if not observers:
            raise NoMatchError("Tracker", "also='attention'", [], refused=self.left)
        self._observers: Sequence[LogitStatistics] = ()
        self._ends: list[Callable[[], None]] = []

    def begin_(self) -> None:
        """Observe the forwards in training mode from now on."""
        if not self._ends:
            self._observers, _ = observers_of(self._found, self._modules, training=True)
            self._ends = observing(self._observers, self._modules, self._found)

    def end_(self) -> None:
        """End it."""
        for end in self._ends:
            end()
        self._ends.clear()

    def take(self) -> tuple[HeadLogits, ...]:
        """What was observed, which ends it."""
        self.end_()
        made = tuple(head for observer in self._observers for head in observer.figures())
        self._observers = ()
        return made


def attention_rows(heads: Sequence[HeadLogits]) -> dict[str, Figures]:
    """The figures of each attention, by its path.

    The largest logit is that of all heads, the entropy their mean, and its share of the maximum that of the head with
    the smallest one.
    """
    return {path or say("the model"): _row(members) for path, members in by_attention(heads).items()}


def _row(heads: Sequence[HeadLogits]) -> Figures:
    read: Mapping[str, list[float]] = {
        name: [value for head in heads if (value := getattr(head, name)) is not None]
        for name in ("largest_logit", "entropy", "entropy_share")
    }
    row = {"largest_logit": max(read["largest_logit"])}
    if read["entropy"]:
        row["entropy"] = sum(read["entropy"]) / len(read["entropy"])
        row["one_token_heads"] = float(one_token_heads(heads))
    if read["entropy_share"]:
        row["entropy_share"] = min(read["entropy_share"])
    return row
