"""A folder to oneself: locked, tested before the work, and how what fails or stops there is said."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import typer

from specsim.cli.console import run
from specsim.io import files
from specsim.io.errors import InputError, Interrupted
from specsim.io.files import check_writable, remove_folder, replacing, replacing_folder, working_in, write_text
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call

COST, HARDWARE = "vllm-llama3.1-8b-eagle-h100", ["--target", "llama-3.1-8b", "--drafter", "eagle", "--gpus", "h100"]


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
from specsim.io.files import working_in
with working_in(Path({str(folder)!r})):
    print("locked", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        refusal(lambda: hold(folder), "another process works in")
        other.kill()
    hold(folder)


def test_folders_made_for_nothing_are_removed_and_leftovers_cleared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model"), working_in(tmp_path / "a" / "b"):
        raise ValueError("no such model")
    assert not any(tmp_path.iterdir())
    (tmp_path / ".plan.json.0123abcd.tmp").mkdir()
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

    def killed(path: Path, **options: bool) -> None:
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
        error = capsys.readouterr().err
        assert error.startswith(f"error: {named}: {what}") and error.count("\n") == 1
        for left in tmp_path.iterdir():
            left.rmdir()


@pytest.mark.parametrize("words", [["leaderboard", "example:lab-model"], ["cost", "compare"]], ids=" ".join)
def test_commands_that_keep_nothing_lock_their_folder_too(tmp_path: Path, words: list[str]) -> None:
    given = ["--cost", COST] if words[0] == "leaderboard" else ["--trace", "example:lab-model", *HARDWARE]
    with working_in(tmp_path):
        assert_refused(call("specsim", *words, *given, "--out", tmp_path), "another process works in", tmp_path)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_ctrl_c_that_python_drops_is_not_lost(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As happens where it comes in a weak reference's callback, of which a figure has thousands."""
    app = typer.Typer()

    class Held:
        pass

    @app.command()
    def draw() -> None:
        held = Held()
        watcher = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGINT))
        del held
        assert watcher() is None
        time.sleep(20)

    monkeypatch.setattr(sys, "argv", ["specsim"])
    with pytest.raises(SystemExit, match="130"):
        run(app)
    assert capfd.readouterr().err == "interrupted: nothing is kept, the same command starts anew\n"


WRITER = """
import sys
from pathlib import Path
from specsim.io.files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("whole")
    print("writing", flush=True)
    sys.stdin.readline()
"""


def test_what_is_written_elsewhere_is_left_alone_and_what_was_killed_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the writer's process id says nothing here, as in another container of the same host name."""
    path = tmp_path / "report.html"
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def no_such_process(process: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", no_such_process)
    with subprocess.Popen(command, **pipes) as writer:
        writer.stdout.readline()
        write_text(path, "mine")
        assert path.read_text() == "mine"
        writer.communicate("\n")
    assert writer.returncode == 0 and path.read_text() == "whole"
    monkeypatch.undo()
    with subprocess.Popen(command, **pipes) as killed:
        killed.stdout.readline()
        killed.kill()
    assert len([*tmp_path.iterdir()]) == 2
    write_text(path, "again")
    assert [left.name for left in tmp_path.iterdir()] == ["report.html"] and path.read_text() == "again"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_those_that_the_umask_leaves_or_that_were_there(tmp_path: Path, umask: int) -> None:
    """As the standard library's own calls give them, beside ours."""
    before = os.umask(umask)
    try:
        (tmp_path / "plain").write_text("")
        (tmp_path / "folder").mkdir()
        write_text(tmp_path / "written", "")
        with replacing_folder(tmp_path / "filled") as work:
            (work / "inside").write_text("")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes["written"] == modes["plain"] and modes["filled"] == modes["folder"]
        (tmp_path / "written").chmod(0o640)
        (tmp_path / "filled").chmod(0o750)
        write_text(tmp_path / "written", "again")
        with replacing_folder(tmp_path / "filled"):
            pass
        assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == 0o640
        assert stat.S_IMODE((tmp_path / "filled").stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_links_are_followed_and_devices_written_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("there", "to_come"):
        (tmp_path / name).symlink_to(elsewhere / name)
    (elsewhere / "there").write_text("old")
    for name in ("there", "to_come"):
        check_writable(tmp_path / name)
        write_text(tmp_path / name, name)
        assert (tmp_path / name).is_symlink() and (elsewhere / name).read_text() == name
    (elsewhere / "trace").mkdir()
    (tmp_path / "trace").symlink_to(elsewhere / "trace")
    with replacing_folder(tmp_path / "trace") as work:
        (work / "new").write_text("")
    assert (tmp_path / "trace").is_symlink() and (elsewhere / "trace" / "new").exists()
    hold(tmp_path / "trace")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        check_writable(pipe)
        write_text(pipe, "through")
        assert reader.communicate()[0] == b"through"
    assert pipe.is_fifo()
    (tmp_path / "null").symlink_to(os.devnull)
    write_text(tmp_path / "null", "gone")
    assert Path(os.devnull).is_char_device() and (tmp_path / "null").is_symlink()
    with pytest.raises(InputError, match="is a file; give a folder"), replacing_folder(pipe):
        pass
