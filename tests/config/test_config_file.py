"""Config files are read, never run, and no file can crash the reader or fill the memory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onecard.config.files import (
    MAX_FILE_BYTES,
    Argument,
    Value,
    parse_argument_text,
    read_config_file,
    split_arguments,
)
from onecard.errors import UserError

DEFAULTS = {
    "n_layer": 12, "n_embd": 768, "out_dir": "out", "learning_rate": 6e-4, "compile": True, "dtype": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.py"


def read(path: Path, content: str | bytes) -> dict[str, Value]:
    """The values that a file with this content assigns."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return {a.name: a.value for a in read_config_file(path, DEFAULTS).assignments}


def refusal(path: Path, content: str | bytes) -> UserError:
    with pytest.raises(UserError) as caught:
        read(path, content)
    return caught.value


# --- what is understood --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("n_layer = 6", 6),
        ("n_layer=6", 6),
        ("n_layer = 6 # baby model", 6),
        ("n_layer: int = 6", 6),
        ("n_layer = 5 * 8", 40),
        ("n_layer = 2**10 // 3 - (7 % 4) + -1", 337),
        ("n_layer = 1_000", 1000),
        ("n_layer = 0x10", 16),
        ("n_layer = n_embd / 64", 12.0),
        ("learning_rate = 1e-3", 1e-3),
        ("learning_rate = +6e-4 / 10", 6e-4 / 10),
        ("compile = False", False),
        ("compile = not True", False),
        ("dtype = None", None),
        ("out_dir = 'out' + '-' + \"mine\"", "out-mine"),
        ("out_dir = 'out' '-mine'", "out-mine"),
        ("out_dir = out_dir + '-2'", "out-2"),
        (r"out_dir = 'C:\data'", r"C:\data"),
    ],
)
def test_a_value_may_be_a_literal_or_arithmetic_on_what_is_known(
    config: Path, source: str, value: Value
) -> None:
    name = source.split("=")[0].split(":")[0].strip()
    result = read(config, source)
    assert result == {name: value}
    assert type(result[name]) is type(value)


def test_names_assigned_earlier_can_be_used_and_helpers_are_no_knobs(config: Path) -> None:
    source = "layers = 6\n_width = 64\nn_layer = layers\nn_embd = _width * n_layer\n"
    assert read(config, source) == {"n_layer": 6, "n_embd": 384}


def test_a_helper_with_an_underscore_may_go_unused(config: Path) -> None:
    assert read(config, "_width = 64\nn_layer = 3\n") == {"n_layer": 3}


def test_a_name_has_the_value_it_was_given_last(config: Path) -> None:
    assert read(config, "a = 1\na = a + 1\na = a * 5\nn_layer = a\n") == {"n_layer": 10}


def test_a_name_that_nobody_uses_is_handed_on_so_that_a_misspelling_is_noticed(config: Path) -> None:
    assert read(config, "n_layr = 6\nn_embd = 64\n") == {"n_layr": 6, "n_embd": 64}


def test_one_value_may_go_to_several_names(config: Path) -> None:
    assert read(config, "n_layer = n_embd = 8") == {"n_layer": 8, "n_embd": 8}


def test_a_name_used_before_it_has_a_value_is_an_error_with_its_line(config: Path) -> None:
    error = refusal(config, "\nn_layer = layers\nlayers = 6\n")
    assert error.what == f"{config}:2: the name 'layers' has no value here"
    assert error.why == "n_layer = layers"


def test_docstrings_comments_and_empty_files_assign_nothing(config: Path) -> None:
    assert read(config, '"""About this run."""\n# nothing else\n\n') == {}
    assert read(config, "") == {}


def test_the_time_in_a_run_name_is_understood(config: Path) -> None:
    before = time.time()
    name = read(config, "import time\nout_dir = 'ft-' + str(time.time())")["out_dir"]
    assert isinstance(name, str)
    assert before <= float(name.removeprefix("ft-")) <= time.time()


def test_imports_are_passed_over_with_a_note_that_names_the_line(config: Path) -> None:
    config.write_text("n_layer = 3\nimport time\nfrom os import path\n")
    parsed = read_config_file(config, DEFAULTS)
    assert [a.name for a in parsed.assignments] == ["n_layer"]
    assert [note.partition(": ")[0] for note in parsed.notes] == [f"{config}:2", f"{config}:3"]
    assert all("import ignored" in note for note in parsed.notes)


