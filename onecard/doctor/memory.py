"""Diagnosis of an out-of-memory error: which tensor, when, whether the card was full, and what fits
instead."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onecard.arch.shapes import GPT2Shape, Shape
from onecard.config.run import RunConfig
from onecard.doctor import tensor as of_tensor
from onecard.doctor.cures import (
    COMFORT,
    DESKTOP,
    Cure,
    Folklore,
    InTheirs,
    cure_here,
    cures_there,
    folklore_of,
    in_theirs,
    with_card_as_said,
)
from onecard.doctor.diagnosis import Diagnosis, Evidence
from onecard.doctor.frames import Buffer
from onecard.doctor.other_memory import of_other_memory
from onecard.doctor.out_of_memory import OutOfMemory
from onecard.doctor.paste import USUAL_VOCABULARIES, Pasted
from onecard.doctor.tensor import Dimensions, Tensor, which
from onecard.language import N_, _
from onecard.plan.answer import question_of
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.others.bills import TRAINERS

MIB = 2**20
# Free memory so many times what was tried is no full card.
PLENTY = 4
MOMENTS = {
    of_tensor.LOADING: N_("while the model was loaded"),
    of_tensor.FORWARD: N_("in a forward pass"),
    of_tensor.LOSS: N_("at the logits and the loss"),
    of_tensor.BACKWARD: N_("in the backward pass"),
    of_tensor.UPDATE: N_("in the optimizer step"),
    of_tensor.EVALUATION: N_("in an evaluation"),
    of_tensor.SAMPLING: N_("while text was generated"),
    of_tensor.RESUMING: N_("while a checkpoint was loaded"),
    of_tensor.COMPILING: N_("while kernels were compiled and tuned"),
}
TYPES = {1: "1 byte", 2: "bf16", 4: "fp32", 8: "8 bytes"}


@dataclass(frozen=True)
class Case:
    """All that is known of one error. `config` is None where nothing shows the model."""

    message: OutOfMemory
    moment: str | None
    buffers: tuple[Buffer, ...]
    pasted: Pasted
    config: RunConfig | None
    target: Target | None  # None: nobody says which card
    command: str = "onecard train"  # that trains the same config here

    @property
    def compiled(self) -> bool:
        if self.pasted.compiled is not None:
            return self.pasted.compiled
        return self.config.compile if self.config is not None else True


def diagnose(case: Case) -> Diagnosis:
    message = case.message
    if (other := of_other_memory(message)) is not None:
        return other
    found = which_tensor(case)
    evidence = [*_tensor_evidence(case, found), *_card_evidence(message)]
    theirs = _theirs(case)
    cures: list[Cure] = []
    folklore: list[Folklore] = []
    unknown: list[str] = []
    cause, what, more = _what(case, theirs)
    evidence += more
    if theirs is not None:
        alone = _fits_alone(case, theirs)
        reserve = DESKTOP if alone else 0
        if alone and not _others(message) and not _is_limit(message) and not _was_not_full(message):
            unknown.append(
                _("who held the rest: a desktop, a browser, a Python left over? nvidia-smi lists them")
            )
        if not theirs.bill(theirs.config.batch_size, compiled=case.compiled).confirmed:
            name = TRAINERS[theirs.trainer].name
            text = _("no card has confirmed {trainer}'s bill at such sizes: it may be 15% off")
            unknown.append(text.format(trainer=name))
        cures += cures_there(theirs, compiled=case.compiled, reserve=reserve)
        folklore += folklore_of(theirs, compiled=case.compiled, short=_short(message), spare=_spare(message))
    if case.config is not None and case.target is not None:
        here = cure_here(question_of(case.config, _card(case)), case.command)
        if here is not None:
            cures.append(here)
    else:
        unknown.append(
            _("the config is not in the paste: with --config FILE cures are computed")
            if case.config is None
            else _("the card is not in the paste: --gpu NAME, such as --gpu 'RTX 4070'")
        )
    if not theirs and case.config is not None and case.target is not None:
        unknown.append(_("memory of this trainer is not modelled; figures are of onecard's own"))
    advice = _advice(message)
    if theirs is None and (segments := _segments_advice(message)) is not None:
        folklore.append(segments)
    if message.cut:
        unknown.append(_("the message is cut: the amounts behind it say whether the card was full"))
    return Diagnosis(
        "out-of-memory", what, tuple(evidence), tuple(cures), tuple(advice), tuple(folklore), tuple(unknown),
        next=_next(case), paste=_("the next error in full, or the first ten lines of the log"),
        moment=case.moment, tensor=_shown(found[0]) if len(found) else "", cause=cause,
    )  # fmt: skip


# --- which tensor -----------------------------------------------------------------------------------


def dimensions_of(config: RunConfig, shape: Shape, compiled: bool) -> Dimensions:
    """Sizes of a step of this config, of nanoGPT's or nanochat's model."""
    is_gpt2 = isinstance(shape, GPT2Shape)
    return Dimensions(
        config.batch_size, shape.block_size, shape.n_embd, shape.n_layer, shape.n_head, shape.vocab_size,
        head_dim=shape.head_dim, fused_qkv=is_gpt2, stacked=not is_gpt2, positions=is_gpt2,
        half=config.dtype != "float32",
    )  # fmt: skip


def which_tensor(case: Case) -> tuple[Tensor, ...]:
    """At most three, best first. A buffer of the traceback's own that has the size is the one."""
    tried = case.message.tried
    shown = []
    for buffer in case.buffers:
        for item in (buffer.item,) if buffer.item else (2, 4):
            size = buffer.bytes(item) or 0
            printed = of_tensor.segment_of(size)
            if tried is None or tried.low <= printed <= tried.high:
                role = N_("a tensor of the compiler's code")
                if buffer.shape[-1] in USUAL_VOCABULARIES:
                    role = N_("logits, or a copy or gradient of them")
                shown.append(Tensor(role, buffer.shape, item, frozenset(), 100.0))
                break
    known = None
    if case.config is not None:
        shape = _shape(case.config)
        known = dimensions_of(case.config, shape, case.compiled) if shape is not None else None
    if tried is None:
        return tuple(shown[:1])
    candidates = which(tried, known, case.moment).candidates
    named = [t for s in shown for t in candidates if t.shape == s.shape and t.item == s.item]
    best = named or shown
    rest = [t for t in candidates if t not in best]
    found = tuple([*best[:1], *rest][: of_tensor.MOST])
    if not found and known is None:
        values = case.pasted.values
        return of_tensor.usual_logits(tried, values.get("batch_size"), values.get("block_size"))
    return found


