"""Measures a card the way training uses it. torch is imported when measuring begins, not before.

Cards boost for a second and then settle, so the load comes first and everything else is timed on a warm card.
Inputs are random numbers: products of zeros draw less power and run faster than any training. Every figure is
the median of several repeats. Each part has its share of the time and leaves out what does not fit in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from onecard.errors import UserError
from onecard.hardware.bench_sizes import CARD_SIZES, CPU_SIZES, Shape, Sizes
from onecard.hardware.cpu import available_memory, local_cpu
from onecard.hardware.machine import GIB
from onecard.hardware.measured import AttentionRate, Load, MatmulRate, Measured
from onecard.hardware.sensors import Sensors, find_sensors
from onecard.language import _

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]

REPEATS = 5
MOST_CALLS = 200
# Of the free memory; the rest is for libraries and for whoever else uses the card.
USABLE = 0.8
SHARES = {"load": 0.2, "matmul": 0.56, "attention": 0.1, "memory": 0.05, "host": 0.05, "launch": 0.02}


def _silent(text: str) -> None:
    pass


class Bench:
    """One device, and how its time is taken."""

    def __init__(self, device: str, sizes: Sizes, sensors: Sensors | None = None) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        self.on_card = self.device.type == "cuda"
        self.sensors = sensors
        if not self.on_card:
            self.dtype = torch.float32
        elif torch.cuda.is_bf16_supported(including_emulation=False):
            self.dtype = torch.bfloat16
        else:
            self.dtype = torch.float16
        self.item = torch.empty(0, dtype=self.dtype).element_size()
        self.usable_bytes = int(USABLE * self._free_bytes())
        self.sizes = self._that_fit(sizes)

    def _free_bytes(self) -> int:
        if self.on_card:
            return int(self.torch.cuda.mem_get_info(self.device)[0])
        free = available_memory()
        return 2 * GIB if free is None else free

    def _that_fit(self, sizes: Sizes) -> Sizes:
        """The large buffers halved until they fit; single products are left out one by one (see matmuls)."""
        ceiling, copied = sizes.ceiling, sizes.copy_bytes
        while self._bytes_of((ceiling, ceiling, ceiling)) > self.usable_bytes and ceiling > 256:
            ceiling //= 2
        while 2 * copied > self.usable_bytes and copied > 2**20:
            copied //= 2
        smallest = min((shape for level in sizes.levels() for shape in level), key=self._bytes_of)
        if max(self._bytes_of(smallest), 2 * copied) > self.usable_bytes:
            raise UserError(
                _("too little free memory to measure: {n:.0f} MiB").format(
                    n=self.usable_bytes / USABLE / 2**20
                ),
                hint=_("onecard gpus   shows who uses the card"),
                exit_code=1,
            )
        return replace(sizes, ceiling=ceiling, copy_bytes=copied)

    def _bytes_of(self, shape: Shape) -> int:
        tokens, n, k = shape
        operands = tokens * k + n * k + tokens * n
        return self.item * (operands + max(tokens * n, tokens * k)) + 4 * n * k

    # --- taking the time ---------------------------------------------------------------------------

    def elapsed(
        self, call: Callable[[], Any], calls: int, *, queued: bool, meanwhile: Callable[[], Any] | None = None
    ) -> float:
        """Seconds for one call. `meanwhile` runs on the CPU while the card works.

        `queued`: the card is made to wait until the calls are queued, so that the card is timed and not the
        CPU that launches them; what the CPU takes is launch_us.
        """
        if not self.on_card:
            started = time.perf_counter()
            for _ in range(calls):
                call()
            seconds = (time.perf_counter() - started) / calls
            if meanwhile is not None:
                meanwhile()
            return seconds
        cuda = self.torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        if queued and hasattr(cuda, "_sleep"):
            cuda._sleep(20_000 * calls)  # clock cycles, about 10 µs for each call
        start.record()
        for _ in range(calls):
            call()
        end.record()
        if meanwhile is not None:
            meanwhile()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / calls

    def seconds_per_call(
        self, call: Callable[[], Any], budget: float, *, queued: bool = True, most_calls: int = MOST_CALLS
    ) -> float:
        """The median of several repeats within about `budget` seconds; at least one call in each."""
        call()  # the first one chooses a kernel and allocates
        once = max(self.elapsed(call, 1, queued=queued), 1e-7)
        calls = max(1, min(most_calls, int(budget / (REPEATS + 1) / once)))
        self.elapsed(call, calls, queued=queued)  # at the speed it will be measured at
        return statistics.median(self.elapsed(call, calls, queued=queued) for _ in range(REPEATS))

    # --- what is measured --------------------------------------------------------------------------

    def sustained(self, seconds: float, say: Say = _silent) -> tuple[float, Load]:
        """TFLOPS of the largest product over `seconds`, and the card at it; the second half counts."""
        size = self.sizes.ceiling
        a, b = (self.torch.randn(size, size, dtype=self.dtype, device=self.device) for _ in range(2))
        out = self.torch.empty_like(a)

        def call() -> None:
            self.torch.mm(a, b, out=out)

        call()
        calls = max(1, int(0.1 / max(self.elapsed(call, 1, queued=False), 1e-7)))
        readings: list[Load] = []
        times: list[float] = []
        until = time.monotonic() + seconds
        while len(times) < 4 or time.monotonic() < until:
            times.append(
                self.elapsed(call, calls, queued=False, meanwhile=lambda: readings.append(self._read()))
            )
            say(_("load, {n:.4g} TFLOPS").format(n=2 * size**3 / times[-1] / 1e12))
        half = len(times) // 2
        return 2 * size**3 / statistics.median(times[half:]) / 1e12, _typical(readings[half:])

    def _read(self) -> Load:
        return self.sensors.read() if self.sensors is not None else Load()

    def matmuls(
        self, levels: list[list[Shape]], seconds: float, say: Say = _silent
    ) -> tuple[list[MatmulRate], list[str]]:
        """The rates, and what was left out."""
        skipped = [s for level in levels for s in level if self._bytes_of(s) > self.usable_bytes]
        too_large, no_time = _("matmul {shape}: too large for the free memory"), _("matmul {shape}: no time")
        notes = [too_large.format(shape=_times(shape)) for shape in skipped]
        levels = [kept for level in levels if (kept := [s for s in level if s not in skipped])]
        everything = [shape for level in levels for shape in level]
        pool = self.torch.randn(
            max(t * k + n * k + t * n for t, n, k in everything), dtype=self.dtype, device=self.device
        )
        out = self.torch.empty(
            max(t * max(n, k) for t, n, k in everything), dtype=self.dtype, device=self.device
        )
        totals = self.torch.zeros(max(n * k for _, n, k in everything), device=self.device)
        until = time.monotonic() + seconds
        found: list[MatmulRate] = []
        left = len(everything)
        for level in levels:
            rates: list[MatmulRate] = []
            for shape in level:
                if found + rates and time.monotonic() > until:
                    break
                say(f"matmul {_times(shape)}")
                budget = max(0.0, until - time.monotonic()) / left / 3
                rates.append(self._matmul(shape, pool, out, totals, budget))
                left -= 1
            if len(rates) < len(level):
                # Half a level would stand in for shapes it has nothing to say about.
                found = found or rates
                late = [s for s in everything if s not in map(_shape_of, found)]
                notes += [no_time.format(shape=_times(s)) for s in late]
                break
            found += rates
        return found, notes

    def _matmul(
        self, shape: Shape, pool: torch.Tensor, out: torch.Tensor, totals: torch.Tensor, budget: float
    ) -> MatmulRate:
        mm = self.torch.mm
        tokens, n, k = shape
        # Weights last: only their size may be an odd one, and what follows it would be badly aligned.
        x, rest = pool[: tokens * k].view(tokens, k), pool[tokens * k :]
        dy, w = rest[: tokens * n].view(tokens, n), rest[tokens * n :][: n * k].view(n, k)
        y, dx = out[: tokens * n].view(tokens, n), out[: tokens * k].view(tokens, k)
        total = totals[: n * k].view(n, k)

        def add_dw() -> None:
            # As the trainer does it: added to an fp32 total by the matmul itself.
            if self.on_card:
                self.torch.ops.aten.addmm.dtype_out(total, dy.T, x, total.dtype, out=total)
            else:
                total.addmm_(dy.T, x)

        seconds = [
            self.seconds_per_call(call, budget)
            for call in (lambda: mm(x, w.T, out=y), lambda: mm(dy, w, out=dx), add_dw)
        ]
        totals.zero_()
        return MatmulRate(*shape, *(2 * tokens * n * k / taken / 1e12 for taken in seconds))

    def attention(self, seconds: float, say: Say = _silent) -> list[AttentionRate]:
        cases = [(head_dim, block) for head_dim in self.sizes.head_dims for block in self.sizes.blocks]
        return [self._attention(*case, seconds / len(cases) / 2, say) for case in cases]

    def _attention(self, head_dim: int, block: int, budget: float, say: Say) -> AttentionRate:
        say(attention_label(head_dim, block))
        torch = self.torch
        batch, heads = self.sizes.attention_tokens // block, self.sizes.attention_width // head_dim
        q, k, v = (
            torch.randn(
                batch, heads, block, head_dim, device=self.device, dtype=self.dtype, requires_grad=True
            )
            for _ in range(3)
        )

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        result = forward()
        gradient = torch.randn_like(result)
        ahead = self.seconds_per_call(forward, budget)
        back = self.seconds_per_call(
            lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True), budget
        )
        flops = 4 * batch * heads * block**2 * head_dim
        return AttentionRate(head_dim, block, flops / ahead / 1e12, 2 * flops / back / 1e12)

    def memory(self, seconds: float) -> tuple[float, float]:
        """GB/s of a copy inside the card (read and written) and of a sum (read)."""
        source = self.torch.randn(self.sizes.copy_bytes // 4, device=self.device)
        target = self.torch.empty_like(source)
        size = source.numel() * 4
        copy = self.seconds_per_call(lambda: target.copy_(source), seconds / 2)
        reduction = self.seconds_per_call(source.sum, seconds / 2)
        return 2 * size / copy / 1e9, size / reduction / 1e9

    def host(self, seconds: float) -> tuple[float, float, bool]:
        """GB/s to the card and back, and whether the host's memory was page-locked."""
        torch, size = self.torch, self.sizes.transfer_bytes
        pinned = self.on_card
        try:
            there = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError:  # a limit on locked memory (containers)
            there, pinned = torch.ones(size, dtype=torch.uint8), False
        here = torch.ones(size, dtype=torch.uint8, device=self.device)
        to_card = self.seconds_per_call(lambda: here.copy_(there, non_blocking=True), seconds / 2)
        back = self.seconds_per_call(lambda: there.copy_(here, non_blocking=True), seconds / 2)
        return size / to_card / 1e9, size / back / 1e9, pinned

    def launch(self, seconds: float) -> float:
        """Microseconds from one tiny kernel to the next, as fast as the CPU launches them.

        The least of several times: whatever else the CPU does only adds to it.
        """
        one = self.torch.zeros(1, device=self.device)

        def once(calls: int) -> float:
            return self.elapsed(lambda: one.add_(1), calls, queued=False)

        once(1)
        calls = max(1, min(1000, int(seconds / (REPEATS + 1) / max(once(10), 1e-7))))
        found, until = [once(calls)], time.monotonic() + seconds
        while len(found) < REPEATS or time.monotonic() < until:
            found.append(once(calls))
        return 1e6 * min(found)