def test_every_assignment_tells_its_file_and_line(config: Path) -> None:
    config.write_text("# comment\nn_layer = 3\n\nn_embd = (\n  64\n)\n")
    origins = [a.origin for a in read_config_file(config, DEFAULTS).assignments]
    assert origins == [f"{config}:2", f"{config}:4"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_files_from_any_editor_are_read(config: Path, newline: str) -> None:
    text = newline.join(["n_layer = 3", "out_dir = 'größe'", ""])
    assert read(config, b"\xef\xbb\xbf" + text.encode()) == {"n_layer": 3, "out_dir": "größe"}


def test_the_line_shown_is_the_line_meant_even_after_a_form_feed(config: Path) -> None:
    error = refusal(config, "n_layer = 3\x0c\nn_embd = 4\nfoo()\n")
    assert (error.what.partition(": ")[0], error.why) == (f"{config}:3", "foo()")


def test_reading_warns_of_nothing(config: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(config, r"out_dir = '\d'") == {"out_dir": r"\d"}


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "int('3')",
        "str(3)",
        "time.time()",
        "str(time.time)",
        "str(time.time(), 'x')",
        "max(1, 2)",
        "2 * len('ab')",
        "dict(a=1)",
        "(lambda: 3)()",
    ],
)
def test_any_other_call_is_an_error_with_file_and_line(config: Path, call: str) -> None:
    error = refusal(config, f"\n\nn_layer = {call}\n")
    assert error.what == f"{config}:3: a call is not understood in a config"
    assert error.why == f"n_layer = {call}"
    assert error.hint


@pytest.mark.parametrize(
    "statement",
    [
        "if True:\n    n_layer = 3",
        "for n_layer in (1, 2): pass",
        "while True: pass",
        "def f(): pass",
        "class C: n_layer = 3",
        "with open('x') as f: pass",
        "try:\n    n_layer = 3\nfinally:\n    pass",
        "del n_layer",
        "n_layer += 1",
        "n_layer, n_embd = 3, 4",
        "config.n_layer = 3",
        "config['n_layer'] = 3",
        "n_layer: int",
        "n_layer",
        "assert n_layer",
        "global n_layer",
        "print('hello')",
    ],
)
def test_any_other_statement_is_an_error_with_file_and_line(config: Path, statement: str) -> None:
    error = refusal(config, f"n_embd = 64\n{statement}\n")
    assert error.what.startswith(f"{config}:2: ")
    assert error.why == statement.split("\n")[0]


@pytest.mark.parametrize(
    "value",
    ["[1, 2]", "(1, 2)", "{'a': 1}", "1j", "b'x'", "...", "f'{n_layer}'", "1 if True else 2", "1 < 2",
     "True and False", "~1", "1 << 3", "n_embd[0]", "n_embd.bit_length", "-'x'", "'x' * 3", "'%d' % 3",
     "3 + 'x'", "None + 1", "-None", "1 / 0", "1 % 0", "0.0 ** -1", "(-8) ** 0.5"],
)  # fmt: skip
def test_a_value_that_is_no_plain_number_or_text_is_an_error_with_file_and_line(
    config: Path, value: str
) -> None:
    assert refusal(config, f"n_layer = {value}\n").what.startswith(f"{config}:1: ")


def test_a_syntax_error_names_file_and_line(config: Path) -> None:
    error = refusal(config, "n_layer = 3\nn_embd = = 4\n")
    assert str(config) in error.what
    assert error.why.startswith("line 2: ")


