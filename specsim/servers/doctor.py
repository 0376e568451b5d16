"""Diagnose a server with speculative decoding from a benchmark: traps, parts of a round, causes, and the K to set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specsim.acceptance.sources import Counters
from specsim.engines.counted import counted
from specsim.engines.export import LARGEST_BATCH, schedule_setting
from specsim.engines.flags import draft_length_flags, kind_of
from specsim.engines.formats.llamacpp import drafting_totals
from specsim.engines.signatures import find_signatures
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate
from specsim.report.doctor import Cause, Checkup, Level, Server, Trap
from specsim.servers.benchmark_files import read_benchmark
from specsim.servers.causes import Rounds, find_causes
from specsim.servers.document import BASELINE, REPEAT, SPECULATIVE, Arm, Bench, read_bench
from specsim.servers.round_costs import DRAWS, Step, fit_round_costs
from specsim.servers.traps import UNDECIDED, bench_traps, find_traps
from specsim.serving.draft_length import ScheduledK

NORMAL = 1.96  # standard errors in half of a 95 % interval
LEAST_DELAY = 0.02  # of a token's time: prompts of others below it go without a word
SCHEDULED = ("vllm", "sglang", "tensorrt-llm")  # engines with a K by batch
BenchLike = Bench | str | PathLike[str]


def doctor(
    *benches: BenchLike,
    benchmark: str | PathLike[str] | None = None,
    benchmark_baseline: str | PathLike[str] | None = None,
    log: str | PathLike[str] | None = None,
    drafter: str | None = None,
    seed: int = 0,
) -> Checkup:
    """Diagnose a server from what `bench` measured, or check a benchmark of your own.

    The seconds of decoding steps are fitted by a pass, further tokens in it, draft steps and a fixed part. Benchmarks
    of the same models at other K tell these parts apart; from a single K, the best K has a wide interval.

    Parameters
    ----------
    *benches : Bench, str or Path
        What `bench` measured: the server first, then the same models at other K, if any.
    benchmark, benchmark_baseline : path, optional
        A result of `vllm bench serve --save-detailed` of your own, and its baseline's, to check for traps.
    log : path, optional
        The log of llama-server, which prints how long drafts took.
    drafter : str, optional
        Kind of drafter for the flags, such as "eagle3".
    seed : int
        Seed of the draws.

    Returns
    -------
    Checkup

    Raises
    ------
    InputError
        If there is nothing to check, and for a server that counted no drafts by position.

    Examples
    --------
    >>> import specsim
    >>> specsim.doctor("k3.json", "k7.json").causes  # doctest: +SKIP
    """
    read = [each if isinstance(each, Bench) else read_bench(each) for each in benches]
    if not read and benchmark is None:
        raise InputError("nothing to check; give a benchmark of specsim, or of your own")
    traps: list[Trap] = []
    if benchmark is not None:
        base = None if benchmark_baseline is None else read_benchmark(benchmark_baseline, BASELINE)
        traps = find_traps(read_benchmark(benchmark, SPECULATIVE), base)
    if not read:
        return _checkup(None, traps)
    main = read[0]
    server = Server(**vars(main.speculative))
    of_others = [trap for each in read[1:] for trap in bench_traps(each) if trap.invalid]
    for trap in (*bench_traps(main), *of_others):
        traps += [trap] * (trap.name not in {other.name for other in traps})
    notes = [note for each in read for note in (*each.notes, *[f"stopped early: {each.stopped}"] * bool(each.stopped))]
    if any(trap.invalid for trap in traps) and not _counting(read):
        return _checkup(server, traps, notes)
    traps += _faults(read, drafter)
    measured = max(len(arm.drafted or []) for each in read for arm in each.arms)
    k = main.speculative.draft_tokens or measured
    rates = _rates(read, 2 * max(k, measured), seed)
    acceptance = tuple(rates.mean(axis=0).tolist())
    server = msgspec.structs.replace(server, draft_tokens=k)
    if main.baseline is None:
        notes.append("without a baseline no time can be explained; start the server without speculation for --baseline")
        return _checkup(server, traps, notes, acceptance[:measured])
    levels, causes = [], []
    clear = [clients for clients in main.concurrencies if main.speedup(clients) is not None]
    if not clear or any(arm.buffered for bench in read for arm in bench.arms):
        return _checkup(server, traps, notes, acceptance[:measured])
    draft_step_s = None if log is None else draft_step_seconds(log)
    most_prompt_s = _most_prompt_s(main)
    costs = fit_round_costs(_steps(read), draft_step_s=draft_step_s, most_prompt_s=most_prompt_s, seed=seed)
    for clients in clear:
        base = _arm(main, BASELINE, clients)
        rounds = Rounds(costs, rates, _running(base), _prompts(base))
        levels.append(_level(main, clients, rounds, k, drafter, seed))
        speedup = levels[-1].speedup
        doubt = math.sqrt(
            speedup.high / speedup.low
        )  # a cause that costs less than the measurement leaves open is none
        causes += [cause for cause in find_causes(rounds, k, server.engine, drafter) if cause.gain > doubt]
    lengths = sorted({each.speculative.draft_tokens or measured for each in read})
    if len(lengths) == 1 and draft_step_s is None:
        other = 1 if k > 2 else 2 * k + 1
        notes.append(
            f"K = {k} alone does not tell drafting from the fixed part of a round; measure a server at K = {other}, "
            "too, and give both files"
        )
    if len(main.concurrencies) == 1 and draft_step_s is None:
        notes.append("one concurrency alone does not tell drafting from verification; give two, such as 1,8")
    delay_ms, most_ms = (1e3 * rounds.prompts * each for each in (float(costs.prompt_s.mean()), most_prompt_s))
    if most_ms > LEAST_DELAY * levels[-1].baseline_ms:
        notes.append(
            f"{levels[-1].concurrency} at once: prompts of others may delay a token by 0 to {most_ms:.2f} ms, and "
            f"{delay_ms:.2f} are assumed; times of requests do not tell them from other growth with the load"
        )
    if any(level.k > measured for level in levels):
        notes.append(
            f"drafts beyond {measured} tokens were not measured: their acceptance is taken to be the last one's"
        )
    source = f"specsim doctor, {server.engine} {server.version}, {server.model}"
    ends = min(main.concurrencies), max(main.concurrencies)
    cost = costs.document(source, main.date, ends, (lengths[0], lengths[-1]))
    schedule = _schedule(levels, server.engine, drafter)
    return _checkup(server, traps, notes, acceptance[:measured], levels, _merged(causes), schedule, cost)


def _checkup(
    server: Server | None,
    traps: Sequence[Trap],
    notes: Sequence[str] = (),
    acceptance: tuple[float, ...] = (),
    levels: Sequence[Level] = (),
    causes: tuple[Cause, ...] = (),
    schedule: str = "",
    cost: dict[str, Any] | None = None,
) -> Checkup:
    verdict = _verdict(traps, levels, causes)
    return Checkup(server, tuple(traps), acceptance, tuple(levels), causes, schedule, cost, tuple(notes), verdict)


def _verdict(traps: Sequence[Trap], levels: Sequence[Level], causes: Sequence[Cause]) -> str:
    invalid = [trap for trap in traps if trap.invalid]
    if invalid:
        return f"the benchmark is not valid: {invalid[0].name}: {invalid[0].evidence}"
    if causes:
        cause = causes[0]
        return f"{cause.name}: {cause.evidence}; try {cause.remedy} ({float(cause.gain):.2f} times as fast)"
    undecided = next((trap for trap in traps if trap.name in UNDECIDED), None)
    if undecided is not None:
        return f"not decidable: {undecided.evidence}; {undecided.remedy}"
    if any(not level.k and level.speedup.high < 1 for level in levels):
        return "no cause stands out, but speculation does not pay: turn it off"
    slow = next((level for level in levels if level.speedup.high < 1), None)
    if slow is not None:
        return f"no cause stands out, but speculation is slower: speedup {slow.speedup}; try {slow.flags}"
    return "no cause found: the server is healthy" if levels else "no cause found"


def _arm(bench: Bench, name: str, clients: int) -> Arm:
    arm = bench.arm(name, clients)
    if arm is None:
        raise InputError(f"the benchmark has no {name} at concurrency {clients}; measure again")
    return arm


def _counting(benches: Sequence[Bench]) -> list[Arm]:
    """Arms that count drafts by position."""
    return [arm for bench in benches for arm in bench.arms if arm.drafted and arm.accepted]


def _counts(benches: Sequence[Bench]) -> tuple[list[Arm], Counters]:
    """Benchmark arms that count drafts by position, and the sum of their counts; InputError if there is none."""
    arms = _counting(benches)
    if not arms:
        raise InputError(
            "the server told no acceptance by position; start vLLM with --per-request-spec-decode-metrics detailed, "
            "llama-server with --metrics, or update SGLang"
        )
    columns = [[getattr(arm, name) for arm in arms] for name in ("drafted", "accepted")]
    drafted, accepted = (np.array([sum(row) for row in zip_longest(*lists, fillvalue=0)]) for lists in columns)
    return arms, Counters(drafted, accepted)


def _faults(benches: Sequence[Bench], drafter: str | None) -> list[Trap]:
    """Find signs of a fault in the server's counts, as traps that leave the benchmark valid."""
    counters = _counts(benches)[1]
    signs = find_signatures(counted(counters), counters, drafter and kind_of(drafter))
    return [Trap(sign.name, sign.evidence, f"check {sign.check}", invalid=False) for sign in signs]


