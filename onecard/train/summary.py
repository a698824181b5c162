"""What was learned: the closing words of a run, every figure measured in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from onecard.data.bins import TokenFile
from onecard.language import _, ngettext, number
from onecard.model.compiling import graphs_compiled
from onecard.train.evaluate import Evaluation
from onecard.train.extension import further_flags
from onecard.train.finished import next_commands
from onecard.train.fit import in_words
from onecard.train.pace import duration
from onecard.train.target_text import count_targets

if TYPE_CHECKING:
    from onecard.train.position import Position
    from onecard.train.training_run import TrainingRun

_COUNTED_TOKENS = 20_000_000
_WORTH_REPORTING = 0.02  # nats by which a loss is worse than its best
_CHANGES = 6  # of the setting, the last ones, are shown


class Summary:
    """Collects the figures while the run goes on; `text()` is for people, `values` for programs."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.interrupted = False
        self.was_finished = False  # before it began
        self.risen = ""  # what to say where the loss went up and stayed there
        self.refits = 0  # how often the setting has changed
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
        values, lines = self.values, []
        if "step" in values:
            lines += [self._head(), self._trained(), *self._risen()]
        lines += self._memory()
        if not self.interrupted and values.get("val_loss") is not None:
            lines += self._learned()
        if "step" in values:
            lines += self._next()
        return "\n".join(lines)

    def _head(self) -> str:
        values, saved = self.values, self.values["saved_step"]
        kept = _("nothing saved yet")
        if saved is not None:
            kept = _("saved as {path}").format(
                path=f"{self._run.config.out_dir}/checkpoints/step-{saved:08d}"
            )
        head = _("done at step {step:,} of {last:,}; {kept}")
        if self.was_finished:
            head = _("finished already, at step {step:,} of {last:,}; {kept}")
        elif self.interrupted:
            head = _("stopped at step {step:,} of {last:,}; {kept}")
        elif self.risen:
            head = _("ended badly at step {step:,} of {last:,}; {kept}")
        return head.format(step=values["step"], last=values["last_step"], kept=kept)

    def _trained(self) -> str:
        values = self.values
        text = _("trained {n:,} tokens ({epochs:.2f} epochs) in {time}").format(
            n=values["tokens"], epochs=values["epochs"], time=duration(values["seconds"])
        )
        if not values["tokens_per_second"]:
            return text
        # After a continuation, tokens and time are those of the whole run, the speed is today's.
        speed = _("{n:,.0f} tokens/s on average")
        if values["continued"]:
            speed = _("{n:,.0f} tokens/s since it was continued")
        return f"{text}, {speed.format(n=values['tokens_per_second'])}"

    def _next(self) -> list[str]:
        """The commands that come next."""
        values, config = self.values, self._run.config
        if self.interrupted:
            again = _("the same command")
            if config.fresh:
                again = _("--init_from=resume, without --fresh")
            elif config.init_from not in ("auto", "resume"):
                again = "--init_from=resume"
            # Before the first checkpoint there is nothing to continue.
            if not values["step"]:
                return [_("begin again with the same command")]
            return [_("continue with {command}").format(command=again)]
        if values["saved_step"] is None or self.risen:
            return []
        return next_commands(config, self._further(), has_tokenizer=self._run.tokenizer is not None)

    def _risen(self) -> list[str]:
        """Of a loss that ended above where it was, which of the two kinds that is."""
        values, out = self.values, self._run.config.out_dir
        if self.risen:
            cure = _(
                "every step of it is in {path}; a lower learning rate or a longer warm-up is the usual cure"
            )
            return [self.risen, cure.format(path=f"{out}/metrics.jsonl")]
        now, best = values.get("val_loss"), values["best_val_loss"]
        if now is None or best is None or now <= best + _WORTH_REPORTING:
            return []
        text = _("the validation loss was {best:.4f} at its best and is {now:.4f} now").format(
            best=best, now=now
        )
        # What is no better known than other text ever was has not been memorised: noise, or a high rate.
        if values["train_loss"] < best - _WORTH_REPORTING:
            text += ": " + _("more steps on this text only memorise it")
        if not self._run.config.always_save_checkpoint:
            text += " " + _("(sample takes the best checkpoint)")
        return [text]

    def _further(self) -> str:
        """Twice as long as it was to be, or is, at a rate that still teaches it something."""
        config, step = self._run.config, self.values["step"]
        trained = (self._run.trained if self.was_finished else None) or config
        steps = 2 * max(config.max_iters, trained.max_iters, step, 1)
        return further_flags(trained, step, steps)

    def _memory(self) -> list[str]:
        """Prediction and measurement, and what fitting has done."""
        values, lines, found = self.values, [], []
        predicted, measured = values.get("predicted_gib"), values.get("measured_gib")
        if predicted and measured:
            text = _("memory {predicted:.2f} GiB predicted, {measured:.2f} measured")
            found.append(text.format(predicted=predicted, measured=measured))
        predicted = values.get("predicted_tokens_per_second")
        measured = values.get("measured_tokens_per_second")
        if predicted and measured:
            text = _("speed {predicted:,.0f} tokens/s predicted, {measured:,.0f} measured")
            found.append(text.format(predicted=predicted, measured=measured))
        if found:
            lines.append("; ".join(found))
        if changes := values.get("refits"):
            text = ngettext(
                "the setting was changed once (events.jsonl):",
                "the setting was changed {n} times (events.jsonl):",
                changes,
            )
            lines.append(text.format(n=changes))
            shown = self.changes if len(self.changes) <= _CHANGES else self.changes[-_CHANGES:]
            if len(shown) < len(self.changes):
                lines.append("  " + _("... {n} before").format(n=len(self.changes) - len(shown)))
            lines += ["  " + _("step {step:,}: {text}").format(step=step, text=text) for step, text in shown]
            graphs = ngettext("{n} graph compiled", "{n} graphs compiled", values["graphs_compiled"])
            last = _("in the end: {setting}; {graphs}").format(
                setting=in_words(self._run.fit.choice), graphs=graphs.format(n=values["graphs_compiled"])
            )
            lines.append(f"  {last}")
        return lines

    def _learned(self) -> list[str]:
        """Validation loss compared with what simple guessing gets on the same tokens."""
        values, vocab = self.values, self._run.model.shape.vocab_size
        counts_V = count_targets(self._run.evaluation["val"], vocab)
        alike_V = np.full(vocab, math.log(self._n_vocab()))
        rows = [
            (_("guessing every token alike"), *self._guessing(alike_V, counts_V)),
            (_("guessing by frequency alone"), *self._guessing(self._unigram_nats(), counts_V)),
        ]
        if values.get("first_val_loss") is not None and "step" in values:
            rows.append((_("this model, before training"), values["first_val_loss"], values["first_val_bpb"]))
        rows.append((_("this model, now"), values["val_loss"], values["val_bpb"]))
        with_bits = values["val_bpb"] is not None
        lines = [_("validation loss in nats per token:")]
        if with_bits:
            lines = [_("validation loss in nats per token (bits per byte):")]
        width = max(28, *(len(row[0]) for row in rows))
        for what, nats, bits in rows:
            # A run from before bits per byte were recorded has none for its beginning.
            shown = f" ({number(bits, '.3f')})" if with_bits and bits is not None else ""
            lines.append(f"  {what:<{width}} {number(nats, '7.4f')}{shown}")
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
