"""One optimizer step: micro-batches in, one update out. Tokens weigh the same however it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard.arch.layout import Setting
from onecard.data.prefetch import Micro, StepMicros
from onecard.language import _
from onecard.model.decoder import Decoder
from onecard.model.dropout import DropoutKeys
from onecard.model.precision import torch_dtype
from onecard.model.rounding import noise_key
from onecard.optim.optimizer import Optimizer
from onecard.optim.region_buffers import Storage
from onecard.optim.rules import Rules, adamw_for_all
from onecard.optim.schedule import StepRates
from onecard.plan.bill import captured_bytes, micro_batch_bytes
from onecard.run.checkpoint import TrainingState
from onecard.train.memory import is_capped, is_out_of_memory, measure_afresh, peak_memory_gib
from onecard.train.replay import (
    Compute,
    CudaCapture,
    Replay,
    give_back,
    launch_share,
    take_workspaces,
)

# Rounding of bf16 accumulators draws from a stream of its own, apart from the update's.
_ACCUMULATORS_STREAM = 1


@dataclass(frozen=True)
class StepResult:
    """Tensors stay on the device until a number is asked for: reading one waits for the GPU."""

    figures: Tensor  # loss, and the norm of the gradient before clipping

    @property
    def loss(self) -> Tensor:
        return self.figures[0]

    @property
    def grad_norm(self) -> Tensor:
        return self.figures[1]


def read(results: Sequence[StepResult]) -> list[tuple[float, float]]:
    """All in one go, since every read waits for the card; one by one where it has no room even for that."""
    figures = [result.figures for result in results]
    try:
        return [(loss, norm) for loss, norm in torch.stack(figures).tolist()]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return [(loss, norm) for loss, norm in (each.tolist() for each in figures)]


@dataclass(frozen=True)
class StepOptions:
    """How a step computes, besides what it learns (the knobs of the same names)."""

    dropout: float = 0.0
    grad_clip: float = 1.0
    seed: int = 0
    compiled: bool = False
    graphs: bool | None = False  # CUDA graphs of micro-batches; None: where a pass is launch-bound


class Stepper:
    """Owns masters, working copies and gradient accumulators (in `optimizer`), loss scaling and clipping."""

    def __init__(
        self,
        model: Decoder,
        *,
        device: str,
        dtype: str,
        rules: Rules = adamw_for_all((0.9, 0.95), 0.1),  # noqa: B008 - a constant
        storage: Storage = Storage(),  # noqa: B008 - immutable
        options: StepOptions = StepOptions(),  # noqa: B008 - immutable
    ) -> None:
        self.model, self.options = model, options
        self.device, self.dtype = device, dtype
        # Of the noise of bf16 accumulators. Like all that is allocated, before the model gives up its own
        # weights: whoever tries again with less must find them.
        self._key = torch.zeros((), dtype=torch.int32, device=device)
        self.optimizer = Optimizer(
            dict(model.named_parameters()),
            layer_matrices=model.layer_matrices(),
            device=device,
            compute=torch_dtype(dtype),
            storage=storage,
            rules=rules,
            seed=options.seed,
            compiled=options.compiled,
        )
        model.use_weights(self.optimizer.working)
        model.use_accumulators(self.optimizer.accumulators, self.optimizer.layer_accumulators)
        self.loss_scale = LossScale(enabled=dtype == "float16")
        self._micros = 0  # of the step in progress: numbers the noise of bf16 accumulators
        self._may_capture = True
        self.replay: Replay | None = None
        self.use_graphs(options.graphs)
        self.updating = False  # weights and moments are between two steps, not to be saved

    def use_graphs(self, graphs: bool | None) -> None:
        """Whether to capture micro-batches as CUDA graphs (None: where that pays), from nothing.

        Also for another setting of the same storage: it runs other kernels, and those have to be compiled
        in plain passes before they can be captured, though the shape of a micro-batch is the same.
        """
        if self.replay is not None:
            self.replay.release()  # it may still be running
        self._room_for, self._warmed_up = 0, False
        measure = launch_share if graphs is None else None
        wanted = graphs is not False and self._may_capture
        self.replay = Replay(self._loss_of, self._capture, measure, self._in_room) if wanted else None

    def _capture(self, compute: Compute, inputs: Sequence[Tensor]) -> CudaCapture:
        self._room_for = 0  # all that is free is given back for it, however it ends
        if not is_capped(self.device):
            return CudaCapture(compute, inputs)  # it grows as it needs to, and holds no more than that
        setting = self._setting_of(len(inputs[0]))
        room = captured_bytes(self.model.shape, setting, self.dtype, self.options.dropout)
        return CudaCapture(compute, inputs, room)

    def _setting_of(self, sequences: int) -> Setting:
        model, storage = self.model, self.optimizer.storage
        return Setting(
            sequences, model.loss_chunk, model.recompute, storage.offload, storage.master_weights,
            storage.optim_states, model.compiled,
        )  # fmt: skip

    def _in_room(self, *inputs: Tensor) -> Tensor:
        """A plain pass, with its room taken."""
        self._take_room(len(inputs[0]))
        return self._loss_of(*inputs)

    def _take_room(self, sequences: int) -> None:
        """Under a cap, what a micro-batch takes in one piece, free again at once: a segment as large as that.

        The allocator then asks for room for the whole of a tensor, even where only its end would have to be
        added to a segment, and where there is not as much it waits for the card and gives everything back
        first: in every micro-batch, in a setting that just fits. What stays must not come to lie amid it.
        """
        if self._room_for >= sequences or not is_capped(self.device):
            return
        self._room_for, peak = sequences, peak_memory_gib(self.device)
        setting = self._setting_of(sequences)
        room = micro_batch_bytes(self.model.shape, setting, self.dtype, self.options.dropout)
        try:
            take_workspaces(self.device)
            torch.empty(room, dtype=torch.uint8, device=self.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return  # it may fit bit by bit all the same
        if peak_memory_gib(self.device) != peak:
            measure_afresh(self.device)  # nothing has used it: it is no peak

    def _warm_up(self, *sizes: int) -> None:
        """Warm up: compile kernels on one layer of each kind, before a whole micro-batch is on the card.
        `sizes`: all that a step's micro-batches have, in sequences.

        The compiler tries kernels out where they are first called, with a buffer as large as the card's
        second cache and copies of what a kernel overwrites: in a real pass amid all that layers have kept, in
        an update when some weights have changed and others have not.
        """
        if self.model.compiled:
            scale = torch.zeros((), dtype=self._accurate, device=self.device)
            layers, block = self.model.one_of_each_kind(), self.model.shape.block_size
            for sequences in sizes:
                tokens_BT = torch.zeros((sequences, block), dtype=torch.int64, device=self.device)
                self._loss_of(tokens_BT, tokens_BT, tokens_BT[:, 0], scale, self._key, layers=layers)
                del tokens_BT
            self._clear()
        self.optimizer.warm_up()
        give_back()  # what it leaves behind would lie amid the room of real micro-batches
        self._warmed_up = True

    def run(
        self,
        micros: StepMicros,
        rates: StepRates,
        *,
        stop: Callable[[], bool] = lambda: False,
        on_micro: Callable[[int, int], None] = lambda done, total: None,
    ) -> StepResult | None:
        """One step, or None if `stop` said so between micro-batches; then nothing has changed."""
        step_tokens = sum(micros.sizes) * self.model.shape.block_size
        figures = torch.zeros(2, device=self.device)  # there before the update, after which nothing may fail
        loss, grad_norm = figures.unbind()
        try:
            if not self._warmed_up:
                self._warm_up(*sorted(set(micros.sizes), reverse=True))
            for done, micro in enumerate(micros):
                if stop():
                    self._clear()
                    return None
                loss += self.backward(micro, step_tokens)
                on_micro(done + 1, len(micros))
            grad_norm.copy_(self.update(rates))
            return StepResult(figures)
        except BaseException:
            if not self.updating:
                self._clear()  # whoever tries the step again must not find half of it
            raise

    def backward(self, micro: Micro, step_tokens: int) -> Tensor:
        """Add this micro-batch's share of the step's gradient; return its share of the loss."""
        # Filled on the device: a copy from the CPU would wait for it.
        if self.optimizer.needs_noise:
            self._key.fill_(
                noise_key(self.options.seed, self.optimizer.steps, _ACCUMULATORS_STREAM + self._micros)
            )
        scale = torch.full((), self.loss_scale.value / step_tokens, dtype=self._accurate, device=self.device)
        self._micros += 1
        return (self.replay or self._in_room)(micro.x, micro.y, micro.ids, scale, self._key) / step_tokens

    def _loss_of(
        self,
        x_BT: Tensor,
        y_BT: Tensor,
        ids_B: Tensor,
        scale: Tensor,
        key: Tensor,
        *,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        dropout = DropoutKeys(dropout_keys(ids_B), self.options.dropout) if self.options.dropout else None
        noise = key if self.optimizer.needs_noise else None
        return self.model.loss_sum(x_BT, y_BT, dropout, scale=scale, noise_key=noise, layers=layers)

    def notes(self) -> list[str]:
        """Messages for the user, once."""
        if self.replay is None or self.replay.problem is None:
            return []
        problem, self._may_capture = (
            self.replay.problem,
            self.replay.ran_out,
        )  # another setting may leave room
        self.replay = None
        return [_("micro-batches are not captured as CUDA graphs: {problem}").format(problem=problem)]

    def release(self) -> None:
        """Make room for something else than training."""
        self._room_for = 0
        if self.replay is not None:
            self.replay.release()

    def update(self, rates: StepRates) -> Tensor:
        """Clip, step, clear. Returns the gradient norm before clipping."""
        grad_norm = self.optimizer.norm() / self.loss_scale.value
        grad_scale = torch.full_like(grad_norm, self.loss_scale.value)
        if self.options.grad_clip:
            grad_scale *= ((grad_norm + 1e-6) / self.options.grad_clip).clamp(min=1.0)
        self._make_ready()
        if self.loss_scale.survives(grad_norm):
            self.updating = True
            self.optimizer.update(rates, grad_scale)
        self._clear()  # part of it: with these gradients it must not be done again
        self.updating = False
        return grad_norm

    def _make_ready(self) -> None:
        """A CUDA graph keeps its memory during an update too: where both do not fit, the graph goes."""
        try:
            self.optimizer.make_ready()
        except Exception as error:
            if not is_out_of_memory(error) or self.replay is None or not self.replay.held_bytes:
                raise
            self.replay.give_up(error)
            self.optimizer.make_ready()

    @property
    def _accurate(self) -> torch.dtype:
        return torch.promote_types(torch_dtype(self.dtype), torch.float32)

    def _clear(self) -> None:
        self.optimizer.clear()
        self._micros = 0

    def export(self) -> TrainingState:
        """All that a checkpoint keeps of weights and optimizer."""
        return TrainingState(
            weights=self.optimizer.export_weights(),
            optimizer=self.optimizer.export_state(),
            scaler=self.loss_scale.to_json(),
        )

    def restore(self, optimizer: Mapping[str, Tensor], scaler: Mapping[str, Any]) -> None:
        """Go on with saved moments; the weights are in the model already."""
        self.optimizer.import_state(optimizer)
        self.loss_scale.restore(scaler)


class LossScale:
    """fp16's smallest numbers are too large for gradients: they are computed this many times larger.

    Halved when a gradient overflows (that step is left out), doubled after 2,000 that did not. bf16 and
    fp32 reach far enough; there the scale is 1 and nothing waits for the device.
    """

    _PATIENCE = 2000

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 65536.0 if enabled else 1.0
        self._good_steps = 0

    def survives(self, grad_norm: Tensor) -> bool:
        """Is this step's gradient to be used? Also learns from the answer."""
        if not self.enabled:
            return True
        if not bool(grad_norm.isfinite()):
            self.value, self._good_steps = max(self.value / 2, 1.0), 0
            return False
        self._good_steps += 1
        if self._good_steps == self._PATIENCE:
            self.value, self._good_steps = self.value * 2, 0
        return True

    def to_json(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": self._good_steps} if self.enabled else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        if self.enabled and values:  # empty when the run computed without loss scaling so far
            self.value, self._good_steps = float(values["scale"]), int(values["good_steps"])


def dropout_keys(id_B: Tensor) -> Tensor:
    """64-bit sequence ids folded to the 32-bit keys dropout hashes."""
    return (id_B ^ (id_B >> 32)).to(torch.int32)
