"""From a model on the CPU to one that trains on its device: memory capped and checked, kernels chosen."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape, Shape
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cpu import available_memory, local_cpu
from onecard.hardware.machine import card_behind
from onecard.hardware.measured import load_measured
from onecard.language import _, joined
from onecard.model.attention import fastest_kernel
from onecard.model.compiling import compile_problem
from onecard.model.decoder import Decoder
from onecard.model.precision import card_has_bf16, torch_dtype
from onecard.optim.recipe import rules_of
from onecard.optim.region_buffers import Storage
from onecard.plan.bill import is_refined
from onecard.plan.lines import GIB, total
from onecard.plan.rates import ANY_CARD, rates_of
from onecard.plan.resident import resident
from onecard.plan.search import Question, chosen
from onecard.train.first_setting import open_fit, process_bytes, setting_notes
from onecard.train.fit import Fit, in_words
from onecard.train.memory import allocator_bytes, cap_memory, forget, ran_out, reserve_of
from onecard.train.other_processes import look_at, process_notes, spilling_note, spilling_platform
from onecard.train.pace import duration
from onecard.train.step import StepOptions, Stepper

# Memory that no question is asked about: a CPU's.
_FAR = 2**62
# Operations of a step that a CPU needs a good part of a minute for.
_MUCH_FOR_CPU = 1e13


def storage_of(setting: Setting) -> Storage:
    return Storage(setting.master_weights, setting.optim_states, setting.offload)


def choose_kernel(shape: Shape, config: RunConfig, device: str, dtype: str) -> str:
    """By measuring; the libraries it needs are loaded then, and count as what CUDA itself takes."""
    sizes = (config.batch_size, shape.n_head, shape.block_size, shape.head_dim)
    return fastest_kernel(*sizes, torch_dtype(dtype), device)[0]


def make_room(shape: Shape, config: RunConfig, device: str, dtype: str, notes: list[str]) -> Fit:
    """Cap what tensors may take, choose how to run in it, and refuse what cannot fit before it is built."""
    reserve, platform = reserve_of(config, device), spilling_platform()
    if reserve is not None and config.vram_reserve is None and platform is not None:
        notes.append(spilling_note(platform, int(reserve * GIB)))
    allocator, cap_notes = cap_memory(device, config.vram_limit, reserve)
    notes += cap_notes
    _check_dropout(shape, config)
    on_card = device.startswith("cuda")
    if allocator is None:
        allocator = allocator_bytes(device, None, None)
    card = card_behind(device)
    rates = None
    if card is not None and on_card:
        # What plan would say: with the card's own measurement where there is one.
        total = torch.cuda.get_device_properties(device).total_memory
        rates = rates_of(card, dtype, load_measured(card.name, total / 2**30))
    capability = torch.cuda.get_device_capability(device) if on_card else None
    l2_bytes = card.l2_bytes if card is not None else None
    allowed = process_bytes(allocator) if allocator is not None else _FAR
    if not on_card and not config.eval_only:
        notes += cpu_notes(shape.flops_per_token * config.tokens_per_step)
    host = available_memory() if on_card else None
    question = Question(config, shape, dtype, rates or ANY_CARD, allowed, host, capability, l2_bytes)
    try:
        fit = open_fit(question, on_card=on_card and not config.eval_only)
    except UserError as error:
        raise _others_hold_too_much(error, question, device) from None
    _check_memory(shape, config, fit.setting, device, dtype, allocator if on_card else None)
    notes += setting_notes(fit)
    return fit


def _others_hold_too_much(error: UserError, question: Question, device: str) -> UserError:
    """A run that does not fit with what other processes hold of the card, and would without them."""
    alone = replace(question, allowed=torch.cuda.mem_get_info(device)[1])
    config = question.config
    found = chosen(alone)[0] if config.auto_fit else alone.answer(setting_of(config, question.shape))
    if config.vram_limit is not None or found is None or not found.fits:
        return error
    holders = process_notes(look_at(device)) or [
        _("`onecard gpus` shows the processes on it, as far as the driver reports them")
    ]
    what = _("other processes hold too much of the card: {n:.2f} GiB of it are left")
    wait = _("with the card to itself it runs with {setting}").format(
        setting=in_words(found) or _("the config as given")
    )
    return UserError(
        what.format(n=question.allowed / GIB),
        joined([error.why, wait], "\n"),
        joined([_("close them, or wait"), *holders], "\n"),
        exit_code=1,
    )


def cpu_notes(flops: float) -> list[str]:
    """Of one step. Where it is much, how long it takes at least, by a matmul that is measured."""
    if flops < _MUCH_FOR_CPU:
        return []
    size, best = 1024, float("inf")
    matrix = torch.ones(size, size)
    for _again in range(4):  # the first one warms up
        began = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    rate = 2 * size**3 / best
    return [
        _(
            "this trains on the CPU: a step is {flops:,.0f} TFLOP, and a matmul here reaches {rate:.2f} "
            "TFLOPS: at least {time} per step (`onecard plan --gpu NAME` predicts what a card would take)"
        ).format(flops=flops / 1e12, rate=rate / 1e12, time=duration(flops / rate))
    ]


def build_stepper(
    model: Decoder, config: RunConfig, fit: Fit, device: str, dtype: str, notes: list[str]
) -> Stepper | None:
    """Put the model on its device, compiled where that works; None where it is only to be evaluated."""
    storage = storage_of(fit.setting)
    problem = _no_compiling(device, storage) if config.compile else None
    if problem is not None:
        notes.append(_("running without torch.compile, it does not work here: {why}").format(why=problem))
    compiled = config.compile and problem is None
    if config.cuda_graphs and not _can_capture(device, storage):
        if device.startswith("cuda"):
            notes.append(_("cuda_graphs is not used: it does not work with offload=gradients"))
        else:
            notes.append(_("cuda_graphs is not used: it needs a CUDA card"))
    if storage.offload != "none" and not device.startswith("cuda"):
        notes.append(_("offload saves a card's memory; on the CPU it only costs a copy"))
    stepper = None
    if config.eval_only:
        _only_weights(model, device, torch_dtype(dtype))
    else:
        stepper = _first_stepper(model, config, fit, device, dtype, notes, compiled=compiled)
    model.recompute, model.loss_chunk = fit.setting.recompute, fit.setting.loss_chunk
    if compiled:
        model.compile_parts()
    return stepper


def _first_stepper(
    model: Decoder, config: RunConfig, fit: Fit, device: str, dtype: str, notes: list[str], *, compiled: bool
) -> Stepper:
    """In the fit's setting, or the first one after it that can be built: others may have taken memory since
    it was chosen. Until then the model has its weights on the CPU."""
    chosen = fit.setting
    while True:
        try:
            room = fit.choice.has_room_to_capture
            stepper = new_stepper(model, config, fit.setting, device, dtype, compiled=compiled, room=room)
            break
        except Exception as error:
            next_one = fit.refused if isinstance(error, UserError) else fit.down
            if not ran_out(error) or next_one(fit.first_step) is None:
                raise
            forget(error)
    if fit.setting != chosen:
        notes.append(
            _("not enough memory at the start: running with {setting}").format(setting=in_words(fit.choice))
        )
    return stepper


def new_stepper(
    model: Decoder,
    config: RunConfig,
    setting: Setting,
    device: str,
    dtype: str,
    *,
    compiled: bool,
    room: bool = True,
) -> Stepper:
    """With the model's present weights as masters. `room`: see graphs_of."""
    return Stepper(
        model,
        device=device,
        dtype=dtype,
        rules=rules_of(config, model.shape),
        storage=storage_of(setting),
        options=StepOptions(
            dropout=config.dropout,
            grad_clip=config.grad_clip,
            seed=config.seed,
            compiled=compiled,
            graphs=graphs_of(config, setting, device, compiled=compiled, room=room),
        ),
    )


