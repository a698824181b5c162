"""Every knob of a run: what it means, its default, and what it must not contradict.

nanoGPT's names and defaults keep their meaning. A value the user set is pinned; what is left at its
default (None reads as `auto`) may be chosen by onecard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from onecard.arch import dial
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, heads_for, nearest
from onecard.config.files import COMMAND_LINE, shown_origin
from onecard.config.knobs import Config, knob, knobs, own_record
from onecard.config.others import NANOCHATS_FLAGS, check_init_from
from onecard.errors import UserError
from onecard.language import N_, _


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """One training run. Defaults are nanoGPT's: GPT-2 124M on OpenWebText."""

    foreign: ClassVar[Mapping[str, str]] = NANOCHATS_FLAGS
    groups: ClassVar[tuple[str, ...]] = (
        N_("model"), N_("batch and horizon"), N_("speed and memory"), N_("optimizer"), N_("schedule"), N_("data"),
        N_("output"), N_("other"),
    )  # fmt: skip

    # fmt: off
    # One knob a line, however long: this is a table.
    # --- what is written, and when
    out_dir: str = knob("str", "out", "folder of the run: checkpoints, curve, samples, log. A new run wants a new one", group="output", changes_result=False, common=True)
    eval_interval: int = knob("int", 2000, "steps between evaluations, each with a checkpoint. Smaller for short runs", group="output", low=1, changes_result=False, alias="eval_every", common=True)
    log_interval: int = knob("int", 1, "steps between log lines", group="output", low=1, changes_result=False)
    eval_iters: int = knob("int", 200, "an evaluation reads eval_iters × batch_size fixed blocks of each split. Fewer are faster and noisier", group="output", low=1, changes_result=False)
    eval_only: bool = knob("bool", False, "evaluate once and end; nothing is trained or saved", group="output", changes_result=False)
    always_save_checkpoint: bool = knob("bool", True, "sample and export take the newest checkpoint; False: the one with the best validation loss. Both are kept", group="output", changes_result=False)
    init_from: str = knob("str", "auto", "what the model begins with: auto (this run, or nothing), scratch, resume, gpt2[-medium|-large|-xl], a folder or a ckpt.pt", group="output", changes_result=False)
    fresh: bool = knob("bool", False, "start over in a used out_dir; the earlier run is set aside, not deleted", group="output", changes_result=False)
    fallback_dir: str | None = knob("str", None, "a second folder, best on another disk, where the run goes on when out_dir is lost", group="output", changes_result=False)
    sample_tokens: int = knob("int", 120, "tokens of sample text at each evaluation; 0 for none", group="output", low=0, high=100_000, changes_result=False)
    # --- wandb
    wandb_log: bool = knob("bool", False, "also log to Weights & Biases; needs the extra wandb", group="other", changes_result=False)
    wandb_project: str = knob("str", "owt", "project name there", group="other", changes_result=False)
    wandb_run_name: str = knob("str", "gpt2", "run name there", group="other", changes_result=False)
    run: str | None = knob("str", None, "nanochat's way to say both: a run name there, or dummy for none", group="other", changes_result=False)
    # --- data
    dataset: str = knob("str", "openwebtext", "folder under data/ that prepare wrote, or a path", group="data", common=True)
    gradient_accumulation_steps: int = knob("int", 40, "micro-batches per step. Times batch_size this is how many sequences a step learns from; memory does not change it", group="batch and horizon", low=1, high=2**24, common=True)
    batch_size: int = knob("int", 12, "sequences per micro-batch. What fits is chosen by itself, with the same tokens per step", group="batch and horizon", low=1, high=2**20, alias="device_batch_size", common=True)
    block_size: int = knob("int", 1024, "tokens per sequence: how far the model sees. Attention's time grows with its square", group="batch and horizon", low=1, high=2**20, alias="max_seq_len", common=True)
    total_batch_size: int | None = knob("int", None, "tokens per step, instead of gradient_accumulation_steps", group="batch and horizon", low=1)
    seed: int = knob("int", 1337, "seed of weights, data order and dropout. Another one shows how much of a difference is chance", group="data", low=0, high=2**31 - 1)
    # --- model
    arch: str = knob("str", "gpt2", "architecture: gpt2 (nanoGPT's) or nanochat", group="model", choices=("gpt2", "nanochat"))
    depth: int | None = knob("int", None, "nanochat's one dial: layers, and with them width, heads, tokens, batch and learning rates. 12 is an evening on a fast card", group="model", low=1, high=128, common=True)
    generation: int = knob("int", 2026, "which nanochat: 2025 (October's d20 and d32) or 2026", group="model", low=2025, high=2026)
    window_pattern: str = knob("str", "SSSL", "nanochat 2026: layer by layer, S sees a quarter of block_size (in whole 128s), L all of it", group="model")
    value_embeddings: bool = knob("bool", True, "nanochat 2026: a second embedding on alternate layers", group="model")
    n_layer: int = knob("int", 12, "layers", group="model", low=1, high=1024, common=True)
    n_head: int = knob("int", 12, "attention heads; they share n_embd, 64 or 128 channels each are usual", group="model", low=1, high=1024, common=True)
    n_embd: int = knob("int", 768, "width of the model: parameters grow with its square", group="model", low=1, high=2**16, common=True)
    vocab_size: int | None = knob("int", None, "rows of the embedding; auto: the dataset's, 50304 for GPT-2's tokens", group="model", low=2, high=2**24)
    dropout: float = knob("float", 0.0, "share of activations dropped. 0 for pretraining; 0.1 to 0.2 where a small text is read many times", group="model", low=0.0, high=0.99, common=True)
    bias: bool = knob("bool", False, "biases in linear layers and layer norms, as OpenAI's GPT-2 has them", group="model")
    # --- optimizer
    optimizer: str | None = knob("str", None, "adamw; or muon for the matrices inside layers, which needs fewer tokens for the same loss. auto: adamw for gpt2, muon for nanochat", group="optimizer", choices=("adamw", "muon"))
    matrix_lr: float | None = knob("float", None, "Muon's learning rate", group="optimizer", low=0.0, high=100.0)
    embedding_lr: float | None = knob("float", None, "nanochat's embedding: learning rate at width 768", group="optimizer", low=0.0, high=100.0)
    unembedding_lr: float | None = knob("float", None, "nanochat's head: learning rate at width 768", group="optimizer", low=0.0, high=100.0)
    scalar_lr: float | None = knob("float", None, "nanochat 2026: learning rate of its scalars", group="optimizer", low=0.0, high=100.0)
    learning_rate: float = knob("float", 6e-4, "AdamW's highest learning rate (gpt2). Larger models want a smaller one: 6e-4 at 124M, 2e-4 at 1.5B", group="optimizer", low=0.0, high=100.0, common=True)
    max_iters: int = knob("int", 600_000, "steps to train. Or say it in tokens", group="batch and horizon", low=0, alias="num_iterations", common=True)
    tokens: int | None = knob("tokens", None, "train for this many tokens (3.2B, 100M) instead of max_iters; the schedule follows", group="batch and horizon", low=1, common=True)
    weight_decay: float = knob("float", 0.1, "pull of matrices and embeddings towards zero, apart from the gradient", group="optimizer", low=0.0, high=100.0)
    beta1: float = knob("float", 0.9, "AdamW: decay of the first moment", group="optimizer", low=0.0, high=0.999999)
    beta2: float = knob("float", 0.95, "AdamW: decay of the second moment. 0.99 where a step has few tokens", group="optimizer", low=0.0, high=0.999999)
    grad_clip: float = knob("float", 1.0, "the gradient's norm is cut to this; 0 for never", group="optimizer", low=0.0)
    # --- learning-rate schedule
    decay_lr: bool = knob("bool", True, "warm up, then fall along a cosine to min_lr; False: a constant rate", group="schedule")
    warmup_iters: int = knob("int", 2000, "steps in which the learning rate rises from 0", group="schedule", low=0, alias="warmup_steps")
    lr_decay_iters: int = knob("int", 600_000, "the step at which min_lr is reached; best the last one", group="schedule", low=1)
    min_lr: float = knob("float", 6e-5, "learning rate at the end of the decay; a tenth of learning_rate is usual", group="schedule", low=0.0, high=100.0)
    warmdown_ratio: float | None = knob("float", None, "nanochat: the last part of the run, in which the learning rate falls", group="schedule", low=0.0, high=1.0)
    final_lr_frac: float | None = knob("float", None, "nanochat: how much of it is left at the end", group="schedule", low=0.0, high=1.0)
    extend: str | None = knob("str", None, "a run made longer by max_iters: stay (at its last rate), rewarm (up to extend_lr and down again), decay (stay, then to 0) or schedule (as if it had been so long from the start)", group="schedule", choices=("stay", "rewarm", "decay", "schedule"))
    extend_lr: float | None = knob("float", None, "extend=rewarm: the highest rate, as in a log line (Muon's where it learns)", group="schedule", low=0.0, high=100.0)
    # --- where and how it computes
    backend: str = knob("str", "nccl", "accepted for nanoGPT's sake; one card needs none", group="other", changes_result=False)
    device: str = knob("str", "auto", "auto, cpu, cuda or cuda:N. A CPU is never chosen where there is a card", group="speed and memory", changes_result=False)
    dtype: str | None = knob("str", None, "float32, bfloat16 or float16; auto: bfloat16 where the card has it", group="speed and memory", choices=("float32", "bfloat16", "float16"))
    compile: bool = knob("bool", True, "compile with torch.compile, kept between runs. Without it a step is slower and takes more memory", group="speed and memory", changes_result=False)
    cuda_graphs: bool | None = knob("bool", None, "replay a micro-batch as a CUDA graph instead of launching kernel by kernel; auto: where it is launch-bound", group="speed and memory", changes_result=False)
    # --- how it fits into memory: none of these changes what is learned, but for the two marked low-bit
    recompute: str | None = knob("str", None, "compute again in the backward pass instead of keeping: none, mlp or block. auto: as little as fits", group="speed and memory", choices=("none", "mlp", "block"), changes_result=False, alias="gradient_checkpointing", alias_values={True: "block", False: "none"})
    auto_fit: bool = knob("bool", True, "choose what is not set below so that it fits, and go on with less when memory runs out", group="speed and memory", changes_result=False)
    loss_chunk: int | None = knob("int", None, "tokens whose logits exist at a time; auto: enough for full speed", group="speed and memory", low=1, changes_result=False)
    offload: str | None = knob("str", None, "into RAM: none, optimizer (masters and moments) or gradients (these too). auto: only where nothing else fits", group="speed and memory", choices=("none", "optimizer", "gradients"), changes_result=False)
    master_weights: str | None = knob("str", None, "the weights that learn: fp32; or bf16 (low-bit, with stochastic rounding), for models that fit in no other way", group="speed and memory", choices=("fp32", "bf16"))
    optim_states: str | None = knob("str", None, "AdamW's moments and Muon's momentum: fp32, int8 (low-bit) or bf16 (Muon's alone)", group="speed and memory", choices=("fp32", "bf16", "int8"))
    vram_limit: float | None = knob("float", None, "GiB of the card that this process may take in all, CUDA itself included", group="speed and memory", low=0.1, high=10_000.0, changes_result=False, common=True)
    vram_reserve: float | None = knob("float", None, "GiB of the card to leave to others, such as a desktop", group="speed and memory", low=0.0, high=10_000.0, changes_result=False)
    # fmt: on
    extended: str | None = own_record()  # where extensions began, and the schedule before (optim/schedule.py)

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Sacred: no memory pressure may change it."""
        return self.sequences_per_step * self.block_size

    def _steps_for_tokens(self) -> int:
        """Rounded up, in whole numbers: a float would be off by one for large horizons."""
        assert self.tokens is not None
        return -(-self.tokens // self.tokens_per_step)

    @property
    def by_muon(self) -> bool:
        """Do the matrices inside layers learn by Muon?"""
        return self.optimizer == "muon" or (self.optimizer is None and self.arch == "nanochat")

    @property
    def muon_lr(self) -> float:
        """Before it is brought to the batch (optim/recipe.py)."""
        return 0.02 if self.matrix_lr is None else self.matrix_lr

    def shape(self, vocab_size: int) -> Any:
        """What the model's tensors follow from (onecard/arch/shapes.py)."""
        if self.arch == "gpt2":
            return GPT2Shape(self.n_layer, self.n_head, self.n_embd, vocab_size, self.block_size, self.bias)
        sizes = (self.n_layer, self.n_head, self.n_embd, vocab_size, self.block_size)
        if self.generation == 2025:
            return NanochatShape(*sizes)
        return Nanochat2026Shape(*sizes, self.window_pattern.upper(), self.value_embeddings)

    def check(self) -> None:
        self._check_arch()
        self._check_batch()
        if self.n_embd % self.n_head:
            most = {f.name: f.metadata["high"] for f in knobs(type(self))}
            even = 2 if self.arch == "nanochat" else 1  # rotary positions turn channels in pairs
            embd = nearest(self.n_embd, most["n_embd"], lambda n: n % (even * self.n_head) == 0)
            head = nearest(self.n_head, most["n_head"], lambda n: self.n_embd % n == 0)
            raise UserError(
                _("n_embd {n_embd} cannot be divided among n_head {n_head}").format(
                    n_embd=self.n_embd, n_head=self.n_head
                ),
                _("every attention head gets n_embd / n_head channels, a whole number"),
                _("--n_embd={embd} or --n_head={head} works").format(embd=embd, head=head),
            )
        if self.tokens is not None and self.is_set("tokens") and self.is_set("max_iters"):
            raise UserError(
                _("tokens and max_iters are both set"),
                _("tokens from {one}, max_iters from {other}; both say when the run ends").format(
                    one=shown_origin(self.origins["tokens"]),
                    other=shown_origin(self.origins["max_iters"]),
                ),
                _("keep one of them; --max_iters={n} is that many tokens").format(n=self._steps_for_tokens()),
            )
        if self.arch == "gpt2" and self.decay_lr and self.min_lr > self.learning_rate:
            raise UserError(
                _("min_lr {min_lr:g} is above learning_rate {learning_rate:g}").format(
                    min_lr=self.min_lr, learning_rate=self.learning_rate
                ),
                _("the learning rate would rise through the run instead of decaying")
                if self.is_set("min_lr")
                else _(
                    "the learning rate would rise through the run instead of decaying (min_lr is at its "
                    "default)"
                ),
                _("{flag}, or --decay_lr=False for a constant rate").format(
                    flag=f"--min_lr={self.learning_rate / 10:g}"
                ),
            )
        if self.extend_lr is not None and self.extend != "rewarm":
            raise UserError(
                _("extend_lr is the highest rate of a rewarm"),
                hint=f"--extend=rewarm --extend_lr={self.extend_lr:g}",
            )
        check_init_from(self.init_from)
        if self.fresh and self.init_from == "resume":
            raise UserError(
                _("fresh starts over and init_from='resume' continues"), hint=_("keep one of them")
            )

    def _check_arch(self) -> None:
        theirs = ("depth", "generation", "embedding_lr", "unembedding_lr", "scalar_lr", "warmdown_ratio",
                  "final_lr_frac", "window_pattern", "value_embeddings")  # fmt: skip
        if self.arch == "gpt2":
            usual = {f.name: f.default for f in knobs(type(self))}
            for name in theirs:
                if self.is_set(name) and getattr(self, name) != usual[name]:
                    raise UserError(
                        _("{name} belongs to arch='nanochat', and arch is 'gpt2' ({origin})").format(
                            name=name, origin=shown_origin(self.origins[name])
                        ),
                        hint=_("--arch=nanochat, or leave it out"),
                    )
            return
        self.shape(self.vocab_size or 64)  # a shape refuses what it cannot be
        if self.dropout:
            raise UserError(
                _("nanochat has no dropout"),
                _("dropout is {dropout:g}").format(dropout=self.dropout),
                "--dropout=0",
            )
        if self.bias:
            raise UserError(_("nanochat has no biases"), hint="--bias=False")
        if self.optimizer == "adamw":
            raise UserError(
                _("nanochat learns by Muon"),
                _("its learning rates are tuned for it"),
                _("--optimizer=muon, or --arch=gpt2"),
            )
        if self.n_embd // self.n_head % 2:
            raise UserError(
                _("nanochat's heads need an even number of channels, not {n}").format(
                    n=self.n_embd // self.n_head
                ),
                _("rotary positions turn them in pairs"),
                _("an n_embd that is a multiple of 2 × n_head works"),
            )
        if self.is_set("depth") and self.is_set("n_layer") and self.depth != self.n_layer:
            raise UserError(
                _("depth is {depth} and n_layer {n_layer}").format(depth=self.depth, n_layer=self.n_layer),
                _("nanochat's depth is its number of layers"),
                _("keep one of them; n_embd may be your own"),
            )

    def _check_batch(self) -> None:
        if self.total_batch_size is None:
            return
        micro = self.batch_size * self.block_size
        if self.total_batch_size % micro:
            up = -(-self.total_batch_size // micro) * micro
            raise UserError(
                _("total_batch_size {n:,} is no whole number of micro-batches").format(
                    n=self.total_batch_size
                ),
                _("one is batch_size {batch_size} × block_size {block_size} = {micro:,} tokens").format(
                    batch_size=self.batch_size, block_size=self.block_size, micro=micro
                ),
                _("--total_batch_size={up}, or another batch_size").format(up=up),
            )
        if self.tokens_per_step != self.total_batch_size:
            raise UserError(
                _("total_batch_size and gradient_accumulation_steps contradict each other"),
                _("{n} micro-batches of {micro:,} tokens are {tokens:,}").format(
                    n=self.gradient_accumulation_steps,
                    micro=micro,
                    tokens=self.tokens_per_step,
                ),
                _("keep one of them"),
            )

    def without_schedule_notes(self) -> RunConfig:
        """Before it is resolved anew, as another architecture's."""
        idle = {*self.schedule_notes(), *self._unused_notes()}
        return dataclasses.replace(self, notes=tuple(n for n in self.notes if n not in idle))

    def schedule_notes(self) -> tuple[str, ...]:
        """A schedule that ends far from the run is legal, and nearly always an oversight."""
        end, last, warmup = self.lr_decay_iters, self.max_iters, self.warmup_iters
        if self.extend not in (None, "schedule"):
            return ()
        if self.arch != "gpt2":
            if warmup < last or not last:
                return ()
            return (_too_long_a_warmup(warmup, last),)
        if not self.decay_lr:
            return ()
        if warmup >= min(end, last) > 0 and self.is_set("max_iters"):
            return (_too_long_a_warmup(warmup, min(end, last)),)
        if not self.is_set("max_iters") or not last or last / 2 <= end <= 2 * last:
            return ()
        text = _(
            "lr_decay_iters is {end} and max_iters {last}: the learning rate stays at min_lr from step {end} "
            "on ({flag} ends both together)"
        )
        if end > last:
            text = _(
                "lr_decay_iters is {end} and max_iters {last}: the learning rate hardly decays ({flag} ends "
                "both together)"
            )
        return (text.format(end=end, last=last, flag=f"--lr_decay_iters={last}"),)

    def resolved(self) -> RunConfig:
        """What the user left open filled in: by the dial, by the batch asked for, by the horizon."""
        config = self
        if self.depth is not None and not self.is_set("arch"):
            config = dataclasses.replace(config, arch="nanochat")
        if config.run is not None:
            wanted = config.run != "dummy"
            names = {"wandb_run_name": config.run, "wandb_project": "nanochat"} if wanted else {}
            config = config._with_defaults(wandb_log=wanted, **names)
        if config.arch == "nanochat":
            config = config._by_the_dial()
        unused = config._unused_notes()
        config = dataclasses.replace(
            config, notes=(*config.notes, *(n for n in unused if n not in config.notes))
        )
        if config.total_batch_size is not None and not config.is_set("gradient_accumulation_steps"):
            micros = max(1, config.total_batch_size // (config.batch_size * config.block_size))
            config = dataclasses.replace(config, gradient_accumulation_steps=micros)
        return config._one_horizon()._with_horizon()

    def _one_horizon(self) -> RunConfig:
        """What the command line says beats a file, also where it says it in the other way: tokens, or steps.

        A file whose learning rate decays over just its max_iters means that it decays over the run.
        """
        given = [name for name in ("tokens", "max_iters") if self.origins.get(name) == COMMAND_LINE]
        if len(given) != 1 or not (self.is_set("tokens") and self.is_set("max_iters")):
            return self
        (other,) = {"tokens", "max_iters"} - set(given)
        left = {other}
        if other == "max_iters" and self.lr_decay_iters == self.max_iters:
            left |= {"lr_decay_iters"} - {n for n in self.origins if self.origins[n] == COMMAND_LINE}
        usual: dict[str, Any] = {f.name: f.default for f in knobs(type(self)) if f.name in left}
        origins = {name: origin for name, origin in self.origins.items() if name not in left}
        where = self.origins[other].rpartition(":")[0] or self.origins[other]
        one, *more = sorted(left)
        note = _("--{name} is used; {one} and {other} of {file} are not")
        if not more:
            note = _("--{name} is used; {one} of {file} is not")
        note = note.format(name=given[0], one=one, other="".join(more), file=shown_origin(where))
        return dataclasses.replace(self, **usual, origins=origins, notes=(*self.notes, note))

    def _with_defaults(self, **values: Any) -> RunConfig:
        """These values where the user has set none (or `auto`)."""
        open_ones = {n: v for n, v in values.items() if not self.is_set(n) or getattr(self, n) is None}
        return dataclasses.replace(self, **open_ones)

    def _unused_notes(self) -> tuple[str, ...]:
        """Knobs that were set and do nothing here."""
        usual = {f.name: f.default for f in knobs(type(self))}
        if self.arch == "gpt2":
            names: tuple[str, ...] = () if self.by_muon else ("matrix_lr",)
            why = _("AdamW's learning rate is learning_rate")
        else:
            names = ("learning_rate", "min_lr", "beta1", "beta2", "lr_decay_iters")
            why = _("nanochat has its own (matrix_lr, warmdown_ratio ...)")
            if self.generation == 2025:
                names += ("window_pattern", "value_embeddings", "scalar_lr")
        idle = [n for n in names if self.is_set(n) and getattr(self, n) != usual[n]]
        return (_("{names} not used: {why}").format(names=", ".join(idle), why=why),) if idle else ()

    def _by_the_dial(self) -> RunConfig:
        """nanochat's values for this depth. Its own tokenizer's vocabulary where none is named."""
        depth = self.depth or (self.n_layer if self.is_set("n_layer") else 12)
        this = dial.GENERATIONS[self.generation]
        vocab = self.vocab_size or this.vocab_size
        shape = this.shape.of_depth(depth, vocab, 2048)
        config = self._with_defaults(
            depth=depth, n_layer=shape.n_layer, n_embd=shape.n_embd, block_size=2048, batch_size=8,
            matrix_lr=this.matrix_lr, embedding_lr=this.embedding_lr,
            unembedding_lr=this.unembedding_lr, scalar_lr=this.scalar_lr, weight_decay=this.weight_decay,
            warmup_iters=this.warmup_iters, warmdown_ratio=this.warmdown_ratio,
            final_lr_frac=this.final_lr_frac, grad_clip=this.grad_clip, eval_interval=250,
        )  # fmt: skip
        config = config._with_defaults(n_head=heads_for(config.n_embd))
        if not config.is_set("gradient_accumulation_steps"):
            config = config._with_defaults(
                total_batch_size=dial.tokens_per_step(self.generation, depth, vocab)
            )
        if not config.is_set("max_iters"):
            # Whole steps, as nanochat counts them.
            step = config.total_batch_size or config.tokens_per_step
            tokens = dial.horizon(self.generation, depth, vocab) // step * step
            config = config._with_defaults(tokens=max(tokens, step))
        return config

    def _with_horizon(self) -> RunConfig:
        """A horizon in tokens becomes max_iters; an unset schedule follows it."""
        if self.tokens is None or (self.is_set("tokens") and self.is_set("max_iters")):
            return dataclasses.replace(self, notes=(*self.notes, *self.schedule_notes()))
        steps = self._steps_for_tokens()
        changes: dict[str, Any] = {"max_iters": steps}
        if not self.is_set("lr_decay_iters"):
            changes["lr_decay_iters"] = max(steps, 1)
        decay = changes.get("lr_decay_iters", self.lr_decay_iters)
        if not self.is_set("warmup_iters") and self.arch == "gpt2":
            usual = type(self).warmup_iters  # not this object's: resolved once, it may be shorter already
            changes["warmup_iters"] = min(usual, decay // 10)
        return dataclasses.replace(self, **changes)


def _too_long_a_warmup(warmup: int, last: int) -> str:
    text = _("the warm-up of {n} steps does not end before the run ({flag})")
    return text.format(n=warmup, flag=f"--warmup_iters={last // 10}")
