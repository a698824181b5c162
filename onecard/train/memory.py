"""How much memory a run has taken, and what to do when there is not enough."""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback

import torch

from onecard.config.run import RunConfig
from onecard.errors import UserError, first_line
from onecard.hardware.machine import local_gpus
from onecard.language import N_, _, joined
from onecard.plan.bill import CONTEXT
from onecard.plan.search import pinned
from onecard.train.other_processes import careful_bytes, spilling_platform

# In the order in which torch looks for them; the older name is known to every version.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_HOST_OUT_OF_MEMORY = (
    "can't allocate memory", "DefaultCPUAllocator: not enough memory", "can't start new thread",
    "Cannot allocate memory", "std::bad_alloc", "HOST_ALLOCATION_FAILED",
    "could not create a primitive", "could not create a memory object",  # oneDNN's
)  # fmt: skip
_OUT_OF_MEMORY = (
    *_HOST_OUT_OF_MEMORY, "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA out of memory",
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9's name
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # on a full card
    "CUDA error: out of memory", "CUDA driver error: out of memory", "Triton Error [CUDA]: out of memory",
)  # fmt: skip
_LOW_BIT = N_("--master_weights=bf16 --optim_states=int8 trains in low bits: not the same training")
_SMALLER = N_("a smaller model or a shorter --block_size needs less of everything")
_CLOSE = N_("close other programs that use the card")
# By card: what CUDA itself took when the limit was set. Asking again takes a kernel and memory, and is asked
# for just when there is none.
_contexts: dict[int, int] = {}
# By card: the share of it that an earlier run in this process was capped at, and the one before that.
_own_caps: dict[int, tuple[float, float]] = {}


def peak_memory_gib(device: str) -> float | None:
    """Most memory held: by tensors on a card, since `measure_afresh`; by the whole process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux


def measure_afresh(device: str) -> None:
    """The peak from here on: of the setting that begins now."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def free_memory_gib(device: str) -> float | None:
    """What is left on the card for anybody, what our allocator holds and does not use included."""
    if not device.startswith("cuda"):
        return None
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + idle) / 2**30


def use_expandable_segments() -> None:
    """Ask the allocator for segments that grow: most fragmentation never comes about.

    Before the first allocation on the card. A user's own setting stays; Windows does not have it.
    """
    if sys.platform == "linux" and not any(n in os.environ for n in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[-1]] = "expandable_segments:True"


def cap_memory(
    device: str, limit_gib: float | None, reserve_gib: float | None
) -> tuple[float | None, list[str]]:
    """Hold the process below vram_limit and leave vram_reserve free.

    Both are about the whole process; what can be capped is the allocator, so the CUDA context (libraries,
    kernels) goes off first, as far as it is loaded by now. Returns the allocator's bytes, None for no cap,
    and notes for the user.
    """
    if device.startswith("cuda"):
        _lift_own_cap(device)
    if limit_gib is None and reserve_gib is None:
        return None, []
    if not device.startswith("cuda"):
        return None, [_("vram_limit and vram_reserve are about a card; this run computes on the CPU")]
    context = _contexts[_index(device)] = _context_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    allocator = allocator_bytes(device, limit_gib, reserve_gib)
    assert allocator is not None
    if allocator <= 0:
        raise UserError(
            _("vram_limit and vram_reserve leave nothing to train in"),
            _("{free:.2f} GiB of {total:.2f} are free; CUDA itself takes {own:.2f}").format(
                free=free / 2**30, total=total / 2**30, own=context / 2**30
            ),
            _("raise --vram_limit, lower --vram_reserve, or close other programs that use the card"),
        )
    index, share = _index(device), min(1.0, allocator / total)
    _own_caps[index] = (share, torch.cuda.get_per_process_memory_fraction(index))
    torch.cuda.set_per_process_memory_fraction(share, index)
    note = _("tensors may take {n:.2f} GiB of the card (CUDA itself: {own:.2f})").format(
        n=allocator / 2**30, own=context / 2**30
    )
    return allocator, [note]


