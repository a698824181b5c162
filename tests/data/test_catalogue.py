"""The named datasets: which files of a repository, in which order, and which flags belong to whom."""

from __future__ import annotations

import pytest

from onecard.config.dataset import OWN_TOKENS
from onecard.data import tokenizer
from onecard.data.hub import catalogue
from onecard.data.hub.catalogue import NAMES, lookup
from onecard.data.prepare.sources import STDLIB
from onecard.errors import UserError


def test_the_names() -> None:
    assert NAMES == ("fineweb", "openwebtext", "tinystories", "climbmix", "shakespeare", "shakespeare_char")


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        lookup("finewebb")


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_complete(name: str) -> None:
    dataset = lookup(name)
    assert dataset.name == name
    assert dataset.description and dataset.licence
    assert dataset.source.startswith("https://")
    assert dataset.tokenizer in tokenizer.NAMES
    assert dataset.is_text != bool(dataset.repo)
    if dataset.is_text:
        assert dataset.size and len(dataset.sha256) == 64
    else:
        assert 1.5 <= dataset.parquet_bytes_per_token <= 3.0
        # English text has 3.5 to 5 bytes per token of GPT-2, whichever way it is stored.
        assert 3.5 <= dataset.parquet_bytes_per_token * dataset.text_bytes_per_parquet_byte <= 5.0


def test_only_shakespeare_char_is_by_character() -> None:
    assert [name for name in NAMES if lookup(name).tokenizer == "char"] == ["shakespeare_char"]
    assert lookup("shakespeare_char").url == lookup("shakespeare").url


def test_the_size_of_fineweb_in_advance() -> None:
    assert lookup("fineweb").parquet_bytes_per_token * 3.2e9 == pytest.approx(9e9, rel=0.01)


def test_fineweb_without_a_crawl_is_the_sample_in_mixed_order() -> None:
    dataset = lookup("fineweb")
    paths = [f"sample/100BT/{part:03}_{number:05}.parquet" for part in range(14) for number in range(10)]
    others = ["sample/10BT/000_00000.parquet", "data/CC-MAIN-2013-20/000_00000.parquet", "README.md"]
    files = dataset.train_files([*others, *paths])
    assert sorted(files) == paths
    # The listing's own order must not matter, and the order is part of what a run can be repeated by.
    assert files == dataset.train_files(paths[::-1])
    assert files[:3] == [
        "sample/100BT/011_00009.parquet",
        "sample/100BT/008_00008.parquet",
        "sample/100BT/010_00006.parquet",
    ]
    # A prefix is spread over the whole sample.
    assert len({path[13:16] for path in files[:14]}) >= 7


def test_a_crawl_in_natural_order() -> None:
    dataset = lookup("fineweb", dump="CC-MAIN-2013-20")
    assert (dataset.repo, dataset.dump) == ("HuggingFaceFW/fineweb", "CC-MAIN-2013-20")
    paths = [f"data/CC-MAIN-2013-20/{name}.parquet" for name in ("2_10", "2_9", "10_0", "2_0")]
    files = dataset.train_files([*paths, "data/CC-MAIN-2013-48/1_0.parquet"])
    assert [path.rpartition("/")[2] for path in files] == [
        "2_0.parquet", "2_9.parquet", "2_10.parquet", "10_0.parquet",
    ]  # fmt: skip


def test_edu_is_another_repository_with_the_same_layout() -> None:
    assert lookup("fineweb", edu=True).repo == "HuggingFaceFW/fineweb-edu"
    assert lookup("fineweb", edu=True).folder == "sample/100BT"
    both = lookup("fineweb", edu=True, dump="CC-MAIN-2024-10")
    assert (both.repo, both.folder, both.edu) == (
        "HuggingFaceFW/fineweb-edu", "data/CC-MAIN-2024-10", True,
    )  # fmt: skip


def test_validation_files_and_other_formats_are_left_out() -> None:
    stories = lookup("tinystories").train_files(
        [
            "README.md",
            "TinyStories-train.txt",
            "data/validation-00000-of-00001-869c898b519ad725.parquet",
            "data/train-00001-of-00004-5852b56a2bd28fd9.parquet",
            "data/train-00000-of-00004-2d5a1467fff1081b.parquet",
        ]
    )
    assert stories == [
        "data/train-00000-of-00004-2d5a1467fff1081b.parquet",
        "data/train-00001-of-00004-5852b56a2bd28fd9.parquet",
    ]
    assert lookup("climbmix").train_files(["README.md", "shard_00001.parquet", "shard_00000.parquet"]) == [
        "shard_00000.parquet",
        "shard_00001.parquet",
    ]
    assert lookup("openwebtext").train_files(
        [
            "plain_text/train-00010-of-00080.parquet",
            "plain_text/train-00002-of-00080.parquet",
            "openwebtext.py",
        ]
    ) == ["plain_text/train-00002-of-00080.parquet", "plain_text/train-00010-of-00080.parquet"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fineweb"])
def test_flags_of_fineweb_belong_to_no_other(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} has no --dump") as caught:
        lookup(name, dump="CC-MAIN-2013-20")
    assert "onecard prepare fineweb --dump CC-MAIN-2013-20" in caught.value.hint
    with pytest.raises(UserError, match=f"{name} has no --edu"):
        lookup(name, edu=True)


@pytest.mark.parametrize(
    "given", ["2013-20", "CC-MAIN-2013", "cc-main-2013-20", "../..", "", "CC-MAIN-2013-20/.."]
)
def test_a_dump_of_another_form(given: str) -> None:
    with pytest.raises(UserError, match="not the name of a crawl") as caught:
        lookup("fineweb", dump=given, edu=True)
    assert caught.value.hint == "onecard prepare fineweb --dump CC-MAIN-2013-20 --edu"


def test_the_catalogue_needs_no_heavy_import() -> None:
    assert not {"numpy", "huggingface_hub", "urllib"} & set(vars(catalogue))


def test_what_is_known_of_tokens_before_they_are_there_is_what_prepare_writes() -> None:
    """Plan counts on it, and may import neither the catalogue nor a tokenizer."""
    by_character = {name: ("char", 65) for name in NAMES if lookup(name).tokenizer == "char"}
    by_byte = {STDLIB: ("byte", tokenizer.make_tokenizer("byte").n_vocab)}
    assert by_character | by_byte == OWN_TOKENS
