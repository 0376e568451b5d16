"""The diagnosis of servers whose costs and acceptance are known, and the traps of benchmarks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import specsim
from specsim.io.json import plain_json
from specsim.replaying.intervals import Estimate
from specsim.report.doctor import Checkup
from specsim.servers.benchmark_files import as_vllm_bench, read_benchmark
from specsim.servers.doctor import doctor, draft_step_seconds
from specsim.servers.document import BASELINE, REPEAT, SPECULATIVE, Arm, Bench, Request, ServerFacts
from specsim.servers.round_costs import Step, fit_round_costs
from specsim.servers.traps import find_traps
from tests.support.commands import call, json_of

REPEATED = Path(__file__).parent / "recorded" / "vllm_bench_repeated.json"
LOG = Path(__file__).parents[1] / "engines" / "fixtures" / "llamacpp_log_k3.txt"
TOKENS, REQUESTS, LONGEST = 101, 60, 12


class Truth(NamedTuple):
    """A server's seconds of a pass, of its further tokens, of a draft step and of a round; acceptance of each token."""

    pass_s: float = 0.010
    token_s: float = 0.0002
    draft_s: float = 0.0010
    round_s: float = 0.0010
    rate: float = 0.75

    def step_s(self, k: int, clients: int) -> float:
        return self.pass_s + self.token_s * clients * (k + 1) + k * self.draft_s + (self.round_s if k else 0.0)

    def speedup(self, k: int, clients: int) -> float:
        tokens = sum(self.rate**i for i in range(k + 1))
        return tokens * self.step_s(0, clients) / self.step_s(k, clients)

    def best(self, clients: int, most: int = LONGEST) -> int:
        return max(range(most + 1), key=lambda k: self.speedup(k, clients))


def arm(name: str, truth: Truth, k: int, clients: int, seed: int = 0) -> Arm:
    """Simulate requests on a server of known acceptance and step times."""
    rng = np.random.default_rng(seed)
    requests, counts = [], np.zeros((2, k), dtype=int)
    for number in range(REQUESTS):
        accepted = np.minimum(rng.geometric(1 - truth.rate, TOKENS) - 1, k)
        accepted = accepted[: 1 + int((np.cumsum(accepted + 1) < TOKENS - 1).sum())]  # rounds until the last token
        rounds, passed = len(accepted), int(accepted.sum())
        counts += np.array([[rounds] * k, (accepted[:, None] > np.arange(k)).sum(axis=0)])
        seconds = rounds * truth.step_s(k, clients) * rng.normal(1, 0.01)
        drafts = (rounds, k * rounds, passed) if k else (None, None, None)
        tokens = rounds + passed + 1
        request = Request(f"prompt {number}", tokens, rounds + 1, 0.0, seconds, "stop", 50, 0, *drafts)
        requests.append(request)
    by_depth = counts.tolist() if k else [None, None]
    clients_s = sum(request.decode_s for request in requests) / clients
    return Arm(name, clients, clients_s, requests, *by_depth, {"temperature": 0.0})


def measured(truth: Truth, k: int, concurrency: tuple[int, ...] = (1,), engine: str = "vllm") -> Bench:
    arms = []
    for clients in concurrency:
        for seed, (name, drafts) in enumerate(((SPECULATIVE, k), (BASELINE, 0), (REPEAT, 0))):
            arms.append(arm(name, truth, drafts, clients, seed))
    server = ServerFacts("http://server", engine, "1", "target", k)
    return Bench(server, replace(server, url="http://baseline"), arms, "prompts", "2026-11-26")


HEALTHY = Truth()
FAULTS = {
    "the drafter does not fit the target": (Truth(rate=0.05), 3),
    "K = 12 is too long": (Truth(rate=0.6), 12),
    "the drafter is slow": (Truth(draft_s=0.010, rate=0.98), 3),
    "a round has a large fixed part": (Truth(round_s=0.030), 3),
    "verification is not free at this load": (Truth(token_s=0.010, pass_s=0.001), 1),
}


