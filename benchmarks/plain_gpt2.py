"""A plain GPT-2 trainer of nanoGPT's design: what a careful user of PyTorch has without onecard.

    python benchmarks/plain_gpt2.py --nanogpt PATH_TO_A_CLONE

The yardstick where no clone of nanoGPT is at hand: fp32 weights, bf16 autocast, one compilation of the whole
model, all logits at once, fused AdamW in two groups, clipping, gradient accumulation. Written here from
scratch; run as a script it trains nanoGPT's own model and this one on the same weights and batches, and
reports by how much their losses differ. memory_speed.py runs its peers in the same loop, so that they differ
by their models alone, and measures with what stands below it.

Shapes: B sequences, T tokens, D width, H heads, Q channels per head, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -1  # a target without loss, as in nanoGPT


class Attention(nn.Module):
    def __init__(self, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        heads = (B, T, self.n_head, D // self.n_head)
        q_BHTQ, k_BHTQ, v_BHTQ = (
            part.view(heads).transpose(1, 2) for part in self.c_attn(x_BTD).chunk(3, dim=2)
        )
        y_BHTQ = F.scaled_dot_product_attention(q_BHTQ, k_BHTQ, v_BHTQ, is_causal=True)
        return self.c_proj(y_BHTQ.transpose(1, 2).reshape(B, T, D))


class FeedForward(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD)))


class Layer(nn.Module):
    def __init__(self, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, bias=False)
        self.attn = Attention(n_head, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd, bias=False)
        self.mlp = FeedForward(n_embd)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class PlainGPT2(nn.Module):
    """GPT-2 without biases or dropout, under the parameter names nanoGPT and onecard use.

    load_state_dict takes either's as it is. Weights begin as GPT-2's do.
    """

    def __init__(self, n_layer: int, n_head: int, n_embd: int, vocab: int, block: int) -> None:
        super().__init__()
        assert n_embd % n_head == 0, "heads of equal width"
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, n_embd),
            "wpe": nn.Embedding(block, n_embd),
            "h": nn.ModuleList(Layer(n_head, n_embd) for _ in range(n_layer)),
            "ln_f": nn.LayerNorm(n_embd, bias=False),
        })  # fmt: skip
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]  # tied
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                into_residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if into_residual else 0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """All logits and the mean loss over targets that are not IGNORE."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.transformer["wte"](tokens_BT) + self.transformer["wpe"](positions_T)
        for layer in self.transformer["h"]:  # type: ignore[attr-defined]  # a ModuleList
            x_BTD = layer(x_BTD)
        logits_BTV = self.lm_head(self.transformer["ln_f"](x_BTD))
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE)
        return logits_BTV, loss


