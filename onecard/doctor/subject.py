"""What an answer's figures are about: the model, its tokens, the card, and what arithmetic and plan say
of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from onecard.arch.shapes import Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.doctor.asked import Asked
from onecard.doctor.figures import Figure
from onecard.errors import UserError
from onecard.hardware.cards import Card, match_card, match_rates
from onecard.plan.answer import question_of
from onecard.plan.machine import Figures, Target, find_target
from onecard.plan.search import Choice, chosen
from onecard.report.eta.estimate import Eta, estimate
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known
from onecard.report.reading.assemble import log_of

_DEPTH = re.compile(r"(?<![\w.])d(\d{1,2})(?![\w.])|--depth[= ](\d{1,2})\b|\bdepth\s?[=:]\s?(\d{1,2})\b")
_MANY_CARDS = re.compile(
    r"(?<![\w.])(\d{1,4})\s?(?:[x\u00d7]|-?GPU)\s?(?:NVIDIA )?((?:RTX |GTX )?[A-Z]{0,2}\d{2,4}(?: ?Ti"
    r"| ?Super)?)\b"
)
_STEPS = re.compile(r"\bmax_(?:iters|steps)\W{1,5}(\d{1,3}(?:[.,]\d{3})+|\d{2,8})\b")
_LAPTOP = re.compile(r"laptop|notebook|port[a\u00e1]til|mobile", re.IGNORECASE)
GENERATIONS = (2025, 2026)


@dataclass(frozen=True)
class Subject:
    """A run: `shape` of it, its tokens, and the card that it is on. None: nobody says it."""

    text: str
    config: RunConfig | None
    card: Card | None
    target: Target | None
    shape: Shape | None
    tokens: float | None  # of the whole run
    eta: Eta | None = None
    widths: tuple[int, ...] = ()  # that are advised in place of the config's own

    @property
    def advised_width(self) -> int | None:
        return self.widths[0] if self.widths else None

    @property
    def peak(self) -> float | None:
        """FLOPs per second of the card at best."""
        if self.card is None:
            return None
        rate = self.card.peak_tflops("bfloat16") or self.card.peak_tflops("float16")
        return rate * 1e12 if rate else None

    @property
    def flops_per_token(self) -> float | None:
        if self.shape is not None:
            return float(self.shape.flops_per_token)
        if self.eta is not None and self.eta.floor_ms and self.eta.tokens_per_step:
            return self.eta.floor_flops / self.eta.tokens_per_step
        return None

    @property
    def tokens_per_step(self) -> int | None:
        if self.eta is not None and self.eta.tokens_per_step:
            return self.eta.tokens_per_step
        return self.config.tokens_per_step if self.config is not None else None

    @property
    def steps(self) -> int | None:
        if self.eta is not None and self.eta.last_step:
            return self.eta.last_step
        said = _STEPS.search(self.text[:200_000])
        return int(re.sub(r"[.,]", "", said[1])) if said else None

    @property
    def floor_of_step(self) -> float | None:
        """Seconds that a step takes at least."""
        if not self.flops_per_token or not self.tokens_per_step or not self.peak:
            return None
        return self.flops_per_token * self.tokens_per_step / self.peak

    def floor(self, tokens: float | None = None, shape: Shape | None = None) -> float | None:
        """Seconds that the run takes at least: its FLOPs at the card's peak."""
        tokens = tokens or self.tokens or (self.steps or 0) * (self.tokens_per_step or 0)
        flops = float(shape.flops_per_token) if shape is not None else self.flops_per_token
        return tokens * flops / self.peak if tokens and flops and self.peak else None

    @cached_property
    def choice(self) -> Choice | None:
        """How onecard would run it on this card; None where it cannot, or nobody says what."""
        if self.config is None or self.target is None:
            return None
        try:
            return chosen(question_of(self.config, self.target))[0]
        except UserError:
            return None

    def seconds(self, tokens: float | None = None) -> float | None:
        """By plan, or by the log's pace."""
        tokens = tokens or self.tokens or (self.steps or 0) * (self.tokens_per_step or 0)
        if not tokens:
            return None
        if self.eta is not None and self.eta.tokens_per_s:
            return tokens / self.eta.tokens_per_s
        speed = self.choice.tokens_per_s if self.choice is not None else 0.0
        return tokens / speed if speed else None


def subject_of(found: Asked, target: Target | None, figures: list[Figure]) -> Subject:
    eta = _eta(found)
    depth = depth_in(found.prose) if found.config is None or found.config.depth is not None else None
    config, shape = found.config, None
    if depth is not None and "nanochat" in found.prose.lower():
        config = of_depth(depth, _parameters_on(depth, figures)) or config
    elif eta is not None and eta.facts.shape is not None:
        shape = eta.facts.shape
    if config is not None and found.card is not None and target is None:
        target = _target(config, found.card)
    if config is not None and target is not None:
        try:
            shape = question_of(config, target).shape
        except UserError:
            shape = None
    tokens = next((f.high for f in figures if f.unit == "tokens" and f.high >= 1e9), None)
    of_depth_ = depth is not None and config is not None and config.depth is not None
    widths = tuple(int(c.value) for c in found.advised.lines if c.name == "n_embd")
    tokens = tokens if of_depth_ else None
    return Subject(found.prose, config, found.card, target, shape, tokens, eta, widths)


def _eta(found: Asked) -> Eta | None:
    """What the log, or the sentences about one, say of its pace."""
    log = log_of(found.reader)
    if log is None:
        return None
    try:
        facts = facts_of(log, Known(card=found.card), None)
        return estimate(replace(facts, card=facts.card or found.card))
    except (UserError, ValueError, ArithmeticError):
        return None


def _target(config: RunConfig, card: Card) -> Target | None:
    try:
        return find_target(config, card.name, None, Figures())
    except UserError:
        return None


def depth_in(line: str) -> int | None:
    for found in _DEPTH.finditer(line):
        depth = int(found[1] or found[2] or found[3])
        if 4 <= depth <= 64:
            return depth
    return None


def of_depth(depth: int, parameters: float | None = None, generation: int | None = None) -> RunConfig | None:
    """A nanochat of this depth, of the generation whose size is the one that is said."""
    configs = []
    for each in GENERATIONS if generation is None else (generation,):
        try:
            configs.append(load_config(RunConfig, [f"--depth={depth}", f"--generation={each}"], check=False))
        except UserError:
            return None
    if parameters is None:
        return configs[0]
    return min(configs, key=lambda config: abs(size_of(config) / parameters - 1))


def size_of(config: RunConfig) -> int:
    from onecard.config.resolve import resolve

    return int(resolve(config).shape.parameters)


def _parameters_on(depth: int, figures: list[Figure]) -> float | None:
    for figure in figures:
        if figure.unit in ("parameters", "M") and depth_in(figure.line) == depth and figure.high > 1e8:
            return figure.high
    return None


def cards_on(line: str) -> tuple[int, Card] | None:
    """8×H100: how many, and which."""
    for found in _MANY_CARDS.finditer(line):
        card = match_rates(found[2]) or match_rates(f"{found[2]} SXM")
        if card is not None and 1 < int(found[1]) < 10_000:
            return int(found[1]), card
    return None


def laptop_of(card: Card | None, line: str) -> Card | None:
    """The laptop card of this name, where the line is about one."""
    if card is None or not _LAPTOP.search(line):
        return None
    return match_card(f"{card.name} Laptop") or match_rates(f"{card.name} Laptop")