def graphs_of(
    config: RunConfig, setting: Setting, device: str, *, compiled: bool, room: bool = True
) -> bool | None:
    """Are micro-batches captured as CUDA graphs? None: where that turns out to be faster.

    By itself only where there is predicted to be `room`: a capture that runs out takes time and gains none.
    """
    if config.cuda_graphs is None and not room:
        return False
    setting = replace(setting, cuda_graphs=config.cuda_graphs, compile=compiled)
    return config.cuda_graphs if setting.may_capture and _can_capture(device, storage_of(setting)) else False


def _can_capture(device: str, storage: Storage) -> bool:
    return device.startswith("cuda") and storage.offload != "gradients"


def _no_compiling(device: str, storage: Storage) -> str | None:
    """Why not to compile, or None."""
    kept_in_bf16 = "bf16" in (storage.master_weights, storage.optim_states)
    if kept_in_bf16 and device.startswith("cuda") and not card_has_bf16(device):
        return _("this card has no bfloat16, in which masters or momenta are kept")
    return compile_problem(device)


def _only_weights(model: Decoder, device: str, compute: torch.dtype) -> None:
    """As the optimizer would have it compute: matrices in the compute dtype, norms and biases in full."""
    full = torch.promote_types(compute, torch.float32)
    model.use_weights(
        {name: p.to(device, compute if p.dim() >= 2 else full) for name, p in model.named_parameters()}
    )