def test_nothing_in_a_config_is_executed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    touch = f"open({str(marker)!r}, 'w')"
    (tmp_path / "intruder.py").write_text(f"{touch}\n")
    monkeypatch.syspath_prepend(tmp_path)
    sources = [
        f"n_layer = __import__('os').system('touch {marker}')",
        f"__import__('os').system('touch {marker}')",
        f"n_layer = {touch}",
        f"n_layer = 1 + len(str({touch}))",
        f"out_dir = str(time.time({touch}))",
        f"out_dir = f'{{{touch}}}'",
        f"out_dir = [{touch} for _ in (1,)]",
        f"n_layer: {touch} = 3",
        f"def f(x={touch}): pass",
        f"@{touch}\nclass C: pass",
        f"with {touch} as f: pass",
        f"exec({touch!r})",
        "import intruder",
        "from intruder import *",
    ]
    for source in sources:
        config.write_text(source)
        with contextlib.suppress(UserError):
            read_config_file(config, DEFAULTS)
        assert not marker.exists(), source
    assert "intruder" not in sys.modules


# --- bounds -------------------------------------------------------------------------------------

MALICIOUS: dict[str, str | bytes] = {
    "a tower of powers": "n_layer = 9**9**9",
    "a power of a large base": "n_layer = 1000000000 ** 60",
    "a chain of squares": "a = 10**6\nb = a*a\nc = b*b\nd = c*c",
    "a long text by repetition": "out_dir = 'a' * 10**9",
    "a long text by doubling": "a = 'a' * 1\n" + "a = a + a\n" * 100,
    "a long text by concatenation": f"a = {'x' * 9000!r}\nout_dir = a + a",
    "a huge decimal": "n_layer = " + "9" * 4000,
    "a decimal beyond Python's own limit": "n_layer = " + "9" * 50_000,
    "a huge hexadecimal": "n_layer = 0x" + "f" * 90_000,
    "a negative huge number": "n_layer = -(10**18) - 1",
    "deep parentheses": "n_layer = " + "(" * 100_000 + "1" + ")" * 100_000,
    "parentheses within the size limit": "n_layer = " + "(" * 49_000 + "1" + ")" * 49_000,
    "deep signs": "n_layer = " + "-" * 99_000 + "1",
    "a long sum": "n_layer = " + "1+" * 49_000 + "1",
    "deep calls": "n_layer = a" + "()" * 900,
    "very deep calls": "n_layer = a" + "()" * 49_000,
    "deep attributes": "n_layer = a" + ".b" * 49_000,
    "deep lists": "n_layer = " + "[" * 150 + "]" * 150,
    "deep conditions": "n_layer = " + "1 if 1 else " * 8_000 + "1",
    "deep indentation": "\n".join(" " * i + "if 1:" for i in range(300)),
    "NUL bytes": b"n_layer = 3\x00\n",
    "only NUL bytes": bytes(1000),
    "invalid UTF-8": b"out_dir = '\xff\xfe'",
    "half a character": "out_dir = 'ß'".encode()[:-2],
    "an unprintable name": "n\u200blayer = 3",
    "binary data": bytes(range(256)) * 300,
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_file_is_refused_at_once(config: Path, name: str) -> None:
    started = time.process_time()
    error = refusal(config, MALICIOUS[name])
    assert time.process_time() - started < 1.0
    assert str(config) in error.what
    assert len(str(error)) < 1000


def test_the_largest_numbers_and_texts_allowed_are_read(config: Path) -> None:
    assert read(config, "n_layer = 10**18") == {"n_layer": 10**18}
    assert read(config, f"out_dir = {'x' * 10_000!r}") == {"out_dir": "x" * 10_000}


def test_a_file_of_fifty_megabytes_is_refused_without_being_loaded(config: Path) -> None:
    with config.open("wb") as file:
        for _ in range(50):
            file.write(b"n_layer = 3 # \n" * 70_000)
    assert config.stat().st_size > 50_000_000
    tracemalloc.start()
    try:
        started = time.process_time()
        with pytest.raises(UserError, match="too large"):
            read_config_file(config, DEFAULTS)
        elapsed = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert elapsed < 1.0
    assert peak < 20_000_000


def test_the_size_limit_leaves_room_for_any_real_config(config: Path) -> None:
    comment = "# a line of comment that explains\n"
    longest = "n_layer = 3\n" + comment * ((MAX_FILE_BYTES - 12) // len(comment))
    assert read(config, longest) == {"n_layer": 3}


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
def test_an_endless_device_is_not_read_to_its_end() -> None:
    with pytest.raises(UserError, match="too large"):
        read_config_file("/dev/zero", DEFAULTS)


@pytest.mark.parametrize("source", ["n_layer = 9**9**9", "out_dir = 'a' * 10**9", "n_layer = 10**64 ** 64"])
def test_refusing_a_large_value_allocates_little(config: Path, source: str) -> None:
    config.write_text(source)
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            read_config_file(config, DEFAULTS)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_folder_is_not_a_config_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_config_file(tmp_path, DEFAULTS)
    assert caught.value.what == f"{tmp_path} is a folder, not a config file"


def test_a_missing_file_gets_the_near_names_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "train_gpt2.py").touch()
    (tmp_path / "unlike.txt").touch()
    with pytest.raises(UserError) as caught:
        read_config_file(tmp_path / "train_gtp2.py", DEFAULTS)
    assert caught.value.what == f"there is no config file {tmp_path / 'train_gtp2.py'}"
    assert caught.value.hint == f"did you mean {tmp_path / 'train_gpt2.py'}?"


def test_a_missing_file_in_a_missing_folder_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no config file"):
        read_config_file(tmp_path / "nowhere" / "x.py", DEFAULTS)


@pytest.mark.parametrize("path", ["x\0.py", "x" * 5000, "\ud800.py"])
def test_a_path_that_no_file_can_have_is_a_clear_error(path: str) -> None:
    with pytest.raises(UserError):
        read_config_file(path, DEFAULTS)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_told(config: Path) -> None:
    config.write_text("n_layer = 3")
    config.chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        read_config_file(config, DEFAULTS)


FUZZ = settings(max_examples=300, deadline=None)

# --- arbitrary content --------------------------------------------------------------------------

VALID = (
    "import time\nout_dir = 'out' + str(time.time())\nn_layer=6 # six\nn_embd = 5 * 8\n"
    "learning_rate = 1e-3\nmin = learning_rate / 10\ncompile = not True\nx = min ** 2\n"
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid config after a few cuts, copies and insertions."""
    text = VALID
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        piece = draw(
            st.one_of(
                st.just(""),
                st.just(text[start:end] * 2),
                st.text(max_size=5),
                st.sampled_from(
                    ["**", "(", ")", "'", "\\", "\n", "\t", "=", "1e999", "-", "//0", "%", ":", "\0"]
                ),
            )
        )
        text = text[:start] + piece + text[end:]
    return text


def reads_or_refuses(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        parsed = read_config_file(path, DEFAULTS)
    except UserError:
        return
    for assignment in parsed.assignments:
        assert assignment.value is None or isinstance(assignment.value, bool | int | float | str)


@FUZZ
@given(st.text())
@example("a = 1e999 ** 0.5\n")
@example("a = 10**18 * 10**18 / 3")
@example("a = 1e308 * 10\nb = int\n")
@example("\ufeff\ufeffa = 1")
def test_any_text_is_read_or_refused_with_a_user_error(folder: Path, text: str) -> None:
    reads_or_refuses(folder / "text.py", text.encode())


@FUZZ
@given(st.binary())
def test_any_bytes_are_read_or_refused_with_a_user_error(folder: Path, content: bytes) -> None:
    reads_or_refuses(folder / "bytes.py", content)


@FUZZ
@given(mutated())
def test_any_damaged_config_is_read_or_refused_with_a_user_error(folder: Path, text: str) -> None:
    reads_or_refuses(folder / "damaged.py", text.encode())


NUMBERS = st.one_of(
    st.integers(-(10**18), 10**18).map(str),
    st.floats(allow_nan=False).map(lambda x: repr(x).replace("inf", "1e999")),
    st.sampled_from(["True", "None", "'a'", "n_embd", "out_dir", "dtype"]),
)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(st.sampled_from(["-", "+", "not "]), inner).map(lambda t: f"({t[0]}{t[1]})"),
    ),
    max_leaves=12,
)


@FUZZ
@given(EXPRESSIONS)
def test_any_arithmetic_gives_what_python_gives_or_a_user_error(folder: Path, expression: str) -> None:
    path = folder / "arithmetic.py"
    try:
        value = read(path, f"n_layer = {expression}")["n_layer"]
    except UserError:
        return
    expected = eval(expression, {"__builtins__": {}}, dict(DEFAULTS))  # made here of numbers and operators
    assert repr(value) == repr(expected)


# --- the command line's words -------------------------------------------------------------------


def takes_value(name: str) -> bool:
    return name in ("n_layer", "out_dir", "learning_rate")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--n_layer=3"], [Argument("n_layer", "3")]),
        (["-n_layer=3"], [Argument("n_layer", "3")]),
        (["--n-layer", "3"], [Argument("n_layer", "3")]),
        (["--out-dir=a-b=c"], [Argument("out_dir", "a-b=c")]),
        (["--out_dir="], [Argument("out_dir", "")]),
        (["--learning_rate", "-1"], [Argument("learning_rate", "-1")]),
        (["--learning_rate", "--compile"], [Argument("learning_rate", None), Argument("compile", None)]),
        (["--compile", "x.py"], [Argument("compile", None), Argument("", "x.py")]),
        (["--compile", "False", "x.py"], [Argument("compile", "False"), Argument("", "x.py")]),
        (["--compile", "0"], [Argument("compile", "0")]),
        (["x", "--n_layer", "3", "y"], [Argument("", "x"), Argument("n_layer", "3"), Argument("", "y")]),
    ],
)  # fmt: skip
def test_arguments_are_split_into_names_values_and_files(words: list[str], expected: list[Argument]) -> None:
    assert split_arguments(words, takes_value) == expected


@pytest.mark.parametrize("word", ["--", "---", "--=3", "-=x.py"])
def test_an_option_without_a_name_is_an_error_and_not_a_file(word: str) -> None:
    with pytest.raises(UserError, match="is not an option"):
        split_arguments([word], takes_value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("10**9", 10**9),
        ("5 * 8", 40),
        ("1e-3", 1e-3),
        ("True", True),
        ("None", None),
        ("'a b'", "a b"),
        ("a b", "a b"),
        ("n_layer", "n_layer"),
        ("open('x', 'w')", "open('x', 'w')"),
        ("9**9**9", "9**9**9"),
        ("3.2B", "3.2B"),
        ("", ""),
        ("\0", "\0"),
        ("-" * 50_000 + "1", "-" * 50_000 + "1"),
    ],
)
def test_text_after_the_equals_sign_is_a_literal_if_it_reads_as_one(text: str, value: Value) -> None:
    result = parse_argument_text(text)
    assert result == value
    assert type(result) is type(value)


@FUZZ
@given(st.text())
def test_any_text_after_the_equals_sign_gives_a_value(text: str) -> None:
    value = parse_argument_text(text)
    assert value is None or isinstance(value, bool | int | float | str)


def test_a_misspelt_knob_that_is_used_further_on_gets_a_note(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("learning_rat = 1e-3\nmin_lr = learning_rat / 10\nbatch = 4\nbatch_size = batch * 2\n")
    parsed = read_config_file(path, {"learning_rate": 6e-4, "min_lr": 6e-5, "batch_size": 12})
    assert [a.name for a in parsed.assignments] == ["min_lr", "batch_size"]
    (note,) = parsed.notes
    assert note.endswith("x.py:1: 'learning_rat' is no knob; did you mean learning_rate?")


def test_configs_that_come_with_the_package_are_found_without_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "prefix" / "share" / "onecard" / "config"
    installed.mkdir(parents=True)
    (installed / "demo.py").write_text("n_layer = 3\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    (found,) = read_config_file("config/demo.py", {"n_layer": 12}).assignments
    assert found.value == 3
    Path("config").mkdir()
    Path("config/demo.py").write_text("n_layer = 4\n")
    (mine,) = read_config_file("config/demo.py", {"n_layer": 12}).assignments
    assert mine.value == 4, "one that is here comes first"
    with pytest.raises(UserError, match=r"there is no config file config/none\.py"):
        read_config_file("config/none.py", {})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Traceback (most recent call last):\n  File x\n", "onecard doctor LOG"),
        ("hello all\niter 0: loss 10.9, time 27345.12ms\n", "onecard report LOG"),
        ("batch_size = = 3\n", "name = value"),
    ],
)
def test_a_log_in_place_of_a_config_names_its_command(tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "it.py").write_text(text)
    with pytest.raises(UserError) as caught:
        read_config_file(tmp_path / "it.py", DEFAULTS)
    assert hint in caught.value.hint
