"""Read measured pass times: written by hand, or of llama-batched-bench, llama-bench, llama-server or a sweep."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from specsim.cost.model import NOISE
from specsim.cost.pass_times import FORM
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.point_calibration import Point
from specsim.engines.formats.llamacpp import STATISTICS, SUMMARY, drafting_totals
from specsim.engines.formats.reading import count, log_lines
from specsim.engines.formats.records import Skipped
from specsim.engines.formats.sweep import is_header, read_rows
from specsim.io.errors import InputError
from specsim.io.json import parse_json

KNOWN = f"give pass times, {FORM}, the output of llama-batched-bench or llama-bench, llama-server's log, or a sweep"
NUMBER = r"(\d{1,12}(?:\.\d{1,12})?)"
# | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | ...
BATCHED = re.compile(r"\|\s*(\d{1,9})\s*" * 3 + r"\|[\s\d.]+" * 3 + rf"\|\s*{NUMBER}\s*\|")
BENCH = re.compile(rf"\|\s*(pp|tg) ?(\d{{1,6}})\s*\|\s*{NUMBER}\s")  # of llama-bench: test, t/s
EVAL = re.compile(rf"(?<!prompt )eval time =\s*{NUMBER} ms /\s*(\d{{1,12}}) tokens")
WIDEST = 64  # tokens; llama-bench reads longer prompts in several passes
CONTEXT = 1000  # cached tokens, for times that are predicted from a data sheet


class ByHand(TypedDict):
    """A file written by hand; `specsim.cost.pass_times` says what its keys are."""

    pass_ms: dict[str, float]
    draft_ms: NotRequired[float]
    round_ms: NotRequired[float]


class BatchedRow(TypedDict):
    """A row of `llama-batched-bench --output-format jsonl`.

    pp, tg, pl : prompt tokens, generated tokens, parallel sequences
    t_tg : seconds of generation
    """

    pp: int
    tg: int
    pl: int
    t_tg: float


@dataclass
class PassTimes:
    """Measured milliseconds.

    pass_ms : by tokens of a target pass, all measurements of it
    draft_ms : of drafting one token, all measurements of it
    round_ms : of a round, beyond passes and drafting
    points : rows of sweeps, for the calibration of a roofline
    notes : which measurements were used
    """

    pass_ms: dict[float, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft_ms: list[float] = field(default_factory=list)
    round_ms: float = 0.0
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, tokens: float, ms: float, where: object) -> None:
        """Add a measurement; InputError for an impossible one."""
        if not (tokens >= 1 and 0 < ms < 1e9):
            raise InputError(f"{where}: a pass over {tokens:g} tokens that takes {ms:g} ms is impossible; {KNOWN}")
        self.pass_ms[tokens].append(ms)

    @property
    def contradictions(self) -> list[str]:
        """A sentence for each pass size, and for drafting, whose measurements differ by more than noise."""
        of_passes = {f"a pass over {tokens:g} tokens": ms for tokens, ms in sorted(self.pass_ms.items())}
        return [
            f"measurements contradict each other: {what} takes {min(ms):.4g} and {max(ms):.4g} ms"
            for what, ms in {**of_passes, "drafting a token": self.draft_ms}.items()
            if ms and max(ms) > (1 + 2 * NOISE) * min(ms)
        ]


def read_pass_times(paths: Iterable[str | Path]) -> PassTimes:
    """Read the times of files, whose formats are recognised by their content; InputError for a file without any.

    A llama-server log without speculation gives a decode step. One with speculation gives a draft step, `dur(b,g,a)`,
    and a verification pass: the rest of a round.
    """
    times = PassTimes()
    logs: list[tuple[Path, list[str]]] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise InputError(f"{path} does not exist; {KNOWN}")
        lines = [*log_lines([path], Skipped())]
        text = "\n".join(lines)
        if '"pass_ms"' in text:
            document: ByHand = parse_json(text, str(path), ByHand, invalid=f"write it {FORM}")
            for tokens, ms in document["pass_ms"].items():
                times.add(_tokens(tokens, path), ms, path)
            times.draft_ms += [document["draft_ms"]] if "draft_ms" in document else []
            times.round_ms = document.get("round_ms", times.round_ms)
        elif rows := [*_batched(path, lines)]:
            shortest = min(prompt for prompt, _, _ in rows)
            for _, sequences, ms in (row for row in rows if row[0] == shortest):
                times.add(sequences, ms, path)
            if any(prompt > shortest for prompt, _, _ in rows):
                times.notes.append(f"{path}: of several prompt lengths, {shortest} tokens are used")
        elif tests := BENCH.findall(text):
            for kind, tokens, speed in tests:
                size = 1 if kind == "tg" else int(tokens)
                if size <= WIDEST:
                    times.add(size, 1e3 * size / max(float(speed), 1e-9), path)
        elif any(map(is_header, lines[:20])):
            _of_sweep(path, times)
        elif EVAL.search(text):
            logs.append((path, lines))
        else:
            raise InputError(f"{path} holds no pass times; {KNOWN}")
    # Logs without speculation come first, because the others' steps without a draft take their decode step.
    for path, lines in sorted(logs, key=lambda log: any(map(STATISTICS.search, log[1]))):
        _of_log(path, lines, times)
    return times


def _tokens(text: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{path}: pass_ms has a pass over {text!r:.20} tokens; write it {FORM}") from None


def _batched(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """Prompt tokens, sequences and milliseconds per step of each row of llama-batched-bench."""
    for line in lines:
        if match := BATCHED.search(line):
            prompt, tokens, sequences = (int(match[group]) for group in (1, 2, 3))
            seconds = float(match[4])
        elif '"t_tg"' in line and line.lstrip().startswith("{"):
            row: BatchedRow = parse_json(line, f"{path}: a row", BatchedRow, invalid=KNOWN)
            prompt, tokens, sequences, seconds = row["pp"], row["tg"], row["pl"], row["t_tg"]
        else:
            continue
        if tokens > 0:
            yield prompt, sequences, 1e3 * seconds / tokens


def _of_sweep(path: Path, times: PassTimes) -> None:
    """Add a sweep's rows: a round takes its acceptance length times TPOT, drafting included."""
    rows = [row for row in read_rows([path], Skipped()) if row.tpot_ms and (row.length or not row.k)]
    batch = min((row.batch for row in rows), default=1)
    for row in rows:
        length = row.length if row.k and row.length else 1.0
        point = Point(row.tpot_ms or 0.0, row.batch, CONTEXT, row.k, length)
        times.points.append(point)
        if row.batch == batch:
            times.add(row.k + 1, 1e3 * point.round_s, path)
    if not {0} < {row.k for row in rows}:
        raise InputError(f"{path} needs times at K = 0 and at some K with its acceptance length; {KNOWN}")
    times.draft_ms.append(0.0)
    times.notes.append(f"{path}: times of K + 1 tokens are whole rounds, drafting included")
    if any(row.batch > batch for row in rows):
        times.notes.append(f"{path}: rows of batch {batch} are used; with --gpu, --target and --drafter all are")


