"""The options of `onecard report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onecard.config.knobs import Config, option
from onecard.errors import UserError
from onecard.language import N_, _
from onecard.plan.options import price_range
from onecard.plan.prices import CURRENCY, PRICE


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Config):
    groups: ClassVar[tuple[str, ...]] = (
        N_("how the answer is wanted"),
        N_("what the log does not say"),
        N_("money"),
    )

    # fmt: off
    full: bool = option("bool", "all of it: tables, mistakes with their evidence, facts with their origin", group="how the answer is wanted")
    html: str | None = option("str", "a page as well: one file, with all that it needs in it", group="how the answer is wanted", value="FILE")
    markdown: bool = option("bool", "to be pasted where runs are discussed", group="how the answer is wanted")
    json: bool = option("bool", "everything, for programs", group="how the answer is wanted")
    log_x: bool = option("bool", "steps on a logarithmic scale: shows the fall of the first steps", group="how the answer is wanted")
    gpu: str | None = option("str", "the card, such as \"RTX 4070\"; the one the log names, or this machine's, unless given", group="what the log does not say", value="CARD")
    gpus: int | None = option("int", "how many such cards train together", group="what the log does not say", low=1, high=100_000, value="N")
    config: str | None = option("str", "the run's config file: model, batch, schedule", group="what the log does not say", value="FILE")
    max_iters: int | None = option("int", "the last step of the run", group="what the log does not say", low=1, value="N")
    tokens: int | None = option("tokens", "the same in tokens: 3.2B", group="what the log does not say", low=1, value="N")
    batch_size: int | None = option("int", "sequences per micro-batch", group="what the log does not say", low=1, value="N")
    block_size: int | None = option("int", "tokens per sequence", group="what the log does not say", low=1, value="N")
    gradient_accumulation_steps: int | None = option("int", "micro-batches per step", group="what the log does not say", low=1, value="N")
    eval_every: int | None = option("int", "steps between evaluations", group="what the log does not say", low=1, value="N")
    eval_tokens: int | None = option("tokens", "tokens of one evaluation: 41.9M", group="what the log does not say", low=1, value="N")
    price: str = option("str", "of a kWh, or a range of it: 0.30, 3-4", default=f"{PRICE:.2f}", group="money", value="N")
    currency: str = option("str", "of the price", default=CURRENCY, group="money", value="NAME")
    idle_watts: float | None = option("float", "what the PC draws besides the card: 80, in a laptop 25", group="money", low=0, high=100_000, value="N")
    # fmt: on

    def check(self) -> None:
        price_range(self.price)
        if self.json and self.markdown:
            raise UserError(_("--json and --markdown do not go together"), hint=_("keep one of them"))
        if self.max_iters is not None and self.tokens is not None:
            raise UserError(
                _("--tokens and --max-iters both say when the run ends"), hint=_("keep one of them")
            )
