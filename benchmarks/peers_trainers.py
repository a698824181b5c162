"""The trainers whose steps benchmarks/peers.py measures: nanoGPT's, nanochat's two, Hugging Face's.

Each is its authors' own model and optimizer, imported from a clone or a package that is named on the command
line, in the order of calls of its own training script. The loops are written here.

A trainer has `evaluate()` (the first evaluation, where its script begins with one), `micros()` (all of a
step's micro-batches) and `update()`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peers import Job

_BATCHES = 4  # different ones, drawn beforehand and pinned: drawing takes longer than a small step
EVALUATED = 3  # batches of each split, as estimate_loss evaluates eval_iters of them


class Trainer(Protocol):
    def evaluate(self) -> None: ...
    def micros(self) -> None: ...
    def update(self) -> None: ...


class _Batches:
    """Random tokens, as good as text. Each comes to the card when it is asked for, as a loader's do."""

    def __init__(self, job: Job, device: str, inputs: torch.dtype = torch.int64) -> None:
        generator = torch.Generator().manual_seed(1)
        drawn = [
            torch.randint(0, job.vocab, (2, job.batch, job.block), generator=generator)
            for _ in range(_BATCHES)
        ]
        cuda = device.startswith("cuda")
        self._waiting = [
            (self._pinned(x.to(inputs), cuda), self._pinned(y, cuda)) for x, y in (d.unbind(0) for d in drawn)
        ]
        self._device, self._next = device, 0

    @staticmethod
    def _pinned(tensor: Tensor, cuda: bool) -> Tensor:
        return tensor.contiguous().pin_memory() if cuda else tensor.contiguous()

    def next(self) -> tuple[Tensor, Tensor]:
        x, y = self._waiting[self._next % _BATCHES]
        self._next += 1
        return x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)


class NanoGPT:
    """train.py: autocast, one compiled model, fused AdamW, clipping; the loss is read after every step."""

    def __init__(self, job: Job, device: str, folder: str) -> None:
        sys.path.insert(0, folder)
        theirs = importlib.import_module("model")
        torch.set_float32_matmul_precision("high")  # train.py allows TF32
        shape = theirs.GPTConfig(
            job.block, job.vocab, job.n_layer, job.heads, job.n_embd, dropout=job.dropout, bias=False
        )
        kind = "cuda" if device.startswith("cuda") else "cpu"
        self._raw = theirs.GPT(shape).to(device)
        self._optimizer = self._raw.configure_optimizers(0.1, 6e-4, (0.9, 0.95), kind)
        self._model: Any = torch.compile(self._raw) if job.compile else self._raw
        self._context = torch.autocast(kind, torch.bfloat16) if kind == "cuda" else contextlib.nullcontext()
        self._batches, self._accumulation = _Batches(job, device), job.accumulation
        self._x, self._y = self._batches.next()
        self._logits: Any = None

    @torch.no_grad()
    def evaluate(self) -> None:
        self._model.eval()
        logits = None
        for _ in range(2 * EVALUATED):
            x, y = self._batches.next()
            with self._context:
                logits, loss = self._model(x, y)
            loss.item()
        del logits
        self._model.train()

    def micros(self) -> None:
        for _ in range(self._accumulation):
            with self._context:
                # The name keeps the logits until the next micro-batch's replace them, as train.py's does.
                self._logits, loss = self._model(self._x, self._y)
                loss = loss / self._accumulation
            self._x, self._y = self._batches.next()
            loss.backward()
        self._loss = loss

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._loss.item()


