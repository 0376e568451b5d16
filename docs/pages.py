"""Pages whose code blocks are programs: run in an empty folder, one after another, their output written below them.

A block of `sh` is a shell's, of `python` one session's for the whole page, and a block with a title is a file of that
name. What a block prints stands in a block of `output` right behind it. A comment before a block says more of it:

    <!-- slow -->            run by the slow tests alone, and by hand
    <!-- measured -->        what it prints differs from run to run; headings of tables are compared, or words
    <!-- quiet -->           what it prints is not shown
    <!-- may end with 1 -->  its one command checks something, and may well find that it fails
    <!-- not run: why -->    nothing here can run it; the tests see to it that its options exist
    <!-- before: command --> a command that readers need not see
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent
ROOT = HOME.parent
COLUMNS = "78"  # of the terminal that commands write to: what a page shows beside both menus in a window of 1280 px
RUNNABLE = ("sh", "python")
BLOCK = re.compile(
    r"(?P<notes>(?:^<!-- (?:slow|measured|quiet|may end with 1|not run: [^\n]*|before: [^\n]*) -->\n+)*)"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"\n]+)")?\n(?P<code>.*?)^```\n'
    r"(?P<output>\n```output\n.*?^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
COMMANDS = """\
specsim() { "$PYTHON" -m specsim "$@"; }
realrun() { "$PYTHON" -m realrun "$@"; }
python() { "$PYTHON" "$@"; }
pytest() { "$PYTHON" -m pytest "$@"; }
"""


class PageError(Exception):
    """A block of a page fails."""


@dataclass(frozen=True)
class Block:
    """A block of code as it stands on a page; `output` is what it printed, None if it prints nothing."""

    language: str
    title: str | None
    code: str
    output: str | None
    notes: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        return "slow" in self.notes

    @property
    def measured(self) -> bool:
        return "measured" in self.notes

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and not any(note.startswith("not run") for note in self.notes)

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """With which its commands may end."""
        return (0, 1) if "may end with 1" in self.notes else (0,)

    @property
    def before(self) -> list[str]:
        return [note.removeprefix("before: ") for note in self.notes if note.startswith("before: ")]


def _block(match: re.Match[str]) -> Block:
    notes = tuple(re.findall(r"<!-- (.*?) -->", match["notes"]))
    output = None if match["output"] is None else match["output"].removeprefix("\n```output\n").removesuffix("```\n")
    return Block(match["language"], match["title"], match["code"], output, notes)


def blocks(text: str) -> list[Block]:
    """All blocks of code of a page, in their order."""
    return [_block(match) for match in BLOCK.finditer(text)]


def block(page: str, holds: str, language: str = "python") -> str:
    """The code of a page's only block in this language that contains these words."""
    all_blocks = blocks((HOME / page).read_text())
    (code,) = [block.code for block in all_blocks if block.language == language and holds in block.code]
    return code


def written() -> list[Path]:
    """All pages of the documentation, and those beside the README."""
    return [*sorted(ROOT.glob("*.md")), *sorted(HOME.rglob("*.md"))]


def pages() -> list[Path]:
    """The pages with blocks that run, the README among them."""
    return [path for path in written() if any(block.runs for block in blocks(path.read_text()))]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In this folder, with tables as wide as a page's; modules that lie in it can be imported."""
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _shell(code: str, folder: Path, exit_codes: tuple[int, ...] = (0,)) -> str:
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": COLUMNS}
    environment["LAB"] = str(ROOT / "realrun" / "weights" / "lab")
    script = f"set -euo pipefail\n{COMMANDS}{code}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in exit_codes:
        raise PageError(f"{code.strip()}\nends with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _python(code: str, folder: Path, names: dict[str, object]) -> str:
    """Run code in a session and return what it prints, the value of a last expression included."""
    tree = ast.parse(code)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    out = io.StringIO()
    try:
        with _inside(folder), contextlib.redirect_stdout(out):
            exec(compile(tree, "<page>", "exec"), names)
            value = None if last is None else eval(compile(last, "<page>", "eval"), names)
            if value is not None:
                print(repr(value))
    except Exception as error:
        raise PageError(f"{code.strip()}\nraises {type(error).__name__}: {error}") from error
    return out.getvalue()


def run(text: str, folder: Path, slow: bool = False) -> list[str | None]:
    """Run a page and return the output of each block, None for blocks that are not run."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed: list[str | None] = []
    for block in blocks(text):
        for command in block.before if slow or not block.slow else ():
            _shell(command, folder)
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.code)
        if block.title is not None or not block.runs or (block.slow and not slow):
            printed.append(None)
        elif block.language == "sh":
            printed.append(_shown(block, _shell(block.code, folder, block.exit_codes)))
        else:
            printed.append(_shown(block, _python(block.code, folder, names)))
    return printed


def _shown(block: Block, printed: str) -> str:
    """Format an output as the page shows it: no trailing blanks, and nothing for a quiet block."""
    if "quiet" in block.notes:
        return ""
    return "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())


def differs(block: Block, printed: str | None) -> bool:
    """Tell whether a block's output differs from the recorded one."""
    if printed is None:
        return False
    recorded = block.output or ""
    if block.measured:
        return _words(recorded) != _words(printed)
    return recorded != printed


def _words(text: str) -> set[str]:
    """The words of the headings of tables, and of all lines where there are none: rows are as they were measured."""
    lines = [line for line in text.splitlines() if line.startswith("┃")] or text.splitlines()
    return set(re.findall(r"[^\W\d_]{2,}", NUMBER.sub("", "\n".join(lines))))


def rewrite(page: Path, slow: bool = True) -> None:
    """Run a page and write what its blocks print, and the figures that it shows."""
    import matplotlib  # pages are read without it

    matplotlib.rcParams["svg.hashsalt"] = page.stem  # figures of the same bytes every time
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    text = page.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        printed = iter(run(text, folder, slow))
        for path in figures(page):
            if (folder / path.name).is_file():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes((folder / path.name).read_bytes())

    def written(match: re.Match[str]) -> str:
        new = next(printed)
        if new is None:
            return match[0]
        output = f"\n```output\n{new}```\n" if new else ""
        title = f' title="{match["title"]}"' if match["title"] else ""
        return f"{match['notes']}```{match['language']}{title}\n{match['code']}```\n{output}"

    page.write_text(BLOCK.sub(written, text))


def figures(page: Path) -> list[Path]:
    """The figures that a page shows and its blocks may have drawn."""
    return [page.parent / path for path in re.findall(r"!\[[^\]]*\]\(([^)]*figures/[^)]+\.svg)\)", page.read_text())]
