"""Traps of benchmarks: what makes a measured speedup, or a server's acceptance, mean something else."""

from __future__ import annotations

from collections import Counter

import numpy as np

from specsim.replaying.intervals import Estimate, noise_floor_percent
from specsim.report.doctor import Trap
from specsim.servers.document import BASELINE, OTHERS, SPECULATIVE, Arm, Bench, ServerFacts, compared

FEWEST = 8  # requests from which on equal lengths or texts are no accident
MOST_CACHED = 0.5  # share of prompt tokens from a cache that is more than a shared system prompt
MOST_APART = 1.05  # ratio of two arms' output lengths, or of output tokens to streamed pieces
MOST_CUT = 0.9  # share of outputs that the limit may cut
UNDECIDED = "too few requests", "noisy machine"  # traps that leave the speedup open


def bench_traps(bench: Bench) -> list[Trap]:
    """Find the traps of what `specsim bench` measured, each once, those that make it invalid first."""
    traps = [] if bench.baseline is None else _of_servers(bench.speculative, bench.baseline)
    for clients in bench.concurrencies:
        own, base = bench.arm(SPECULATIVE, clients), bench.arm(BASELINE, clients)
        if own is not None:
            traps += find_traps(own, base, bench.null(clients))
    first: dict[str, Trap] = {}
    for trap in traps:
        first.setdefault(trap.name, trap)
    return sorted(first.values(), key=lambda trap: not trap.invalid)


def _of_servers(own: ServerFacts, base: ServerFacts) -> list[Trap]:
    if own.url == base.url:
        text = f"both are {own.url}, so that there is nothing to compare"
        return [Trap("the server is its own baseline", text, "start the same server without speculation")]
    model = [facts.model.rstrip("/").rpartition("/")[2] for facts in (own, base)]
    pairs = {"engine": (own.engine, base.engine), "version": (own.version, base.version), "model": model}
    other = [f"{name} {mine} and {its}" for name, (mine, its) in pairs.items() if mine != its]
    if not other:
        return []
    text = f"server and baseline differ in {', '.join(other)}, so that a speedup is not speculation's alone"
    return [Trap("baseline of another server", text, "start the same server without speculation")]


def find_traps(speculative: Arm, baseline: Arm | None = None, null: Estimate | None = None) -> list[Trap]:
    """Find the traps of a benchmark, of the speculative server and perhaps its baseline.

    null : the A/A test of the baseline; None if it was not repeated
    """
    traps = _of_arm(speculative)
    for arm in (speculative, baseline):
        if arm is not None:
            traps += _of_times(arm)
    if baseline is not None:
        traps = [*_between(speculative, baseline), *traps, *_too_few(speculative, baseline, null)]
    return sorted(traps, key=lambda trap: not trap.invalid)


def _of_arm(arm: Arm) -> list[Trap]:
    requests, traps = arm.requests, []
    repeats = len(requests) - len({request.prompt for request in requests})
    cached = sum(request.cached_tokens or 0 for request in requests)
    prompt = sum(request.prompt_tokens or 0 for request in requests if request.cached_tokens is not None)
    if repeats or cached > MOST_CACHED * max(prompt, 1):
        evidence = [f"{repeats} of {len(requests)} requests repeat a prompt"] * bool(repeats)
        evidence += [f"{100 * cached / max(prompt, 1):.0f} % of the prompt tokens came from a cache"] * bool(cached)
        traps.append(
            Trap(
                "repeated prompts",
                f"{' and '.join(evidence)}, which warms the prefix cache and drafters that copy earlier text",
                "send every prompt once, more of them than requests",
            )
        )
    lengths = {request.output_tokens for request in requests}
    finish = Counter(request.finish for request in requests)
    if len(requests) >= FEWEST and len(lengths) == 1 and set(finish) == {""}:
        traps.append(
            Trap(
                "outputs of fixed length (ignore_eos)",
                f"all {len(requests)} outputs have exactly {max(lengths)} tokens, by ignore_eos or a limit; text "
                "behind an answer's end repeats itself and is accepted more often",
                "leave out --ignore-eos, and let answers end",
            )
        )
    elif finish["length"] > MOST_CUT * len(requests):
        text = f"the limit of {max(lengths)} tokens cut {finish['length']} of {len(requests)} outputs"
        traps.append(Trap("outputs cut", text, "raise --max-tokens to the lengths of your traffic", False))
    if arm.tokens_per_delta > MOST_APART and not arm.buffered:
        traps.append(
            Trap(
                "bursty streaming",
                f"a streamed piece holds {arm.tokens_per_delta:.2f} tokens, so the time between pieces (ITL) is not "
                "the time per token",
                "compare TPOT, or tokens by the usage counts, not ITL or counted pieces",
                False,
            )
        )
    return traps