def cap_again(device: str, limit_gib: float | None, reserve_gib: float | None) -> None:
    """Amid a run: others have come or gone, and what may be taken is more or less than at the start.

    Never less than stands on the card: a run that is to make do with less has to let go of something first.
    """
    if not device.startswith("cuda") or (limit_gib is None and reserve_gib is None):
        return
    index, total = _index(device), torch.cuda.mem_get_info(device)[1]
    allocator = allocator_bytes(device, limit_gib, reserve_gib)
    assert allocator is not None
    share = min(1.0, max(allocator, torch.cuda.memory_reserved(device)) / total)
    _own_caps[index] = (share, _share_from_outside(index))
    torch.cuda.set_per_process_memory_fraction(share, index)


def reserve_of(config: RunConfig, device: str) -> float | None:
    """GiB to leave free: the user's figure; some where the driver spills instead of failing; else none."""
    if config.vram_reserve is not None or not device.startswith("cuda") or not spilling_platform():
        return config.vram_reserve
    free, total = torch.cuda.mem_get_info(device)
    # Ours counts as free: a card that we have filled ourselves is to be left as much as an empty one.
    return careful_bytes(free + torch.cuda.memory_reserved(device), total, spills=True) / 2**30


def allocator_bytes(device: str, limit_gib: float | None, reserve_gib: float | None) -> float | None:
    """What tensors may take of the card now, all of ours included; None where there is no card."""
    if not device.startswith("cuda"):
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)  # ours already
    # The driver does not know of torch's own limit, which whoever started this process may have set.
    allocator = min(float(free), _share_from_outside(_index(device)) * total)
    if limit_gib is not None:
        context = _contexts.get(_index(device))
        allocator = min(
            allocator, limit_gib * 2**30 - (_context_bytes(device) if context is None else context)
        )
    if reserve_gib is not None:
        allocator = min(allocator, free - reserve_gib * 2**30)
    return allocator


def _index(device: str) -> int:
    """Not every call of torch's takes "cuda" for the current card."""
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _share_from_outside(index: int) -> float:
    """The share of the card that others have limited this process to: without our own cap, which is no reason
    to ask for less the next time."""
    now = torch.cuda.get_per_process_memory_fraction(index)
    own, before = _own_caps.get(index, (None, 1.0))
    # Not equal: torch keeps it as whole bytes.
    return before if own is not None and abs(now - own) < 1e-6 else now


def _lift_own_cap(device: str) -> None:
    """One run's vram_limit is not the next one's in the same process; a limit set by others stays."""
    index = _index(device)
    if index in _own_caps:
        torch.cuda.set_per_process_memory_fraction(_share_from_outside(index), index)
        del _own_caps[index]


def _context_bytes(device: str) -> int:
    """What this process holds on the card outside the allocator, as the driver counts it."""
    square = torch.ones(64, 64, device=device)
    torch.mm(square, square)  # a context, and the matmul library in it
    torch.cuda.synchronize(device)
    held = process_bytes_on(device)
    # WSL and containers do not report it.
    return CONTEXT if held is None else max(held - torch.cuda.memory_reserved(device), 0)


def process_bytes_on(device: str) -> int | None:
    """What this process holds of the card in all; None where the driver does not report it."""
    if not device.startswith("cuda"):
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    for gpu in local_gpus():
        if gpu.uuid is not None and uuid in gpu.uuid:
            for process in gpu.processes:
                if process.mine and process.memory_bytes:
                    return process.memory_bytes
    return None


def is_capped(device: str) -> bool:
    """May tensors take less than the card has? By our cap, or by whoever started this process."""
    if not device.startswith("cuda"):
        return False
    return torch.cuda.get_per_process_memory_fraction(_index(device)) < 1.0