@pytest.mark.parametrize("k", [3, 4, 5])
def test_a_healthy_server_has_no_cause(k: int) -> None:
    assert abs(HEALTHY.speedup(k, 1) / HEALTHY.speedup(HEALTHY.best(1), 1) - 1) < 0.1  # else K would be a cause
    checkup = doctor(measured(HEALTHY, k))
    assert checkup.causes == () and [trap for trap in checkup.traps if trap.invalid] == []
    assert repr(checkup) == "no cause found: the server is healthy"


@pytest.mark.parametrize("cause", FAULTS)
def test_the_cause_is_named_first(cause: str) -> None:
    """A second K tells drafts from a fixed part, a second concurrency from verification."""
    truth, k = FAULTS[cause]
    checkup = doctor(measured(truth, k, (1, 4)), measured(truth, 2, (1, 4)))
    assert [found.name for found in checkup.causes][:1] == [cause]


def test_a_drafter_of_which_nothing_is_accepted() -> None:
    checkup = doctor(measured(Truth(rate=0.0), 3))
    assert checkup.causes[0].name == "the drafter does not fit the target" and checkup.levels[0].k == 0
    assert [trap.name for trap in checkup.traps] == ["no draft was ever accepted"]


def test_k_is_the_best_of_all_by_the_true_costs() -> None:
    """Near enough that no other K is more than 3 % faster, at every load."""
    concurrency = (1, 8, 32)
    for truth in (HEALTHY, Truth(rate=0.5), Truth(rate=0.9), Truth(draft_s=0.003), Truth(token_s=0.0008)):
        checkup = doctor(measured(truth, 2, concurrency), measured(truth, 6, concurrency))
        for level in checkup.levels:
            best = truth.speedup(truth.best(level.concurrency), level.concurrency)
            assert truth.speedup(level.k, level.concurrency) > 0.97 * best
            assert float(level.predicted) == pytest.approx(truth.speedup(level.k, level.concurrency), rel=0.08)


def test_a_single_k_leaves_the_best_k_open() -> None:
    one, two = doctor(measured(HEALTHY, 3)), doctor(measured(HEALTHY, 3), measured(HEALTHY, 8))
    widths = [level.k_range[1] - level.k_range[0] for checkup in (one, two) for level in checkup.levels]
    assert widths[0] > widths[1] and "K = 3 alone" in one.notes[0] and len(two.notes) == 1


def test_costs_are_a_cost_file_of_the_true_rounds() -> None:
    truth, concurrency = Truth(draft_s=0.002), (1, 4, 16)
    checkup = doctor(measured(truth, 2, concurrency), measured(truth, 6, concurrency))
    document = plain_json(checkup.cost, "cost", invalid="")
    assert document["fitted"] == {"batches": [1, 16], "draft_tokens": [2, 6]}
    cost = specsim.read_cost(document)
    for k in (1, 2, 4, 6):
        round_s = float(cost.draft(k, 100)) + float(cost.verify(k + 1, 100)) + cost.round_overhead()
        assert round_s == pytest.approx(truth.step_s(k, 1), rel=0.03)


def test_the_fit_finds_costs_of_steps_without_noise() -> None:
    truth = Truth()
    steps = [Step(b, k, truth.step_s(k, b), 0.001) for b in (1, 8, 32) for k in (0, 1, 4, 7)]
    costs = fit_round_costs(steps)
    found = {name: float(getattr(costs, name).mean()) for name in ("pass_s", "token_s", "draft_s", "round_s")}
    assert found == pytest.approx({name: getattr(truth, name) for name in found}, rel=0.1)


