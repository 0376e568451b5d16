"""Sentences of the documentation say no result that a script did not write.

Looked for is what results look like: percentages, thousands, decimals and "so many times". What stands in code, in
tables, in headings and between a script's markers is left out, as are versions, and sections and theorems of papers.
"""

from __future__ import annotations

import re

import pytest

from docs import pages, values
from tests.support import ROOT

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
