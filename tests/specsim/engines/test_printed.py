"""What engines and benchmarks printed of runs whose rounds or times are known, by their definitions and readers.

The lab's pair, greedy, K = 3. OpenVINO GenAI 2026.4.1: rounds are m_batch_sizes, the tokens of every iteration.
onnxruntime-genai 0.18: per_round is what the counts grew by, token by token, proposed and accepted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.acceptance.sources import Rounds
from specsim.cost.model import CostModel, FullDraftCost
from specsim.engines.definitions import LENGTH, RATE, TPOT, Totals, find_definitions
from specsim.engines.formats.records import ImportedRecords
from specsim.engines.formats.registry import read_any, recognise
from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import NgramRule
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.priced import PricedTrace
from tests.support.checks import refusal

FIXTURES = Path(__file__).parent / "fixtures"
OPENVINO = [json.loads(line) for line in (FIXTURES / "openvino_requests.jsonl").read_text().splitlines()]
ONNXRUNTIME = [json.loads(line) for line in (FIXTURES / "onnxruntime_stats.jsonl").read_text().splitlines()]
NONE = "  Num accepted token: 0 tokens\n"
UNKNOWN = Totals.of(Rounds(np.array([1]), np.array([1])), np.nan)


def value(engine: str, quantity: str, totals: Totals) -> float:
    (number,) = find_definitions(quantity, engine)
    return float(number.value(totals))


def totals_of(drafted: list[int], accepted: list[int], output: int) -> Totals:
    """Of one request."""
    rounds = Rounds(np.array(drafted), np.array(accepted), sequence_id=np.zeros(len(drafted), np.int64))
    return Totals.of(rounds, output)


@pytest.mark.parametrize("request_", OPENVINO)
def test_openvino_leaves_out_the_last_round(request_: dict[str, object]) -> None:
    sizes = np.array(request_["m_batch_sizes"])
    totals = totals_of([3] * (len(sizes) - 1), (sizes[1:] - 1).tolist(), int(sizes.sum()))
    assert request_["num_accepted_tokens"] == totals.accepted - totals.last[1] < totals.accepted
    assert request_["num_draft_tokens"] == totals.drafted - totals.last[0]
    assert value("openvino", RATE, totals) == pytest.approx(request_["draft_acceptance_rate"])


def test_openvino_has_no_rate_of_a_single_round() -> None:
    assert np.isnan(value("openvino", RATE, totals_of([3], [2], 4)))


@pytest.mark.parametrize("stats", ONNXRUNTIME)
def test_onnxruntime_divides_by_evaluated_drafts(stats: dict[str, object]) -> None:
    drafted, accepted = (list(column) for column in zip(*stats["per_round"], strict=True))  # type: ignore[call-overload]
    plain = int(stats["standard_fallback_steps"])  # type: ignore[call-overload]
    output = int(stats["tokens_emitted"]) + plain  # type: ignore[call-overload]
    totals = replace(totals_of(drafted, accepted, output), plain_steps=plain)
    assert totals.evaluated == stats["draft_tokens_evaluated"] < totals.drafted == stats["draft_tokens_proposed"]
    assert value("onnxruntime-genai", RATE, totals) == pytest.approx(stats["acceptance_rate"])
    assert value("onnxruntime-genai", LENGTH, totals) == pytest.approx(stats["mean_emitted_tokens_per_round"])
    assert value("vllm", RATE, totals) < value("onnxruntime-genai", RATE, totals)


def test_aiperf_prints_two_means() -> None:
    """What AIPerf 0.13 makes of two requests, of 4 and 12 rounds."""
    accepted = np.array([3, 3, 3, 3, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0])
    totals = Totals.of(Rounds(np.full(16, 3), accepted, sequence_id=np.repeat([0, 1], [4, 12])), 31)
    printed = {number.printed: number.value(totals) for number in find_definitions(LENGTH, "aiperf")}
    printed |= {number.printed: number.value(totals) for number in find_definitions(RATE, "aiperf")}
    assert printed == pytest.approx(
        {
            "Acceptance Length": 2.625,
            "Token-Weighted Acceptance Length": 1.9375,
            "Draft Acceptance Rate": 54.166666666666664,
            "Overall Draft Acceptance Rate": 31.25,
        }
    )


TIMES = [  # engine, output tokens, seconds until the first and the last token, TPOT as printed in seconds
    ("llamacpp", 96, 0.060419, 0.060419 + 0.443672, 0.00467),
    *(
        (
            "openvino",
            each["num_generated_tokens"],
            each["ttft_ms"] / 1e3,
            each["generate_ms"] / 1e3,
            each["tpot_ms"] / 1e3,
        )
        for each in OPENVINO
    ),
    ("guidellm", 21, 0.5, 2.5, 0.11904761904761905),  # 0.8.1: time_per_output_token_ms of given times
    ("mlx", 16, 1.96483, 2.77074, 1 / 19.851),  # mlx-lm 0.32.2: generation_tps, by a clock around stream_generate
    ("mlx", 40, 1.18973, 6.09723, 1 / 8.151),
]


@pytest.mark.parametrize(("engine", "output", "first_s", "total_s", "printed_s"), TIMES)
def test_tpot(engine: str, output: int, first_s: float, total_s: float, printed_s: float) -> None:
    totals = replace(UNKNOWN, output_tokens=output, first_s=first_s, total_s=total_s)
    assert value(engine, TPOT, totals) == pytest.approx(printed_s, rel=5e-3)
    assert engine not in ("guidellm", "mlx") or value("specsim", TPOT, totals) != pytest.approx(printed_s, rel=0.02)


def read(path: Path) -> tuple[str, ImportedRecords]:
    return read_any([path])


def test_openvino_is_imported_with_the_last_rounds() -> None:
    rounds = sum(len(each["m_batch_sizes"]) - 1 for each in OPENVINO)
    accepted = sum(sum(each["m_batch_sizes"]) - len(each["m_batch_sizes"]) for each in OPENVINO)
    for name in ("openvino_requests.jsonl", "openvino_sample.txt"):
        kind, imported = read(FIXTURES / name)
        assert (kind, imported.requests, imported.plain_steps) == ("openvino", 3, 0)
        assert (imported.counted[0], imported.counted[2]) == (rounds, accepted)
        assert imported.output_tokens == tuple(each["num_generated_tokens"] for each in OPENVINO)


def test_onnxruntime_is_imported_by_proposed_drafts() -> None:
    kind, imported = read(FIXTURES / "onnxruntime_stats.jsonl")
    each_round = [round_ for stats in ONNXRUNTIME for round_ in stats["per_round"]]
    assert (kind, imported.sums) == ("onnxruntime", (len(each_round), *map(sum, zip(*each_round, strict=True))))
    assert imported.plain_steps == sum(stats["standard_fallback_steps"] for stats in ONNXRUNTIME)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"draft_tokens_evaluated": 4}', "rounds"),
        (json.dumps(ONNXRUNTIME[0] | {"draft_tokens_accepted": 99}), "export again"),
        (json.dumps(ONNXRUNTIME[0] | {"rounds": 0}), "export again"),
        (json.dumps(ONNXRUNTIME[0] | {"draft_tokens_proposed": 1}), "impossible counts: 1 drafted tokens"),
        ('{"m_batch_sizes": [1, 5], "num_assistant_tokens": 3}', "accepts 4 of 3 drafted"),
        ('{"m_batch_sizes": [1]}', "no request with rounds"),
        (f"MAIN MODEL\n  Num generated token: 9\n  Total iteration number: 10\n{NONE}", "9 output in 10 iterations"),
        (f"MAIN MODEL\n{NONE}", "no MAIN MODEL with tokens and iterations"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    refusal(lambda: read(tmp_path / "file"), match=message)


def test_what_mlx_prints_counts_no_drafts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(
        "Prompt: 11 tokens, 2.5 tokens-per-sec\nGeneration: 40 tokens, 8.151 tokens-per-sec\n"
    )
    refusal(lambda: recognise(tmp_path / "file"), "what mlx_lm.generate prints, which counts no drafts")


class PerToken(CostModel):
    """A millisecond for each verified token; drafts cost nothing."""

    def draft(self, n_tokens: int, context: Any) -> Any:
        return np.zeros(np.shape(context))

    def verify(self, n_tokens: int, context: Any) -> Any:
        return np.full(np.shape(context), 1e-3 * n_tokens)

    def autoregressive_step(self, context: Any) -> Any:
        return self.verify(1, context)


def test_lookup_that_is_padded_pays_for_misses() -> None:
    """8 tokens that repeat nothing: 8 rounds without a draft, each a pass over 1 token, or over K + 1 = 4."""
    trace = lookup_trace([TokenText([1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], "all", 8)], NgramRule(), 3)
    plain, padded = (PricedTrace(trace, cost).replay(FixedK(3)) for cost in (PerToken(), FullDraftCost(PerToken(), 3)))
    assert plain.seconds.sum() == pytest.approx(8e-3) and padded.seconds.sum() == pytest.approx(8 * 4e-3)
