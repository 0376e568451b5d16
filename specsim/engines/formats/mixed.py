"""What a file mixes: several models, processes or engines, and lines that stand twice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

MODEL = re.compile(
    r"with config: model='([^']+)'|\bmodel_name=\"([^\"]+)\"|non-default args: \{.{0,4000}?'model': '([^']+)'"
)
PROCESS = re.compile(r"\((?:APIServer|EngineCore\w*|MainProcess) pid=(\d+)\)")
ENGINE = re.compile(r"\bEngine (\d{3}):|\bengine=\"(\d+)\"")
LINES = {"SpecDecoding metrics:": "vLLM", "draft acceptance": "llama.cpp", "Decode batch": "SGLang"}
COUNTS = re.compile("|".join(LINES))
TIME = re.compile(r"\d\d:\d\d:\d\d|^\d+\.\d+\.\d+\.\d+")


def mixed_sources(path: Path) -> list[str]:
    """Notes on what the counts in a text file are summed over; empty for those of a single server."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if COUNTS.search(line)]
    several = {
        "models": {match[1] or match[2] or match[3] for match in MODEL.finditer(text)},
        "processes": {match[1] for line in lines for match in PROCESS.finditer(line)},
        "engines": {match[1] or match[2] for match in ENGINE.finditer(text)},
    }
    notes = [
        f"{len(names)} {what} are summed ({', '.join(sorted(names)[:4])}): give a file of one to tell them apart"
        for what, names in several.items()
        if len(names) > 1
    ]
    engines = [engine for words, engine in LINES.items() if any(words in line for line in lines)]
    if len(engines) > 1:
        notes.append(f"lines of {' and '.join(engines)}: only one engine's are counted; give a file of each")
    twice = sum(times > 1 for line, times in Counter(lines).items() if TIME.search(line))
    if twice:
        notes.append(f"{twice} lines stand more than once, as a log does that was written twice: they count each time")
    return notes
