"""--apply: only the lines of the cure change, the file as it was is kept, and nothing is written unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.doctor.apply import apply_cure, edit_of, write
from onecard.doctor.cures import Cure, Line
from onecard.errors import UserError

CONFIG = """# mine
batch_size = 16   # per step
gradient_accumulation_steps = 5 * 8
n_layer = 12; n_head = 12
learning_rate = 6e-4\t# peak
compile = True
"""
LINES = (Line("batch_size", 8, 16), Line("gradient_accumulation_steps", 80, 40), Line("compile", False, True))
CURE = Cure("nanogpt", LINES, 1, 1, None, None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train_mine.py"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def test_only_values_change(config: Path) -> None:
    backup = write(edit_of(config, LINES))
    assert config.read_text() == CONFIG.replace("batch_size = 16 ", "batch_size = 8 ").replace(
        "5 * 8", "80   # was 40"
    ).replace("compile = True", "compile = False   # was True")
    assert backup.read_text() == CONFIG
    assert load_config(RunConfig, [str(config)]).tokens_per_step == 8 * 80 * 1024


def test_line_ends_marks_and_the_rest_of_a_line_stay(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbf" + CONFIG.replace("\n", "\r\n").encode())
    write(edit_of(config, (Line("n_head", 6, 12), Line("batch_size", 8, 16))))
    content = config.read_bytes()
    assert content.startswith(b"\xef\xbb\xbf# mine\r\nbatch_size = 8   # per step\r\n")
    assert b"n_layer = 12; n_head = 6" in content
    assert content.count(b"\r\n") == CONFIG.count("\n")


def test_a_name_that_is_not_there_is_added_and_the_last_of_two_is_changed(config: Path) -> None:
    config.write_text("batch_size = 4\nbatch_size = 16")
    write(edit_of(config, (Line("batch_size", 8, 16), Line("compile", False, True))))
    assert config.read_text() == "batch_size = 4\nbatch_size = 8   # was 16\ncompile = False\n"


def test_values_that_follow_from_others_are_refused(config: Path) -> None:
    config.write_text("batch_size = 16\nmax_iters = batch_size * 10\n")
    before = config.read_bytes()
    with pytest.raises(UserError, match="max_iters"):
        edit_of(config, (Line("batch_size", 8, 16),))
    assert config.read_bytes() == before
    assert [path.name for path in config.parent.iterdir()] == [config.name]


def test_nothing_is_written_without_a_yes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not apply_cure(str(config), [CURE], yes=False, ask=lambda: False)
    out, err = capsys.readouterr()
    assert "-batch_size = 16" in out
    assert "+batch_size = 8" in out
    assert "--yes" in err
    assert config.read_text() == CONFIG


def test_no_terminal_is_no_yes(config: Path) -> None:
    assert not apply_cure(str(config), [CURE], yes=False)
    assert config.read_text() == CONFIG


def test_backups_are_never_overwritten_and_rights_stay(config: Path) -> None:
    config.chmod(0o640)
    for size in (8, 4):
        assert apply_cure(
            str(config), [Cure("nanogpt", (Line("batch_size", size),), 1, 1, None, None)], yes=True
        )
    names = sorted(path.name for path in config.parent.iterdir())
    assert names == ["train_mine.py", "train_mine.py.bak", "train_mine.py.bak1"]
    assert (config.parent / "train_mine.py.bak").read_text() == CONFIG
    assert config.stat().st_mode & 0o777 == 0o640


def test_of_a_link_the_file_behind_it_is_written(config: Path) -> None:
    link = config.parent / "link.py"
    link.symlink_to(config)
    assert apply_cure(str(link), [CURE], yes=True)
    assert link.is_symlink()
    assert "batch_size = 8" in config.read_text()


def test_a_file_that_changed_meanwhile_is_left(config: Path) -> None:
    edit = edit_of(config, LINES)
    config.write_text(CONFIG + "# more\n")
    with pytest.raises(UserError, match="changed meanwhile"):
        write(edit)
    assert config.read_text() == CONFIG + "# more\n"


def test_cures_without_lines_change_nothing(config: Path) -> None:
    with pytest.raises(UserError, match="no change"):
        apply_cure(str(config), [Cure("nanogpt", (), 1, 1, None, None)], yes=True)
    with pytest.raises(UserError, match="no change"):
        apply_cure(str(config), [Cure("onecard", LINES, 1, 1, None, None)], yes=True)
