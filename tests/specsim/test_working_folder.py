"""A folder to oneself: locked, tested before the work, and how what fails or stops there is said."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from specsim import files
from specsim.cli.console import run
from specsim.errors import Interrupted
from specsim.files import check_writable, remove_folder, replacing, working_in
from tests.support.checks import refusal


def hold(folder: Path) -> None:
    with working_in(folder):
        pass


def test_two_do_not_work_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with working_in(folder):
        refusal(lambda: hold(folder), str(folder), "another process works in", "give another folder")
        (folder / "kept").write_text("")
    hold(folder)
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code = f"""
import time
from pathlib import Path
from specsim.files import working_in
with working_in(Path({str(folder)!r})):
    print("locked", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        refusal(lambda: hold(folder), "another process works in")
        other.kill()
    hold(folder)


def test_folders_made_for_nothing_are_removed_and_leftovers_cleared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model"), working_in(tmp_path / "a" / "b"):
        raise ValueError("no such model")
    assert not any(tmp_path.iterdir())
    with subprocess.Popen([sys.executable, "-c", ""]) as killed:
        killed.wait()
    left = tmp_path / f".plan.json.{files._machine()}-{killed.pid}.x"
    left.mkdir()
    (tmp_path / ".mine").write_text("")
    hold(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".mine"]


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="nothing was kept"), working_in(tmp_path / "a"):
        raise KeyboardInterrupt
    (tmp_path / "log").write_text("")
    with pytest.raises(Interrupted, match="is kept in .*; the same command goes on"), working_in(tmp_path):
        raise KeyboardInterrupt


def test_a_file_in_the_place_of_a_folder_and_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refusal(lambda: hold(tmp_path / "file"), "is a file")
    refusal(lambda: check_writable(tmp_path), "is a folder")
    check_writable(tmp_path / "new" / "profile.json")
    assert not (tmp_path / "new").exists()


def test_a_folder_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()

    def killed(path: Path) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(InterruptedError):
            remove_folder(folder)
    assert not folder.exists() and len([*tmp_path.iterdir()]) == 1
    remove_folder(folder)  # which is not there


SAID = [
    (errno.ENOSPC, "the disk is full; free some space"),
    (errno.EDQUOT, "your disk quota is used up; free some space"),
    (errno.EACCES, "no permission (Permission denied); choose another place"),
    (errno.EROFS, "no permission (Read-only file system); choose another place"),
]


@pytest.mark.parametrize(("number", "what"), SAID)
def test_what_a_disk_refuses_is_one_line_that_names_the_users_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    """While the file is written, and before the work."""
    path = tmp_path / "out" / "profile.json"
    app = typer.Typer()

    @app.command()
    def write() -> None:
        with replacing(path) as temporary, temporary.open("w"):
            raise OSError(number, os.strerror(number), str(temporary))

    @app.command()
    def check() -> None:
        check_writable(path)

    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    for command, named in (("write", path), ("check", tmp_path)):
        monkeypatch.setattr(sys, "argv", ["specsim", command])
        with pytest.raises(SystemExit, match="2"):
            run(app)
        said = capsys.readouterr().err
        assert said.startswith(f"error: {named}: {what}") and said.count("\n") == 1
        for made in tmp_path.iterdir():
            made.rmdir()


def test_ctrl_c_in_a_command_that_keeps_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()

    @app.command()
    def compute() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["specsim"])
    with pytest.raises(SystemExit, match="130"):
        run(app)
    assert capsys.readouterr().err.strip() == "interrupted: nothing is kept, the same command starts anew"