def _rates(benches: Sequence[Bench], longest: int, seed: int) -> Floats:
    """Draws [R, D] of the acceptance of the i-th token, if all before it were; beyond what was met as the last."""
    arms, counters = _counts(benches)
    counts = counted(counters)
    requests = [request for arm in arms for request in arm.requests if request.rounds and request.accepted is not None]
    if len({len(arm.drafted or []) for arm in arms}) == 1 and requests:  # of one K, so that they can be compared
        own = np.array([[request.rounds, request.accepted] for request in requests], dtype=np.float64)
        counts = replace(counts, unit="requests", unit_rounds=own[:, 0], unit_accepted=own[:, 1])
    rates = counts.draw_rates(DRAWS, np.random.default_rng(seed))
    reached = int(np.flatnonzero(counts.verified > 0)[-1]) + 1  # deeper tokens were never verified
    beyond = np.repeat(rates[:, reached - 1 : reached], longest - reached, axis=1)
    return np.concatenate([rates[:, :reached], beyond], axis=1)


def _running(arm: Arm) -> float:
    """Requests that were decoding at the same time, on average."""
    return max(1.0, float(arm.columns[0].sum()) / arm.clients_s)


def _steps(benches: Sequence[Bench]) -> list[Step]:
    """Decoding steps of all arms, each benchmark's scaled so that its baseline takes as long as the first's."""
    main, steps = benches[0], []
    for bench in benches:
        for clients in bench.concurrencies:
            base, reference = bench.arm(BASELINE, clients), main.arm(BASELINE, clients)
            if base is None or reference is None:
                continue
            scale, noise = reference.token_s / base.token_s, _noise(bench, clients)
            for name in (SPECULATIVE, BASELINE, REPEAT):
                arm = bench.arm(name, clients)
                if arm is not None and not (name != SPECULATIVE and bench is not main):
                    drafts = arm.drafted_per_round if name == SPECULATIVE else 0.0
                    seconds, error = scale * arm.token_s * arm.tokens_per_round, max(arm.token_error, noise)
                    steps.append(Step(_running(arm), drafts, seconds, error, _prompts(arm) * arm.tokens_per_round))
    return steps


