"""`specsim bench` and `specsim doctor`: measure a server, and find out why speculation is slow on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specsim.cli.command import Answer
from specsim.cli.console import BAD_INPUT, claim_file, print_facts, print_notes, print_table, progress_bar
from specsim.cli.options import (
    OVERWRITE_FILE_HELP,
    BatchSettings,
    RoundsSettings,
    SeedSettings,
)
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.engines.diagnose import Diagnosis
    from specsim.engines.import_records import Reading
    from specsim.report.doctor import Checkup
    from specsim.servers.document import Bench

# Ratio of requests at once above which two rates do not compare; a log's mean is below the limit of the benchmark.
OTHER_LOAD = 1.5


@dataclass(frozen=True, kw_only=True)
class BenchSettings(SeedSettings):
    """How servers are measured."""

    baseline: str | None = setting(
        None, "The same server without speculation; measured twice, as an A/A test. For counters, a benchmark's file."
    )
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


def measured(url: str, options: BenchSettings, journal: Path | None = None) -> Bench:
    """Run the benchmark that the options describe, with progress on standard error."""
    from specsim.servers.bench import bench as measure

    settings = dict(vars(options))
    with progress_bar() as progress:
        return measure(url, **settings, journal=journal, progress=progress)


def bench(files: BenchFiles, options: BenchSettings) -> Answer:
    """Measure a server with speculation.

    Sends prompts to a running server and, in turns, to the same server without speculation. Shows time per output
    token, time to the first token, acceptance, and the speedup with its interval over prompts and the noise floor.
    Needs `pip install -c constraints.txt '.[servers]'`. Talks to these servers alone. With --out, finished blocks of
    prompts are kept in a folder beside it until the end, so that the same command goes on if it is stopped.

    Example: specsim bench http://localhost:8000 --baseline http://localhost:8001 --concurrency 1,8 --out bench.json
    """
    from specsim.io.files import remove_folder, replacing_folder, working_in, write_json
    from specsim.servers.benchmark_files import as_vllm_bench

    if files.out is not None:
        claim_file(files.out, overwrite=files.overwrite)
    if files.records is not None and files.records.exists():
        raise InputError(f"{files.records} exists; choose a new folder")
    if files.out is None:
        result = measured(files.url, options)
    else:
        work = files.out.with_name(f"{files.out.name}.unfinished")
        with working_in(work):
            result = measured(files.url, options, work / "blocks.jsonl")
            if not result.stopped:
                write_json(result.as_dict(), files.out)
                remove_folder(work)
    if files.records is not None and not (result.stopped and files.out is not None):
        with replacing_folder(files.records) as folder:
            for arm in result.arms:
                name = f"{arm.name.replace(', ', '-')}-{arm.concurrency}.json"
                write_json(as_vllm_bench(arm, result.speculative.model), folder / name)
    error = f"error: {result.stopped}" if result.stopped else ""
    if error and files.out is not None:
        error += f"; what was measured is kept in {work}, and the same command goes on"

    def show() -> None:
        _print_bench(result)

    return Answer(result.as_dict(), show, warning=error, code=BAD_INPUT if error else 0)


def _print_bench(result: Bench) -> None:
    from specsim.replaying.intervals import noise_floor_percent
    from specsim.servers.document import SPECULATIVE
    from specsim.servers.traps import bench_traps

    invalid = [f"{trap.name}: {trap.evidence}; {trap.remedy}" for trap in bench_traps(result) if trap.invalid]
    print_notes(invalid, "not valid")
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


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Settings):
    """What is checked, and where the answer is written."""

    source: str | None = argument(
        "Server with speculation, to measure now; or its counters, as `specsim advise` takes them; or leave it out "
        "with --from.",
        default=None,
    )
    from_: list[Path] = setting(
        [], "Benchmark of `specsim bench --out`; repeat for the same models at other K.", flag="--from"
    )
    benchmark: Path | None = setting(None, "Your own result of `vllm bench serve --save-detailed`, to check for traps.")
    benchmark_baseline: Path | None = setting(
        None, "Your result without speculation, which --benchmark is compared to."
    )
    log: Path | None = setting(None, "Log of llama-server, which tells how long drafts take.")
    drafter: str | None = setting(
        None, "Kind of drafter, such as eagle3, mtp or prompt-lookup: for the flags, and for signs of a fault."
    )
    out: Path | None = setting(None, "Where to write the page, HTML.")
    cost_out: Path | None = setting(None, "Where to write the costs, JSON, for `specsim advise` and `replay`.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.benchmark_baseline is not None and self.benchmark is None:
            raise InputError("--benchmark-baseline goes with --benchmark; give both")


@dataclass(frozen=True, kw_only=True)
class CountersOptions(RoundsSettings, BatchSettings):
    """What was measured beside counters."""

    panel = "Counters"
    context: int = setting(1000, "Cached tokens at which costs are taken.", low=1)
    tokens_per_second: float | None = setting(
        None, "Measured tok/s with speculation. Default: the file's, of a log or a benchmark."
    )
    baseline_tokens_per_second: float | None = setting(
        None, "Measured tok/s without speculation, at the same load; or --baseline with a benchmark's file."
    )
    cost: Path | None = setting(
        None, "Costs, to split a round's time further; `specsim cost list` names those that ship."
    )


def doctor(options: DoctorOptions, counters: CountersOptions, settings: BenchSettings) -> Answer:
    """Find out why speculation is slow.

    Measures a running server as `specsim bench` does, or takes such a benchmark. Tells traps of the benchmark, where
    the time of a round goes, the causes of a loss with a flag to try, and the draft length K for each concurrency.

    From counters and throughput it tells how many tokens a round yields, how many decode steps it costs, and the K
    that would pay. A log or a benchmark with speculation has both; a benchmark without it goes with --baseline.

    Example: specsim doctor http://localhost:8000 --baseline http://localhost:8001 --concurrency 1,8,32

    Example: specsim doctor counters.json --baseline-tokens-per-second 52 --tokens-per-second 41

    Example: specsim doctor bench.txt --baseline without.txt

    Example: specsim doctor --from k3.json --from k7.json --out doctor.html --cost-out cost.json
    """
    from specsim.io.files import write_json, write_text
    from specsim.report.doctor import doctor_result
    from specsim.report.page import page
    from specsim.servers.doctor import doctor as find_causes
    from specsim.servers.document import read_bench

    if counters.accept_length is not None or (options.source is not None and "://" not in options.source):
        file = settings.baseline if settings.baseline and "://" not in settings.baseline else None
        if options != DoctorOptions(source=options.source, drafter=options.drafter) or settings != BenchSettings(
            seed=settings.seed, baseline=file
        ):
            raise InputError("options of servers, benchmarks and pages do not go with counters; leave them out")
        return _doctor_of_counters(options, counters, settings)
    if options.source is None and not options.from_ and options.benchmark is None:
        raise InputError("nothing to check; give a server's URL, counters, --from BENCH.json, or --benchmark FILE")
    if counters != CountersOptions():
        raise InputError("tokens per second, --cost, --batch, --context and --policy go with counters; give a file")
    if options.cost_out is not None and options.source is not None and settings.baseline is None:
        raise InputError("--cost-out needs the time without speculation; give --baseline")
    for path in (options.out, options.cost_out):
        if path is not None:
            claim_file(path, overwrite=options.overwrite)
    for path in (options.benchmark, options.benchmark_baseline, options.log):
        if path is not None and not path.is_file():
            raise InputError(f"{path} does not exist; check the path")
    benches = [read_bench(path) for path in options.from_]
    if options.source is not None:
        benches.insert(0, measured(options.source, settings))
    checkup = find_causes(
        *benches,
        benchmark=options.benchmark,
        benchmark_baseline=options.benchmark_baseline,
        log=options.log,
        drafter=options.drafter,
        seed=settings.seed,
    )
    if options.out is not None:
        write_text(options.out, page(doctor_result(checkup)))
    if options.cost_out is not None:
        if checkup.cost is None:
            raise InputError("no costs were found; measure a --baseline, too")
        write_json(checkup.cost, options.cost_out)
    return Answer(checkup.as_dict(), lambda: _print_checkup(checkup))


def _print_checkup(checkup: Checkup) -> None:
    from specsim.report.doctor import LEVELS, level_rows, server_facts

    if checkup.server is not None:
        print_facts("server", server_facts(checkup.server))
    if checkup.acceptance:
        rates = ", ".join(f"{100 * rate:.0f}" for rate in checkup.acceptance)
        print(f"accepted by draft position, if all before were: {rates} %")
    if checkup.levels:
        print_table("where time goes, and the K to set", LEVELS, level_rows(checkup.levels))
    for title, fixes in (("traps", checkup.traps), ("causes, the first costs most", checkup.causes)):
        if fixes:
            rows = [[fix.name, fix.evidence, fix.remedy] for fix in fixes]
            print_table(title, [title.split(",")[0][:-1], "evidence", "try"], rows, labels=3)
    print_notes(checkup.notes)
    for level in checkup.levels:
        print(f"{level.concurrency} at once: {level.flags}")
    if checkup.schedule:
        print(f"one schedule for all: {checkup.schedule}")
    print(checkup.verdict)


def _doctor_of_counters(doctor: DoctorOptions, options: CountersOptions, settings: BenchSettings) -> Answer:
    from specsim.cost.files import read_cost
    from specsim.engines.diagnose import diagnose
    from specsim.engines.formats.bench_results import read_throughput
    from specsim.engines.formats.registry import FORMATS

    reading = options.read_counts(doctor.source)
    rate = options.tokens_per_second or reading.setup.tokens_per_s
    baseline_rate, notes = options.baseline_tokens_per_second, reading.notes
    if settings.baseline is not None and baseline_rate is None:
        baseline_rate, load = read_throughput(Path(settings.baseline))
        if options.tokens_per_second is None and rate is not None:
            notes = (*notes, *_other_load(reading, settings.baseline, load))
    if rate is None or baseline_rate is None:
        missing = [
            flag
            for flag, value in (
                ("--tokens-per-second", rate),
                ("--baseline-tokens-per-second (or --baseline with a benchmark's file)", baseline_rate),
            )
            if value is None
        ]
        raise InputError(f"{reading}; what is its throughput? Add {' and '.join(missing)}")
    diagnosis = diagnose(
        reading.source,
        baseline_tokens_per_s=baseline_rate,
        tokens_per_s=rate,
        cost=None if options.cost is None else read_cost(options.cost, batch=options.batch),
        context=options.context,
        seed=settings.seed,
        drafter=doctor.drafter or reading.setup.kind or None,
    )

    def show() -> None:
        if reading.kind in FORMATS:
            decoding = " while decoding" if reading.engine == "llamacpp" and rate != options.tokens_per_second else ""
            print(f"{reading}; {rate:,.5g} tok/s{decoding}, {baseline_rate:,.5g} without speculation")
        _print_diagnosis(diagnosis, notes)

    return Answer(diagnosis.as_dict(), show)


def _other_load(reading: Reading, baseline: str, load: float | None) -> list[str]:
    """A note if loads are unknown; InputError if they differ so much that the rates do not compare."""
    own = reading.setup.running
    if own is None or load is None:
        unknown = " and ".join(name for name, known in ((reading.name, own), (baseline, load)) if known is None)
        return [f"{unknown}: how many requests ran at once is not told; the rates compare only at the same load"]
    if max(own, load) > OTHER_LOAD * min(own, load):
        raise InputError(
            f"{reading.name} is of {own:.3g} requests at once, {baseline} of {load:.3g}: their rates do not compare; "
            f"measure the baseline with {own:.0f}, or give the rates at one load by --tokens-per-second and "
            "--baseline-tokens-per-second"
        )
    return []


def _print_diagnosis(diagnosis: Diagnosis, notes: tuple[str, ...]) -> None:
    print(diagnosis)
    print(f"tokens per step [95 % interval]: {diagnosis.tokens_per_round}")
    if diagnosis.parts:
        print_facts("a step, in normal decode steps", diagnosis.parts, number=".3f")
    print_notes([*notes, *map(str, diagnosis.signatures)])
    for assumed, advice in diagnosis.advice:
        print(f"{assumed}: {advice}")
