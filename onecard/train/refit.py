"""Changing a run's setting while it runs: free the card, take the next setting, go on with the same step.

Where masters and states change place, all that training has learned waits in host memory meanwhile, so that
nothing is lost if the next setting does not fit either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from onecard.arch.layout import Setting
from onecard.errors import first_line
from onecard.language import _, english_of
from onecard.plan.lines import GIB
from onecard.plan.search import Choice
from onecard.plan.update import UPDATE
from onecard.run.pause import PauseRequest, left_in_words
from onecard.train.evaluate import at_a_time
from onecard.train.failures import DivergedError
from onecard.train.fit import Fit, in_words
from onecard.train.host_copy import free_for_tensors, put_in_place, try_to_free_card
from onecard.train.journal import Journal
from onecard.train.memory import (
    allocator_retries,
    cap_again,
    forget,
    is_of_host_memory,
    is_out_of_memory,
    measure_afresh,
    peak_memory_gib,
    ran_out,
    reserve_of,
)
from onecard.train.other_processes import look_at, process_notes, spilling_platform
from onecard.train.pausing import left_on_card, needed_by, rest_until_taken_back, take_card
from onecard.train.retries import as_user_error, once_more, wait_for_others
from onecard.train.speed_watch import SpeedWatch
from onecard.train.training_run import TrainingRun
from onecard.train.trial import Trial, gain_of

_OF_TRAINING = ("loss", "backward pass of a layer", UPDATE)  # moments that every step has
# Steps between looks at how much memory there is now, and seconds: small models step in milliseconds.
_CLIMB_EVERY, _CLIMB_SECONDS = 32, 1.0
# The speed of a setting counts from its ninth step on, and after as many as two such stretches.
_STEADY, _MEASURED = 8, 16
# It just fits, but the allocator starts over again and again: as good as not fitting, if that is slow. Looked
# at so often, twice in a row (a capture may do it once); borne for so many steps where nothing is better.
_THRASHING_EVERY, _THRASHING, _BORNE = 8, 4, 2048
_HOST_TRIES = 6  # at a step, where host memory is short
_NOTICE_EVERY = 60.0  # seconds between looks at the other processes on the card
# A change that was to be faster and measures so much slower is taken back.
_SLOWER = 0.98
# How far a measured peak may move predictions for other settings: further, and it is not the bill that errs.
_LEAST_SHARE, _MOST_SHARE = 0.9, 1.1


class Refit:
    """What the loop asks when memory runs out, and now and then when it may have come back."""

    def __init__(self, run: TrainingRun, journal: Journal) -> None:
        self.run, self.journal = run, journal
        measure_afresh(run.device)  # what choosing kernels and building took is no setting's peak
        self._retries = allocator_retries(run.device)  # when last looked at
        self._tight = 0  # looks in a row that found too many
        self._tight_from = 0, 0.0  # steps and seconds finished when the first of them found it
        self._bearable: dict[Setting, int] = {}  # tight ones that nothing smaller is better than; until when
        self._trial: Trial | None = None
        self._emptied_for: int | None = None  # the step whose sample is tried again
        self._host_tries = 0  # since a step got through
        self._short = False  # was there too little, by the bill, when no setting was left?
        first = look_at(run.device)
        run.notes += process_notes(first)
        self._watch = SpeedWatch(spilling_platform() is not None, first)
        self._watched = 0, 0.0  # steps and seconds of this process that are finished
        self._began_at = 0  # of these steps, the one with which the present setting began
        self._resumed_at = 0  # and the one after the last pause
        self._steady: tuple[int, float] | None = None  # where it had settled
        self._looked = time.monotonic()
        self._slow, self._noticed = False, time.monotonic()

    @property
    def fit(self) -> Fit:
        return self.run.fit

    @property
    def _on_card(self) -> bool:
        return self.run.device.startswith("cuda")

    def after(self, error: BaseException, where: str) -> bool:
        """Ran out in `where`: is there another setting to try again with? It is in place then."""
        try:
            again = self._deal_with(error, where)
        except Exception as another:
            if not ran_out(another) or self.run.host_copy is None:
                raise
            forget(another)  # nothing could be put in place: all is in host memory, and may wait there
            again = False
        # Every error is the end of a retry: they must not pass for a setting that fits too tightly.
        self._retries, self._tight = allocator_retries(self.run.device), 0
        return again

    def _deal_with(self, error: BaseException, where: str) -> bool:
        """The cheapest that was not tried yet: smaller bites, an emptied card, no sample, another setting."""
        run, step = self.run, self.run.position.step
        if not is_out_of_memory(error) or run.stepper is None or run.stepper.updating:
            return False
        text = first_line(error)
        if where == "evaluation" and self.fit.evaluate_less(step):
            forget(error)
            self.journal.shortage(where, text, at_a_time(self.fit.evaluation_batch))
            return True
        if where == "sampling" and self.fit.enabled and self._emptied_for != step:
            # Training rests meanwhile: its setting matters little, what it no longer uses may be enough.
            self._emptied_for = step
            run.stepper.release()
            forget(error)
            self.journal.shortage(where, text, _("one more try on an emptied card"), aloud=False)
            return True
        if where == "sampling":
            # Text to look at is not worth slower training. If memory has become short for that too, it is
            # training that will change.
            forget(error)
            self.fit.without_sample()
            self.journal.shortage(where, text, _("no sample text"))
            return True
        if self._on_card and is_of_host_memory(error):
            if self._host_tries < _HOST_TRIES:
                self._host_tries += 1
                once_more(run, self.journal, error, where, aloud=self._host_tries == 1)
                return True
            self.fit.spare_the_host(step)
        before, peak = self.fit.choice, peak_memory_gib(run.device)
        forget(error)
        run.stepper.release()
        self._cap_anew()  # what others have given back may be used, what they have taken is theirs
        there = free_for_tensors(run)
        if self.fit.down(step, there) is None:
            self._short = there is not None and there < self.fit.least_need
            return False
        self._trial = None
        change_setting(run, step)
        self._another_setting()
        after = self.fit.choice
        if after.setting == before.setting:
            # Nothing is smaller: all that helps is that others give memory back, and that takes a while.
            again = _("trying again with {setting}").format(setting=in_words(after))
            self.journal.shortage(where, text, again, aloud=self.fit.retries == 1)
            wait_for_others()
            return True
        message = _("out of memory in {where}: going on with {setting}").format(
            where=_(where), setting=in_words(after)
        )
        self._report(message, where, before, error=text, measured_gib=peak)
        return True

    def _report(self, text: str, where: str, before: Choice, **more: Any) -> None:
        """Of a change that is made: both settings with their bills."""
        after = self.fit.choice
        self.journal.refitted(
            text, where=where, before=before.setting.to_json(), after=after.setting.to_json(),
            predicted_gib=round(before.bill.allocated / GIB, 3), now_gib=round(after.bill.allocated / GIB, 3),
            **more,
        )  # fmt: skip

    def wait(
        self, error: BaseException, wanted: PauseRequest, stop: Callable[[], bool], save: Callable[[], None]
    ) -> bool:
        """Nothing is small enough for what others have left of the card: the run waits in host memory until
        they give some back, or it is to end. False: it is not others who have it, or host memory has no room.
        """
        run, was_short = self.run, self._short
        there, needs, self._short = free_for_tensors(run), self.fit.least_need, False
        half_way = run.stepper is not None and run.stepper.updating
        if not is_out_of_memory(error) or not self.fit.enabled or half_way or there is None:
            return False
        if there >= needs and run.host_copy is None:
            self.fit.progressed()
            return was_short  # given back a moment ago: once more
        if there >= needs and not was_short:
            # All is in host memory, and there should be room: it may have come back a moment ago.
            taken = take_card(run, needs, smaller_too=True) is None
            self._another_setting()
            return taken
        if run.host_copy is None and try_to_free_card(run) is not None:
            return False
        self._rest(wanted, stop, save, needs)
        return True

    def pause(self, wanted: PauseRequest, stop: Callable[[], bool], save: Callable[[], None]) -> None:
        """The card is free until the request is taken back and there is room again, or the run is to end."""
        run = self.run
        needs = needed_by(run, measured=self.journal.session[0] > max(self._began_at, self._resumed_at))
        if (refused := try_to_free_card(run)) is not None:
            wanted.refused(str(english_of(refused)))
            self.journal.note([_("asked to pause, but training goes on: {why}").format(why=refused)])
            return
        left = left_on_card(run.device)
        wanted.granted(left)
        self.journal.paused(left_in_words(left))
        # A kill while paused then loses nothing, and the card is free already.
        wanted.says("paused", "it is writing a checkpoint")
        self._rest(wanted, stop, save, needs)

    def _rest(
        self, wanted: PauseRequest, stop: Callable[[], bool], save: Callable[[], None], needs: float
    ) -> None:
        """Saved, and without the card until there is room and no pause is requested."""
        run, before, step = self.run, self.fit.choice, self.run.position.step
        try:
            save()
        except DivergedError:
            raise
        except Exception as error:
            self.journal.save_failed(step, as_user_error(error, step))
        if wanted.requested():
            wanted.says("paused")
        left = left_on_card(run.device)
        if not rest_until_taken_back(run, self.journal, wanted, stop, left, needs):
            return  # it is to end
        measure_afresh(run.device)
        self.fit.progressed()
        self._resumed_at = self.journal.session[0]
        self.journal.going_on()
        if self.fit.setting != before.setting:
            self._trial = None
            self._another_setting()
            message = _("there is less memory than before: going on with {setting}").format(
                setting=in_words(self.fit.choice)
            )
            self._report(message, "pause", before)
        wanted.over()

    def settled(self) -> None:
        """All steps so far are finished: their time is a measurement."""
        steps, seconds = self.journal.session
        (steps_before, seconds_before), self._watched = self._watched, (steps, seconds)
        if self._steady is None and steps >= self._began_at + _STEADY:
            self._steady = self._watched
        # What a processor has to share is no news; whoever sits at it knows.
        if steps > steps_before and self._on_card:
            self._slow = self._watch.step_took(seconds - seconds_before, steps - steps_before) or self._slow
        if self._on_card and time.monotonic() - self._noticed > _NOTICE_EVERY:
            self._noticed = time.monotonic()
            self.journal.note(self._watch.notice(look_at(self.run.device)))

    def _another_setting(self, expected_seconds: float | None = None) -> None:
        """Another pace from here on; `expected_seconds` a step at most, where that is known."""
        self._began_at, self._steady = self.journal.session[0], None
        self._watch.reset(expected_seconds)

    def _speed(self) -> float | None:
        """Tokens per second of the present setting; None until enough of its steps are finished."""
        return self._speed_from(self._steady, _MEASURED) if self._steady is not None else None

    def _speed_from(self, then: tuple[int, float], least: int) -> float | None:
        steps, seconds = (now - before for now, before in zip(self._watched, then, strict=True))
        return steps * self.run.config.tokens_per_step / seconds if steps >= least and seconds else None

    def _speed_changed(self) -> bool:
        """Steps take much longer, or no longer do: reported, and where the driver spills, acted on."""
        run, self._slow = self.run, False
        verdict = self._watch.verdict(look_at(run.device))
        if verdict is None:
            return False
        self.journal.speed_changed(verdict.text, asdict(verdict))
        if verdict.reason != "spilling":
            return False
        changed = self._leave(str(english_of(verdict.text)))
        if changed:
            self._cap_anew()  # what others have taken since is no longer ours to fill
        return changed

    def _leave(self, why: str) -> bool:
        """The present setting, as if it had run out. Where nothing can be put in its place it has."""
        error = torch.OutOfMemoryError(why)
        changed = self.after(error, "training")
        if self.run.stepper is None:
            raise error  # all is in host memory, and may wait
        return changed

    def _cap_anew(self) -> None:
        """By what there is now: the cap of the start knows nothing of who has come or gone."""
        config, device = self.run.config, self.run.device
        cap_again(device, config.vram_limit, reserve_of(config, device))

    def _thrashing(self) -> bool:
        if self.run.position.step % _THRASHING_EVERY:
            return False
        before, self._retries = self._retries, allocator_retries(self.run.device)
        self._tight = self._tight + 1 if self._retries - before >= _THRASHING else 0
        if self._tight == 1:
            self._tight_from = self._watched
        borne = self._bearable.get(self.fit.setting, -1) > self.run.position.step
        return self.fit.enabled and self._tight > 1 and not borne

    def climb(self) -> bool:
        """Has the setting changed after this step? For a faster one, if memory has come back, or for a
        smaller one, if it fits too tightly, which is taken back where it is slower. Looked at rarely: it
        costs a question to the driver."""
        run, step = self.run, self.run.position.step
        self.fit.progressed()
        self._host_tries = 0
        if self._thrashing() and self._speed() is not None:
            # Was it right to come here? That this one is tight as well must not keep it from being judged.
            if self._trial is not None and self._judge(self._trial):
                return True
            # As fast as it has been since it is tight: what it did before says nothing about now.
            if (speed := self._speed_from(self._tight_from, _THRASHING_EVERY)) is not None:
                return self._leave_tight(speed)
        if self._slow and self._speed_changed():
            return True
        too_soon = self._on_card and time.monotonic() - self._looked < _CLIMB_SECONDS
        if step % _CLIMB_EVERY or step >= run.config.max_iters or too_soon:
            return False
        self._looked = time.monotonic()
        if self._trial is not None:
            return self._judge(self._trial)
        there = free_for_tensors(run)
        # On a CPU nothing is faster than what was asked for; only what was given up may come back.
        if there is None and self.fit.as_given:
            return False
        before, speed, peak = self.fit.choice, self._speed(), peak_memory_gib(run.device)
        wanted = self.fit.up(step, math.inf if there is None else there, self._measured_share(before))
        if wanted is None:
            return False
        if there is not None:
            self._cap_anew()  # what has come back may be used
        change_setting(run, step)
        after = self.fit.choice
        if after.setting != wanted:
            self._another_setting()
            message = _("there was not enough memory for {wanted} after all: going on with {setting}").format(
                wanted=in_words(self.fit.question.answer(wanted)), setting=in_words(after)
            )
            self._report(message, "climb", before, measured_gib=peak)
            return True
        self._another_setting(self._watch.usual)
        self._trial = Trial(before, speed)
        gain = gain_of(before.tokens_per_s, after.tokens_per_s)
        message = _("there is memory for more: going on with {setting}").format(setting=in_words(after))
        self._report(message, "climb", before, measured_gib=peak, predicted_gain=gain)
        return True

    def _leave_tight(self, speed: float) -> bool:
        before = self.fit.choice
        changed = self._leave(
            f"the allocator started over {_THRASHING} times or more in {_THRASHING_EVERY} steps, twice"
        )
        if self.fit.setting == before.setting:
            self._bear(before.setting)  # nothing is smaller: to try and report it once is enough
        else:
            self._trial = Trial(before, speed, tight=True)
        return changed

    def _bear(self, setting: Setting) -> None:
        self._bearable[setting] = self.run.position.step + _BORNE

    def _measured_share(self, now: Choice) -> float:
        """The present setting's measured peak over the predicted one."""
        if not self.run.device.startswith("cuda"):
            return 1.0
        share = (peak_memory_gib(self.run.device) or 0.0) * GIB / now.bill.allocated
        # An evaluation or a sample may not have come since the peak is measured: no reason to expect less.
        least = _LEAST_SHARE if now.bill.worst.name in _OF_TRAINING else 1.0
        return min(max(share, least), _MOST_SHARE)

    def _judge(self, stage: Trial) -> bool:
        """Did the change bring what was predicted? One that made it slower is taken back."""
        run, now, speed = self.run, self.fit.choice, self._speed()
        if speed is None:
            return False  # not measured yet, and no other change before that
        self._trial = None
        gain = gain_of(stage.speed, speed)
        self.journal.gained(gain_of(stage.before.tokens_per_s, now.tokens_per_s), gain)
        if gain is None or 1 + gain >= _SLOWER:
            return False
        if stage.tight:
            self._bear(stage.before.setting)
        self.fit.back(stage.before.setting, run.position.step)
        change_setting(run, run.position.step)
        self._another_setting()
        message = _("that made it {n:.0%} slower: going back to {setting}").format(
            n=-gain, setting=in_words(self.fit.choice)
        )
        self._report(message, "back", now, measured_gain=gain)
        return True


def change_setting(run: TrainingRun, step: int) -> None:
    """Put the fit's setting in place; the next one, and so on, where building it runs out itself."""
    assert run.stepper is not None
    run.stepper.release()
    put_in_place(run, step, run.stepper.optimizer.storage)
    measure_afresh(run.device)
