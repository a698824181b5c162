"""A diagnosis: what happened, the figures that show it, cures that plan has checked, and what cannot be
known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecard.doctor.cures import Cure, Folklore
from onecard.plan.lines import GIB


@dataclass(frozen=True)
class Evidence:
    text: str  # a sentence with its figures
    of: str = ""  # the part of the paste that shows it, unchanged
    key: str = ""  # tensor, card, bill, ...; stable and English


OK, WRONG, UNKNOWN = "ok", "wrong", "unknown"
SIGNS = {OK: "✓", WRONG: "✗", UNKNOWN: "?"}


@dataclass(frozen=True)
class Judged:
    """A line or a figure of an advice, computed. `unknown`: it cannot be computed, and is left alone."""

    words: str  # as it was claimed
    verdict: str  # OK, WRONG or UNKNOWN
    reason: str  # what is so, with its figures
    weight: float = 1.0  # how much hangs on it: the worst are shown first
    short: str = ""  # of config lines: what fits beside others on one line
    key: str = ""  # stable and English: memory, speed, time, energy, model, tokens, loss, ...

    @property
    def sign(self) -> str:
        return SIGNS[self.verdict]


@dataclass(frozen=True)
class Diagnosis:
    """`key` is stable and English: out-of-memory, not-a-number, device-assert, ...; `unknown` where the
    cause is."""

    key: str
    what: str
    evidence: tuple[Evidence, ...] = ()
    cures: tuple[Cure, ...] = ()
    advice: tuple[str, ...] = ()  # cures that are no settings: a command, something to end or install
    folklore: tuple[Folklore, ...] = ()
    unknown: tuple[str, ...] = ()
    next: str = ""  # the command to run next
    paste: str = ""  # what to paste after it
    moment: str | None = None
    tensor: str = ""  # shape and type of the tensor, where it is one
    cause: str = ""  # of a key that has several, such as paging or evaluation of slow; stable and English
    advised: str = ""  # of an answer that was pasted with the error: how much of it is right
    claims: tuple[Judged, ...] = ()  # of an advice: its lines and figures
    stages: tuple[Judged, ...] = ()  # of an advice: each config that it asks for, as a whole

    @property
    def is_known(self) -> bool:
        return self.key != "unknown"

    def _claims(self, verdict: str) -> list[Judged]:
        return [claim for claim in (*self.stages, *self.claims) if claim.verdict == verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "what": {"key": self.key, "text": self.what, "cause": self.cause or None, "moment": self.moment,
                     "tensor": self.tensor or None},
            "evidence": [
                *({"text": e.text, "of": e.of} for e in self.evidence),
                *({"text": c.reason, "of": c.words} for c in self._claims(OK)),
            ],
            "cures": [*map(cure_to_json, self.cures), *({"trainer": "any", "text": t} for t in self.advice)],
            "folklore": [
                {
                    "advice": f.advice, "text": f.text,
                    "gib": round(f.bytes / GIB, 3) if f.bytes is not None else None,
                    "speed": round(f.share, 3) if f.share is not None else None,
                }
                for f in self.folklore
            ] + [
                {"advice": c.words, "text": c.reason, "gib": None, "speed": None} for c in self._claims(WRONG)
            ],
            "claims": [
                {"claim": c.words, "verdict": c.verdict, "reason": c.reason, "about": c.key or None}
                for c in (*self.stages, *self.claims)
            ],
            "unknown": list(self.unknown),
            "next": self.next or None,
        }  # fmt: skip


def cure_to_json(cure: Cure) -> dict[str, Any]:
    return {
        "trainer": cure.trainer,
        "lines": [str(line) for line in cure.lines],
        "settings": {line.name: line.value for line in cure.lines},
        "gib": round(cure.bytes / GIB, 3),
        "spare_gib": round(cure.spare / GIB, 3),
        "tokens_per_s": round(cure.tokens_per_s, 1) if cure.tokens_per_s else None,
        "speed": round(cure.share, 3) if cure.share else None,
        "quality": cure.quality,
        "command": cure.command or None,
    }
