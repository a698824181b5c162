"""Facts and settings that stand around a log's rows: what its program prints as it begins, configs, and the
command line that began it."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from onecard.report.reading.names import word_set
from onecard.report.reading.numbers import whole

Value = int | float | str

# nanoGPT's count of parameters leaves position embeddings out.
FACTS: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = tuple(
    (name, re.compile(pattern), reader)
    for name, pattern, reader in (
        ("tokens_per_step", r"tokens per iteration will be: (\d[\d,]{0,20})", whole),
        ("tokens_per_step", r"Total batch size (\d[\d,]{0,20}) =>", whole),
        ("tokens_per_step", r"\btotal batch size +\| (\d{1,12})\b", whole),
        ("tokens_per_step", r"total desired batch size: (\d[\d,]{0,20})", whole),
        ("parameters", r"number of parameters: (\d[\d.]{0,12})M", lambda t: whole(t + "e6")),
        ("parameters_in_all", r"Number of parameters: (\d[\d,]{0,20})", whole),
        ("parameters_in_all", r"^\|? ?num_parameters +\| (\d{1,15})\b", whole),
        ("parameters_in_all", r"^total +: (\d[\d,]{0,20})$", whole),
        ("parameters_in_all", r"Total parameters: (\d[\d,]{0,20})$", whole),
        ("parameters_in_all", r"Number of trainable parameters = (\d[\d,]{0,20})", whole),
        ("flops_per_token", r"Estimated FLOPs per token: (\d(?:\.\d{1,12})?e\+?\d{1,2})\b", float),
        ("last_step", r"number of iterations[\w :]{0,40}: (\d[\d,]{0,20})", whole),
        ("last_step", r"^done at step [\d,]{1,20} of (\d[\d,]{0,20});", whole),
        ("last_step", r"Total optimization steps = (\d[\d,]{0,20})", whole),
        ("last_step", r"TrainOutput\(global_step=(\d{1,12}),", whole),
        ("last_step", r"\"max_steps\": (\d{1,12}),?$", whole),
        ("last_step", r"^stopping_early: .{1,80}\bstep:(\d{1,12})/", whole),  # by the clock
        ("planned_tokens", r"Total number of training tokens: (\d[\d,]{0,20})", whole),
        ("tokens_of_one_card", r"Tokens / micro-batch / rank: \d+ x \d+ = (\d[\d,]{0,20})", whole),
        ("tokens_of_all_cards", r"Tokens / micro-batch: (\d[\d,]{0,20})", whole),
        ("cards", r"^\| num_processes +\| (\d{1,5})\b", int),
        ("cards", r"Running Pytorch [\w.+]+ compiled for CUDA.{0,40}world_size[ :=]+(\d{1,5})", int),
        ("gpu", r"\bGPU: (.{2,80}?) \| Peak FLOPS", str.strip),
        ("gpu", r"^\| device +\| (.{2,60}?) +\|$", str.strip),
        ("gpu", r"\| +\d+ +(NVIDIA [\w .-]{2,40}?) +(?:On|Off|WDDM|TCC) +\|", str.strip),
        (
            "cards_shown",
            r"\| +(\d{1,2}) +NVIDIA [\w .-]{2,40}? +(?:On|Off|WDDM|TCC) +\|",
            lambda t: int(t) + 1,
        ),
        ("peak_flops", r"Peak FLOPS \(BF16\): (\d\.\d{1,12}e\+\d{1,2}|inf)\b", float),
        ("dtype", r"COMPUTE_DTYPE: (?:torch\.)?(bfloat16|float16|float32)", str),
        ("dtype", r"training tokens in .{1,200}; \w+(?::\d+)?, (bfloat16|float16|float32)", str),
        ("device", r"training tokens in .{1,200}; (\w+)(?::\d+)?, (?:bfloat16|float16|float32)", str),
        ("device", r"Autodetected device type: (\w+)", str),
        ("train_tokens", r"; (\d[\d,]{0,20}) training tokens in ", whole),
        ("vocab_size", r"found vocab_size = (\d{1,9})", int),
        ("vocab_size", r"Vocab size: (\d[\d,]{0,12})", whole),
        ("vocab_size", r"^\| padded_vocab_size Vp +\| (\d{1,9})\b", int),
    )
)
# A process that starts says one of these.
START = re.compile(
    r"Overriding config with |^\s*Overriding: \w+ = |tokens per iteration will be: |Vocab size: \d"
    r"|Initializing a new model from scratch|Resuming training from |Autodetected device type"
    r"|^\| train data pattern |\*{5} Running training \*{5}"
)
# One of these is in every line that START or one of FACTS finds.
HEAD_WORDS = (
    "tokens per iteration will be: ", "Total batch size ", "umber of parameters: ", "total batch size ",
    "Estimated FLOPs per token: ", "number of iterations", "Tokens / micro-batch", "Peak FLOPS",
    "COMPUTE_DTYPE: ", "training tokens", "found vocab_size = ", "Vocab size: ", "Overriding",
    "Initializing a new model from scratch", "Resuming training from ", "Autodetected device type",
    "total desired batch size", "num_parameters", "total ", "Total parameters", "trainable parameters",
    "Total optimization steps", "TrainOutput(", "max_steps", "num_processes", "Running Pytorch", "| device ",
    "NVIDIA", "padded_vocab_size", "done at step ", "train data pattern", "Running training",
    "stopping_early: ",
)  # fmt: skip

WANTED = word_set(
    "batch_size block_size gradient_accumulation_steps max_iters n_layer n_head n_embd vocab_size bias dtype "
    "device eval_interval eval_iters log_interval learning_rate min_lr warmup_iters lr_decay_iters decay_lr "
    "dropout weight_decay beta1 beta2 grad_clip dataset out_dir compile optimizer init_from seed arch depth "
    "tokens master_weights optim_states eval_only "
    # nanochat's
    "max_seq_len device_batch_size total_batch_size num_iterations target_param_data_ratio target_flops "
    "eval_tokens eval_every core_metric_every embedding_lr unembedding_lr matrix_lr warmup_ratio "
    "warmdown_ratio final_lr_frac lr_warmdown_ratio aspect_ratio head_dim window_pattern "
    "num_layers model_dim num_heads num_kv_heads sequence_len "
    # Hugging Face's
    "per_device_train_batch_size per_device_eval_batch_size max_steps num_train_epochs warmup_steps "
    "lr_scheduler_type logging_steps eval_steps bf16 fp16 torch_compile optim max_grad_norm "
    # litgpt's and others'
    "global_batch_size micro_batch_size lr_warmup_steps max_tokens max_seq_length grad_accum "
    "seq_len seq_length sequence_length context_length nproc_per_node adam_beta1 adam_beta2 warmdown_iters "
    "cooldown_iters cooldown_frac num_steps val_loss_every val_tokens"
)
# Of names that may be the end of a longer one: nobody knows, where a text begins with it.
_ENDS_OF_OTHERS = frozenset(name for name in WANTED if any(m != name and m.endswith(name) for m in WANTED))
# What llm.c calls nanoGPT's knobs, in the table it prints.
_TABLE_NAMES = {
    "micro batch size B": "batch_size", "sequence length T": "block_size",
    "learning rate (LR)": "learning_rate", "LR scheduler": "lr_scheduler",
    "warmup iterations": "warmup_iters", "weight decay": "weight_decay", "num_layers L": "n_layer",
    "num_heads NH": "n_head", "channels C": "n_embd", "max_steps": "max_iters",
    "final LR fraction": "final_lr_frac", "val_loss_every": "eval_interval", "val_max_steps": "eval_iters",
}  # fmt: skip
_TABLE_LINE = re.compile(r"^\| ([\w() ]{4,24}?) +\| (\S{1,60}) +\|$")
_CONFIG_LINE = re.compile(
    r"^\s*(?:Overriding:\s*)?[\"']?([A-Za-z_]\w{2,40})[\"']?\s*[=:]\s*([^#=\n]{1,200}?)\s*,?\s*(?:#.*)?$"
)
_INLINE = re.compile(
    r"(?<![\w.-])(?:--)?[\"']?([A-Za-z_]\w{2,40})[\"']?\s?[=:]\s?"
    r"([\"'][^\"'\n]{0,80}[\"']|[-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?(?![\w.])|True|False|true|false)"
)
_WORDS = ("bfloat16", "float16", "float32", "cpu", "cuda")  # values that are printed without quotes


def setting(text: str, known: Mapping[str, Value]) -> Value | None:
    """A literal, or a product such as `5 * 8` or `batch_size * 2`; None for anything else."""
    if text in ("true", "false"):
        return text == "true"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text if re.fullmatch(r"[\w.]{1,40}", text) else None
    return _value(node, known)


def _value(node: ast.expr, known: Mapping[str, Value], depth: int = 0) -> Value | None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as literal):
            return literal
        case ast.Name(id=name):
            return known.get(name, name if name in _WORDS else None)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as literal)):
            return -literal
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.FloorDiv() as op, right=right) if depth < 8:
            a, b = _value(left, known, depth + 1), _value(right, known, depth + 1)
            if not (isinstance(a, int | float) and isinstance(b, int | float)):
                return None
            if isinstance(op, ast.Mult):
                return a * b
            return (a // b if isinstance(op, ast.FloorDiv) else a / b) if b else None
    return None


def settings_of(line: str, known: Mapping[str, Value], *, first: bool = False) -> dict[str, Value]:
    """Settings that a program prints in this line or a config has. `first`: does the text begin here?"""
    if "|" in line and (row := _TABLE_LINE.match(line)):
        name = _TABLE_NAMES.get(row[1])
        value = setting(row[2], known) if name else None
        return {name: value} if name and value is not None and value != -1 else {}
    if found := _CONFIG_LINE.match(line):
        name = found[1]
        if name in WANTED and not (first and name in _ENDS_OF_OTHERS):
            value = setting(found[2], known)
            return {name: value} if value is not None else {}
    if line.lstrip()[:1] in "{[(" or "(" in line:  # a dict or a call with many of them
        found_here = inline_settings(line, known)
        return found_here if len(found_here) > 2 else {}
    return {}


def inline_settings(line: str, known: Mapping[str, Value]) -> dict[str, Value]:
    """`name=value` anywhere in a line."""
    found: dict[str, Value] = {}
    for name, text in _INLINE.findall(line):
        if name in WANTED and (value := setting(text, known)) is not None:
            found.setdefault(name, value)
    return found


def facts_of(line: str) -> dict[str, Any]:
    found = {}
    for name, pattern, reader in FACTS:
        if (match := pattern.search(line)) and (value := reader(match[1])) is not None:
            found[name] = value
    return found


# --- the command line -----------------------------------------------------------------------------

_COMMAND = re.compile(
    r"(?:^|[\s`$>])(?:[~.]?/[\w./-]{0,120}/)?("
    r"(?:python3?|torchrun|accelerate|deepspeed|uv run|onecard train|mpirun|\./train)\b[^`\n]{0,4000}"
    r"|[\w./]{0,60}train\w{0,20}\.(?:py|cu|sh)\b[^`\n]{0,4000})"
)
_TRAINS = re.compile(r"train|pretrain|run_clm|\bsft\b", re.IGNORECASE)
_SHORT = {  # of llm.c's train_gpt2cu
    "-b": "batch_size", "-t": "block_size", "-l": "learning_rate", "-u": "warmup_iters", "-c": "weight_decay",
    "-x": "max_iters", "-v": "eval_interval", "-q": "final_lr_frac", "-n": "checkpoint_every",
    "-k": "lr_scheduler", "-d": "total_batch_size",
}  # fmt: skip
MAY_BE_COMMAND = re.compile(r"python|torchrun|accelerate|deepspeed|uv run|onecard train|mpirun|train\w*\.")


def command_of(line: str) -> str | None:
    """The command in this line that begins a training; None where there is none."""
    if not MAY_BE_COMMAND.search(line) or (found := _COMMAND.search(line)) is None:
        return None
    text = found[1].strip()
    programs = [word for word in text.split()[:40] if not word.startswith("-") and "=" not in word]
    trains = any(_TRAINS.search(word) for word in programs) and "-" in text
    return text if trains or ".py config/" in text else None


def is_offered(line: str, command: str) -> bool:
    """Does a sentence introduce the command ("to train further: ..."), so that nobody has typed it?"""
    return re.search(r"[^\W\d]:\s*$", line[: line.find(command)]) is not None


def command_settings(command: str) -> tuple[dict[str, Value], dict[str, str]]:
    """(settings by name, the words each was read from): flags as the trainer names them."""
    try:
        pieces = shlex.split(command, comments=True)
    except ValueError:
        pieces = command.split()
    found: dict[str, Value] = {}
    evidence: dict[str, str] = {}
    for index, piece in enumerate(pieces):
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        flag, equals, text = piece.partition("=")
        short = _SHORT.get(piece) if "gpt2cu" in command else None
        if not (flag.startswith("--") and len(flag) > 2) and short is None:
            continue
        name = short or flag[2:].rpartition(".")[2].replace("-", "_")
        if not equals:
            negative = re.match(r"-[\d.]", following) is not None
            text = following if following and (negative or not following.startswith("-")) else "True"
        if name in WANTED or short:
            value = setting(text, found)
            if value is None and re.fullmatch(r"[\w./-]{1,80}", text):
                value = text
            if value is not None:
                found[name] = value
                evidence[name] = piece if equals or text == "True" else f"{piece} {text}"
    return found, evidence
