"""Every block of the documentation runs, and prints what stands below it; what cannot run is at least a command.

Sentences say no result that a script did not write. Looked for is what results look like: percentages, thousands,
decimals and "so many times". What stands in code, in tables, in headings and between a script's markers is left out, as
are versions, and sections and theorems of papers.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

import realrun.measure.probe as probe_module
import realrun.measure.profile as profile_module
from docs import benefit, idea, pages, tables, values
from docs.notebook import NOTEBOOK, PAGE
from realrun.cli.main import app
from realrun.measure.interleaving import TURN_ROUNDS
from studies.papers.findings import audit
from tests.contract.test_options_named import APPS, OPTION, command_of, options
from tests.support import ROOT

PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages.pages()}
WRITTEN = pages.written()


def check(page: Path, folder: Path, slow: bool) -> None:
    text = page.read_text()
    printed = pages.run(text, folder, slow)
    wrong = [
        f"{block.code}prints\n{new}and not\n{block.output}"
        for block, new in zip(pages.blocks(text), printed, strict=True)
        if pages.differs(block, new)
    ]
    assert wrong == [], f"python -m docs {page.relative_to(ROOT)} writes it anew"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_stands_in_it(name: str, tmp_path: Path) -> None:
    check(PAGES[name], tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, path in PAGES.items() if "<!-- slow -->" in path.read_text()])
def test_a_page_with_slow_blocks_prints_what_stands_in_it(name: str, tmp_path: Path) -> None:
    check(PAGES[name], tmp_path, slow=True)


@pytest.mark.slow
def test_a_validation_takes_the_route_that_contributing_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named functions are called in the order of the list, and so is each named class at some time."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Follow a prompt")[2].partition("\n## ")[0]
    route = re.findall(r"`([a-z_/]+\.py)`,\s+`(\w+)`", section)
    called: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            place = (Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_qualname.split(".")[0])
            if place in route and place not in called:
                called.append(place)

    options = (
        "--drafter prompt-lookup --num-prompts 4 --max-new-tokens 4 --max-draft-tokens 2 --policy fixed_k --trials 1"
    )
    monkeypatch.setattr(probe_module, "LIMIT_S", 0.0)
    monkeypatch.setattr(profile_module, "LIMIT_S", 0.0)
    sys.setprofile(note)
    try:
        CliRunner().invoke(app, ["validate", *options.split(), "--out", str(tmp_path / "out")])
    finally:
        sys.setprofile(None)
    functions, steps = ([place for place in places if place[1][0].islower()] for places in (called, route))
    assert functions == steps and {*called} == {*route}
    assert len(re.findall(r"^\d+\. ", section, re.MULTILINE)) == 12


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_commands_of_a_page_exist_and_take_their_options(name: str) -> None:
    """Also those that nothing here can run, and those in sentences."""
    text = (ROOT / name).read_text()
    codes = [block.code for block in pages.blocks(text) if block.language == "sh"]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    codes += [code for code in inline if code.split(" ")[0] in APPS and " ... " not in code]
    for code in codes:
        for line in code.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line):
                words = shlex.split(part, comments=True)
                if words and words[0] in APPS:
                    used = {word.split("=")[0] for word in words if OPTION.match(word)}
                    strange = used - options(command_of(" ".join(words)))
                    assert not strange, f"{part.strip()}: {sorted(strange)}"


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_no_table_is_wider_than_a_page(name: str) -> None:
    """Other lines wrap, as docs/style.css says."""
    lines = [line for block in pages.blocks((ROOT / name).read_text()) for line in (block.output or "").splitlines()]
    assert [line for line in lines if line[:1] in "┏┃┡│└" and len(line) > int(pages.COLUMNS)] == []


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_a_sentence_says_what_an_output_means(name: str) -> None:
    parts = re.split(r"^```output\n.*?^```\n", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [text[:60] for text in parts[1:] if not text.lstrip().startswith("This means: ")] == []


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_every_note_stands_right_before_a_block(name: str) -> None:
    text = (ROOT / name).read_text()
    notes = re.findall(r"<!-- ((?:slow|measured|quiet|may end with|not run|before)\b.*?) -->", text)
    assert notes == [note for block in pages.blocks(text) for note in block.notes]


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_a_block_that_may_end_with_1_is_one_command(name: str) -> None:
    """Of several, the note would hide that the others failed."""
    checks = [block.code for block in pages.blocks((ROOT / name).read_text()) if "may end with 1" in block.notes]
    assert [code for code in checks if len(code.replace("\\\n", " ").strip().splitlines()) != 1] == []


def test_tables_and_values_are_what_their_owners_say() -> None:
    wrong = [path.name for path in tables.written_pages() if tables.written(path.read_text()) != path.read_text()]
    assert wrong == [], "python -m docs.tables writes them anew"


def test_every_value_is_said_somewhere_and_known() -> None:
    said = {found["name"] for path in WRITTEN for found in values.PLACE.finditer(path.read_text())}
    assert values.VALUES.keys() - said == set()
    figures = audit().findings
    assert [name for name in said - values.VALUES.keys() if name.partition(":")[0] not in figures] == []


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_no_value_begins_a_line_or_stands_in_code(name: str) -> None:
    """A comment that begins a line ends the paragraph, and in code it would be seen."""
    text = (ROOT / name).read_text()
    assert re.findall(r"^\s*<!-- value: .*", text, re.MULTILINE) == []
    assert [block.code for block in pages.blocks(text) if "<!-- value" in block.code] == []


def test_values_are_written_anew() -> None:
    text = "in <!-- value: rounds of a turn -->no<!-- --> rounds, <!-- value: edd.vct_nodes:.0f -->0<!-- --> nodes"
    assert values.written(text) == (
        f"in <!-- value: rounds of a turn -->{TURN_ROUNDS}<!-- --> rounds, "
        "<!-- value: edd.vct_nodes:.0f -->363<!-- --> nodes"
    )
    with pytest.raises(KeyError, match="nobody.knows"):
        values.written("<!-- value: nobody.knows:.0f -->1<!-- -->")


@pytest.mark.parametrize(("figure", "draw"), [(idea.FIGURE, idea.idea), (benefit.FIGURE, benefit.benefit)])
def test_a_picture_is_what_its_script_draws(figure: Path, draw: Callable[[], str]) -> None:
    labels = re.compile(r"<text[^>]*>([^<]*)</text>|<path[^>]* d=\"([^\"]*)\"")
    assert labels.findall(figure.read_text()) == labels.findall(draw())


EXAMPLE = """\
<!-- before: echo 41 > answer -->

