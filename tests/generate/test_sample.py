"""The sample command: prompts, output on a pipe and on a terminal, memory, Ctrl-C."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.config.sample import SampleConfig
from onecard.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from onecard.errors import UserError
from onecard.generate import sample as sample_module
from onecard.generate.decode import Sampling, generate
from onecard.generate.sample import SEPARATOR, prompt_ids, sample_command, sample_text, samples_at_once
from onecard.model.gpt2 import GPT2
from onecard.model.precision import torch_dtype
from onecard.run.load import LoadedModel


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only make threads wait for each other, long where other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def byte_model(vocab_size: int = 257, block_size: int = 32) -> GPT2:
    return GPT2.initialised(GPT2Shape(2, 2, 16, vocab_size, block_size, bias=False), seed=1)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedModel]:
    """Make the command load this model, whatever is on disk."""

    def install(model: GPT2 | None = None, tokenizer: Tokenizer | None = None) -> LoadedModel:
        loaded = LoadedModel(model or byte_model(), tokenizer or ByteTokenizer(), "out-test, step 10", "cpu")
        monkeypatch.setattr(sample_module, "load_for_sampling", lambda config: loaded)
        return loaded

    return install


class Terminal(io.StringIO):
    """Remembers what was visible after each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def writes(text: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Replace the model's chance by this text: every row writes it. Returns the calls made."""
    tokens = tokenizer.encode(text)
    calls: list[dict[str, Any]] = []

    def scripted(model: GPT2, prompt: list[int], **arguments: Any) -> Iterator[Tensor]:
        calls.append({"prompt": prompt, **arguments})
        for token in tokens:
            yield torch.full((arguments["samples"],), token)

    monkeypatch.setattr(sample_module, "generate", scripted)
    return calls


def expected_text(loaded: LoadedModel, config: SampleConfig, number: int, prompt: str) -> str:
    ids = loaded.tokenizer.encode(prompt)
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    steps = generate(
        loaded.model,
        ids,
        samples=1,
        max_new_tokens=config.max_new_tokens,
        sampling=sampling,
        n_vocab=257,
        first_sample=number,
    )
    return loaded.tokenizer.decode(ids + [int(step) for step in steps])


# --- output -----------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_text(load: Callable[..., LoadedModel], capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load()
    config = SampleConfig(start="Once", num_samples=3, max_new_tokens=12)
    assert sample_command(config) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(
        expected_text(loaded, config, number, "Once") + f"\n{SEPARATOR}\n" for number in range(3)
    )
    assert "sampling from out-test, step 10" in captured.err
    assert re.search(
        r"3 samples, 36 tokens in \d+\.\d\d s: [\d,]+ tokens/s without the \d+\.\d\d s for reading "
        r"the prompt \(cpu, float32\)\n$",
        captured.err,
    )


def test_batches_and_numbering_do_not_change_the_samples(
    load: Callable[..., LoadedModel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(byte_model().double())
    config = SampleConfig(num_samples=5, max_new_tokens=40)
    sample_command(config)
    at_once = capsys.readouterr().out
    monkeypatch.setattr(sample_module, "_MOST_AT_ONCE", 2)
    sample_command(config)
    assert capsys.readouterr().out == at_once


def test_one_token_has_no_rate(load: Callable[..., LoadedModel], capsys: pytest.CaptureFixture[str]) -> None:
    load()
    assert sample_command(SampleConfig(num_samples=1, max_new_tokens=1)) == 0
    assert re.search(r"1 sample, 1 token in \d+\.\d\d s \(cpu, float32\)\n$", capsys.readouterr().err)


def test_a_terminal_sees_the_first_sample_grow_by_whole_characters(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load()
    writes("né 漢🙂!", monkeypatch, loaded.tokenizer)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert sample_command(SampleConfig(start="¿", num_samples=2, max_new_tokens=11)) == 0
    whole = "¿né 漢🙂!"
    growing = [whole[:length] for length in range(1, len(whole) + 1)]
    assert terminal.seen[: len(growing)] == growing
    assert terminal.getvalue() == f"{whole}\n{SEPARATOR}\n" * 2


def test_a_character_cut_off_at_the_end_shows_as_replacement(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    half = "🙂".encode()[:2]
    monkeypatch.setattr(
        sample_module, "generate", lambda *_, **__: iter([torch.tensor([byte]) for byte in half])
    )
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sample_command(SampleConfig(start="a", num_samples=1, max_new_tokens=2))
    assert terminal.getvalue() == f"a\ufffd\n{SEPARATOR}\n"


def test_a_terminal_does_not_obey_the_model_but_a_pipe_gets_every_byte(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load()
    writes("\x1b[2Jok\n\x9b", monkeypatch, loaded.tokenizer)
    config = SampleConfig(start="a", num_samples=1, max_new_tokens=8)
    sample_command(config)
    assert capsys.readouterr().out.startswith("a\x1b[2Jok\n\x9b")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sample_command(config)
    assert terminal.getvalue().startswith("a\\x1b[2Jok\n\\x9b")


def test_an_output_encoding_without_the_character(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load()
    writes("漢", monkeypatch, loaded.tokenizer)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", newline="\n"))
    assert sample_command(SampleConfig(start="a", num_samples=1, max_new_tokens=3)) == 0
    assert raw.getvalue() == f"a?\n{SEPARATOR}\n".encode()


def test_progress_only_where_a_person_watches_and_nothing_streams(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    config = SampleConfig(num_samples=2, max_new_tokens=5)
    for out, shows in ((io.StringIO(), True), (Terminal(), False)):
        stderr = Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert sample_command(config) == 0
        assert ("10/10" in stderr.getvalue()) == shows
        assert "10/10" not in out.getvalue()
        assert (out.getvalue().count(SEPARATOR), stderr.getvalue().count(SEPARATOR)) == (2, 0)


# --- prompts ----------------------------------------------------------------------------------------


def test_prompt_from_a_file(
    load: Callable[..., LoadedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load()
    calls = writes("!", monkeypatch, loaded.tokenizer)
    path = tmp_path / "prompt.txt"
    path.write_text("Grüße\naus der Datei", encoding="utf-8")
    assert sample_command(SampleConfig(start=f"FILE:{path}", num_samples=1, max_new_tokens=1)) == 0
    assert capsys.readouterr().out == f"Grüße\naus der Datei!\n{SEPARATOR}\n"
    assert calls[0]["prompt"] == list("Grüße\naus der Datei".encode())


def test_prompt_files_that_cannot_be_read(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    load()
    with pytest.raises(UserError, match=r"missing\.txt cannot be read"):
        sample_command(SampleConfig(start=f"FILE:{tmp_path / 'missing.txt'}"))
    with pytest.raises(UserError, match="cannot be read"):
        sample_command(SampleConfig(start=f"FILE:{tmp_path}"))
    with pytest.raises(UserError, match="cannot be read"):
        sample_command(SampleConfig(start="FILE:a\0b"))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8") as raised:
        sample_command(SampleConfig(start=f"FILE:{latin}"))
    assert "byte 2 is 0xfc" in raised.value.why


def test_an_empty_prompt_starts_a_document(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load()
    calls = writes("hi", monkeypatch, loaded.tokenizer)
    sample_command(SampleConfig(start="", num_samples=1, max_new_tokens=2))
    assert calls[0]["prompt"] == [256]
    assert capsys.readouterr().out == f"hi\n{SEPARATOR}\n"

    loaded = load(byte_model(vocab_size=4), CharTokenizer("\nhi!"))
    calls = writes("hi", monkeypatch, loaded.tokenizer)
    sample_command(SampleConfig(start="", num_samples=1, max_new_tokens=2))
    assert calls[0]["prompt"] == [0]
    assert capsys.readouterr().out == f"hi\n{SEPARATOR}\n"


def test_a_prompt_the_model_has_no_embedding_for(load: Callable[..., LoadedModel]) -> None:
    load(byte_model(vocab_size=128))
    with pytest.raises(UserError, match=r"token 195 of the prompt is not among the model's 128"):
        sample_command(SampleConfig(start="ü"))


def test_the_sliding_window_is_told_once_and_before(
    load: Callable[..., LoadedModel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(byte_model(block_size=16))
    monkeypatch.setattr(sample_module, "_MOST_AT_ONCE", 1)
    sample_command(SampleConfig(start="abcd", num_samples=2, max_new_tokens=13))
    assert "window" not in capsys.readouterr().err
    sample_command(SampleConfig(start="abcd", num_samples=2, max_new_tokens=14))
    assert capsys.readouterr().err.count("from new token 14 on") == 1
    sample_command(SampleConfig(start="a" * 20, num_samples=1, max_new_tokens=2))
    errors = capsys.readouterr().err
    assert "the prompt has 20 tokens: the model sees the last 16" in errors
    assert "from new token 2 on" in errors


# --- memory, Ctrl-C, divergence ---------------------------------------------------------------------


def runs_out_above(rows: int, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> list[int]:
    """Inject an out-of-memory error into batches of more than `rows`; returns the batch sizes tried."""
    tried: list[int] = []

    def tight(model: GPT2, prompt: list[int], **arguments: Any) -> Iterator[Tensor]:
        tried.append(arguments["samples"])
        for step, tokens in enumerate(generate(model, prompt, **arguments)):
            if arguments["samples"] > rows and step == after:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield tokens

    monkeypatch.setattr(sample_module, "generate", tight)
    return tried


def test_out_of_memory_halves_the_batch_and_goes_on(
    load: Callable[..., LoadedModel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(byte_model().double())
    config = SampleConfig(num_samples=7, max_new_tokens=6)
    sample_command(config)
    expected = capsys.readouterr().out
    tried = runs_out_above(2, monkeypatch, after=3)
    assert sample_command(config) == 0
    captured = capsys.readouterr()
    assert tried == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert captured.out == expected
    assert "again with 3 samples at once" in captured.err
    assert "again with 1 sample at once" in captured.err
    assert "7 samples, 42 tokens" in captured.err


def test_out_of_memory_with_one_sample_is_told(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    runs_out_above(0, monkeypatch)
    with pytest.raises(UserError, match="not enough memory for one sample"):
        sample_command(SampleConfig(num_samples=4, max_new_tokens=6))


def test_samples_at_once_follow_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GPT2Shape(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024, bias=False)
    with torch.device("meta"):
        model = GPT2(shape)
    cache = 2 * 12 * 501 * 768 * 4
    at_once = samples_at_once(model, SampleConfig(num_samples=1000), prompt_tokens=1)
    assert 2**30 // (cache * 1.2) < at_once < 2**30 // cache
    assert samples_at_once(model, SampleConfig(num_samples=3), prompt_tokens=1) == 3
    # Half the bytes, twice the samples; a sliding window needs room to recompute itself.
    assert samples_at_once(model.bfloat16(), SampleConfig(num_samples=1000), 1) > 1.8 * at_once
    sliding = samples_at_once(model, SampleConfig(num_samples=1000, max_new_tokens=1025), 1)
    assert sliding < 0.7 * samples_at_once(model, SampleConfig(num_samples=1000, max_new_tokens=1024), 1)
    monkeypatch.setattr(sample_module, "_CPU_BUDGET", 1)
    assert samples_at_once(model, SampleConfig(num_samples=3), prompt_tokens=1) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_prints_what_there_is(
    terminal: bool,
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load()

    def interrupted(*_: object, **arguments: Any) -> Iterator[Tensor]:
        for token in b"go":
            yield torch.full((arguments["samples"],), token)
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_module, "generate", interrupted)
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert sample_command(SampleConfig(start="let ", num_samples=2)) == 130
    assert out.getvalue() == f"let go\n{SEPARATOR}\n" * 2
    assert "2 samples, 4 tokens" in capsys.readouterr().err


def test_ctrl_c_before_the_first_token_prints_nothing(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load()

    def interrupted(*_: object, **__: object) -> Iterator[Tensor]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(sample_module, "generate", interrupted)
    assert sample_command(SampleConfig(num_samples=2)) == 130
    assert capsys.readouterr().out == ""


def test_a_diverged_model_is_told(load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = byte_model()
    model.transformer.ln_f.weight.data[0] = float("nan")
    load(model)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(UserError, match="not numbers"):
        sample_command(SampleConfig(start="a", num_samples=2))
    assert terminal.getvalue() == f"a\n{SEPARATOR}\n"


def test_bfloat16_weights(load: Callable[..., LoadedModel], capsys: pytest.CaptureFixture[str]) -> None:
    load(byte_model().bfloat16())
    assert sample_command(SampleConfig(num_samples=2, max_new_tokens=40)) == 0
    captured = capsys.readouterr()
    assert captured.out.count(SEPARATOR) == 2
    assert "(cpu, bfloat16)" in captured.err


# --- samples of a training run ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sample_text(dtype: str) -> None:
    model, tokenizer = byte_model().to(torch_dtype(dtype)).train(), ByteTokenizer()
    text = sample_text(model, tokenizer, "ab", 40, seed=5)
    assert text.startswith("ab")
    assert text == sample_text(model, tokenizer, "ab", 40, seed=5)
    assert text != sample_text(model, tokenizer, "ab", 40, seed=6)
    assert model.training
    assert sample_text(model, tokenizer, "ab", 0, seed=5) == "ab"
    assert not sample_text(model, tokenizer, "", 1, seed=5, temperature=0.0).startswith("<|endoftext|><|end")


def test_an_alphabet_without_a_line_break_begins_with_its_first_character() -> None:
    tokenizer = CharTokenizer.of_text(set("abc"))
    assert prompt_ids(tokenizer, "\n", 3) == prompt_ids(tokenizer, "", 3) == [0]
    with pytest.raises(UserError):
        prompt_ids(tokenizer, "x", 3)
