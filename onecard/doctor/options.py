"""The options of `onecard doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from onecard.config.knobs import Config, option
from onecard.errors import UserError
from onecard.language import N_, _


@dataclass(frozen=True, kw_only=True)
class Options(Config):
    """What `onecard doctor` is asked, besides the paste."""

    # fmt: off
    config: str | None = option("str", N_("the run's config file: says the model's shape and its batch"), value="FILE")
    gpu: str | None = option("str", N_("the card, such as \"RTX 4070\"; the one the paste names, or this machine's, unless given"), value="CARD")
    vram_limit: float | None = option("float", N_("GiB of the card that the process may take"), low=0.1, high=10_000, value="GIB")
    vram_reserve: float | None = option("float", N_("GiB of the card that are left to other programs, such as a desktop"), low=0, high=10_000, value="GIB")
    apply: bool = option("bool", N_("write the first cure for their trainer into --config: shows the difference, asks, and keeps a backup"))
    yes: bool = option("bool", N_("with --apply: do not ask"))
    full: bool = option("bool", N_("all of it: every line and figure of an advice, with its reason"))
    json: bool = option("bool", N_("print the facts as JSON, for programs"))
    # fmt: on

    def check(self) -> None:
        if self.apply and self.config is None:
            raise UserError(
                _("--apply needs the file that is to be changed"),
                hint="onecard doctor ERROR.txt --config CONFIG.py --apply",
            )
        if self.yes and not self.apply:
            raise UserError(_("--yes belongs to --apply"), hint="onecard doctor --help")
