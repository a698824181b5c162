"""Head and cross-entropy together, several ways: time, extra memory and error of each on this GPU.

    python benchmarks/loss_kernels.py [--vocab 50304 65536] [--quick] --out FILE.json

From hidden states x (rows × width, bf16), head (vocab × width, bf16) and targets to the loss, dx (bf16)
and dW added into an fp32 buffer. The loss is a mean: for another scale the packages need one more pass.
`chunked-*` never hold all logits: chunk by chunk of rows they make logits, overwrite them with their
gradient (the middle) and multiply that into dx and dW. Times are for all rows, those of parts too.
Errors are norms of differences from float64 over the norm of the float64 result.
`--device cpu --tiny` checks without timing; TRITON_INTERPRET=1 adds the Triton kernel to that.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import command_line
from torch import Tensor

from onecard.model.loss import LossOptions
from onecard.model.loss_kernel import kernel_chunk_loss_

IGNORE = -1
# Triton block and warps. More warps: fewer rows in flight, so a row's second read finds it still in L2.
CONFIGS = ((4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32))
Middle = Callable[[Tensor, Tensor, Tensor, float], object]  # logits (overwritten), targets, losses, scale


def triton_middle(
    logits: Tensor, targets: Tensor, losses: Tensor, scale: float, config: tuple[int, int] = CONFIGS[0],
    softcap: float = 0.0, z_weight: float = 0.0,
) -> None:  # fmt: skip
    """The kernel of onecard/model/loss_kernel.py, which returns a sum of losses."""
    tensor = torch.full((), scale, device=logits.device)
    losses.zero_()
    losses[0] = kernel_chunk_loss_(logits, targets, tensor, LossOptions(softcap, z_weight), *config)


@torch.compile(dynamic=False)
def compiled_middle(logits: Tensor, targets: Tensor, losses: Tensor, scale: float) -> None:
    z = logits.float()
    peak = z.amax(1, keepdim=True)  # in this form Inductor can find max and sum in one pass
    lse = peak + (z - peak).exp().sum(1, keepdim=True).log()
    valid = (targets != IGNORE)[:, None]
    onehot = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    # No gather: fused with the overwriting below, it could read what another warp has already written.
    picked = torch.where(onehot, z, 0.0).sum(1, keepdim=True)
    losses.copy_(torch.where(valid, lse - picked, 0.0)[:, 0])
    logits.copy_(torch.where(valid, ((z - lse).exp() - onehot.float()) * scale, 0.0))


class Problem:
    """Like a model that has learned something: low ids frequent, many targets likely, loss far from ln V."""

    def __init__(self, rows: int, width: int, vocab: int, device: str) -> None:
        with torch.device(device):
            torch.manual_seed(vocab)
            noise, common = 0.02 * torch.randn(vocab, width), F.normalize(torch.randn(width), dim=0)
            self.head = (noise - 0.1 * torch.arange(1, vocab + 1).log()[:, None] * common).bfloat16()
            self.targets = (vocab ** torch.rand(rows) - 1).long().clamp_(0, vocab - 1)
            known = 24 * torch.rand(rows, 1) * F.normalize(noise[self.targets], dim=1)
            self.x = (torch.randn(rows, width) + 10 * common + known).bfloat16()
            self.dx, self.ref_dx = torch.empty_like(self.x), torch.empty(rows, width)
            self.acc, dw = torch.zeros(vocab, width), torch.zeros(vocab, width, dtype=torch.float64)
        self.scale, self.ref_loss, w = 1 / rows, dw.new_zeros(()), self.head.double()
        for at in range(0, rows, 512):  # the reference, in float64
            x, target = self.x[at : at + 512].double(), self.targets[at : at + 512, None]
            log_p = (x @ w.T).log_softmax(1)
            self.ref_loss -= log_p.gather(1, target).sum() / rows
            gradient = (log_p.exp() - torch.zeros_like(log_p).scatter_(1, target, 1.0)).div_(rows)
            self.ref_dx[at : at + 512] = gradient @ w
            dw.addmm_(gradient.T, x)
        self.ref_dw = dw.float()


def addmm(acc: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.addmm.dtype_out(acc, gradient.T, x, torch.float32, out=acc)


def mm_add(acc: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
    return acc.add_(torch.mm(gradient.T, x))


# The contenders: each returns loss and dx and adds dW into problem.acc.
def chunked(p: Problem, chunk: int, middle: Middle | None, accumulate: Any) -> tuple[Tensor, Tensor]:
    buffer = torch.empty(chunk, len(p.head), dtype=p.x.dtype, device=p.x.device)
    losses = torch.empty(len(p.x), device=p.x.device)
    for at in range(0, len(p.x), chunk):
        x, dx, targets = (t[at : at + chunk] for t in (p.x, p.dx, p.targets))
        logits = buffer[: len(x)]
        torch.mm(x, p.head.T, out=logits)
        if middle:
            middle(logits, targets, losses[at : at + chunk], p.scale)
        torch.mm(logits, p.head, out=dx)
        accumulate(p.acc, logits, x)
    return losses.sum() * p.scale, p.dx


@torch.enable_grad()
def by_autograd(p: Problem, loss: Any) -> tuple[Tensor, Tensor]:
    x, head = p.x.detach().requires_grad_(), p.head.detach().requires_grad_()
    value = loss(x, head, p.targets)
    dx, dw = torch.autograd.grad(value, (x, head))
    p.acc += dw
    return value.detach(), dx


@torch.compile(dynamic=False)
def whole(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, head).float(), targets, ignore_index=IGNORE)


def liger(x: Tensor, head: Tensor, targets: Tensor, chunk_mem_const: int = 1) -> Tensor:
    function = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    plain = (None, None, IGNORE, 0.0, 0.0, "mean", None, False)
    last = (torch.float32, False, False, False, None, None, chunk_mem_const)  # dW summed in fp32
    return function.LigerFusedLinearCrossEntropyFunction.apply(x, head, targets, *plain, *last)[0]


def cce(x: Tensor, head: Tensor, targets: Tensor, filter_eps: str | None = "high") -> Tensor:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return function(x, head, targets, ignore_index=IGNORE, filter_eps=filter_eps, impl="cce")


def timed(function: Callable[[], object], repeats: int, times: float = 1.0) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"ms": float("nan")}
    for _ in range(3):
        function()
    pairs = [[torch.Event("cuda", enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    took = [start.elapsed_time(end) for start, end in pairs]
    found = {"ms": statistics.median(took), "ms_min": min(took), "ms_max": max(took)}
    return {name: round(value * times, 4) for name, value in found.items()}


def verdict(**pairs: tuple[Tensor, Tensor, float]) -> dict[str, Any]:
    errors = {}  # relative; the third of each is the largest allowed
    for name, (value, wanted, _) in pairs.items():
        error = (value.double() - wanted.double()).norm() / wanted.double().norm()
        errors[name] = float(f"{error.item():.2g}")
    return {"error": errors, "right": all(errors[name] < pairs[name][2] for name in pairs)}  # NaN is not


def measure(p: Problem, run: Callable[[Problem], tuple[Tensor, Tensor]], repeats: int) -> dict[str, Any]:
    p.dx.fill_(float("nan"))
    p.acc.copy_(p.ref_dw)  # something of dW's size, so that adding and overwriting differ
    loss, dx = run(p)
    dw = (p.acc.sub_(p.ref_dw), p.ref_dw, 3e-2)
    row = verdict(loss=(loss, p.ref_loss, 1e-2), dx=(dx, p.ref_dx, 3e-2), dw=dw)
    fresh = 0 if dx is p.dx else dx.nbytes  # an output, so no extra, but not in the baseline
    del loss, dx
    row |= timed(lambda: run(p), repeats)
    if p.x.is_cuda:
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(p)
        row["extra_mib"] = round((torch.cuda.max_memory_allocated() - base - fresh) / 2**20, 1)
    return row


def check_middle(middle: Middle, device: str, softcap: float = 0.0, z_weight: float = 0.0) -> dict[str, Any]:
    """Small and awkward: ignored rows that hold NaN, a width that no block divides, softcap, z-loss."""
    logits = (4 * torch.randn(70, 9001, device=device)).bfloat16()
    targets = torch.randint(0, 9001, (70,), device=device)
    targets[::7] = IGNORE
    with torch.enable_grad():
        z = logits.double().requires_grad_()
        capped = softcap * (z / softcap).tanh() if softcap else z
        wanted = F.cross_entropy(capped, targets, ignore_index=IGNORE, reduction="none")
        wanted = wanted + z_weight * capped.logsumexp(1).square() * (targets != IGNORE)
        (slope,) = torch.autograd.grad(0.37 * wanted.sum(), z)
    logits[targets == IGNORE] = float("nan")
    losses = torch.full((70,), float("nan"), device=device)
    middle(logits, targets, losses, 0.37)
    return verdict(loss=(losses.sum(), wanted.detach().sum(), 1e-5), dlogits=(logits, slope, 5e-3))


class Bench:
    """Runs jobs until the time is spent. A job that fails is a row that says why."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device, self.began = options, options.device, time.perf_counter()
        self.problem = cache(lambda vocab: Problem(options.rows, options.width, vocab, self.device))
        self.config: dict[int, tuple[int, int]] = {}  # the fastest for each vocabulary
        self.rows: list[dict[str, Any]] = []

    def job(self, name: str, work: Callable[[], dict[str, Any]], **names: Any) -> dict[str, Any]:
        row = {"contender": name, **names}
        try:
            if time.perf_counter() - self.began > self.options.budget:
                raise TimeoutError("not run, the time budget is spent")
            gc.collect()
            torch.cuda.empty_cache()
            row |= work()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]  # Triton's last line says more than its first
            row["failed"] = f"{type(error).__name__}: {' ... '.join({lines[0]: 0, lines[-1]: 0})}"[:200]
        self.rows.append(row)
        self.save()
        print(f"{time.perf_counter() - self.began:6.1f} s", json.dumps(row), flush=True)
        return row

    def contender(self, name: str, run: Any, vocab: int, **names: Any) -> None:
        self.job(name, lambda: measure(self.problem(vocab), run, self.options.repeats), vocab=vocab, **names)

    def part(self, kernel: Middle | None, vocab: int, chunk: int) -> dict[str, Any]:
        """A kernel alone, or all but the kernel. GB/s count one read and one write: the least possible."""
        p, repeats = self.problem(vocab), self.options.repeats
        if kernel is None:
            row = timed(lambda: chunked(p, chunk, None, self.accumulate), repeats)
            return row | {"tflops": round(6e-9 * p.x.numel() * vocab / row["ms"], 1)}
        logits, losses = p.x[:chunk] @ p.head.T, torch.empty(chunk, device=self.device)
        work = partial(kernel, logits, p.targets[:chunk], losses, p.scale)
        row = timed(work, repeats, len(p.x) / chunk)
        return row | {"gb_per_s": round(4e-6 * len(p.x) * vocab / row["ms"], 1)}

    def own(self, vocab: int, chunk: int) -> None:
        at, main = {"vocab": vocab, "chunk": chunk}, chunk in self.options.chunks[:2]
        self.job("part: three matmuls", partial(self.part, None, **at), **at)
        self.job("part: compiled", partial(self.part, compiled_middle, **at), **at)
        if vocab not in self.config:
            ms = {}
            for config in CONFIGS:
                work = partial(self.part, partial(triton_middle, config=config), **at)
                row = self.job(f"part: triton {config[0]} x {config[1]} warps", work, **at)
                ms[config] = row.get("ms", float("inf"))
            self.config[vocab] = min(ms, key=lambda config: ms[config])
        ours: dict[str, Any] = {"compiled": compiled_middle}
        ours["triton"] = partial(triton_middle, config=self.config[vocab])
        adds = dict.fromkeys([self.accumulate, mm_add] if main else [self.accumulate])
        for name, add in product(ours, adds):
            run = partial(chunked, chunk=chunk, middle=ours[name], accumulate=add)
            self.contender(f"chunked-{name} {add.__name__}", run, **at)

    def run(self) -> None:
        vocabs, chunks, device = self.options.vocab, self.options.chunks, self.device
        capped = partial(triton_middle, softcap=15.0, z_weight=1e-3)
        one = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        check = lambda: verdict(sum=(addmm(one.float(), one, one), 65 * one.float(), 1e-6))  # noqa: E731
        self.accumulate = addmm if self.job("check: addmm.dtype_out", check).get("right") else mm_add
        self.job("check: triton", lambda: check_middle(triton_middle, device))
        self.job("check: triton, all options", lambda: check_middle(capped, device, 15.0, 1e-3))
        self.job("check: compiled", lambda: check_middle(compiled_middle, device))
        losses = dict[str, Any](whole=whole, liger=liger, liger_x8=partial(liger, chunk_mem_const=8))
        if new := getattr(F, "linear_cross_entropy", None):  # torch >= 2.13
            options = torch.nn.LinearCrossEntropyOptions()
            losses["torch linear_cross_entropy"] = partial(new, ignore_index=IGNORE, options=options)
        locks = {"cce": cce, "cce, nothing filtered": partial(cce, filter_eps=None)}
        # What matters most first, in case time runs out; last what waits on locks and so could hang.
        for vocab, chunk in product(vocabs, chunks[:2]):
            self.own(vocab, chunk)
        for vocab, name in product(vocabs, losses):
            self.contender(name, partial(by_autograd, loss=losses[name]), vocab)
        for vocab, chunk in product(vocabs, chunks[2:]):
            self.own(vocab, chunk)
        for vocab, name in product(vocabs, locks):
            self.contender(name, partial(by_autograd, loss=locks[name]), vocab)

    def save(self) -> None:
        result = {
            "what": f"linear head + cross-entropy, {self.options.rows} × {self.options.width}, bf16",
            "date": time.strftime("%Y-%m-%d"),
            "command": command_line(),
            "card": torch.cuda.get_device_name() if self.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "triton": next((d.version for d in metadata.distributions(name="triton")), None),
            "triton_configs": self.config,
            "rows": self.rows,
        }
        if self.options.out:
            self.options.out.write_text(json.dumps(result, indent=1) + "\n")

    def table(self, hangs: bool = False) -> None:
        print(f"\n{'vocab':>6} {'contender':30} {'chunk':>5} {'ms':>9} {'extra MiB':>9}  error or rate")
        for row in sorted(self.rows, key=lambda row: (row.get("vocab", 0), row["contender"][:4] != "part")):
            line = f"{row.get('vocab', ''):>6} {row['contender']:30} {row.get('chunk', ''):>5} "
            line += f"{row.get('ms', ''):>9} {row.get('extra_mib', ''):>9}  {row.get('failed', '')}"
            line += " ".join(f"{name} {value:.1e}" for name, value in row.get("error", {}).items())
            line += "".join(f"{row[name]} {name}" for name in ("tflops", "gb_per_s") if name in row)
            print(line + ("" if row.get("right", True) else "  WRONG"), flush=True)
        if hangs:
            print("stopped: the contender after the last one printed hangs", flush=True)
            os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--out", type=Path)
    for name, default in {"rows": 16384, "width": 768, "repeats": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, nargs="+", default=[50304, 65536])
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 2048, 1024, 8192])
    parser.add_argument("--quick", action="store_true", help="the first two chunk sizes only")
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no contender starts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    if options.tiny:
        options.rows, options.width, options.vocab, options.chunks = 256, 64, [1024], [128, 64, 96]
    options.chunks = options.chunks[: 2 if options.quick else None]
    torch.set_grad_enabled(False)  # the mode is part of what compiled code is keyed on: one for all
    torch._dynamo.config.recompile_limit = 64  # past it torch would quietly run uncompiled
    bench = Bench(options)
    watch = threading.Timer(options.budget + 40, bench.table, [True])
    watch.daemon = True
    watch.start()
    bench.run()
    bench.table()


if __name__ == "__main__":
    main()