class Nanochat:
    """base_train.py of either generation: Muon and AdamW, logits in fp32, the whole model compiled.

    Attention is PyTorch's own, which is what every card but a few has.
    """

    def __init__(self, job: Job, device: str, folder: str) -> None:
        # No attention kernel is fetched from the Hub, and the module is asked before it is imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
        sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # an import of it fails
        sys.path.insert(0, folder)
        theirs = importlib.import_module("nanochat.gpt")
        self._first_generation = job.contender == "nanochat-2025"
        shape = theirs.GPTConfig(
            sequence_len=job.block, vocab_size=job.vocab, n_layer=job.n_layer, n_head=job.heads,
            n_kv_head=job.heads, n_embd=job.n_embd,
        )  # fmt: skip
        torch.set_float32_matmul_precision("high")
        with torch.device("meta"):
            self._raw = theirs.GPT(shape)
        self._raw.to_empty(device=device)
        self._raw.init_weights()
        if self._first_generation:
            self._optimizers = list(self._raw.setup_optimizers())
        else:
            self._optimizers = [self._raw.setup_optimizer()]
        self._model: Any = torch.compile(self._raw, dynamic=False) if job.compile else self._raw
        cuda = device.startswith("cuda")
        self._context: Any = (
            torch.autocast("cuda", torch.bfloat16)
            if cuda and self._first_generation
            else contextlib.nullcontext()
        )
        inputs = torch.int32 if self._first_generation else torch.int64
        self._batches, self._accumulation = _Batches(job, device, inputs), job.accumulation
        self._x, self._y = self._batches.next()

    @torch.no_grad()
    def evaluate(self) -> None:
        self._model.eval()
        for _ in range(EVALUATED):
            x, y = self._batches.next()
            with self._context:
                self._model(x, y, loss_reduction="none").sum().item()
        self._model.train()

    def micros(self) -> None:
        for _ in range(self._accumulation):
            with self._context:
                loss = self._model(self._x, self._y)
            self._loss = loss.detach()
            (loss / self._accumulation).backward()
            self._x, self._y = self._batches.next()

    def update(self) -> None:
        if self._first_generation:
            torch.nn.utils.clip_grad_norm_(self._raw.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self._model.zero_grad(set_to_none=True)
        self._loss.item()


class Bare:
    """Hugging Face's model in the calls that its Trainer makes, where accelerate is not installed."""

    def __init__(self, model: Any, job: Job, device: str) -> None:
        self._model = model.to(device).train()
        self._run: Any = torch.compile(self._model) if job.compile else self._model
        cuda = device.startswith("cuda")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=5e-5, fused=cuda)
        self._context = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
        self._batches, self._accumulation = _Batches(job, device), job.accumulation

    def evaluate(self) -> None:
        """Its Trainer does not begin with one."""

    def micros(self) -> None:
        for _ in range(self._accumulation):
            x, _ = self._batches.next()
            with self._context:
                out = self._run(input_ids=x, labels=x)
            (out["loss"] / self._accumulation).backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._model.zero_grad()


def huggingface_model(job: Job) -> Any:
    """GPT-2 or Llama as transformers builds it from these sizes, with random weights."""
    import transformers

    common = {"vocab_size": job.vocab, "attn_implementation": "sdpa"}
    if job.contender == "huggingface-gpt2":
        config = transformers.GPT2Config(
            n_positions=job.block, n_embd=job.n_embd, n_layer=job.n_layer, n_head=job.heads,
            bos_token_id=0, eos_token_id=0, **common,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            max_position_embeddings=job.block, hidden_size=job.n_embd, num_hidden_layers=job.n_layer,
            num_attention_heads=job.heads, intermediate_size=_llama_inner(job.n_embd), **common,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    if job.checkpointing:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
    return model


def _llama_inner(width: int) -> int:
    """Two thirds of four times the width, a multiple of 256, as Llama has it."""
    return -(-8 * width // 3 // 256) * 256


class _Rows(torch.utils.data.Dataset):
    def __init__(self, job: Job) -> None:
        self._tokens = torch.randint(0, job.vocab, (64, job.block))

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[index % 64]
        return {"input_ids": row, "labels": row}


def run_huggingface(job: Job, device: str, steps: int, folder: str, note: Callable[[str], Any]) -> None:
    """`steps` steps of transformers' own Trainer; `note` is called after the first and at the end."""
    import transformers

    cuda = device.startswith("cuda")
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=job.batch, bf16=cuda,
        gradient_accumulation_steps=job.accumulation, gradient_checkpointing=job.checkpointing,
        torch_compile=job.compile, report_to="none", save_strategy="no", logging_steps=1, use_cpu=not cuda,
        dataloader_pin_memory=cuda, disable_tqdm=True,
    )  # fmt: skip

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                note("first")

    trainer = transformers.Trainer(
        model=huggingface_model(job), args=arguments, train_dataset=_Rows(job), callbacks=[Marks()]
    )
    trainer.train()
    note("steady")


def trainer_of(job: Job, device: str, folders: dict[str, str]) -> Trainer:
    if job.contender == "nanogpt":
        return NanoGPT(job, device, folders["nanogpt"])
    if job.contender.startswith("nanochat"):
        return Nanochat(job, device, folders[job.contender])
    return Bare(huggingface_model(job), job, device)
