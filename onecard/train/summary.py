"""What was learned: the closing words of a run, every figure measured in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onecard.data.bins import TokenFile, read_meta
from onecard.model.compiling import graphs_compiled
from onecard.train.pace import duration

if TYPE_CHECKING:
    from onecard.train.position import Position
    from onecard.train.start import Run

_COUNTED_TOKENS = 20_000_000


class Summary:
    """Collects the figures while the run goes on; `text()` is for people, `values` for programs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.interrupted = False
        self.values: dict[str, Any] = {}

    def evaluated(self, train_loss: float, val_loss: float) -> None:
        self.values |= {"train_loss": train_loss, "val_loss": val_loss}

    def evaluated_only(self, *, interrupted: bool) -> Summary:
        self.interrupted = interrupted
        return self

    def finished(
        self,
        position: Position,
        *,
        tokens_per_second: float | None,
        continued: bool,
        interrupted: bool,
        saved_step: int,
    ) -> Summary:
        self.interrupted = interrupted
        self.values |= {
            "step": position.step,
            "last_step": self._run.config.max_iters,
            "saved_step": saved_step if saved_step >= 0 else None,
            "tokens": position.data.sequences * self._run.config.block_size,
            "epochs": self._epochs(position),
            "seconds": position.seconds,
            "tokens_per_second": tokens_per_second,
            "continued": continued,
            "graphs_compiled": graphs_compiled(),
            "first_val_loss": position.first_val_loss,
            "best_val_loss": position.best_val_loss,
        }
        return self

    def _epochs(self, position: Position) -> float:
        data = position.data
        return data.epoch + data.index / self._run.sequences.n_blocks(data.epoch, data.epoch_tokens)

    def text(self) -> str:
        out = self._run.config.out_dir
        values, lines = self.values, []
        if "step" in values:
            saved = values["saved_step"]
            head = "stopped" if self.interrupted else "done"
            kept = (
                f"saved as {out}/checkpoints/step-{saved:08d}" if saved is not None else "nothing saved yet"
            )
            lines.append(f"{head} at step {values['step']:,} of {values['last_step']:,}; {kept}")
            took = duration(values["seconds"])
            lines.append(f"trained {values['tokens']:,} tokens ({values['epochs']:.2f} epochs) in {took}")
            if values["tokens_per_second"]:
                # After a continuation, tokens and time are those of the whole run, the speed is today's.
                when = "since it was continued" if values["continued"] else "on average"
                lines[-1] += f", {values['tokens_per_second']:,.0f} tokens/s {when}"
        if not self.interrupted and values.get("val_loss") is not None:
            lines += self._learned()
        if self.interrupted and "step" in values:
            config = self._run.config
            again = "the same command" if config.init_from in ("auto", "resume") and not config.fresh else (
                "--init_from=resume" + (", without --fresh" if config.fresh else "")
            )  # fmt: skip
            lines.append(f"continue with {again}")
        return "\n".join(lines)

    def _learned(self) -> list[str]:
        """Validation loss beside what simple guessing gets on the same tokens."""
        val_loss = self.values["val_loss"]
        first = self.values.get("first_val_loss")
        frequency = self.unigram_loss()
        rows = [
            ("guessing every token alike", math.log(self._n_vocab())),
            ("guessing by frequency alone", frequency),
            ("this model, before training", first) if first is not None and "step" in self.values else None,
            ("this model, now", val_loss),
        ]
        bytes_per_token = self._bytes_per_token()
        unit = "nats per token"
        lines = [f"validation loss in {unit}" + (" (bits per byte):" if bytes_per_token else ":")]
        for row in rows:
            if row is not None:
                bits = f" ({row[1] / math.log(2) / bytes_per_token:.3f})" if bytes_per_token else ""
                lines.append(f"  {row[0]:<28} {row[1]:7.4f}{bits}")
        return lines

    def _n_vocab(self) -> int:
        """Ids that mean something; the embedding may be padded beyond them."""
        tokenizer = self._run.tokenizer
        return tokenizer.n_vocab if tokenizer is not None else self._run.model.shape.vocab_size

    def unigram_loss(self) -> float:
        """Cross-entropy of validation tokens under the training tokens' frequencies (add-one)."""
        vocab = self._run.model.shape.vocab_size
        train = _counts(self._run.sequences.tokens, vocab) + 1
        val = np.zeros(vocab)
        for tokens_BL in self._run.evaluation["val"].batches(64):
            val += np.bincount(tokens_BL[:, 1:].ravel(), minlength=vocab)
        return float(-(val / val.sum() * np.log(train / train.sum())).sum())

    def _bytes_per_token(self) -> float | None:
        meta = read_meta(Path("data") / self._run.config.dataset)
        try:
            return float(meta["splits"]["val"]["bytes_per_token"]) if meta else None
        except (KeyError, TypeError, ValueError):
            return None


def _counts(tokens: Any, vocab: int) -> np.ndarray:
    assert isinstance(tokens, TokenFile)
    return np.bincount(tokens.read(0, min(len(tokens), _COUNTED_TOKENS)), minlength=vocab).astype(np.float64)
