"""The verdict on a run, in two sentences: is it healthy, and where does it stand or end."""

from __future__ import annotations

from onecard.language import N_, _
from onecard.plan.amounts import count
from onecard.report.answer import (
    LEAST_LOSSES,
    Report,
    first_loss,
    loss_text,
    losses_seen,
    range_texts,
    steps_seen,
    tokens_at,
)

OLDER = 0.05  # of the steps: an evaluation from before that is not where the run stands
# By the keys of alarms; what is seen of each is its own sentence, and the first of the reasons.
_TROUBLE = N_("Not healthy: something has been wrong since step {step:,}.")
_TROUBLES = {
    "diverging": N_("Not healthy: the run has been diverging since step {step:,}."),
    "not-a-number": N_("Not healthy: the loss has been no number since step {step:,}."),
    "unlearned": N_("Not healthy: nothing has been learned since step {step:,}."),
    "stuck": N_("Not healthy: the loss has been stuck since step {step:,}."),
    "memorising": N_("Not healthy: the model has been memorising its text since step {step:,}."),
}


def verdict_of(report: Report) -> tuple[str, str]:
    return _first(report), _second(report)


def _first(report: Report) -> str:
    health, loss = report.health, report.loss
    if health == "not-healthy":
        alarm = max(report.alarms, key=lambda each: each.weight)
        text = _(_TROUBLES.get(alarm.key, _TROUBLE))
        return text.format(step=alarm.step if alarm.step is not None else report.facts.step)
    if health == "unknown":
        return _cannot_know(report)
    if health == "healthy-but" and report.grave:
        return _("Healthy, but: {what}").format(what=sentence(report.grave))
    if health == "healthy-but":
        return _("Healthy, but behind what usual runs of its size reach.")
    assert loss is not None
    first = first_loss(report.facts, loss)
    if first is None or first <= loss.value or loss_text(first) == loss.text:
        return _("Healthy: nothing in the curve is wrong.")
    text = _("Healthy: the {name} has fallen from {first} to {last}, and nothing in the curve is wrong.")
    return text.format(name=loss.name, first=loss_text(first), last=loss.text)


def _cannot_know(report: Report) -> str:
    begin, end = steps_seen(report.facts)
    text = _("Nothing is wrong in the {n:,} steps that the log shows, which are too few for a verdict.")
    if losses_seen(report.facts) < LEAST_LOSSES:
        text = _("Whether this run is healthy cannot be known from so few losses.")
    return text.format(n=round(end - begin))


def _second(report: Report) -> str:
    loss, end, place = report.loss, report.end, report.place
    if report.health == "unknown" or loss is None:
        return _("Give more of the log, its first lines and its latest ones; or ask again later.")
    at = _where(report)
    if report.health == "not-healthy":
        return _("Its {name} is {loss} at {at}.").format(name=loss.name, loss=loss.text, at=at)
    if end is not None:
        low, high = range_texts(end.low, end.high)
        text = _("It stands at {loss} at {at} and should end between {low} and {high}.")
        if loss.unit == "bpb":  # forecasts are in nats a token
            text = _(
                "It stands at {loss} bits per byte at {at}; "
                "its training loss should end between {low} and {high}."
            )
        elif report.forecast is not None and report.forecast.of != loss.split:
            text = _(
                "Its validation loss is {loss} at {at}; "
                "its training loss should end between {low} and {high}."
            )
        return text.format(loss=loss.text, at=at, low=low, high=high)
    shown = report.comparable and place is not None and place.unit == loss.unit
    if shown and place is not None and place.low is not None and place.high is not None:
        text = _("Its {name} is {loss} at {at}, where usual runs of its size end at {low} to {high}.")
        low, high = range_texts(place.low, place.high)
        return text.format(name=loss.name, loss=loss.text, at=at, low=low, high=high)
    return _("Its {name} is {loss} at {at}.").format(name=loss.name, loss=loss.text, at=at)


def _where(report: Report) -> str:
    """Where the loss was: by its tokens, or where it is well before the run's last step, by that step."""
    loss, step = report.loss, report.facts.step
    assert loss is not None
    tokens = tokens_at(report.facts, loss.step)
    if tokens is None or loss.step < (1 - OLDER) * step:
        return _("step {n:,}").format(n=round(loss.step))
    return _("{tokens} tokens").format(tokens=count(tokens))


def sentence(text: str) -> str:
    """With its full stop."""
    return text if text.endswith((".", "!", "?")) else text + "."
