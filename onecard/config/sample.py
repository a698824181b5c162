"""Knobs of sampling, as nanoGPT's sample.py has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onecard.config.knobs import Config, knob
from onecard.config.others import check_init_from
from onecard.errors import UserError
from onecard.language import N_, _


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """How text is generated with a run or a pretrained model, as by nanoGPT's sample.py."""

    groups: ClassVar[tuple[str, ...]] = (N_("model"), N_("sampling"), N_("system"))

    # fmt: off
    init_from: str = knob("str", "resume", "resume (the run in out_dir), gpt2[-medium|-large|-xl], a folder or a ckpt.pt", group="model")
    out_dir: str = knob("str", "out", "folder of the run", group="model", common=True)
    step: int | None = knob("int", None, "which checkpoint; auto: the newest (the best when always_save_checkpoint=False)", group="model", low=0, common=True)
    start: str = knob("str", "\n", "what the text begins with, or FILE:path to read it from a file", group="sampling", common=True)
    num_samples: int = knob("int", 10, "how many texts", group="sampling", low=1, high=100_000, common=True)
    max_new_tokens: int = knob("int", 500, "tokens in each", group="sampling", low=1, high=10_000_000, common=True)
    temperature: float = knob("float", 0.8, "1 as learned; below 1 more careful, 0 always the likeliest token", group="sampling", low=0.0, high=100.0, common=True)
    top_k: int | None = knob("int", 200, "choose among the k likeliest tokens only; auto or 0: among all", group="sampling", low=0, common=True)
    top_p: float = knob("float", 1.0, "choose among the likeliest tokens that together reach this probability", group="sampling", low=0.0, high=1.0, common=True)
    seed: int = knob("int", 1337, "text k depends only on the seed and k", group="sampling", low=0, high=2**31 - 1, common=True)
    device: str = knob("str", "auto", "auto, cpu, cuda or cuda:N", group="system", common=True)
    dtype: str | None = knob("str", None, "float32, bfloat16 or float16; auto: bfloat16 where the card has it", group="system", choices=("float32", "bfloat16", "float16"), common=True)
    compile: bool = knob("bool", False, "accepted for nanoGPT's sake; cached decoding needs no compilation", group="system")
    # fmt: on

    def check(self) -> None:
        check_init_from(self.init_from)
        if self.init_from in ("auto", "scratch"):
            raise UserError(
                _("there is nothing to sample from in init_from='{init_from}'").format(
                    init_from=self.init_from
                ),
                hint=_("--init_from=resume with --out_dir=FOLDER, or --init_from=gpt2"),
            )
