"""What the command line says: help, refusals and short answers, at 80 columns. To be changed on purpose only.

A file for each verb: every call with its exit code, what it prints and what it says on stderr. Calls that
depend on the machine (its card, its memory) are not here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from corpora import text_of, write_corpus
from doors import onecard, with_configs, without_paths
from recorder import HERE, frozen

from onecard import __version__

TINY = (
    "--dataset=text --device=cpu --no-compile --n_layer=2 --n_head=2 --n_embd=16 --block_size=32 "
    "--batch_size=4 --gradient_accumulation_steps=1 --max_iters=2 --eval_iters=1 --dtype=float32"
)
# One call a line, as in a shell.
CALLS: dict[str, str] = {
    "onecard": """

        --help
        --version
        trian
        prepair
        --out_dir=out
    """,
    "train": """
        --help
        config/missing.py
        config
        hostile/call.py
        hostile/broken.py
        hostile/loop.py
        hostile/binary.py
        hostile/type.py
        hostile/unknown.py
        hostile/time.py --n_lair=3
        config/train_shakespeare_char.py --n_lair=3
        --n_lair=3
        --learnig_rate=1e-3
        --n_layer=twelve
        --n_layer=12.5
        --n_layer=0
        --n_layer=99999
        --n_layer
        --n_layer=
        --learning_rate=fast
        --learning_rate=1e999
        --dropout=1.5
        --bias=perhaps
        --compile=2
        --no-n_layer
        --dtype=fp8
        --arch=llama
        --arch=gpt2 --depth=12
        --arch=nanochat --depth=12 --n_layer=10
        --arch=nanochat --dropout=0.1
        --arch=nanochat --bias=True
        --arch=nanochat --optimizer=adamw
        --arch=nanochat --generation=2024
        --arch=nanochat --n_embd=16 --n_head=2
        --arch=nanochat --window_pattern=SXL
        --n_embd=100 --n_head=12
        --tokens=3B --max_iters=100
        --tokens=many
        --min_lr=1 --learning_rate=0.1
        --total_batch_size=1000
        --total_batch_size=24576 --gradient_accumulation_steps=3
        --extend=rewarm
        --extend_lr=0.1
        --extend=longer
        --init_from=gpt5
        --init_from=resume --fresh
        --target_flops=1e18
        --core_metric_every=2
        --fp8
        -n_layer=3
        hello
        --dataset=missing --device=cpu
        --dataset=/ --device=cpu
        --dataset=text --device=tpu
        --dataset=short --block_size=512 --device=cpu
        --dataset=cut --device=cpu
        --dataset=empty --device=cpu
        --dataset=future --device=cpu
        --dataset=foreign --vocab_size=50 --block_size=32 --device=cpu --no-compile --out_dir=new
        --dataset=odd --device=cpu
        TINY --out_dir=text.txt
        TINY --out_dir=thesis
        TINY --out_dir=mine
        TINY --out_dir=mine --init_from=scratch
        TINY --out_dir=new --init_from=resume
        TINY --out_dir=new --init_from=./missing
        TINY --out_dir=new --init_from=text.txt
        TINY --out_dir=new --init_from=gpt2-huge
        TINY --out_dir=new --extend=stay
        TINY --out_dir=new --fallback_dir=new/second
        TINY --out_dir=new --init_from=nanogpt/ckpt.pt
        --out_dir=new --pause
        --out_dir=mine --pause
        --out_dir=mine --resume-now
        --out_dir=damaged --device=cpu
    """,
    "sample": """
        --help
        --out_dir=missing
        --out_dir=empty
        --out_dir=mine --step=7
        --out_dir=mine --num_samples=0
        --out_dir=mine --temperature=-1
        --out_dir=mine --top_p=2
        --out_dir=mine --strat=hello
        --out_dir=mine --start=ümlaut --device=cpu
        --out_dir=mine --start=FILE:missing.txt --device=cpu
        --out_dir=mine --start=FILE:binary.txt --device=cpu
        --out_dir=mine --device=tpu
        --out_dir=mine --n_layer=3 --device=cpu --num_samples=1 --max_new_tokens=5 --start=The
        --init_from=scratch
        --init_from=gpt5
        --init_from=./missing
        --init_from=text.txt --device=cpu
        --out_dir=damaged --device=cpu
        config/missing.py
    """,
    "plan": """
        --help
        config/missing.py --gpu 4070
        config/train_gpt2.py --gpu 4071
        config/train_gpt2.py --gpu "RTX 3080"
        config/train_gpt2.py --gpu ""
        config/train_gpt2.py --gpu
        config/train_gpt2.py --gpu "Card 99999999GB" --tflops 30 --bandwidth 100
        config/train_gpt2.py --gpu "My Card" --tflops 30
        config/train_gpt2.py --gpu 4070 --tflops fast
        config/train_gpt2.py --gpu 4070 --tflops 0
        config/train_gpt2.py --gpu 4070 --price 0,30
        config/train_gpt2.py --gpu 4070 --host-ram -1
        config/train_gpt2.py --gpu 4070 --as llama.cpp
        config/train_gpt2.py --gpu 4070 --as nanogpt --compare
        config/train_gpt2.py --gpu 4070 --largest --stages
        config/train_gpt2.py --gpu 4070 --by yesterday
        config/train_gpt2.py --gpu 4070 --by 25:00
        config/train_gpt2.py --gpu 4070 --by 2001-01-01
        config/train_gpt2.py --gpu 4070 --by 1ms
        config/train_gpt2.py --gpu 4070 --compair
        config/train_gpt2.py --gpu 4070 --json=no
        config/train_gpt2.py --gpu 4070 --max_iters=0
        config/train_gpt2.py --gpu 4070 --n_layers=3
        config/train_gpt2.py --gpu 4070 --vram_reserve=12
        config/train_gpt2.py --gpu 4070 --vram_limit=100 --eval_only=True --watts 150
        config/train_gpt2.py --gpu 4070 --vram_limit=0.8 --largest
        config/train_d12.py --gpu 4070 --as nanogpt
        config/train_gpt2.py --gpu 4070 --as nanogpt --dropout=0.99 --optimizer=muon
        config/train_gpt2.py --device=cpu
        mine damaged --gpu 4070
        mine --gpu 4070
        damaged --gpu 4070
        nosuchfile --gpu 4070
    """,
    "prepare": """
        --help

        missing.txt
        missing.txt --check
        corpus text.txt
        corpus --tokenizer=bert
        corpus --tokenizer=gpt2 --train-tokenizer=512
        corpus --train-tokenizer=5
        corpus --train-tokenizer=60000 --name=large
        corpus --train-tokenizer=many
        corpus --tokens=many
        corpus --tokens=0
        corpus --val-fraction=0.9
        corpus --val-fraction=x
        corpus --name=../up
        corpus --name=a/b
        corpus --dump=CC-MAIN-2013-20
        corpus --edu
        corpus --texts
        corpus --text-column=missing --tokenizer=byte --name=columns
        nothing
        binary.txt --tokenizer=byte
        archive.zip
        fineweb --dump=2013
        fineweb --tokenizer=char
        shakespeare --edu
        fineweb --tokens=1M
        text.txt --tokenizer=char
        text.txt --tokenizer=byte
        text.txt --tokenizer=char --tokens=100
        corpus --name=text --tokenizer=char
        data/text --check
        data/cut --check
        data/foreign --check
        data/odd --check
        data/empty --check
    """,
    "export": """
        --help

        mine
        missing folder
        mine corpus
        mine text.txt --to=nanogpt
        mine text.txt
        mine new --to=gguf
        mine new --step=7
        mine new --step=x
        mine new --stepp=7
        empty new
        damaged new
        nanochat new
        nanochat new.pt
    """,
    "eta": """
        --help

        missing.log
        corpus
        empty
        binary.txt
        log.txt --gpu=4071
        log.txt --gpu="RTX 3080"
        log.txt --gpu=4070 --max-iters=6000 --tokens=3B
        log.txt --gpu=4070 --max-iters=10
        log.txt --gpu=4070 --max-iters=0
        log.txt --gpu=4070 --max-iters=1.5
        log.txt --gpu=4070 --max-iter=5
        log.txt --gpu=4070 --batch-size=16
        log.txt --gpu=4070 --batch-size=0
        log.txt --gpu=4070 --tokens=many
        log.txt --gpu=4070 --config=missing.py
        log.txt --gpu=4070 --config=hostile/call.py
        headless.log --gpu=4070 --tokens=3B
        text.txt --gpu=4070
        damaged --gpu=4070
    """,
    "gpus": """
        --help
        4070
        "rtx4070 laptop"
        4071
        "RTX 3080"
        a b
        --jsn
    """,
    "bench": """
        --help
        --seconds=0
        --seconds=soon
        --device=cpu --power-limits=200,170
        config/demo.py --power-limits=200,170
        --power-limits=high
        --sceonds=3
        a b
    """,
}


def place(folder: Path) -> Path:
    """What the calls are about: configs, data, runs, whole and damaged."""
    with_configs(folder)
    write_corpus(folder / "corpus")
    (folder / "text.txt").write_text(text_of(9, 3000), encoding="utf-8")
    assert onecard("prepare", "text.txt", "--tokenizer=char", folder=folder).code == 0
    shutil.copytree(HERE / "runs" / "gpt2", folder / "mine")
    shutil.copytree(HERE / "runs" / "nanochat-2026", folder / "nanochat")
    shutil.copytree(HERE.parent / "fixtures" / "nanogpt", folder / "nanogpt")
    (folder / "log.txt").write_bytes((HERE / "logs" / "nanogpt-40m.log").read_bytes())
    (folder / "headless.log").write_bytes((HERE / "logs" / "nanogpt-headless.log").read_bytes())
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "archive.zip").write_bytes(b"PK\3\4" + bytes(60))
    for name in ("empty", "nothing", "thesis"):
        (folder / name).mkdir()
    (folder / "nothing" / "empty.txt").touch()
    (folder / "thesis" / "chapter.tex").write_text("not a run's")
    shutil.copytree(HERE / "runs" / "gpt2", folder / "damaged")
    (folder / "damaged" / "config.json").write_text("{cut")
    for file in (folder / "damaged" / "checkpoints").rglob("model.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    hostile = folder / "hostile"
    hostile.mkdir()
    for name, content in HOSTILE.items():
        (hostile / f"{name}.py").write_bytes(content)
    datasets(folder / "data")
    for age, name in enumerate(
        ("nanogpt/ckpt.pt", *(f"{run}/checkpoints" for run in ("nanochat", "damaged", "mine")))
    ):
        if (folder / name).exists():
            os.utime(folder / name, (age, age))  # messages list the newest first
    return folder


HOSTILE = {
    "call": b"import os\nout_dir = os.system('id')\n",
    "broken": b"n_layer = = 3\n",
    "loop": b"for n in range(3):\n    n_layer = n\n",
    "binary": bytes(range(128, 256)),
    "type": b"n_layer = 'twelve'\n",
    "unknown": b"n_layers = 3\nlearning_rte = 1\n",
    "time": b"import time\nout_dir = 'out' + str(time.time())\n",
}


def datasets(data: Path) -> None:
    """As people and other programs leave them."""
    tokens = (np.arange(400) % 60).astype("<u2")
    for name in ("short", "cut", "empty", "foreign", "odd", "future"):
        (data / name).mkdir()
        tokens.tofile(data / name / "train.bin")
        tokens.tofile(data / name / "val.bin")
    (data / "empty" / "train.bin").write_bytes(b"")
    (data / "odd" / "train.bin").write_bytes(b"abc")
    meta = json.loads((data / "text" / "meta.json").read_text())
    (data / "cut" / "meta.json").write_text(json.dumps(meta))
    (data / "future" / "meta.json").write_text(json.dumps(meta | {"schema": 99}))


# How long it took, and when it would be done.
_CLOCK = re.compile(r"in [\d.]+ s\b|(?<=done )\d{4}-\d\d-\d\d(\s+\d\d:\d\d)?|(?<=  done )[\s\S]*?now\n")


@pytest.mark.parametrize("verb", CALLS)
def test_the_command_line_says_what_was_recorded(verb: str, tmp_path: Path) -> None:
    folder, blocks = place(tmp_path), []
    for line in CALLS[verb].splitlines()[1:-1]:
        words = shlex.split(line.replace("TINY", TINY))
        code, out, err = onecard(*([] if verb == "onecard" else [verb]), *words, folder=folder)
        shown = f"$ onecard {'' if verb == 'onecard' else verb} {line.strip()}\nexit code {code}\n"
        shown += "".join(f"{name}\n{text}\n" for name, text in (("--- out", out), ("--- err", err)) if text)
        shown = _CLOCK.sub("...", without_paths(shown, folder))
        blocks.append(shown.replace(__version__, "VERSION"))
    frozen(f"texts/{verb}.txt", "\n".join(blocks))
