"""Facts of a run that every answer about it stands on, and where each is from.

The log's own words come first, then the command line, the config, the run's folder and the data; what none of
them says is None. Nothing is assumed here: an answer that assumes a default says so itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onecard.arch.shapes import Shape
from onecard.config.run import RunConfig
from onecard.hardware.cards import Card
from onecard.report.log import Log


@dataclass(frozen=True)
class Schedule:
    """A learning rate by step. `kind`: cosine, linear, constant, wsd (constant, then down), table or
    unknown."""

    kind: str
    peak: float | None = None
    final: float | None = None
    warmup_steps: int = 0
    # The step at which the rate is down at `final`; None: it never falls.
    horizon: int | None = None
    decay_start: int | None = None  # of wsd
    decay_shape: str = "linear"  # of wsd: linear, cosine, sqrt, exponential
    table: tuple[tuple[int, float], ...] = ()  # (step, rate), in order
    assumed: bool = False  # nobody says it: the trainer's default


@dataclass(frozen=True)
class RunFacts:
    """What is known of one run."""

    log: Log
    config: RunConfig | None = None
    shape: Shape | None = None
    parameters: int | None = None
    parameters_without_embeddings: int | None = None
    flops_per_token: float | None = None
    tokens_per_step: int | None = None
    batch_size: int | None = None
    block_size: int | None = None
    gradient_accumulation_steps: int | None = None
    cards: int = 1
    vocab_size: int | None = None
    tokenizer: str | None = (
        None  # gpt2, char, byte, nanochat-32k, nanochat-65k, gpt-neox, llama2; None: not said
    )
    data: str | None = None  # as references.toml names it: FineWeb, FineWeb-Edu, OpenWebText, C4, ...
    train_tokens: int | None = None  # of the data there is: tokens / train_tokens are the passes
    eval_tokens: int | None = None  # of one evaluation of one split
    eval_every: int | None = None  # steps between evaluations; 0: there are none
    last_step: int | None = None  # the step at which the run ends
    schedule: Schedule | None = None
    dropout: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    dtype: str | None = None
    compiled: bool | None = None
    card: Card | None = None
    source: str = ""  # as the person named it, for commands: a folder, a file, "-"
    folder: str = ""  # of a run of onecard or nanoGPT, where it is one
    # Of each fact by name: log, command, prose, config, folder, data, flag, usual (this machine's card),
    # trainer (its default).
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last one seen."""
        seen = [columns.step[-1] for columns in (self.log.steps, self.log.evaluations) if len(columns)]
        return int(max(seen, default=0))

    @property
    def tokens(self) -> int | None:
        """Seen so far."""
        for columns in (self.log.steps, self.log.evaluations):
            if len(columns) and columns.step[-1] == self.step and columns.tokens[-1] == columns.tokens[-1]:
                return int(columns.tokens[-1])
        return self.step * self.tokens_per_step if self.tokens_per_step else None