def _check_memory(
    shape: Shape, config: RunConfig, setting: Setting, device: str, dtype: str, allocator: float | None
) -> None:
    """Weights, gradients and states must fit, or nothing will."""
    storage, training = storage_of(setting), not config.eval_only
    held = resident(shape, setting, dtype, by_muon=config.by_muon, refined=is_refined(config))
    needed = total(held.card) if training else shape.parameters * torch_dtype(dtype).itemsize
    on_card = device.startswith("cuda")
    if training and not on_card and storage.offload != "none":
        # On a CPU both are the same memory, and offloading only adds a copy.
        needed += total(held.host)
    if allocator is not None:
        have, there = allocator, _("vram_limit and vram_reserve leave {n:,.1f} GiB")
    elif on_card:
        have, there = torch.cuda.mem_get_info(device)[0], _("{n:,.1f} GiB of the card are free")
    else:
        have, there = local_cpu().memory_bytes or needed, _("this machine has {n:,.1f} GiB")
    if needed > have:
        smaller = ["--offload=optimizer"] if training and on_card and storage.offload == "none" else []
        if training and not on_card and storage.offload != "none":
            smaller.append("--offload=none")
        if training and not storage.low_bit:
            smaller.append("--master_weights=bf16 --optim_states=int8 (low-bit)")
        smaller.append(_("a smaller n_layer or n_embd"))
        what = _("a model of {n:,.0f}M parameters cannot be evaluated here")
        why = _("the weights alone take {n:,.1f} GiB; {there}")
        if training:
            what = _("a model of {n:,.0f}M parameters cannot be trained here")
            why = _("weights, gradients and the optimizer's states alone take {n:,.1f} GiB; {there}")
        raise UserError(
            what.format(n=shape.parameters / 1e6),
            why.format(n=needed / 2**30, there=there.format(n=have / 2**30)),
            _("needs less: {flags}").format(flags=joined(smaller)),
        )


def _check_dropout(shape: Shape, config: RunConfig) -> None:
    """Masks count attention weights in 32 bits."""
    if config.dropout and not isinstance(shape, GPT2Shape):
        raise UserError(
            _("a model of architecture {arch} has no dropout").format(arch=shape.arch), hint="--dropout=0"
        )
    if config.dropout and shape.n_head * config.block_size**2 >= 2**31:
        raise UserError(
            _("dropout does not reach block_size {n} with {heads} heads").format(
                n=config.block_size, heads=shape.n_head
            ),
            _("its masks number at most 2^31 attention weights a sequence"),
            "--dropout=0",
        )