```python title="more.py"
def more(number):
    return number + 1
```

```python
import pathlib

import more

read = int(pathlib.Path("answer").read_text())
more.more(read)
```

<!-- measured -->

```sh
cat answer
```

```output
about 12
```

<!-- slow -->

```sh
exit 1
```

<!-- not run: it would end the world -->

```sh
exit 2
```
"""


def test_blocks_run_one_after_another_in_one_folder(tmp_path: Path) -> None:
    assert pages.run(EXAMPLE, tmp_path) == [None, "42\n", "41\n", None, None]
    with pytest.raises(pages.PageError, match="ends with 1"):
        pages.run(EXAMPLE, tmp_path, slow=True)


@pytest.mark.parametrize(("code", "fails"), [(0, False), (1, False), (2, True)])
def test_a_block_may_end_with_1_where_a_note_says_so(code: int, fails: bool, tmp_path: Path) -> None:
    text = f"<!-- may end with 1 -->\n\n```sh\necho checked; exit {code}\n```\n"
    if fails:
        with pytest.raises(pages.PageError, match="ends with 2"):
            pages.run(text, tmp_path)
    else:
        assert pages.run(text, tmp_path) == ["checked\n"]


@pytest.mark.parametrize("app", APPS)
def test_pages_run_the_commands_themselves(app: str, tmp_path: Path) -> None:
    (printed,) = pages.run(f"```sh\n{app} --version\n```\n", tmp_path)
    assert printed is not None and re.search(r"\d+\.\d+", printed)


def test_a_page_is_rewritten_and_then_agrees(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(EXAMPLE)
    pages.rewrite(page, slow=False)
    text = page.read_text()
    assert "```output\n42\n```" in text and "```output\n41\n```" in text and "about 12" not in text
    again = pages.run(text, tmp_path)
    assert [pages.differs(block, new) for block, new in zip(pages.blocks(text), again, strict=True)] == [False] * 5


@pytest.mark.parametrize(
    ("recorded", "printed", "measured", "differs"),
    [
        ("2.1 s", "2.2 s", False, True),
        ("took 2.1 s", "took 13 s", True, False),
        ("took 2.1 s", "lasted 2.1 s", True, True),
        ("", "x", False, True),
    ],
)
def test_what_was_measured_is_compared_by_its_words(recorded: str, printed: str, measured: bool, differs: bool) -> None:
    block = pages.Block("sh", None, "", recorded, ("measured",) if measured else ())
    assert pages.differs(block, printed) is differs


NOT_PROSE = re.compile(
    r"^```.*?^```$"  # blocks of code, and outputs
    r"|<!--.*?-->"
    r"|\$\$.*?\$\$|\$[^$\n]*\$"  # formulas
    r"|`[^`]*`"
    r"|\]\([^)]*\)"  # where links lead
    r"|^[|#].*?$",  # tables and headings
    re.MULTILINE | re.DOTALL,
)
RESULT = re.compile(
    r"\d[\d,.]* %"
    r"|\b\d{1,3}(?:,\d{3})+\b"
    r"|(?<![\w.:-])(?<!section )(?<!Theorem )(?<!Python )(?<!capability )\d+\.\d+(?![\d.]*[\w.-]*\w)"
    r"|\b(?:\d+|two|three|four|five|six|seven|eight|nine|ten) times\b"
)
LEVEL = "95 %"  # of every interval and every comparison
STATED = {  # by page, what is no result, and why
    "CHANGELOG.md": {"0.32": "vLLM's version", "3.1": "EAGLE's version", "3.6": "Qwen's version"},
    "docs/howto/serve.md": {"0.32": "vLLM's version"},
    "docs/howto/doctor.md": {
        "0.32": "vLLM's version",
        "2026.10": "llama.cpp's version",
        "10 %": "LEAST_GAIN of specsim/servers/causes.py",
    },
    "docs/mathematics.md": {"0.8": "a setting of the code above it"},
}


def results(text: str) -> list[str]:
    """What looks like a result in the sentences of a page and is not between markers."""
    prose = " ".join(NOT_PROSE.sub("", values.PLACE.sub("", text)).split())
    return [found for found in RESULT.findall(prose) if found != LEVEL]


@pytest.mark.parametrize("name", [path.relative_to(ROOT).as_posix() for path in pages.written()])
def test_sentences_say_no_result_that_no_script_wrote(name: str) -> None:
    found = results((ROOT / name).read_text())
    assert sorted(found) == sorted(STATED.get(name, {})), "let docs/values.py write it, or say why it is no result"


def test_results_are_seen_in_sentences_alone() -> None:
    text = """\
# 1.5 times

It is 1.31 times as fast, or 12 % faster, after 14,119 rounds; by 1.5. Three times as fast as arXiv:2401.10774, section
3.3.3, at Llama-3.1-8B, Python 3.11, compute capability 9.0, p = `0.5` and $0.5$, with 95 % intervals, four times.

| 1.5 | 12 % |

```sh
echo 1.5
```

<!-- value: between runs -->1.7<!-- --> %
"""
    assert results(text) == ["1.31", "12 %", "14,119", "1.5", "four times"]


def test_the_notebook_runs_and_prints_what_stands_in_it(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    blocks = "\n".join(f"```python\n{''.join(cell['source'])}\n```\n" for cell in cells)
    recorded = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    assert pages.run(blocks, tmp_path) == recorded, "python -m docs.notebook writes it anew"


def test_the_notebook_is_its_page() -> None:
    codes = [block.code.strip() for block in pages.blocks(PAGE.read_text()) if block.runs]
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"] == codes
