"""A trainer that does not run out: the planner's fastest setting for the memory there is now, and the next
one when memory turns out to be less.

What may change is arch/layout.py's Setting: micro-batch, loss chunk, recompute, offload. All exact settings
compute the same step, so one that ran out is simply done again by another; tokens per step, data and learning
rates do not notice. This module decides; refit.py and host_copy.py put the setting in place; the loop tries
again. What a run begins with is first_setting.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onecard.arch.layout import Setting
from onecard.config.resolve import setting_of
from onecard.language import _, joined
from onecard.plan.rates import ANY_CARD
from onecard.plan.search import (
    Choice,
    Question,
    fastest,
    settings,
    smallest,
)

# Compiled code exists once for every micro-batch: no more sizes than this in a run.
MOST_MICRO_BATCHES = 5
# The next setting after a failure has to need this much less, or the failure comes again.
_LOWER = 0.97
# One that failed is tried again after so many steps, twice as many after each further failure; after one that
# held so many times longer, as after the first.
_PATIENCE, _FORGIVEN = 64, 8
# Amid a run a setting that is so much faster is worth a change: it costs compiling, and a test of its gain.
_WORTH_CHANGING = 1.03
# Back to what the run began with for any gain: it has been chosen for its speed already.
_WORTH_RETURNING = 1.002
# At the bottom there is nothing smaller, but whoever took the memory may give it back: so often is it tried
# again, without a step getting through in between.
_MOST_RETRIES = 8


@dataclass
class Failure:
    """A setting that ran out or was slower than expected, and when it may be tried again."""

    again_at: int
    patience: int = _PATIENCE
    ran_out: bool = False  # since it was last in use


def in_words(choice: Choice) -> str:
    """A setting as flags of `onecard train`, and what flags cannot say."""
    if not choice.last_micro_batch:
        return choice.flags
    split = _("(micro-batches of {n}, the last of {last})").format(
        n=choice.setting.micro_batch, last=choice.last_micro_batch
    )
    return joined(filter(None, (choice.flags, split)), " ")


class Fit:
    """Which setting a run uses now, and which one comes next."""

    def __init__(self, question: Question, setting: Setting, *, enabled: bool, on_card: bool = True) -> None:
        self.question, self.setting, self.enabled, self._on_card = question, setting, enabled, on_card
        self.first_step = 0  # of this start: a run that goes on has made some
        self._first, self._since = setting, 0  # the one the run began with; the step that brought the present
        self.evaluation_batch = setting.micro_batch
        self._evaluation = Failure(0, _PATIENCE // 2)
        self._sizes = {setting.micro_batch}
        self._failed: dict[Setting, Failure] = {}
        self._known: dict[Setting, tuple[Choice, Choice]] = {}
        self._barred: tuple[int, Callable[[Choice], bool]] | None = (
            None  # what host memory had no room for; until when
        )
        self.retries = 0  # tries at the bottom since a step got through
        self._no_sample = False
        self._daring = False  # was the present setting taken though its bill was too large?

    @property
    def as_given(self) -> bool:
        """Is the setting the config's own? Then there is nothing to climb to."""
        return self.setting == self._given.setting

    @property
    def _given(self) -> Choice:
        return self.question.answer(setting_of(self.question.config, self.question.shape))

    @property
    def choice(self) -> Choice:
        return self.question.answer(self.setting)

    @property
    def predicted_seconds(self) -> float | None:
        """Of a step in the present setting; None where nothing is predicted: on a CPU, on an unknown card."""
        if not self._on_card or self.question.rates is ANY_CARD or self.choice.step is None:
            return None
        return self.choice.step.seconds

    @cached_property
    def _settings(self) -> list[Setting]:
        """All settings. Masters and states in the bits they have: others would be another training."""
        now = self.setting
        names = ["master_weights", "optim_states", "compile", *(() if self.may_offload else ("offload",))]
        kept: dict[str, Any] = {n: getattr(now, n) for n in names}
        every = (replace(s, **kept) for s in settings(self.question.config, self.question.shape))
        return list(dict.fromkeys(every))

    @property
    def may_offload(self) -> bool:
        """On a CPU it takes more of the very memory that ran out."""
        return self._on_card

    def room_to_capture(self, allocator: float | None) -> bool:
        """For a CUDA graph, of `allocator` bytes, besides the present setting. None: as at the start."""
        now = self.choice
        if allocator is None:
            return now.has_room_to_capture
        return now.bill.need + now.capture_bytes <= allocator

    def _with(self, setting: Setting, allocator: float) -> Choice:
        """As fast as it is with so much memory for tensors: a CUDA graph takes some of it. Whether the
        setting itself fits is judged when it is taken."""
        roomy, bare = self._known.get(setting, (None, None))
        if roomy is None or bare is None:
            roomy = replace(self.question, allowed=2**62).answer(setting)
            bare = replace(self.question, allowed=roomy.bill.process).answer(setting)
            self._known[setting] = roomy, bare  # billed and timed once
        return roomy if roomy.bill.need + roomy.capture_bytes <= allocator else bare

    def down(self, step: int, allocator: float | None = None) -> Setting | None:
        """After running out: the next-fastest setting with a lower peak. None: there is none.

        `allocator`: what there was for tensors at that moment, where it is known. If that was too little by
        the bill, others had taken it: when they give it back, the setting is as good as it was. Only one
        that should have fitted is trusted less and less.
        """
        if not self.enabled:
            return None
        there = math.inf if allocator is None else allocator
        self._lift_bar(step)
        expected = self.choice.bill.need > there and not self._daring
        self._not_again_soon(step, ran_out=True, expected=expected)
        smallest_failed = min(_of_the_setting(self.question.answer(s)) for s in self._recent(step))
        # Where all that is smaller has failed lately, it is still more likely to fit than what failed now.
        # What is too large for what was there, by its bill, comes last.
        for failed in (smallest_failed, _of_the_setting(self.choice)):
            lower = [c for c in self._candidates(there) if _of_the_setting(c) < _LOWER * failed]
            for some in ([c for c in lower if c.bill.need <= there], lower):
                if (found := self._take(some, step)) is not None:
                    return found
        # Where most of the peak is there whatever is done, nothing is so much smaller: the smallest there is.
        rest = [c for c in self._candidates(there) if c.bill.need < self.choice.bill.need]
        if rest and (found := self._take([smallest(rest)], step)) is not None:
            return found
        self.retries += 1
        return self.setting if self.retries <= _MOST_RETRIES else None

    def refused(self, step: int, allocator: float | None = None, stays: str | None = None) -> Setting | None:
        """After host memory had no room for the present setting, though the card had: the fastest of those
        that ask less of it. `stays`: it had none for the move itself, so masters and states stay.
        None: there is none, or the setting needs no host memory.
        """
        asked, there = self.choice.bill.host, math.inf if allocator is None else allocator
        if not self.enabled or (stays is None and not asked):
            return None
        self._barred = (
            step + _PATIENCE,
            ((lambda c: c.bill.host >= asked) if stays is None else (lambda c: c.setting.offload != stays)),
        )
        failed = self._recent(step)
        left = [c for c in self._candidates(there) if c.setting not in failed]
        least = min((_of_the_setting(self.question.answer(s)) for s in failed), default=math.inf)
        lower = [c for c in left if _of_the_setting(c) < _LOWER * least]
        fitting = [c for c in left if c.bill.need <= there]
        for some in ([c for c in lower if c.bill.need <= there], lower, fitting, left):
            if (found := self._take(some, step)) is not None:
                return found
        return None

    def spare_the_host(self, step: int) -> None:
        """Host memory has run out: nothing that asks more of it than the present setting, for a while."""
        asked = self.choice.bill.host
        self._barred = step + _PATIENCE, lambda c: c.bill.host > asked

    def _lift_bar(self, step: int) -> None:
        if self._barred is not None and step >= self._barred[0]:
            self._barred = None

    @property
    def tried(self) -> bool:
        """Have settings run out?"""
        return bool(self._failed)

    @property
    def least_need(self) -> int:
        """Bytes for tensors of the smallest setting of those that host memory has room for."""
        every = [self.question.answer(setting) for setting in self._settings]
        return min(choice.bill.need for choice in [c for c in every if not self._is_barred(c)] or every)

    def progressed(self) -> None:
        """A step got through, or there is memory again."""
        self.retries = 0

    def evaluate_less(self, step: int) -> bool:
        """After an evaluation ran out: fewer sequences at a time. False: it is one already."""
        if not self.enabled or self.evaluation_batch <= 1:
            return False
        if self._evaluation.again_at <= step:  # not once for every halving
            self._evaluation.patience *= 2
            self._evaluation.again_at = step + self._evaluation.patience
        self.evaluation_batch //= 2
        return True

    def evaluate_more(self, step: int) -> None:
        """Before an evaluation: as many sequences at a time as training has, if that failed long ago."""
        if self.evaluation_batch < self.setting.micro_batch and step >= self._evaluation.again_at:
            self.evaluation_batch = self.setting.micro_batch

    def without_sample(self) -> None:
        """Nothing makes room for a sample now."""
        self._no_sample = True

    def may_sample(self) -> bool:
        """Once no after it was given up: the next time things may be different."""
        given_up, self._no_sample = self._no_sample, False
        return not given_up

    def up(self, step: int, allocator: float, measured_share: float = 1.0) -> Setting | None:
        """A faster setting for which there is room: `allocator` bytes are there for tensors in all.

        `measured_share`: the present setting's measured peak over its predicted one. Others are taken to be
        off by as much: what was measured may allow what the bill alone would not, or the reverse.
        """
        if not self.enabled:
            return None
        self._lift_bar(step)
        if self.question.rates is ANY_CARD:
            # What is faster is not known: back to what was asked for, and no further.
            if self.as_given:
                return None
            allocator = min(allocator, self._given.bill.need * measured_share)
        now = self._with(self.setting, allocator)

        def is_faster(choice: Choice) -> bool:
            worth = _WORTH_RETURNING if choice.setting == self._first else _WORTH_CHANGING
            return choice.setting != self.setting and choice.tokens_per_s > worth * now.tokens_per_s

        possible = (
            c for c in self._candidates(allocator)
            if c.bill.need * measured_share <= allocator and is_faster(c)
            and not (c.setting in self._failed and self._failed[c.setting].again_at > step)
        )  # fmt: skip
        found = self._take(possible, step)
        self._daring = found is not None and self.choice.bill.need > allocator
        if found is not None:
            self.evaluation_batch = found.micro_batch
        return found

    def back(self, to: Setting, step: int) -> None:
        """The present setting turned out slower than the one before it."""
        self._not_again_soon(step, ran_out=False)
        self.setting, self._since, self._daring = to, step, False
        self.evaluation_batch = min(self.evaluation_batch, to.micro_batch)

    def remembered(self) -> Callable[[], None]:
        """Brings the present state back: what was only tried while others had the memory is no failure."""
        now = dict(vars(self))
        sizes, failed = set(self._sizes), {setting: replace(f) for setting, f in self._failed.items()}

        def bring_back() -> None:
            vars(self).update(now, _sizes=set(sizes), _failed={s: replace(f) for s, f in failed.items()})

        return bring_back

    def _not_again_soon(self, step: int, *, ran_out: bool, expected: bool = False) -> None:
        failure = self._failed.setdefault(self.setting, Failure(0, _PATIENCE // 2))
        if step - self._since > _FORGIVEN * failure.patience:
            failure.patience = _PATIENCE // 2
        failure.ran_out = ran_out
        failure.patience = max(failure.patience, _PATIENCE) if expected else 2 * failure.patience
        failure.again_at = step + (_PATIENCE if expected else failure.patience)

    def _recent(self, step: int) -> list[Setting]:
        """What ran out and is not to be tried yet; the present one among them."""
        return [setting for setting, f in self._failed.items() if f.ran_out and f.again_at > step]

    def _candidates(self, allocator: float) -> Iterator[Choice]:
        """Of few sizes of micro-batches. The smallest is always one of them: it may be all that fits. Without
        those that host memory has no room for."""
        smallest_size = min(setting.micro_batch for setting in self._settings)
        known = self._sizes | {smallest_size}
        full = len(known) >= MOST_MICRO_BATCHES
        for setting in self._settings:
            if full and setting.micro_batch not in known:
                continue
            choice = self._with(setting, allocator)
            if not self._is_barred(choice):
                yield choice

    def _is_barred(self, choice: Choice) -> bool:
        return self._barred is not None and self._barred[1](choice)

    def _take(self, candidates: Iterable[Choice], step: int) -> Setting | None:
        found = fastest(candidates)
        if found is None:
            return None
        self.setting, self._since, self._daring = found.setting, step, False
        self._sizes.add(found.setting.micro_batch)
        self.evaluation_batch = min(self.evaluation_batch, found.setting.micro_batch)
        return found.setting


def _of_the_setting(choice: Choice) -> int:
    """Its peak without what every setting takes."""
    return choice.bill.allocated - choice.bill.workspace.bytes