def measure(
    device: str,
    *,
    seconds: float,
    own: Sequence[tuple[int, int]] = (),
    sizes: Sizes | None = None,
    say: Say = _silent,
) -> Measured:
    """Everything, in about `seconds`. `own`: widths, with their vocabularies, besides the usual ones."""
    began = time.monotonic()
    name, memory_gib, sensors = describe(device)
    with computing_on(device):
        bench = Bench(device, sizes or (CARD_SIZES if device != "cpu" else CPU_SIZES), sensors)
        ceiling, load = bench.sustained(seconds * SHARES["load"], say)
        rates, skipped = bench.matmuls(bench.sizes.levels(own), seconds * SHARES["matmul"], say)
        attention = bench.attention(seconds * SHARES["attention"], say)
        say(_("memory"))
        copy, reduction = bench.memory(seconds * SHARES["memory"])
        say(_("RAM"))
        h2d, d2h, pinned = bench.host(seconds * SHARES["host"])
        say(_("launches"))
        launch = bench.launch(seconds * SHARES["launch"])
    return Measured(
        card=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype=str(bench.dtype).removeprefix("torch."),
        ceiling_size=bench.sizes.ceiling,
        ceiling_tflops=ceiling,
        copy_gbps=copy,
        reduce_gbps=reduction,
        h2d_gbps=h2d,
        d2h_gbps=d2h,
        launch_us=launch,
        matmuls=tuple(rates),
        attention=tuple(attention),
        load=load,
        pinned=pinned,
        memory_gib=memory_gib,
        driver=sensors.driver() if sensors else None,
        torch=str(bench.torch.__version__),
        seconds=round(time.monotonic() - began, 2),
        skipped=tuple(skipped),
    )