def _shape(config: RunConfig) -> Shape | None:
    from onecard.config.resolve import resolve
    from onecard.errors import UserError

    try:
        return resolve(config).shape
    except UserError:
        return None


def _shown(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape))} {TYPES.get(tensor.item, '')}".strip()


def _tensor_evidence(case: Case, found: tuple[Tensor, ...]) -> list[Evidence]:
    tried = case.message.tried
    if tried is None and not found:
        return [Evidence(_("the message names no size"), key="tensor")] if case.message.words else []
    segment = which(tried, None).segment if tried is not None else None
    if segment is not None and not found:
        text = (
            _(
                "2.00 MiB is what PyTorch takes for any tensor of up to 1 MiB: the size names no tensor, "
                "the card was full"
            )
            if segment == 2
            else _("20.00 MiB is what PyTorch takes for any tensor of 1 to 10 MiB: the size names no tensor")
        )
        return [Evidence(text, key="tensor")]
    if not found:
        return [Evidence(_("no tensor of this config has the size that was tried"))] if case.config else []
    first = found[0]
    text = _("{shape} are {bytes:,} bytes ({gb:.3f} GB, {gib:.3f} GiB): {role}").format(
        shape=_shown(first),
        bytes=first.bytes,
        gb=first.bytes / 1e9,
        gib=first.bytes / GIB,
        role=_(first.role),
    )
    if first.shape[-1] in USUAL_VOCABULARIES and first.item == 2:
        text += "; " + _("there are several copies, the fp32 one has {gib:.2f} GiB").format(
            gib=2 * first.bytes / GIB
        )
    others = [_("or {shape}: {role}").format(shape=_shown(t), role=_(t.role)) for t in found[1:]]
    guess = [] if case.config is not None or case.buffers else [_("a guess from usual sizes")]
    return [Evidence("; ".join([text, *others, *guess]), key="tensor")]


# --- the card ---------------------------------------------------------------------------------------


def _spare(message: OutOfMemory) -> int | None:
    spare = message.spare
    return spare.middle if spare is not None else None


def _short(message: OutOfMemory) -> int | None:
    """Bytes that were missing: what was tried, less what the driver still had."""
    if message.tried is None:
        return None
    free = message.free.middle if message.free is not None else 0
    if message.allowed is not None and message.allocated is not None:
        spare = _spare(message) or 0
        free = min(free, max(0, message.allowed.middle - message.allocated.middle - spare))
    return max(0, message.tried.middle - free)


def _others(message: OutOfMemory) -> int:
    """Bytes that other processes hold, by their own lines or by what is left over."""
    if message.others:
        return sum(amount.middle for _pid, amount in message.others)
    if message.capacity is None or message.free is None:
        return 0
    if message.in_use is not None:
        left = message.capacity.middle - message.free.middle - message.in_use.middle
        return left if left > 100 * MIB else 0
    # Versions before 2.0 do not say what the process holds: what it has reserved, and CUDA's own.
    if message.reserved is None or message.reserved.middle < (message.allocated or message.reserved).middle:
        return 0
    left = message.capacity.middle - message.free.middle - message.reserved.middle - CONTEXT
    return left if left > GIB else 0