def _of_log(path: Path, lines: Sequence[str], times: PassTimes) -> None:
    """Add a llama-server log's decode step, or its verification pass and draft step."""
    text = "\n".join(lines)
    evals = [(float(ms), int(tokens)) for ms, tokens in EVAL.findall(text)]
    ended = [(count(match[2], "accepted"), count(match[3], "generated")) for match in SUMMARY.finditer(text)]
    accepted, generated = (sum(column) for column in zip((0, 0), *ended, strict=True))
    eval_ms, steps = sum(ms for ms, _ in evals), sum(tokens - 1 for _, tokens in evals) - accepted
    if steps < 1:
        raise InputError(f"{path}: {len(evals)} requests generated only their first token; give a log with more output")
    drafts, drafted, draft_ms = drafting_totals(lines)
    if not drafts or not drafted:
        if accepted:
            raise InputError(f"{path} has no line `statistics ... dur(b,g,a)`, which tells drafting; {KNOWN}")
        times.add(1, eval_ms / steps, path)
        return
    if abs(drafted - generated) > 2 * NOISE * drafted:
        raise InputError(
            f"{path}: the requests drafted {generated:,} tokens, the server {drafted:,.0f} since its start; give its "
            "whole log"
        )
    times.draft_ms.append(draft_ms / drafted)
    plain = steps - drafts
    if plain > 2 * NOISE * steps and 1.0 not in times.pass_ms:
        raise InputError(
            f"{path}: {plain:,.0f} of {steps:,} steps draft nothing, and their time is not known; add a log without "
            "speculation"
        )
    if plain > 2 * NOISE * steps:
        eval_ms, steps = eval_ms - plain * float(np.mean(times.pass_ms[1.0])), drafts
    times.add(round(drafted / drafts, 1) + 1, (eval_ms - draft_ms) / steps, path)


def pass_times_document(times: PassTimes, source: str, roofline: RooflineCost | None = None) -> dict[str, Any]:
    """Return measured times in the form of a cost file.

    roofline : predicts a decode step and a draft step where they were not measured; predictions are scaled by the
        measured over the predicted time of the narrowest pass

    Raises InputError where something is missing and there is no roofline.
    """
    pass_ms = {tokens: float(np.mean(ms)) for tokens, ms in sorted(times.pass_ms.items())}
    missing = [] if 1.0 in pass_ms else ["a decode step (a pass over 1 token)"]
    missing += [] if times.draft_ms else ["drafting a token (draft_ms)"]
    draft_ms = float(np.mean(times.draft_ms)) if times.draft_ms else 0.0
    if missing:
        if roofline is None:
            raise InputError(
                f"{source}: no time of {' and of '.join(missing)}; measure it, or add --gpu, --target and --drafter"
            )
        if not pass_ms:
            raise InputError(f"{source}: no pass was measured; {KNOWN}")
        narrowest, narrowest_ms = min(pass_ms.items())
        factor = narrowest_ms / 1e3 / float(roofline.verify(round(narrowest), CONTEXT))
        step_ms, of_draft_ms = (
            1e3 * float(factor * seconds)
            for seconds in (roofline.autoregressive_step(CONTEXT), roofline.draft(1, CONTEXT))
        )
        pass_ms.setdefault(1.0, step_ms)
        draft_ms = draft_ms if times.draft_ms else of_draft_ms
        source += f"; {' and '.join(missing)} by the data sheet, times {factor:.2f} as a pass over {narrowest:g}"
    return {
        "pass_ms": {f"{tokens:g}": float(f"{ms:.6g}") for tokens, ms in sorted(pass_ms.items())},
        "draft_ms": float(f"{draft_ms:.6g}"),
        **({"round_ms": times.round_ms} if times.round_ms else {}),
        "source": f"measured: {source}",
    }