class PlainTrainer:
    """nanoGPT's step around any model that gives (logits, loss); fp16 and its loss scaling are left out."""

    def __init__(
        self,
        model: nn.Module,
        device: str = "cuda",
        dtype: str = "bfloat16",
        learning_rate: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        grad_clip: float = 1.0,
        compile: bool = True,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is float32 or bfloat16, not {dtype}")
        self.model = model.to(device)
        self.device, self.dtype, self.grad_clip = device, dtype, grad_clip
        kind = torch.device(device).type
        if kind == "cuda":  # what autocast leaves in fp32 may use TF32, as in nanoGPT
            torch.set_float32_matmul_precision("high")
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=betas,
            fused=kind == "cuda",  # as nanoGPT does
        )
        # Public: a model called in another way than model(x, y) can be put here.
        self.forward: Callable[[Tensor, Tensor], tuple[Any, Tensor]]
        self.forward = torch.compile(self.model) if compile else self.model

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def step(self, micros: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        """One update from these micro-batches. The loss stays on the device: reading it would wait."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mean_loss = torch.zeros((), device=self.device)
        for x_BT, y_BT in micros:
            with self._autocast():
                # Kept by name on purpose: nanoGPT's loop holds each micro-batch's logits until the next
                # one's replace them, and its peak memory with them.
                _logits_BTV, loss = self.forward(x_BT, y_BT)
                loss = loss / len(micros)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            mean_loss += loss.detach()
        if self.grad_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mean_loss

    @torch.no_grad()
    def evaluate(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """The mean loss of one batch, in the precision trained with."""
        with self._autocast():
            _, loss = self.forward(x_BT, y_BT)
        return loss


def peer(name: str, shape: Sequence[int], device: str, compile: bool, nanogpt: str = "") -> PlainTrainer:
    """A model of others in the loop above: nanogpt (from the clone at that path), plain or huggingface.

    `shape` is PlainGPT2's n_layer, n_head, n_embd, vocab, block. Hugging Face's GPT-2 gets its labels (it
    shifts by itself), no cache and no padding mask. That is kinder than its Trainer, which also turns all
    logits to fp32. It has biases, as GPT-2 does.
    """
    n_layer, n_head, n_embd, vocab, block = shape
    if name == "plain":
        with torch.device(device):  # weights drawn there: seconds less
            plain = PlainGPT2(*shape)
        return PlainTrainer(plain, device, compile=compile)
    if name == "nanogpt":
        sys.path.insert(0, nanogpt)
        from model import GPT, GPTConfig  # type: ignore[import-not-found]  # in the clone

        with torch.device(device):
            theirs = GPT(GPTConfig(block, vocab, n_layer, n_head, n_embd, dropout=0.0, bias=False))
        trainer = PlainTrainer(theirs, device, compile=compile)
        trainer.optimizer = theirs.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
        return trainer
    assert name == "huggingface"
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, n_positions=block, n_embd=n_embd, n_layer=n_layer, n_head=n_head,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        bare = GPT2LMHeadModel(config).train()
    trainer = PlainTrainer(bare, device, compile=False)
    compiled: Any = torch.compile(bare) if compile else bare
    trainer.forward = lambda x_BT, _: (None, compiled(input_ids=x_BT, labels=x_BT).loss)
    return trainer


# --- measuring


def measure_steps(
    row: dict[str, Any], step: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor, warmup: int, steps: int
) -> None:
    """Fill `row` with median seconds and torch's peaks; after an exception it holds what came before.

    Peaks of the steady steps alone (peak_), of all but the first step (after_first_), of all since the
    process began (process_).
    """
    peaks: list[tuple[int, int]] = []

    def note_peaks() -> None:
        if x.is_cuda:
            peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
            torch.cuda.reset_peak_memory_stats()

    try:
        for phase, count in (("first_step_s", 1), ("warmup_step_s", warmup), ("step_s", steps)):
            seconds = []
            for _ in range(count):
                began = time.perf_counter()
                step(x, y)
                if x.is_cuda:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            row[phase] = round(statistics.median(seconds), 5)
            if phase != "step_s":
                note_peaks()
    finally:
        note_peaks()
        for name, since in (("peak", 2), ("after_first", 1), ("process", 0)):
            for i, kind in enumerate(("allocated", "reserved")):
                if peaks[since:]:
                    row[f"{name}_{kind}_gib"] = round(max(p[i] for p in peaks[since:]) / 2**30, 3)


def host_memory(pinned_bytes: int | None = None) -> dict[str, float | None]:
    """Largest resident size so far, and pinned memory: in that or not, as the driver maps it."""
    # Not getrusage: its figure survives exec, so that a large parent would show in its child.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
    if pinned_bytes is None and torch.cuda.is_available():
        pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return {
        "host_max_rss_gib": round(int(found[1]) / 2**20, 3) if found else None,
        "host_pinned_gib": None if pinned_bytes is None else round(pinned_bytes / 2**30, 3),
    }


def matmul_tflops(device: str) -> float | None:
    """The speed of light of this run: bf16 8192³, on a card as warm as the steps left it."""
    n = 8192 if device == "cuda" else 512
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    try:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(6):
            wait()
            began = time.perf_counter()
            for _ in range(5):
                a @ b
            wait()
            seconds.append((time.perf_counter() - began) / 5)
    except RuntimeError:  # no room: the other rows tell
        return None
    return round(2 * n**3 / statistics.median(seconds[1:]) / 1e12, 2)


def check_against_nanogpt(path: Path, steps: int = 20) -> dict[str, Any]:
    """Both models from the same weights over the same batches (fp32, CPU); their losses and weights after.

    Tokens are drawn unevenly, so that there is something to learn, and some targets are IGNOREd. The learning
    rate changes every step, and clipping is tight enough to bite: a difference in any of these would show.
    """
    sys.path.insert(0, str(path.resolve()))
    import model as nanogpt_model

    vocab, block, accumulation, clip = 97, 24, 3, 0.5
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
        shape = nanogpt_model.GPTConfig(block, vocab, n_layer=3, n_head=4, n_embd=32, dropout=0.0, bias=False)
        theirs = nanogpt_model.GPT(shape)
        optimizer = theirs.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    ours = PlainGPT2(n_layer=3, n_head=4, n_embd=32, vocab=vocab, block=block)
    ours.load_state_dict(theirs.state_dict())
    trainer = PlainTrainer(
        ours, "cpu", "float32", 1e-3, (0.9, 0.95), weight_decay=0.1, grad_clip=clip, compile=False
    )
    losses: list[tuple[float, float]] = []
    norms: list[float] = []
    for step in range(steps):
        tokens = torch.randint(0, vocab, (2, accumulation, 4, block + 1)).amin(0)
        x, y = tokens[..., :-1], tokens[..., 1:].clone()
        y[torch.rand(y.shape) < 0.1] = IGNORE
        lr = 1e-3 * (step + 1) / 10
        their_loss = 0.0
        for group in optimizer.param_groups:
            group["lr"] = lr
        for micro in range(accumulation):
            _, loss = theirs(x[micro], y[micro])
            (loss / accumulation).backward()
            their_loss += loss.item() / accumulation
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append((their_loss, trainer.step(list(zip(x, y, strict=True)), lr).item()))
    differences = [abs(a - b) for a, b in losses]
    return {
        "what": "plain_gpt2 against nanoGPT's model and optimizer, same weights and batches, CPU, float32",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps_clipped": sum(norm > clip for norm in norms),
        "largest_difference": max(differences),
        "at_step": differences.index(max(differences)),
        "largest_weight_difference": max(
            (a - b).abs().max().item() for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(json.dumps(check_against_nanogpt(options.nanogpt, options.steps), indent=1))


if __name__ == "__main__":
    main()