def _card_evidence(message: OutOfMemory) -> list[Evidence]:
    found = []
    if message.allowed is not None and message.free is not None and message.tried is not None:
        found.append(
            Evidence(
                _(
                    "this process may take {allowed:.2f} GiB (set_per_process_memory_fraction); the card "
                    "has {free:.2f} GiB free"
                ).format(allowed=message.allowed.middle / GIB, free=message.free.middle / GIB)
            )
        )
    elif message.capacity is not None and message.free is not None:
        text = _("of the card's {capacity:.2f} GiB {free:.2f} were free").format(
            capacity=message.capacity.middle / GIB, free=message.free.middle / GIB
        )
        if message.allocated is not None:
            text += _(", {allocated:.2f} in PyTorch's tensors").format(
                allocated=message.allocated.middle / GIB
            )
        if others := _others(message):
            text += _(", {others:.2f} held by other programs").format(others=others / GIB)
        found.append(Evidence(text))
    return found


def _card(case: Case) -> Target:
    """The target as the message has it: its capacity, and what others hold."""
    assert case.target is not None
    message = case.message
    if message.allowed is not None:
        return replace(case.target, allowed=min(case.target.allowed, message.allowed.middle + CONTEXT))
    capacity = message.capacity.high if message.capacity is not None else None
    return with_card_as_said(case.target, capacity, _others(message))


def _theirs(case: Case) -> InTheirs | None:
    if case.config is None or case.target is None:
        return None
    return in_theirs(case.config, _card(case), case.pasted.trainer or "nanogpt")


def _fits_alone(case: Case, theirs: InTheirs) -> bool:
    return theirs.runs(theirs.config.batch_size, compiled=case.compiled)


def _what(case: Case, theirs: InTheirs | None) -> tuple[str, str, list[Evidence]]:
    """(the cause, the sentence that says what happened, figures for it)."""
    message = case.message
    when = _(MOMENTS[case.moment]) if case.moment else _("at a moment that the paste does not show")
    others = _others(message)
    if _is_limit(message):
        text = _("The process ran into its own limit {when}; the card was not full.")
        return "limit", text.format(when=when), []
    if _was_not_full(message):
        text = _("The card was not full: it had several times as much free as was tried ({when}).")
        return "not-full", text.format(when=when), []
    if others > GIB:
        text = _("The card was full {when}, and {n:.2f} GiB of it belonged to other programs.")
        return "other-programs", text.format(when=when, n=others / GIB), []
    if theirs is None:
        return "", _("The card was full {when}.").format(when=when), []
    bill = theirs.bill(theirs.config.batch_size, compiled=case.compiled)
    need, there = (bill.reserved + CONTEXT) / GIB, theirs.target.allowed / GIB
    text = _("{trainer} at this config: {need:.2f} GiB predicted, {there:.2f} there")
    name = TRAINERS[theirs.trainer].name
    figures = Evidence(text.format(trainer=name, need=need, there=there), key="bill")
    if _fits_alone(case, theirs):
        text = _("It ran out {when}, though it fits with {n:.2f} GiB to spare: something else held them.")
        return "something-else", text.format(when=when, n=max(0.0, there - need)), [figures]
    text = _("The card is too small for this config: it ran out {when}.")
    return "too-small", text.format(when=when), [figures]


def _is_limit(message: OutOfMemory) -> bool:
    if message.allowed is None or message.free is None or message.tried is None:
        return False
    return message.free.low > message.tried.high


def _was_not_full(message: OutOfMemory) -> bool:
    if message.free is None or message.tried is None or message.allowed is not None:
        return False
    return message.free.low > PLENTY * message.tried.high


def _segments_advice(message: OutOfMemory) -> Folklore | None:
    from onecard.doctor.cures import _segments

    spare, short = _spare(message), _short(message)
    return _segments(spare, short) if spare is not None and short is not None else None


def _advice(message: OutOfMemory) -> list[str]:
    found = []
    for pid, amount in message.others[:2]:
        if amount.middle > COMFORT:
            text = _("process {pid} holds {n:.2f} GiB: nvidia-smi names it; if it was left over, kill {pid}")
            found.append(text.format(pid=pid, n=amount.middle / GIB))
    if _is_limit(message):
        found.append(_("raise or drop torch.cuda.set_per_process_memory_fraction"))
    return found


def _next(case: Case) -> str:
    if case.config is None:
        return "onecard doctor - --config CONFIG.py"
    depth, named = case.config.depth, case.target is not None and not case.target.here
    if depth is not None:
        card = f" --gpu '{case.target.card.name}'" if case.target is not None and named else ""
        return f"onecard plan --depth={depth} --generation={case.config.generation}{card}"
    gpu = f" --gpu '{case.target.card.name}'" if case.target is not None and not case.target.here else ""
    return f"onecard plan CONFIG.py --as nanogpt{gpu}"