def _noise(bench: Bench, clients: int) -> float:
    """Relative error of an arm by the A/A test, which sees a machine that drifts; 0 without one."""
    null = bench.null(clients)
    if null is None or null.low == null.high:
        return 0.0
    return max(abs(float(np.log(null.estimate))), float(np.log(null.high / null.low)) / (2 * NORMAL)) / math.sqrt(2)


def _prompts(arm: Arm) -> float:
    """Prompts of other requests that the server reads per output token of a request."""
    return (_running(arm) - 1) / float(np.mean([request.output_tokens for request in arm.requests]))


def _most_prompt_s(bench: Bench) -> float:
    """Seconds by which a prompt delays other requests, at most.

    No longer than a first token takes at the least load, and no more than both arms' times per token grow from there to
    the largest load. 0 for a single load, which does not tell.
    """
    least, most = min(bench.concurrencies), max(bench.concurrencies)
    bound = _arm(bench, BASELINE, least).ttft_s
    for name in (BASELINE, SPECULATIVE):
        alone, loaded = _arm(bench, name, least), _arm(bench, name, most)
        prompts = _prompts(loaded) - _prompts(alone)
        grown_s = loaded.token_s - alone.token_s * alone.tokens_per_round / loaded.tokens_per_round
        bound = min(bound, max(grown_s, 0.0) / prompts) if prompts > 0 else 0.0
    return bound


