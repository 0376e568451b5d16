"""`specsim bench`: a running server with speculative decoding, measured beside one without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_notes, print_table, progress_bar
from specsim.cli.options import OVERWRITE_FILE_HELP, SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.servers.document import Bench


@dataclass(frozen=True, kw_only=True)
class BenchSettings(SeedSettings):
    """How servers are measured."""

    baseline: str | None = setting(None, "The same server without speculation; measured twice, as an A/A test.")
    prompts: Path | None = setting(
        None,
        'Prompts, JSON Lines: {"prompt": text or token ids}, {"turns": [...]} or {"messages": [...]}. Default: 240 '
        "tasks of six kinds.",
    )
    completions: bool = setting(
        False, "Send questions as texts to continue, to a model without a chat template.", flag="--completions"
    )
    concurrency: tuple[int, ...] = setting((1,), "Requests at the same time, such as 1,8,32.")
    requests: int = setting(48, "Requests per server and concurrency, at least 4 per client.", low=1)
    minutes: float = setting(10.0, "Time limit.", above=0)
    max_tokens: int = setting(128, "Output tokens of a request, at most.", low=2)
    temperature: float = setting(0.0, "Sampling temperature.", low=0)


@dataclass(frozen=True, kw_only=True)
class BenchFiles(Settings):
    """The server, and where results are written."""

    url: str = argument("Server with speculation: vLLM, SGLang or llama.cpp, such as http://localhost:8000.")
    out: Path | None = setting(None, "Where to write the benchmark, JSON, for `specsim doctor --from`.")
    records: Path | None = setting(
        None, "New folder for a file per server and concurrency, as `vllm bench serve --save-detailed` writes."
    )
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def measured(url: str, options: BenchSettings) -> Bench:
    """Run the benchmark that the options describe, with progress on standard error."""
    from specsim.servers.bench import bench as measure

    settings = dict(vars(options))
    with progress_bar() as progress:
        return measure(url, **settings, progress=progress)


def bench(files: BenchFiles, options: BenchSettings) -> Answer:
    """Measure a server with speculation.

    Sends prompts to a running server and, in turns, to the same server without speculation. Shows time per output
    token, time to the first token, acceptance, and the speedup with its interval over prompts and the noise floor.
    Needs `pip install 'specsim[servers]'`. Talks to these servers alone.

    Example: specsim bench http://localhost:8000 --baseline http://localhost:8001 --concurrency 1,8 --out bench.json
    """
    from specsim.io.files import write_json
    from specsim.servers.benchmark_files import as_vllm_bench

    if files.out is not None:
        claim_file(files.out, overwrite=files.overwrite)
    if files.records is not None and files.records.exists():
        raise InputError(f"{files.records} exists; choose a new folder")
    result = measured(files.url, options)
    if files.out is not None:
        write_json(result.as_dict(), files.out)
    if files.records is not None:
        files.records.mkdir(parents=True)
        for arm in result.arms:
            name = f"{arm.name.replace(', ', '-')}-{arm.concurrency}.json"
            write_json(as_vllm_bench(arm, result.speculative.model), files.records / name)

    def show() -> None:
        _print_bench(result)

    return Answer(result.as_dict(), show)


def _print_bench(result: Bench) -> None:
    from specsim.replaying.intervals import noise_floor_percent
    from specsim.servers.document import SPECULATIVE

    rows = []
    for arm in result.arms:
        speedup, null = result.speedup(arm.concurrency), result.null(arm.concurrency)
        speculates = arm.name == SPECULATIVE
        rows.append(
            [
                f"{arm.concurrency}",
                arm.name,
                f"{arm.tokens_per_s:.1f}",
                f"{1e3 * arm.token_s:.2f}",
                f"{1e3 * arm.ttft_s:.0f}",
                f"{arm.tokens_per_round:.2f}" if speculates else "",
                str(speedup) if speculates and speedup else "",
                f"{noise_floor_percent(null):.1f} %" if speculates and null else "",
            ]
        )
    columns = ["at once", "server", "tok/s", "ms per token", "ms to first", "acceptance length (tau)"]
    facts = result.speculative
    title = f"{facts.engine} {facts.version}, {facts.model}: {len(result.arms[0].requests)} prompts of {result.prompts}"
    print_table(title, [*columns, "speedup [95 % interval]", "noise floor"], rows, labels=2)
    print_notes(result.notes)
