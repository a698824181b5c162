"""Which texts are held out: the wanted share, however few and uneven they are; sides that stay."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.config.dataset import character_table
from onecard.data.prepare import split
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.outcome import PreparedFacts
from onecard.data.prepare.reading import DIGEST_SPAN, Batch, Place, document_digest
from onecard.data.prepare.split import even_rule
from onecard.errors import UserError


def batch_of(texts: list[str]) -> Batch:
    batch = Batch()
    for number, text in enumerate(texts):
        batch.add(text.encode(), document_digest(text.encode()), True, Place(0, number + 1))
    return batch


def held_out(rule: split.Rule, texts: list[str]) -> set[str]:
    _, chosen = rule.assign(batch_of(texts))
    return {text for text, is_out in zip(texts, chosen, strict=True) if is_out}


def uneven(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    return [f"{seed} {n} " + "x" * int(chance.paretovariate(1.5) * 100) for n in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_of_149_uneven_documents_a_tenth_is_held_out(seed: int) -> None:
    texts = uneven(seed, 149)
    total = sum(map(len, texts))
    share = sum(map(len, held_out(even_rule([batch_of(texts)], DIGEST_SPAN // 10), texts))) / total
    assert 0.08 <= share <= 0.12


def test_one_document_of_nearly_all_is_trained_on() -> None:
    texts = ["giant " * 10_000, *(f"note {n} " * 50 for n in range(10))]
    for seed in range(10):
        named = [f"{seed} {text}" for text in texts]
        chosen = held_out(even_rule([batch_of(named)], DIGEST_SPAN // 10), named)
        assert chosen and not any("giant" in text for text in chosen)


@given(st.lists(st.text(min_size=1, max_size=30), min_size=2, max_size=60), st.sampled_from([0.02, 0.1, 0.5]))
def test_equal_documents_are_on_one_side_and_later_ones_move_nothing(texts: list[str], share: float) -> None:
    rule = even_rule([batch_of(texts)], int(share * DIGEST_SPAN))
    before = held_out(rule, texts)
    again = held_out(rule, [*texts, "later", *texts])
    assert again - {"later"} == before


def test_very_many_documents_get_no_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are even by themselves; data prepared before there were salts goes on as it was."""
    monkeypatch.setattr(split, "_LOOKED_OVER_DOCUMENTS", 10)
    rule = even_rule([batch_of(uneven(0, 20))], DIGEST_SPAN // 10)
    assert rule.salt == 0
    digests_D = np.arange(0, DIGEST_SPAN, 2**20, dtype=np.uint64)
    assert rule.holds_out(digests_D).tolist() == (digests_D < rule.threshold).tolist()


# --- through the front door ---------------------------------------------------------------------


def run(root: Path, *inputs: Path, **options: Any) -> PreparedFacts:
    options = {"tokenizer": "byte", "out_root": str(root / "data"), "name": "it"} | options
    return prepare([str(given) for given in inputs], PrepareOptions(**options), progress=False)


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def test_prepare_holds_out_the_wanted_share_and_growth_keeps_the_sides(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", uneven(3, 149))
    meta = run(tmp_path, corpus).meta
    assert 0.09 <= meta["splits"]["val"]["tokens"] / meta["tokens"] <= 0.11
    before = {name: (tmp_path / "data" / "it" / name).read_bytes() for name in ("train.bin", "val.bin")}
    (corpus / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in uneven(4, 300)))
    grown = run(tmp_path, corpus)
    for name, content in before.items():
        bin = (grown.folder / name).read_bytes()
        assert bin.startswith(content) and len(bin) > len(content)


def test_the_summary_says_the_share_and_what_comes_next(tmp_path: Path, monkeypatch: Any) -> None:
    from onecard.data.prepare.outcome import summary

    write(tmp_path / "corpus", uneven(3, 149))
    monkeypatch.chdir(tmp_path)
    facts = prepare(["corpus"], PrepareOptions(tokenizer="byte"), progress=False)
    val = facts.meta["splits"]["val"]
    share = val["tokens"] / facts.meta["tokens"]
    lines = summary(facts).splitlines()
    how = f"{val['documents']} of 149 documents, {share:.1%} of the tokens (the aim was 10.0%)"
    assert f"  validation: {how}, chosen by hash" in lines
    assert lines[-1] == "next: onecard plan config/demo.py --dataset=corpus --out_dir=out-corpus"
    assert facts.to_json()["next"] == lines[-1].removeprefix("next: ")


@pytest.mark.parametrize(
    ("text_bytes", "config"),
    [
        (5e6, "config/demo.py"), (100e6, "config/train_shakespeare_char.py"),
        (3e9, "config/train_fineweb.py"), (14e9, "config/train_fineweb_124m.py"),
    ],
)  # fmt: skip
def test_more_text_is_for_a_larger_model(text_bytes: float, config: str, tmp_path: Path) -> None:
    from onecard.data.prepare.outcome import next_command

    facts = PreparedFacts(tmp_path / "mine", {"text_bytes": text_bytes}, False, 0.0)
    assert next_command(facts).startswith(f"onecard plan {config} --dataset={tmp_path / 'mine'} ")


def test_characters_are_written_for_nanogpt_too(tmp_path: Path) -> None:
    text = tmp_path / "play.txt"
    text.write_text("To be, or not to be: ñ 你 🙂\n" * 50, encoding="utf-8")
    folder = run(tmp_path, text, tokenizer="char").folder
    content = pickle.loads((folder / "meta.pkl").read_bytes())
    characters = "".join(sorted(set(text.read_text(encoding="utf-8"))))
    assert character_table(folder / "meta.pkl") == characters
    assert content == {
        "vocab_size": len(characters),
        "stoi": {character: n for n, character in enumerate(characters)},
        "itos": dict(enumerate(characters)),
    }
    run(tmp_path, text, tokenizer="byte", force=True)
    assert not (folder / "meta.pkl").exists(), "nanoGPT would take bytes for characters"


def test_some_tokens_of_one_document_are_refused_before_and_after(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("To be or not to be. " * 500)
    for _ in range(2):
        with pytest.raises(UserError, match="--tokens needs more than one document"):
            run(tmp_path, text, tokens=100)
        run(tmp_path, text)


def test_fewer_tokens_than_there_are_take_nothing_away(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", uneven(5, 50))
    there = run(tmp_path, corpus).meta["splits"]["train"]["tokens"]
    again = run(tmp_path, corpus, tokens=100)
    assert again.already
    assert again.remarks == (f"100 training tokens were asked for; the {there:,} that are here stay",)