def _level(bench: Bench, clients: int, rounds: Rounds, k: int, drafter: str | None, seed: int) -> Level:
    arm, base, speedup = _arm(bench, SPECULATIVE, clients), _arm(bench, BASELINE, clients), bench.speedup(clients)
    if speedup is None:
        raise InputError(f"concurrency {clients}: the arms have no prompt in common; measure again")
    # Measured now, times the predicted change: what the model gets wrong of both lengths cancels.
    error = np.log(speedup.high / speedup.low) / (2 * NORMAL) if speedup.high > speedup.low else 0.0
    noise = np.exp(error * np.random.default_rng(seed).standard_normal(len(rounds.speeds)))
    gains = rounds.speeds / rounds.speeds[:, k : k + 1] * float(speedup) * noise[:, None]
    gains[:, 0] = 1.0
    best = int(gains.mean(axis=0).argmax())
    ends: Ints = np.quantile(gains.argmax(axis=1), (0.05, 0.95), method="nearest")
    gain = gains[:, best]
    predicted = Estimate(float(gain.mean()), *map(float, np.quantile(gain, (0.05, 0.95))))
    ratio = float(predicted) / float(speedup)
    base_s, c = rounds.decode_s, rounds.concurrency
    drafts = arm.drafted_per_round
    parts = {
        "verification": float((rounds.costs.verify(c, drafts) / base_s).mean()),
        "drafting": float((rounds.costs.draft(c, drafts) / base_s).mean()),
        "fixed part": float((rounds.costs.round_s / base_s).mean()),
        "prompts of others": float((arm.tokens_per_round * rounds.prompts * rounds.costs.prompt_s / base_s).mean()),
    }
    measured = arm.tokens_per_round / float(speedup) / sum(parts.values())  # over what the fit makes of it
    parts = {name: measured * part for name, part in parts.items() if part or name != "prompts of others"}
    return Level(
        clients, 1e3 * arm.token_s, 1e3 * base.token_s, arm.tokens_per_s, speedup, bench.null(clients),
        arm.tokens_per_round, parts, best, (int(ends[0]), int(ends[1])), predicted, 1e3 * arm.token_s / ratio,
        arm.tokens_per_s * ratio, draft_length_flags(bench.speculative.engine, best, drafter),
    )  # fmt: skip


def _schedule(levels: Sequence[Level], engine: str, drafter: str | None) -> str:
    """Flags of a K by batch, where the best K differs and the engine has such a schedule."""
    lengths = {1 if number == 0 else level.concurrency: level.k for number, level in enumerate(levels)}
    if len(set(lengths.values())) == 1 or engine not in SCHEDULED:
        return ""
    return schedule_setting(engine, ScheduledK(lengths), LARGEST_BATCH, drafter=drafter).flags


def _merged(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """The three that cost most, each once."""
    first: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda cause: -cause.gain):
        first.setdefault(cause.name, cause)
    return tuple(first.values())[:3]


def draft_step_seconds(log: str | PathLike[str]) -> float:
    """Seconds of a draft step by the statistics in llama-server's log: drafting since its start over drafted tokens."""
    _, drafted, draft_ms = drafting_totals(Path(log).read_text(errors="replace").splitlines())
    if not drafted:
        raise InputError(f"{log} has no line `statistics ... dur(b,g,a)`; give the log of a llama-server that drafted")
    return draft_ms / 1e3 / drafted