def allocator_retries(device: str) -> int:
    """How often the allocator had to give everything back and start over: each time the card stands still."""
    if not device.startswith("cuda"):
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def is_out_of_memory(error: BaseException) -> bool:
    """On a card torch has an error of its own; its libraries and the CPU have RuntimeErrors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # a process or a mapping that the system has no memory for
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OUT_OF_MEMORY)


def is_of_host_memory(error: BaseException) -> bool:
    """Out of memory, and not of the card's."""
    if not is_out_of_memory(error) or isinstance(error, torch.OutOfMemoryError):
        return False
    return not isinstance(error, RuntimeError) or any(word in str(error) for word in _HOST_OUT_OF_MEMORY)


def ran_out(error: BaseException) -> bool:
    """The same, or host memory has no room for what was to move there: a UserError."""
    return is_out_of_memory(error) or isinstance(error, UserError)


def forget(error: BaseException) -> None:
    """Frames of a traceback hold tensors: the very ones there is no room for."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def out_of_memory(
    config: RunConfig, device: str, tried: str | None = None, opening: BaseException | None = None
) -> UserError:
    """What needs less, the cheapest first; what would be another training says so.

    `tried` is the last of the settings that auto_fit went through: none of them is advice any more.
    `opening`: what happened, where there was no step yet.
    """
    if tried is not None:
        hints = [_(_LOW_BIT)] if _could_be_lower(config) else []
        smallest = {"recompute": "block", "offload": "gradients"}
        held = [f"--{n}={v}" for n, v in pinned(config).items() if smallest.get(n, v) != v]
        if held:
            hints.insert(
                0,
                _("without your {flags} it could go on in less memory, and slower").format(
                    flags=" ".join(held)
                ),
            )
        hints += [_(_CLOSE), _(_SMALLER)] if device.startswith("cuda") else [_(_SMALLER)]
        why = _("even with {setting}").format(setting=tried)
        return UserError(_("out of memory"), why, joined(hints, "\n"), exit_code=1)
    hints = _for_training(config, on_card=device.startswith("cuda"))
    if config.eval_only:
        half = max(1, config.batch_size // 2)
        flags = f"--batch_size={half} --eval_iters={2 * config.eval_iters}"
        hints = [_("{flags} evaluates as much in smaller pieces").format(flags=flags)]
    hints.append(_(_SMALLER))
    why = _("a micro-batch of {n} sequences of {tokens} tokens does not fit").format(
        n=config.batch_size, tokens=config.block_size
    )
    if opening is not None:
        why = _("while the run was being opened: {error}").format(error=first_line(opening))
        hints = [_("close other programs"), *hints]
    elif not config.auto_fit:
        hints.insert(0, _("--auto_fit=True goes on by itself, in a setting that needs less"))
    return UserError(_("out of memory"), why, joined(hints, "\n"), exit_code=1)


def _for_training(config: RunConfig, on_card: bool) -> list[str]:
    hints = []
    if config.recompute in (None, "none", "mlp"):
        hints.append(_("--recompute=block keeps a tenth of the activations and computes the rest again"))
    half = _next_smaller(config.batch_size, config.sequences_per_step)
    if half is not None:
        more = config.sequences_per_step // half
        flags = f"--batch_size={half} --gradient_accumulation_steps={more}"
        hints.append(_("{flags} needs less for activations").format(flags=flags))
    if not on_card:
        pass  # host memory is what ran out
    elif config.offload in (None, "none"):
        hints.append(
            _("--offload=optimizer keeps masters and moments, {n} bytes a parameter, in RAM").format(n=12)
        )
    elif config.offload == "optimizer":
        hints.append(_("--offload=gradients keeps gradient accumulators in RAM too"))
    return [*hints, _(_LOW_BIT)] if _could_be_lower(config) else hints


def _could_be_lower(config: RunConfig) -> bool:
    return config.master_weights != "bf16" or config.optim_states != "int8"


def _next_smaller(batch_size: int, sequences_per_step: int) -> int | None:
    """The largest micro-batch of at most half the size that still makes the very same step."""
    return next((b for b in range(batch_size // 2, 0, -1) if sequences_per_step % b == 0), None)
