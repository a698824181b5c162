"""What was learned: the closing words of a run, every figure measured in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from onecard.data.bins import TokenFile
from onecard.model.compiling import graphs_compiled
from onecard.train.evaluate import Evaluation
from onecard.train.extension import further_flags
from onecard.train.pace import duration
from onecard.train.target_text import count_targets

if TYPE_CHECKING:
    from onecard.train.position import Position
    from onecard.train.start import Run

_COUNTED_TOKENS = 20_000_000
_WORTH_TELLING = 0.02  # nats by which a loss is worse than its best
_CHANGES = 6  # of how steps are carried out, the last ones, are shown


class Summary:
    """Collects the figures while the run goes on; `text()` is for people, `values` for programs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.interrupted = False
        self.was_finished = False  # before it began
        self.risen = ""  # what to say where the loss went up and stayed there
        self.refits = 0  # how often steps had to be carried out in another way
        self.changes: list[tuple[int, str]] = []  # and what came of it: when, and in words
        self.values: dict[str, Any] = {}

    def evaluated(self, found: Evaluation) -> None:
        self.values |= {
            "train_loss": found.train_loss,
            "val_loss": found.val_loss,
            "train_bpb": found.train_bpb,
            "val_bpb": found.val_bpb,
        }

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
        predicted: dict[str, float | None],
    ) -> Summary:
        self.interrupted = interrupted
        self.risen = position.risen()
        self.values |= {
            "step": position.step,
            "last_step": self._run.config.max_iters,
            "saved_step": saved_step if saved_step >= 0 else None,
            "tokens": position.data.sequences * self._run.config.block_size,
            "epochs": self._epochs(position),
            "seconds": position.seconds,
            "tokens_per_second": tokens_per_second,
            "refits": self.refits,
            **predicted,
            "continued": continued,
            "graphs_compiled": graphs_compiled(),
            "first_val_loss": position.first_val_loss,
            "first_val_bpb": position.first_val_bpb,
            "best_val_loss": position.best_val_loss,
            "best_train_loss": position.best_train_loss,
            "loss_has_risen": bool(self.risen),
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
            head = "stopped" if self.interrupted else "ended badly" if self.risen else "done"
            kept = (
                f"saved as {out}/checkpoints/step-{saved:08d}" if saved is not None else "nothing saved yet"
            )
            lines.append(f"{head} at step {values['step']:,} of {values['last_step']:,}; {kept}")
            if self.was_finished:
                lines[-1] = f"finished already, at step {values['step']:,} of {values['last_step']:,}; {kept}"
                lines.append(f"to train further: {self._further()}")
            took = duration(values["seconds"])
            lines.append(f"trained {values['tokens']:,} tokens ({values['epochs']:.2f} epochs) in {took}")
            if values["tokens_per_second"]:
                # After a continuation, tokens and time are those of the whole run, the speed is today's.
                when = "since it was continued" if values["continued"] else "on average"
                lines[-1] += f", {values['tokens_per_second']:,.0f} tokens/s {when}"
            lines += self._risen()
        lines += self._memory()
        if not self.interrupted and values.get("val_loss") is not None:
            lines += self._learned()
        if self.interrupted and "step" in values:
            config = self._run.config
            again = "the same command" if config.init_from in ("auto", "resume") and not config.fresh else (
                "--init_from=resume" + (", without --fresh" if config.fresh else "")
            )  # fmt: skip
            # Before the first checkpoint there is nothing to continue.
            lines.append(f"continue with {again}" if values["step"] else "begin again with the same command")
        return "\n".join(lines)

    def _risen(self) -> list[str]:
        """Of a loss that ended above where it was, which of the two kinds that is."""
        values, out = self.values, self._run.config.out_dir
        if self.risen:
            return [
                self.risen,
                f"every step of it is in {out}/metrics.jsonl; "
                "a lower learning rate or a longer warm-up is the usual cure",
            ]
        now, best = values.get("val_loss"), values["best_val_loss"]
        if now is None or best is None or now <= best + _WORTH_TELLING:
            return []
        newest = "" if self._run.config.always_save_checkpoint else " (sample takes the best checkpoint)"
        # What is no better known than other text ever was has not been memorised: noise, or a high rate.
        memorised = values["train_loss"] < best - _WORTH_TELLING
        why = ": more steps on this text only memorise it" if memorised else ""
        return [f"the validation loss was {best:.4f} at its best and is {now:.4f} now{why}{newest}"]

    def _further(self) -> str:
        """Twice as long as it was to be, or is, at a rate that still teaches it something."""
        config, step = self._run.config, self.values["step"]
        trained = self._run.trained or config
        steps = 2 * max(config.max_iters, trained.max_iters, step, 1)
        return f"onecard train --out_dir={config.out_dir} {further_flags(trained, step, steps)}"

    def _memory(self) -> list[str]:
        """Prediction beside measurement, and what fitting has done."""
        values, lines = self.values, []
        kinds = (("memory", "gib", ".2f", "GiB"), ("speed", "tokens_per_second", ",.0f", "tokens/s"))
        found = []
        for what, key, form, unit in kinds:
            predicted, measured = (values.get(f"{how}_{key}") for how in ("predicted", "measured"))
            if predicted and measured:
                found.append(f"{what} {predicted:{form}} {unit} predicted, {measured:{form}} measured")
        if found:
            lines.append("; ".join(found))
        if values.get("refits"):
            times = "once" if values["refits"] == 1 else f"{values['refits']} times"
            lines.append(f"how steps are carried out was changed {times} (events.jsonl):")
            shown = self.changes if len(self.changes) <= _CHANGES else self.changes[-_CHANGES:]
            if len(shown) < len(self.changes):
                lines.append(f"  ... {len(self.changes) - len(shown)} before")
            lines += [f"  step {step:,}: {text}" for step, text in shown]
            lines.append(
                f"  in the end: {self._run.fit.choice.words}; {values['graphs_compiled']} graphs compiled"
            )
        return lines

    def _learned(self) -> list[str]:
        """Validation loss beside what simple guessing gets on the same tokens."""
        values, vocab = self.values, self._run.model.shape.vocab_size
        counts_V = count_targets(self._run.evaluation["val"], vocab)
        alike_V = np.full(vocab, math.log(self._n_vocab()))
        rows = [
            ("guessing every token alike", *self._guessing(alike_V, counts_V)),
            ("guessing by frequency alone", *self._guessing(self._unigram_nats(), counts_V)),
        ]
        if values.get("first_val_loss") is not None and "step" in values:
            rows.append(("this model, before training", values["first_val_loss"], values["first_val_bpb"]))
        rows.append(("this model, now", values["val_loss"], values["val_bpb"]))
        with_bits = values["val_bpb"] is not None
        lines = ["validation loss in nats per token" + (" (bits per byte):" if with_bits else ":")]
        for what, nats, bits in rows:
            # A run from before bits per byte were recorded has none for its beginning.
            shown = f" ({bits:.3f})" if with_bits and bits is not None else ""
            lines.append(f"  {what:<28} {nats:7.4f}{shown}")
        return lines

    def _n_vocab(self) -> int:
        """Ids that mean something; the embedding may be padded beyond them."""
        tokenizer = self._run.tokenizer
        return tokenizer.n_vocab if tokenizer is not None else self._run.model.shape.vocab_size

    def _unigram_nats(self) -> np.ndarray:
        """Surprise at each id under the training tokens' frequencies (add-one)."""
        train_V = _counts(self._run.sequences.tokens, self._run.model.shape.vocab_size) + 1
        return -np.log(train_V / train_V.sum())

    def _guessing(self, nats_V: np.ndarray, counts_V: np.ndarray) -> tuple[float, float | None]:
        """Nats per token and bits per byte of so many targets of each id, at so many nats each."""
        text = self._run.text.get("val")
        bits = text.bits_per_byte(float(counts_V @ (nats_V * text.is_text_V))) if text is not None else None
        return float(counts_V @ nats_V / counts_V.sum()), bits


def _counts(tokens: Any, vocab: int) -> np.ndarray:
    assert isinstance(tokens, TokenFile)
    return np.bincount(tokens.read(0, min(len(tokens), _COUNTED_TOKENS)), minlength=vocab).astype(np.float64)
