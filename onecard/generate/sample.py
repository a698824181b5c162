"""`onecard sample`: text from a run or a pretrained model, as nanoGPT's sample.py prints it.

Samples go to stdout, each followed by a line of dashes; everything else a person may want to know
goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from onecard.config.sample import SampleConfig
from onecard.data.tokenizer import Tokenizer
from onecard.errors import UserError
from onecard.generate.decode import Sampling, generate
from onecard.model.decoder import Decoder
from onecard.run.load import LoadedModel, load_for_sampling
from onecard.terminal import console, folded, say, write

SEPARATOR = "---------------"
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C

# More rows than this make a step slower for everybody and hardly raise the total rate.
_MOST_AT_ONCE = 256
_CPU_BUDGET = 2**30
# Bytes per vocabulary entry while one token is chosen: a handful of float64 and int64 rows.
_CHOOSING_BYTES = 64
# Values of width n_embd per token alive at once when a whole window is recomputed: the MLP's hidden
# layer before and after GELU (4 + 4), the residual stream, q, k, v and the attention's output.
_WINDOW_VALUES = 16


def sample_command(config: SampleConfig) -> int:
    """Draw and print; the exit code is 0, or 130 after Ctrl-C."""
    text = read_prompt(config.start)
    try:
        loaded = load_for_sampling(config)
        _tell(f"sampling from {loaded.description}")
        for note in loaded.notes:
            _tell(f"note: {note}")
        return _Drawing(loaded, config, text).run()
    except KeyboardInterrupt:
        return INTERRUPTED


def sample_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt_text: str,
    n_tokens: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int | None = 200,
) -> str:
    """Prompt and continuation, for the samples a training run keeps.

    A prompt the tokenizer cannot write and a diverged model raise UserError.
    """
    prompt = prompt_ids(tokenizer, prompt_text, model.shape.vocab_size)
    sampling = Sampling(temperature, top_k, top_p=1.0, seed=seed)
    steps = generate(
        model, prompt, samples=1, max_new_tokens=n_tokens, sampling=sampling, n_vocab=tokenizer.n_vocab
    )
    drawn = [int(next_1) for next_1 in steps]
    return tokenizer.decode((prompt if prompt_text else []) + drawn)


def read_prompt(start: str) -> str:
    """The text of `start`, which may name a file as FILE:path."""
    if not start.startswith("FILE:"):
        return start
    path = Path(start.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"the prompt file {path} is not UTF-8 text",
            f"byte {error.start} is {error.object[error.start]:#04x}: {error.reason}",
            "save it as UTF-8",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(
            f"the prompt file {path} cannot be read",
            getattr(error, "strerror", None) or str(error),
            "--start='FILE:path' reads a file, any other --start is the prompt itself",
        ) from None


def prompt_ids(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[int]:
    """Ids of the prompt. An empty one is the start of a document: the end-of-text token, or a line break."""
    try:
        ids = tokenizer.encode_prompt(text or "\n") if text or tokenizer.eot is None else [tokenizer.eot]
    except UserError:
        if text not in ("", "\n"):
            raise
        ids = [0]  # nobody asked for this line break, and the model's alphabet has none: its first character
    largest = max(ids)
    if largest >= vocab_size:
        raise UserError(
            f"the prompt has token {largest}, the model knows {vocab_size}",
            f"{tokenizer.decode([largest])!r} has no row in its embedding: the model was trained with "
            "another tokenizer or a smaller vocabulary",
            "leave it out of the prompt, or sample with the tokenizer the model was trained with",
        )
    return ids


def samples_at_once(model: Decoder, config: SampleConfig, prompt_tokens: int) -> int:
    """How many samples fit into the memory that decoding may take: a quarter of what the card has free."""
    shape, weight = model.shape, model.lm_head.weight
    budget = torch.cuda.mem_get_info(weight.device)[0] // 4 if weight.is_cuda else _CPU_BUDGET
    context = min(shape.block_size, prompt_tokens + config.max_new_tokens)
    values = 2 * shape.n_layer * context * shape.n_embd
    if _window_slides(model, config, prompt_tokens):
        values += _WINDOW_VALUES * context * shape.n_embd
    per_sample = values * weight.element_size() + _CHOOSING_BYTES * shape.vocab_size
    return max(1, min(config.num_samples, budget // per_sample, _MOST_AT_ONCE))


def _window_slides(model: Decoder, config: SampleConfig, prompt_tokens: int) -> bool:
    """Will a step see more tokens than the model has positions? The last token drawn is never read."""
    return prompt_tokens + config.max_new_tokens - 1 > model.shape.block_size


@dataclass
class _Tally:
    """What the closing line tells."""

    samples: int = 0
    tokens: int = 0
    prompt_seconds: float = 0.0
    decoded: int = 0  # tokens after the first of each sample: the first comes with the prompt
    decode_seconds: float = 0.0

    def add(self, rows: int, times: list[float]) -> None:
        """`times`: when the batch began, then when each of its tokens was there."""
        self.samples += rows
        self.tokens += rows * (len(times) - 1)
        self.prompt_seconds += times[1] - times[0]
        self.decoded += rows * (len(times) - 2)
        self.decode_seconds += times[-1] - times[1]

    def line(self, device: str, dtype: torch.dtype) -> str:
        seconds = self.prompt_seconds + self.decode_seconds
        line = f"{_count(self.samples, 'sample')}, {_count(self.tokens, 'token')} in {seconds:.2f} s"
        if self.decoded:
            rate = self.decoded / self.decode_seconds
            line += f": {rate:,.0f} tokens/s without the {self.prompt_seconds:.2f} s for reading the prompt"
        return f"{line} ({device}, {str(dtype).removeprefix('torch.')})"


class _Drawing:
    """One run of the sample command: batches of samples until all are printed."""

    def __init__(self, loaded: LoadedModel, config: SampleConfig, text: str) -> None:
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, loaded.device
        self.config = config
        self.sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
        self.prompt = prompt_ids(self.tokenizer, text, self.model.shape.vocab_size)
        # The stand-in for an empty prompt is no text of the user's.
        self.shown_prompt = self.prompt if text else []
        self.streams = sys.stdout.isatty()
        self.tally = _Tally()

    def run(self) -> int:
        self._tell_about_the_window()
        total = self.config.num_samples
        at_once = samples_at_once(self.model, self.config, len(self.prompt))
        done = 0
        interrupted = False
        with _progress(total * self.config.max_new_tokens, shown=not self.streams) as report:
            while done < total and not interrupted:
                rows = min(at_once, total - done)
                try:
                    interrupted = self._batch(done, rows, report)
                except torch.OutOfMemoryError:
                    at_once = rows // 2
                else:
                    done += rows
                    continue
                # Only here, outside the except clause, are the failed batch's tensors free.
                self._recover(at_once)
        if self.tally.tokens:
            _tell(self.tally.line(self.device, self.model.lm_head.weight.dtype))
        return INTERRUPTED if interrupted else 0

    def _batch(self, first_sample: int, rows: int, report: Callable[[int], None]) -> bool:
        """Draw and print `rows` samples. True if Ctrl-C cut them short; what there was is printed."""
        interrupted = False
        steps: list[Tensor] = []
        times = [time.perf_counter()]
        stream = _Stream(self.tokenizer, self.shown_prompt) if self.streams else None
        try:
            for next_B in generate(
                self.model,
                self.prompt,
                samples=rows,
                max_new_tokens=self.config.max_new_tokens,
                sampling=self.sampling,
                n_vocab=self.tokenizer.n_vocab,
                first_sample=first_sample,
            ):
                times.append(time.perf_counter())
                steps.append(next_B)
                if stream:
                    stream.push(int(next_B[0]))
                report(first_sample * self.config.max_new_tokens + rows * len(steps))
        except KeyboardInterrupt:
            interrupted = True
        except UserError:
            if stream:
                stream.finish()  # the message belongs on a line of its own
            raise
        if stream:
            stream.finish()
        if steps:
            self.tally.add(rows, times[: len(steps) + 1])
            for tokens in torch.stack(steps, dim=1).tolist()[1 if stream else 0 :]:
                write(self.tokenizer.decode(self.shown_prompt + tokens) + f"\n{SEPARATOR}\n")
            sys.stdout.flush()
        return interrupted

    def _recover(self, at_once: int) -> None:
        if at_once == 0:
            raise UserError(
                "the card has not enough memory for one sample",
                f"the model is loaded, but a context of {len(self.prompt) + self.config.max_new_tokens:,} "
                "tokens does not fit beside it",
                "close other programs that use the card, lower --max_new_tokens, or use --device=cpu",
            )
        if self.streams:
            write("\n")
        torch.cuda.empty_cache()
        _tell(f"out of memory: starting this batch again with {_count(at_once, 'sample')} at once")

    def _tell_about_the_window(self) -> None:
        block_size = self.model.shape.block_size
        if len(self.prompt) > block_size:
            length = _count(len(self.prompt), "token")
            _tell(f"the prompt has {length}: the model sees the last {block_size:,} (its block_size)")
        if _window_slides(self.model, self.config, len(self.prompt)):
            first = max(2, block_size - len(self.prompt) + 2)
            _tell(
                f"from new token {first:,} on, the text is longer than the model's window of {block_size:,}: "
                "the window slides and is read anew for every token, which is much slower"
            )


class _Stream:
    """One sample on the terminal, token by token, characters whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._decoder = tokenizer.stream()
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> None:
        if text := self._decoder.push(token):
            write(text)
            sys.stdout.flush()

    def finish(self) -> None:
        write(self._decoder.finish() + f"\n{SEPARATOR}\n")
        sys.stdout.flush()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _tell(text: str) -> None:
    say(folded(text))


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar with the time left on stderr, where a person looks at it and nothing else moves."""
    stderr: TextIO = sys.stderr
    if not shown or not stderr.isatty():
        yield lambda completed: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    # rich would otherwise take the samples off stdout and write them above its bar.
    with Progress(*columns, console=console(stderr), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda completed: bar.update(task, completed=completed)