def served(name: str, truth: Truth, k: int, clients: int, prompt_s: float, wait_s: float) -> tuple[Arm, float]:
    """Run a server event by event: it reads a prompt alone, or takes a step of all sequences.

    prompt_s, wait_s : of a first token, seconds in which the server reads the prompt, and which delay nobody else.
    Returns the requests, and the seconds per output token that they waited for the prompts of others.
    """
    total = max(REQUESTS, 6 * clients)
    lengths, rng = np.random.default_rng(5).integers(65, 192, total), np.random.default_rng(k)
    now_s, lost_s, accepted_at = 0.0, 0.0, np.zeros(k, dtype=int)
    waiting, decoding = [(number, 0.0) for number in range(clients)], {}
    later, requests = iter(range(clients, total)), []
    while waiting or decoding:
        if waiting:
            number, sent_s = waiting.pop(0)
            now_s += prompt_s
            lost_s += prompt_s * len(decoding)
            decoding[number] = [now_s, now_s - sent_s + wait_s, 1, 0, 0]
            continue
        now_s += truth.step_s(k, len(decoding))
        for number, state in list(decoding.items()):
            accepted = min(int(rng.geometric(1 - truth.rate)) - 1, k)
            accepted_at += accepted > np.arange(k)
            state[2], state[3], state[4] = state[2] + accepted + 1, state[3] + 1, state[4] + accepted
            if state[2] < lengths[number]:
                continue
            del decoding[number]
            first_s, ttft_s, tokens, rounds, passed = state
            drafts = (rounds, k * rounds, passed) if k else (None, None, None)
            requests.append(
                Request(f"prompt {number}", tokens, rounds + 1, ttft_s, now_s - first_s, "stop", 50, 0, *drafts)
            )
            waiting += [(other, now_s) for other in [next(later, None)] if other is not None]
    counts = ([sum(request.rounds or 0 for request in requests)] * k, accepted_at.tolist()) if k else (None, None)
    tokens = sum(request.output_tokens - 1 for request in requests)
    return Arm(name, clients, now_s, requests, *counts, {"temperature": 0.0}), lost_s / tokens


@pytest.mark.parametrize("token_s", [1e-6, 5e-5])
@pytest.mark.parametrize("blocking", [1.0, 0.4, 0.0])
def test_prompts_are_part_of_a_round_as_far_as_they_delay_others(blocking: float, token_s: float) -> None:
    """Of 25 ms to a first token, all, a part or nothing is time in which the server does not decode.

    32 clients with answers of 128 tokens on average: up to 31 x 25 ms / 128 = 6 ms per token, beside steps of 5 ms. A
    server whose steps do not grow with its load tells all of it; else other growth is taken for prompts in part.
    """
    truth, k = Truth(0.005, token_s, 0.0005, 0.0005, 0.7), 3
    arms, delays_s = [], {}
    for clients in (1, 32):
        for name, drafts in ((SPECULATIVE, k), (BASELINE, 0)):
            own, delays_s[name, clients] = served(
                name, truth, drafts, clients, 0.025 * blocking, 0.025 * (1 - blocking)
            )
            arms.append(own)
    server = ServerFacts("http://server", "vllm", "1", "target", k)
    checkup = doctor(Bench(server, replace(server, url="http://baseline"), arms, "prompts", "2026-11-26"))
    for level in checkup.levels:
        assert sum(level.parts.values()) == pytest.approx(level.tokens_per_round / float(level.speedup))
        lost = level.tokens_per_round * delays_s[SPECULATIVE, level.concurrency] / (level.baseline_ms / 1e3)
        prompts = level.parts.get("prompts of others", 0.0)
        assert prompts == pytest.approx(lost, abs=0.15 if token_s < 1e-5 else 0.35)

    def speedup(length: int) -> float:
        """Of a sequence among 28.4, which decode on average while others wait or have ended."""
        tokens = sum(truth.rate**i for i in range(length + 1))
        base_s, round_s = truth.pass_s + 28.4 * token_s, truth.step_s(length, 28)
        delay_s = delays_s[BASELINE, 32]
        return tokens * (base_s + delay_s) / (round_s + tokens * delay_s)

    loaded = checkup.levels[-1]
    assert speedup(loaded.k) > 0.97 * max(speedup(length) for length in range(7))
    assert float(loaded.predicted) == pytest.approx(speedup(loaded.k), rel=0.05)
    told = [note for note in checkup.notes if "prompts of others may delay" in note]
    assert len(told) == (blocking > 0 or token_s > 1e-5)


