"""The options of `onecard prepare`."""

from __future__ import annotations

from dataclasses import dataclass

from onecard.config.knobs import Config, option


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Config):
    """What `onecard prepare` is asked, besides the texts."""

    # fmt: off
    name: str | None = option("str", "the folder under data/; named after the first input unless given", value="NAME")
    out_root: str = option("str", "the folder that holds all datasets; nanoGPT's configs look in data/", default="data", value="FOLDER")
    tokens: int | None = option("tokens", "stop when there are this many training tokens: 3.2B, 100M; else all there are", value="N")
    tokenizer: str | None = option("str", "gpt2; byte (usual for stdlib); char (usual for shakespeare_char)", choices=("gpt2", "byte", "char"), value="NAME")
    train_tokenizer: int | None = option("int", "learn a BPE of this many tokens from the text itself, such as 32768; it is kept with the data", value="N")
    text_column: str | None = option("str", "the column of jsonl and parquet that holds the text: text unless given", value="NAME")
    val_fraction: float | None = option("float", "the share of documents held out for validation, chosen by their hash", value="X")
    dump: str | None = option("str", "fineweb only: one crawl, such as CC-MAIN-2013-20; else a sample of all crawls", value="NAME")
    edu: bool = option("bool", "fineweb only: FineWeb-Edu, the part that teaches")
    keep: bool = option("bool", "keep the parquet files that are downloaded (in the Hub cache)")
    check_: bool = option("bool", "prepare nothing: verify data/NAME against its meta.json, and show what is in it")
    force: bool = option("bool", "replace a data/NAME that was made from something else")
    json: bool = option("bool", "print the facts as JSON, for programs")
    # fmt: on
