"""What comes from elsewhere: nanochat's flags that are no knobs here, and what a run may begin with."""

from __future__ import annotations

import difflib

from onecard.arch.shapes import PRETRAINED
from onecard.config.files import did_you_mean, shortened
from onecard.errors import UserError
from onecard.language import N_, _

# By name, what to use instead.
NANOCHATS_FLAGS = {
    "target_param_data_ratio": N_("a horizon is given in tokens, --tokens=2.2B, or in steps"),
    "target_flops": N_("a horizon is given in tokens, --tokens=2.2B, or in steps"),
    "aspect_ratio": N_("a width of your own: --n_embd"),
    "head_dim": N_("heads of your own: --n_head"),
    "device_type": N_("--device=cuda or --device=cpu"),
    "eval_tokens": N_("--eval_iters, times batch_size × block_size tokens"),
    "sample_every": N_("samples come with evaluations; --sample_tokens=0 for none"),
    "save_every": N_("checkpoints come with evaluations: --eval_interval"),
    "model_tag": "--out_dir=FOLDER",
    "resume_from_step": N_("--init_from=resume continues from the newest checkpoint"),
    "core_metric_every": N_("CORE is not here yet; leave it out"),
    "core_metric_max_per_task": N_("CORE is not here yet; leave it out"),
    "fp8": N_("8-bit matmuls are not here yet; leave it out"),
    "fp8_recipe": N_("8-bit matmuls are not here yet; leave it out"),
}


def check_init_from(init_from: str) -> None:
    if (
        init_from in ("auto", "scratch", "resume", *PRETRAINED)
        or "/" in init_from
        or init_from.endswith(".pt")
    ):
        return
    near = difflib.get_close_matches(init_from, ("auto", "scratch", "resume", *PRETRAINED), n=1)
    raise UserError(
        _("init_from cannot be {value}").format(value=shortened(init_from)),
        _("it is auto, scratch, resume, one of {names}, or a path with a slash in it").format(
            names=", ".join(PRETRAINED)
        ),
        did_you_mean(near) or _("for a folder here: --init_from=./{init_from}").format(init_from=init_from),
    )