def test_a_log_tells_drafting_from_the_fixed_part() -> None:
    """Of the last line of a real log: dur(g) over #gen tokens."""
    assert draft_step_seconds(LOG) == pytest.approx(0.958464 / 1414)


def test_no_baseline_leaves_acceptance_alone() -> None:
    bench = measured(HEALTHY, 3)
    checkup = doctor(replace(bench, baseline=None, arms=bench.arms[:1]))
    assert checkup.levels == () and checkup.acceptance == pytest.approx([0.75] * 3, abs=0.03)
    assert "without a baseline" in checkup.notes[0]


def traps(own: Arm, base: Arm | None = None) -> list[tuple[str, bool]]:
    return [(trap.name, trap.invalid) for trap in find_traps(own, base)]


def test_traps_of_a_benchmark() -> None:
    own, base = arm(SPECULATIVE, HEALTHY, 3, 1), arm(BASELINE, HEALTHY, 0, 1, 1)
    bursts = [("bursty streaming", False)]
    assert traps(own, base) == bursts  # 1 + rounds pieces hold all tokens
    assert traps(own, replace(base, concurrency=8))[0] == ("baseline at another concurrency", True)
    assert traps(own, replace(base, sampling={"temperature": 1.0}))[0] == ("other sampling", True)
    short = [replace(request, output_tokens=50) for request in base.requests]
    assert traps(own, replace(base, requests=short))[0] == ("other output lengths", True)
    repeated = [replace(request, prompt="same") for request in own.requests]
    assert traps(replace(own, requests=repeated))[0] == ("repeated prompts", True)
    cached = [replace(request, cached_tokens=40) for request in own.requests]
    assert traps(replace(own, requests=cached))[0] == ("repeated prompts", True)
    equal = [replace(request, output_tokens=100, finish="") for request in own.requests]
    assert traps(replace(own, requests=equal))[0] == ("outputs of fixed length (ignore_eos)", True)
    cut = [replace(request, finish="length") for request in own.requests]
    assert traps(replace(own, requests=cut)) == [("outputs cut", False), *bursts]