def describe(device: str) -> tuple[str, float | None, Sensors | None]:
    """Name, memory in GiB and sensors of what is measured."""
    if device == "cpu":
        return f"CPU {local_cpu().name}", None, None
    import torch

    properties = torch.cuda.get_device_properties(device)
    sensors = find_sensors(str(getattr(properties, "uuid", "")) or None)
    return properties.name, properties.total_memory / GIB, sensors


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Computes on this card, and gives its memory back at the end; a full one is the user's to empty."""
    import torch

    try:
        with torch.cuda.device(device) if device != "cpu" else nullcontext():
            yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            _("the card's memory ran out while measuring"),
            why=str(error).splitlines()[0],
            hint=_("onecard gpus   shows who else uses the card"),
            exit_code=1,
        ) from None
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()


def _typical(readings: list[Load]) -> Load:
    def median(name: str) -> float | None:
        values = [value for reading in readings if (value := getattr(reading, name)) is not None]
        return statistics.median(values) if values else None

    return Load(*(median(name) for name in ("clock_mhz", "power_w", "temperature_c", "power_limit_w")))


def attention_label(head_dim: int, block: int) -> str:
    return _("attention, heads of {size}, {n} tokens").format(size=head_dim, n=block)


def _shape_of(rate: MatmulRate) -> Shape:
    return rate.tokens, rate.n, rate.k


def _times(shape: Shape) -> str:
    return " × ".join(map(str, shape))
