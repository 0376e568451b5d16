"""`specsim doctor`: why a server with speculative decoding is slow, and which K to set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_facts, print_notes, print_table
from specsim.cli.options import OVERWRITE_FILE_HELP, BatchSettings, RoundsSettings
from specsim.cli.servers.bench import BenchSettings, measured
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.engines.diagnose import Diagnosis
    from specsim.servers.doctor import Checkup


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
    drafter: str | None = setting(None, "Kind of drafter for the flags: model, eagle, eagle3, mtp or prompt-lookup.")
    out: Path | None = setting(None, "Where to write the page, HTML.")
    cost_out: Path | None = setting(None, "Where to write the costs, JSON, for `specsim advise` and `replay`.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None and not self.from_ and self.benchmark is None:
            raise InputError("nothing to check; give a server's URL, counters, --from BENCH.json, or --benchmark FILE")
        if self.benchmark_baseline is not None and self.benchmark is None:
            raise InputError("--benchmark-baseline goes with --benchmark; give both")


@dataclass(frozen=True, kw_only=True)
class CountersOptions(RoundsSettings, BatchSettings):
    """What was measured beside counters."""

    panel = "Counters"
    tokens_per_second: float | None = setting(None, "Measured tok/s with speculation.")
    baseline_tokens_per_second: float | None = setting(None, "Measured tok/s without speculation, at the same load.")
    cost: Path | None = setting(
        None, "Costs, to split a round's time further; `specsim cost list` names those that ship."
    )


def doctor(options: DoctorOptions, counters: CountersOptions, settings: BenchSettings) -> Answer:
    """Find out why speculation is slow.

    Measures a running server as `specsim bench` does, or takes such a benchmark. Tells traps of the benchmark, where
    the time of a round goes, the causes of a loss with a flag to try, and the draft length K for each concurrency.

    From counters and throughput it tells how many tokens a round yields, how many decode steps it costs, and the K
    that would pay.

    Example: specsim doctor http://localhost:8000 --baseline http://localhost:8001 --concurrency 1,8,32

    Example: specsim doctor counters.json --baseline-tokens-per-second 52 --tokens-per-second 41

    Example: specsim doctor --from k3.json --from k7.json --out doctor.html --cost-out cost.json
    """
    from specsim.io.files import write_json, write_text
    from specsim.report.doctor import doctor_result
    from specsim.report.page import page
    from specsim.servers.doctor import doctor as find_causes
    from specsim.servers.document import read_bench

    if options.source is not None and "://" not in options.source:
        if options != DoctorOptions(source=options.source) or settings != BenchSettings(seed=settings.seed):
            raise InputError(f"{options.source}: options of servers, benchmarks and pages do not go with counters")
        return _doctor_of_counters(options.source, counters, settings.seed)
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
    document = checkup.as_dict()
    if options.out is not None:
        write_text(options.out, page(doctor_result(document)))
    if options.cost_out is not None:
        if checkup.cost is None:
            raise InputError("no costs were found; measure a --baseline, too")
        write_json(checkup.cost, options.cost_out)
    return Answer(document, lambda: _print_checkup(checkup, document))


def _print_checkup(checkup: Checkup, document: dict[str, Any]) -> None:
    from specsim.report.doctor import LEVELS, fix_rows, level_rows, server_facts

    if checkup.server is not None:
        print_facts("server", server_facts(document))
    if checkup.acceptance:
        rates = ", ".join(f"{100 * rate:.0f}" for rate in checkup.acceptance)
        print(f"accepted by draft position, if all before were: {rates} %")
    if checkup.levels:
        print_table("where time goes, and the K to set", LEVELS, level_rows(document))
    for title, key in (("traps", "traps"), ("causes, the first costs most", "causes")):
        if document[key]:
            print_table(title, [title.split(",")[0][:-1], "evidence", "try"], fix_rows(document, key), labels=3)
    print_notes(checkup.notes)
    for level in checkup.levels:
        print(f"{level.concurrency} at once: {level.flags}")
    if checkup.schedule:
        print(f"one schedule for all: {checkup.schedule}")
    print(repr(checkup))


def _doctor_of_counters(source: str, options: CountersOptions, seed: int) -> Answer:
    from specsim.cost.files import read_cost
    from specsim.engines.diagnose import diagnose

    rate, baseline_rate = options.tokens_per_second, options.baseline_tokens_per_second
    if rate is None or baseline_rate is None:
        raise InputError(
            f"{source} is not an address such as http://localhost:8000, and counters need --tokens-per-second and "
            "--baseline-tokens-per-second; give both"
        )
    diagnosis = diagnose(
        source,
        baseline_tokens_per_s=baseline_rate,
        tokens_per_s=rate,
        cost=None if options.cost is None else read_cost(options.cost, batch=options.batch),
        context=options.context,
        policy=options.policy,
        seed=seed,
    )
    return Answer(diagnosis.as_dict(), lambda: _print_diagnosis(diagnosis))


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    print(diagnosis)
    print(f"tokens per step [95 % interval]: {diagnosis.tokens_per_round}")
    if diagnosis.parts:
        print_facts("a step, in normal decode steps", diagnosis.parts, number=".3f")
    for assumed, advice in diagnosis.advice:
        best = advice.lengths[advice.k].speedup
        with_k = f"K = {advice.k}, {best:.2f}x [{best.low:.2f}, {best.high:.2f}]"
        choice = with_k if advice.k else "turn speculation off"
        print(f"{assumed}: {choice}{'' if advice.sure else ' (uncertain: collect more rounds)'}")
