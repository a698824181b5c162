"""`onecard sample`: text from a run or a pretrained model, as nanoGPT's sample.py prints it.

Samples go to stdout, each followed by a line of dashes; everything else a person may want to know
goes to stderr.
"""

from __future__ import annotations

import shlex
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
from onecard.language import _, ngettext
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
    """Generate text and print it; the exit code is 0, or 130 after Ctrl-C."""
    text = read_prompt(config.start)
    try:
        loaded = load_for_sampling(config)
        _say(_("sampling from {description}").format(description=loaded.description))
        for note in loaded.notes:
            _note(note)
        code = _Session(loaded, config, text).run()
    except KeyboardInterrupt:
        return INTERRUPTED
    if code == 0 and not config.is_set("start") and config.init_from == "resume" and sys.stderr.isatty():
        command = f'onecard sample {shlex.quote(config.out_dir)} "Once upon a time"'
        _say(_("to give the beginning yourself: {command}").format(command=command))
    return code


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
    generated = [int(next_1) for next_1 in steps]
    return tokenizer.decode((prompt if prompt_text else []) + generated)


def read_prompt(start: str) -> str:
    """The text of `start`, which may name a file as FILE:path."""
    if not start.startswith("FILE:"):
        return start
    path = Path(start.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            _("the prompt file {path} is not UTF-8 text").format(path=path),
            _("byte {start:,} is {byte:#04x}: {reason}").format(
                start=error.start, byte=error.object[error.start], reason=error.reason
            ),
            _("save it as UTF-8"),
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(
            _("the prompt file {path} cannot be read").format(path=path),
            getattr(error, "strerror", None) or str(error),
            _("a prompt that begins with FILE: names a file; any other is the prompt itself"),
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
        shown = repr(tokenizer.decode([largest]))
        raise UserError(
            _("token {largest:,} of the prompt is not among the model's {vocab_size:,}").format(
                largest=largest, vocab_size=vocab_size
            ),
            _(
                "{shown} has no row in its embedding: the model was trained with another tokenizer or a "
                "smaller vocabulary"
            ).format(shown=shown),
            _("leave it out of the prompt, or sample with the tokenizer the model was trained with"),
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
    """Will a step see more tokens than the model has positions? The last token is never read."""
    return prompt_tokens + config.max_new_tokens - 1 > model.shape.block_size


@dataclass
class _Tally:
    """What the closing line reports."""

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
        facts = {
            "samples": _samples(self.samples), "tokens": _tokens(self.tokens), "device": device,
            "dtype": str(dtype).removeprefix("torch."), "prompt": self.prompt_seconds,
            "seconds": self.prompt_seconds + self.decode_seconds,
        }  # fmt: skip
        if not self.decoded:
            return _("{samples}, {tokens} in {seconds:.2f} s ({device}, {dtype})").format(**facts)
        facts["rate"] = self.decoded / self.decode_seconds
        return _(
            "{samples}, {tokens} in {seconds:.2f} s: {rate:,.0f} tokens/s without the {prompt:.2f} s for "
            "reading the prompt ({device}, {dtype})"
        ).format(**facts)


class _Session:
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
        self._warn_of_the_window()
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
            _say(self.tally.line(self.device, self.model.lm_head.weight.dtype))
        return INTERRUPTED if interrupted else 0

    def _batch(self, first_sample: int, rows: int, report: Callable[[int], None]) -> bool:
        """Generate and print `rows` samples. True if Ctrl-C cut them short; what there was is printed."""
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
            context = len(self.prompt) + self.config.max_new_tokens
            raise UserError(
                _("the card has not enough memory for one sample"),
                _("the model is loaded, but a context of {context:,} tokens does not fit as well").format(
                    context=context
                ),
                _("close other programs that use the card, lower --max_new_tokens, or use --device=cpu"),
            )
        if self.streams:
            write("\n")
        torch.cuda.empty_cache()
        _say(
            _("out of memory: starting this batch again with {samples} at once").format(
                samples=_samples(at_once)
            )
        )

    def _warn_of_the_window(self) -> None:
        block_size = self.model.shape.block_size
        if len(self.prompt) > block_size:
            length = len(self.prompt)
            _say(
                _(
                    "the prompt has {length:,} tokens: the model sees the last {block_size:,} (its "
                    "block_size)"
                ).format(length=length, block_size=block_size)
            )
        if _window_slides(self.model, self.config, len(self.prompt)):
            first = max(2, block_size - len(self.prompt) + 2)
            _say(
                _(
                    "from new token {first:,} on, the text is longer than the model's window of "
                    "{block_size:,}: the window slides and is read anew for every token, which is much slower"
                ).format(first=first, block_size=block_size)
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


def _samples(count: int) -> str:
    return ngettext("{n:,} sample", "{n:,} samples", count).format(n=count)


def _tokens(count: int) -> str:
    return ngettext("{n:,} token", "{n:,} tokens", count).format(n=count)


def _say(text: str) -> None:
    say(folded(text))


def _note(text: str) -> None:
    _say(_("note: {text}").format(text=text))


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar with the time left on stderr, where a person looks at it and nothing else moves."""
    stderr: TextIO = sys.stderr
    if not shown or not stderr.isatty():
        yield lambda completed: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(_("tokens")),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(_("left:")),
        TimeRemainingColumn(),
    )
    # rich would otherwise take the samples off stdout and write them above its bar.
    with Progress(*columns, console=console(stderr), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda completed: bar.update(task, completed=completed)