def test_the_number_of_requests_that_would_settle_a_small_difference() -> None:
    """Eight pairs with a ratio of 1.02 and a log half-width of h need 8 (h / log 1.02)^2 requests for half of that."""
    noise = np.tile([0.1, -0.1], 4)
    base = [Request(f"{n}", 101, 101, 0.0, float(1.02 * np.exp(noise[n])), "stop") for n in range(8)]
    own = [Request(f"{n}", 101, 101, 0.0, 1.0, "stop") for n in range(8)]
    (trap,) = find_traps(Arm(SPECULATIVE, 1, 8.0, own), Arm(BASELINE, 1, 8.0, base))
    assert trap.name == "too few requests" and not trap.invalid
    needed = int(trap.remedy.split()[-1].replace(",", ""))
    for count, settled in ((needed, True), (needed // 3, False)):
        wave = np.tile(noise, -(-count // 8))[:count]  # as many requests that vary as these
        many = [Request(f"{n}", 101, 101, 0.0, float(1.02 * np.exp(wave[n])), "stop") for n in range(count)]
        mine = [Request(f"{n}", 101, 101, 0.0, 1.0, "stop") for n in range(count)]
        names = [trap.name for trap in find_traps(Arm(SPECULATIVE, 1, 1.0, mine), Arm(BASELINE, 1, 1.0, many))]
        assert ("too few requests" not in names) == settled


def test_a_difference_within_the_noise_floor() -> None:
    """Twelve equal pairs with a ratio of 1.1, and a baseline that may differ from itself by 15 %."""
    base = [Request(f"{n}", 101, 101, 0.0, 1.1, "stop") for n in range(12)]
    own = [Request(f"{n}", 101, 101, 0.0, 1.0, "stop") for n in range(12)]
    arms = Arm(SPECULATIVE, 1, 12.0, own), Arm(BASELINE, 1, 13.2, base)
    (trap,) = find_traps(*arms, Estimate(1.0, 0.85, 1.15))
    assert trap.name == "noisy machine" and "noise floor of 15.0 %" in trap.evidence
    assert find_traps(*arms, Estimate(1.0, 0.95, 1.05)) == []


def files_of(checkup_of: Bench, folder: Path) -> Path:
    from specsim.io.files import write_json

    path = folder / "bench.json"
    write_json(checkup_of.as_dict(), path)
    return path


def test_the_command_writes_a_page_and_costs(tmp_path: Path) -> None:
    truth, k = FAULTS["K = 12 is too long"]
    bench, page, cost = files_of(measured(truth, k), tmp_path), tmp_path / "doctor.html", tmp_path / "cost.json"
    document: dict[str, Any] = json_of(
        call("specsim", "doctor", "--from", bench, "--out", page, "--cost-out", cost, "--drafter", "eagle3", "--json")
    )
    assert document["causes"][0]["name"] == "K = 12 is too long"
    flags = document["levels"][0]["flags"]
    assert '"method": "eagle3"' in flags and f'"num_speculative_tokens": {document["levels"][0]["k"]}' in flags
    html = page.read_text()
    assert "K = 12 is too long" in html and "&#34;num_speculative_tokens&#34;" in html and "<script src" not in html
    assert "<table>" in html and "&lt;table" not in html and "&lt;td" not in html
    shown = call("specsim", "doctor", "--from", bench)
    assert shown.code == 0 and shown.out.splitlines()[-1].startswith("K = 12 is too long: a round of 12 drafts yields")
    counters = tmp_path / "counters.json"
    counters.write_text('{"drafted": [900, 900, 900], "accepted": [600, 400, 200]}')
    assert json_of(call("specsim", "advise", counters, "--cost", cost, "--json"))["k"] in range(4)
    result = tmp_path / "doctor.json"
    result.write_text(call("specsim", "doctor", "--from", bench, "--json").out)
    assert call("specsim", "report", result, "--out", tmp_path / "again.html").code == 0


def test_a_result_that_vllm_wrote_for_four_prompts_sent_three_times() -> None:
    """`vllm bench serve --num-prompts 12` on a data set of four, which it repeats by default, and 24 tokens at most."""
    result = json.loads(REPEATED.read_text())
    own = read_benchmark(REPEATED, SPECULATIVE)
    assert (own.concurrency, len(own.requests)) == (2, 12)
    tpot_ms = [1e3 * request.decode_s / (request.output_tokens - 1) for request in own.requests]
    assert np.mean(tpot_ms) == pytest.approx(result["mean_tpot_ms"], rel=1e-3)
    found = find_traps(own)
    assert [trap.name for trap in found] == [
        "repeated prompts", "outputs of fixed length (ignore_eos)", "bursty streaming"
    ]  # fmt: skip
    assert found[0].evidence.startswith("8 of 12 requests repeat a prompt")
    pieces = sum(len(times) + 1 for times in result["itls"])
    assert f"holds {result['total_output_tokens'] / pieces:.2f} tokens" in found[2].evidence


def test_the_command_checks_a_benchmark_of_vllm(tmp_path: Path) -> None:
    from specsim.io.files import write_json

    own, base = tmp_path / "own.json", tmp_path / "base.json"
    write_json(as_vllm_bench(arm(SPECULATIVE, HEALTHY, 3, 8), "target"), own)
    write_json(as_vllm_bench(arm(BASELINE, HEALTHY, 0, 1, 1), "target"), base)
    document = json_of(call("specsim", "doctor", "--benchmark", own, "--benchmark-baseline", base, "--json"))
    assert document["verdict"].startswith("the benchmark is not valid: baseline at another concurrency")
    assert isinstance(doctor(measured(HEALTHY, 3)), Checkup)
