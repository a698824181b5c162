"""A report for programs: English, nats and fractions, null for what is not known."""

from __future__ import annotations

import math
from typing import Any

from onecard.report.answer import Report, heaviest, perplexity
from onecard.report.findings import Finding, Forecast, Mistake, NextStep, Place
from onecard.report.pages.plotting import starts_of
from onecard.report.pages.tables import facts_shown
from onecard.report.verdict import verdict_of


def to_json(report: Report) -> dict[str, Any]:
    """The forecast is a list, the end of the schedule first."""
    facts, loss, course = report.facts, report.loss, report.course.to_json()
    found = {
        "run": report.name or None,
        "health": report.health,
        "verdict": " ".join(verdict_of(report)),
        "step": facts.step,
        "last_step": facts.last_step,
        "tokens": facts.tokens,
        "loss": None if loss is None else {
            "value": loss.value, "split": loss.split, "unit": loss.unit, "step": loss.step,
            "perplexity": perplexity(loss),
        },
        "place": _place(report.place),
        "forecast": _forecast(report.forecast),
        "forecast_refused": (report.forecast.refused or None) if report.forecast else None,
        "forecast_notes": list(report.forecast.notes) if report.forecast else [],
        "forecast_by_law": dict(report.forecast.by_law) if report.forecast else {},
        "mistakes": [_mistake(each) for each in heaviest(report.mistakes)],
        "next_steps": [_next(each) for each in report.next_steps],
        **course,
        "alarms": [_finding(each) for each in report.alarms],
        "findings": [_finding(each) for each in report.findings],
        "facts": _facts(report),
        "sample": None if report.sample is None else {"step": report.sample.step, "text": report.sample.text},
        "notes": [*facts.notes, *facts.log.remarks, *report.remarks],
    }  # fmt: skip
    strict: dict[str, Any] = strictly(found)
    return strict


def strictly(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: strictly(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strictly(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _place(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    names = ("model", "parameters_m", "tokens_b", "loss", "source")
    return {
        "text": place.text, "expected": place.expected, "low": place.low, "high": place.high,
        "rows": [dict(zip(names, row, strict=True)) for row in place.rows],
        "bridges": list(place.bridges), "cannot": place.cannot or None,
    }  # fmt: skip


def _forecast(forecast: Forecast | None) -> list[dict[str, Any]]:
    return [vars(point) | {"case": point.case or None} for point in (forecast.points if forecast else ())]


def _finding(finding: Finding) -> dict[str, Any]:
    return {"key": finding.key, "text": finding.text, "good": finding.good, "step": finding.step}


def _mistake(mistake: Mistake) -> dict[str, Any]:
    return {name: getattr(mistake, name) for name in ("key", "text", "evidence", "change", "costs")}


def _next(step: NextStep) -> dict[str, Any]:
    return vars(step) | {"gain": list(step.gain) if step.gain else None}


def _facts(report: Report) -> dict[str, Any]:
    """Each fact with its origin: log, command, prose, config, folder, data, flag."""
    facts = report.facts
    plain = {key: getattr(facts, key, None) for key, _name, _value in facts_shown(report)}
    found: dict[str, Any] = {"format": {"value": facts.log.format, "from": "log"}}
    for key, value in plain.items():
        if key == "shape" and facts.shape is not None:
            value = {"n_layer": facts.shape.n_layer, "n_embd": facts.shape.n_embd}
        elif key == "card" and facts.card is not None:
            value = facts.card.name
        elif key == "schedule" and facts.schedule is not None:
            value = {name: inner for name, inner in vars(facts.schedule).items() if name != "table"}
        if value is not None:
            found[key] = {"value": value, "from": facts.origin.get(key)}
    found["cards"] = {"value": facts.cards, "from": facts.origin.get("cards")}
    found["starts"] = {"value": [int(step) for step in starts_of(facts.log)], "from": "log"}
    return found