def _of_times(arm: Arm) -> list[Trap]:
    """Whether the arm's times are of something else than its tokens."""
    traps = []
    if arm.buffered:
        traps.append(
            Trap(
                "buffered stream",
                f"{100 * arm.share_at_once:.0f} % of a response of the {arm.name} server arrive with its first "
                "piece, so that the time between tokens is not seen",
                "turn off the proxy's buffering (nginx: proxy_buffering off), or measure the server itself",
            )
        )
    if arm.other_tokens:
        tokens = sum(request.output_tokens for request in arm.requests)
        traps.append(
            Trap(
                "others used the server",
                f"the {arm.name} server counts {arm.other_tokens:,} {OTHERS.partition(':')[0]} ({tokens:,})",
                "measure while nobody else uses it",
            )
        )
    return traps


def _between(speculative: Arm, baseline: Arm) -> list[Trap]:
    traps = []
    if speculative.concurrency != baseline.concurrency:
        traps.append(
            Trap(
                "baseline at another concurrency",
                f"the baseline ran {baseline.concurrency} requests at a time, the speculative server "
                f"{speculative.concurrency}; a step takes longer the more run",
                f"measure the baseline at concurrency {speculative.concurrency}",
            )
        )
    names = sorted({*speculative.sampling, *baseline.sampling})
    other = [name for name in names if speculative.sampling.get(name) != baseline.sampling.get(name)]
    if other:
        values = ", ".join(
            f"{name} {baseline.sampling.get(name)} and {speculative.sampling.get(name)}" for name in other
        )
        traps.append(Trap("other sampling", f"baseline and speculative server differ in {values}", "use the same"))
    tokens = [np.mean([request.output_tokens for request in arm.requests]) for arm in (baseline, speculative)]
    if max(tokens) > MOST_APART * min(tokens):
        text = f"outputs have {tokens[0]:.0f} tokens without speculation and {tokens[1]:.0f} with it"
        traps.append(Trap("other output lengths", text, "use the same prompts, limits and seed, or temperature 0"))
    return traps


def _too_few(speculative: Arm, baseline: Arm, null: Estimate | None) -> list[Trap]:
    """Whether the speedup's interval, or the noise floor, contains no difference at all; and how many would do."""
    speedup = compared(baseline, speculative)
    if speedup is None:
        if speculative.buffered or baseline.buffered:
            return []
        text = "fewer than two prompts were answered by both servers, so that the speedup has no interval"
        return [Trap("too few requests", text, "give --requests 48, or more --minutes", False)]
    gain = abs(np.log(speedup.estimate))
    half = np.log(speedup.high / speedup.low) / 2
    if gain > half:
        floor = 0.0 if null is None else noise_floor_percent(null)
        if 100 * abs(speedup.estimate - 1) > floor:
            return []
        text = (
            f"speedup {speedup} is within the noise floor of {floor:.1f} %, by which the baseline differs from itself"
        )
        return [Trap("noisy machine", text, "measure on an idle machine, or more requests", False)]
    needed = int(np.ceil(len(speculative.requests) * (half / max(gain, 0.01)) ** 2))
    text = f"speedup {speedup} does not differ significantly from 1 with {len(speculative.requests)} requests"
    return [Trap("too few requests", text, f"give about --requests {needed:,}", False)]
