"""What advice promises: intervals where requests differ, steps without a draft, commands, signs of a fault."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

import specsim
from specsim.acceptance.sources import Rounds
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost, shipped_costs
from specsim.cost.model import ConstantCost
from specsim.cost.roofline.cost import Covered, RooflineCost
from specsim.cost.roofline.published import CALIBRATED_PERCENT, calibrated_error
from specsim.engines.advise import Advice, BreakEven, advise
from specsim.engines.diagnose import diagnose
from specsim.engines.export import export_flags
from specsim.engines.flags import draft_length_flags, server_command, without_option
from specsim.engines.formats.mixed import mixed_sources
from specsim.engines.import_records import read_counts
from specsim.engines.signatures import FIRST_POSITION
from specsim.io.arrays import Ints
from specsim.serving.draft_length import as_schedule
from tests.support.checks import refusal
from tests.support.commands import call, json_of

INPUTS = Path(__file__).parent / "inputs"
COST = ConstantCost(s_d=0.001, s_t=0.010)
NGRAM = {"drafted": [200] * 3, "accepted": [160, 140, 100], "plain_steps": 1400}  # 200 of 1,600 steps draft


def covers(advice: Advice, k: int, truth: float) -> bool:
    speedup = advice.lengths[k].speedup
    return speedup.low <= truth <= speedup.high


@pytest.mark.parametrize("sd", [0.0, 0.1, 0.18])
@pytest.mark.parametrize("told_apart", [True, False])
def test_intervals_cover_where_requests_differ(sd: float, *, told_apart: bool) -> None:
    """Prompts of 40 rounds with an acceptance of their own, told apart or taken to differ."""
    k, rounds, rng = 3, 40, np.random.default_rng(5)
    many = np.clip(np.random.default_rng(9).normal(0.65, sd, 400_000), 0.02, 0.98)
    truth = float(np.mean(1 + many + many**2 + many**3)) * 0.010 / 0.013
    covered = []
    for seed in range(40):
        for prompts in (12, 60, 200):
            rates = np.clip(rng.normal(0.65, sd, prompts), 0.02, 0.98)
            accepted = np.cumprod(rng.random((prompts, rounds, k)) < rates[:, None, None], axis=2).sum(axis=2).ravel()
            sequence = np.repeat(np.arange(prompts), rounds) if told_apart else None
            source = Rounds(np.full(accepted.size, k), accepted, None, sequence)
            covered.append(covers(advise(source, COST, seed=seed), k, truth))
    assert np.mean(covered) >= 0.9


@pytest.mark.parametrize("name", ["smollm2-eagle", "lab-model", "lab-eagle", "lab-lookup"])
def test_intervals_cover_prompts_of_recorded_traces(name: str) -> None:
    """12 or 40 prompts, drawn again from a trace's; the truth is the speedup of all of them."""
    k, rng = 4, np.random.default_rng(2)
    log = specsim.replay(specsim.read_trace(f"example:{name}"), COST, "fixed_k", k=k).rounds
    drafted, accepted = (np.asarray(column, dtype=np.int64) for column in (log.drafted, log.accepted))
    rows = [np.flatnonzero(log.sequence == sequence) for sequence in np.unique(log.sequence)]

    def counted(prompts: Ints) -> Rounds:
        own = np.concatenate([rows[prompt] for prompt in prompts])
        sequence = np.repeat(np.arange(len(prompts)), [len(rows[prompt]) for prompt in prompts])
        return Rounds(drafted[own], accepted[own], None, sequence)

    truth = advise(counted(np.arange(len(rows))), COST).lengths[k].speedup.estimate
    draws = [rng.integers(0, len(rows), prompts) for prompts in (12, 40) for _ in range(50)]
    assert np.mean([covers(advise(counted(draw), COST), k, truth) for draw in draws]) >= 0.9


def test_steps_without_a_draft_yield_a_token_each() -> None:
    """By hand: 200 rounds emit 600 tokens and 1,400 steps one each, so 2,000 in 1,600 steps."""
    advice = advise(NGRAM, ConstantCost(1e-9, 1.0))
    assert advice.lengths[3].tokens_per_round == pytest.approx(1.25)
    assert advice.lengths[3].speedup.estimate == pytest.approx(1.25, rel=1e-6)  # drafts and verification are free
    assert any("12 % of the steps draft" in note for note in advice.notes)
    diagnosis = diagnose(NGRAM, baseline_tokens_per_s=90, tokens_per_s=100)
    assert (diagnosis.tokens_per_round.estimate, diagnosis.round_tokens) == pytest.approx((1.25, 1.125), rel=1e-6)
    free = diagnosis.advice[0][1].lengths
    assert free[3].speedup.estimate == pytest.approx(100 / 90, rel=1e-6)  # at the measured K, what was measured


def test_no_speedup_exceeds_the_tokens_of_a_step() -> None:
    """However far costs may be off: drafts and verification take time, so that 1.25 tokens are at most 1.25 times."""
    many = {key: [10**4 * n for n in counts] for key, counts in NGRAM.items() if key != "plain_steps"}
    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", "prompt-lookup", engine="vllm"))
    advice = advise({**many, "plain_steps": 1400 * 10**4}, cost)
    assert cost.speedup_error[1] > 0.1 and advice.lengths[3].speedup.high == pytest.approx(1.25, abs=0.01)
    never = advise({"drafted": [10**6] * 3, "accepted": [0] * 3}, cost)
    assert all(length.speedup.high <= 1.001 for length in never.lengths)


def test_where_hardly_a_draft_is_accepted_speculation_is_turned_off(tmp_path: Path) -> None:
    """1.0001 tokens per step gain at most 0.01 %, whatever drafts cost; of 30 rounds that is not known."""
    never = tmp_path / "never.json"
    never.write_text(json.dumps({"drafted": [10**5] * 3, "accepted": [10, 0, 0]}))
    costs = ("--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle3", "--engine", "vllm")
    for source in ((never,), ("--accept-length", "1.0", "--k", 3)):
        shown = call("specsim", "advise", *source, *costs).out.splitlines()
        assert shown[-2].startswith("turn speculation off: no draft length is 1 % faster (K = 1: 0.86")
        assert shown[-1] == "vllm serve <llama-3.1-8b>"
    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", "eagle3", engine="vllm"))
    few = advise({"drafted": [30], "accepted": [0]}, cost)
    assert few.k is None and few.lengths[1].speedup.high > 1.01
    # A gain that is known stays one, however small: 1.1 tokens in 1.095 steps.
    assert advise({"drafted": [10**8], "accepted": [10**7]}, ConstantCost(0.0095, 0.1)).k == 1


def test_where_steps_without_a_draft_are_unknown_nothing_is_promised() -> None:
    unknown = {key: NGRAM[key] for key in ("drafted", "accepted")}
    advice = advise(unknown, COST, drafter="ngram")
    assert advice.upper_bound and advice.k is None and not advice.sure and "at most" in repr(advice)
    refusal(lambda: advice.flags("vllm"), "nothing is recommended: at most")
    diagnosis = diagnose(unknown, baseline_tokens_per_s=90, tokens_per_s=100, drafter="suffix")
    assert "at most 3.00 tokens" in repr(diagnosis) and diagnosis.advice == ()
    assert advise(unknown, COST, drafter="eagle3").k == 3  # which drafts in every step


def test_throughput_may_be_of_one_request_or_of_a_whole_server() -> None:
    counters = json.loads((INPUTS / "counters3.json").read_text())
    for scale in (1e-3, 1.0, 10.01, 1e5):
        found = diagnose(counters, baseline_tokens_per_s=100 * scale, tokens_per_s=90 * scale)
        assert repr(found).startswith("0.90x (10 % slower)") and found.round_tokens == pytest.approx(2.18 / 0.9)
        # 1.42 decode steps over 3 drafts: 1.6 tokens in 1 + 1.422 / 3 at K = 1
        assert found.advice[0][1].lengths[1].speedup.estimate == pytest.approx(1.6 / (1 + (2.18 / 0.9 - 1) / 3))


@pytest.mark.parametrize("tail", [[0, 0, 0, 0], [4, 3, 2, 1]])
def test_the_k_that_runs_is_in_the_table_whatever_is_accepted(tail: list[int]) -> None:
    counters = {"drafted": [1000] * 5, "accepted": [500, *tail]}
    assert [length.k for length in advise(counters, COST).lengths] == [0, 1, 2, 3, 4, 5]
    best = diagnose(counters, baseline_tokens_per_s=60, tokens_per_s=40).advice[0][1]
    assert best.k == 1 and best.lengths[1].speedup.estimate == pytest.approx(1.2, abs=0.01)


@pytest.mark.parametrize("target", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("batch", [1, 2, 8, 15])
def test_the_interval_holds_the_error_of_costs_and_its_estimate(target: str, batch: int) -> None:
    cost = read_cost(data_sheet_document("h100", target, "eagle3", engine="vllm"), batch=batch)
    advice = advise({"drafted": [10**7] * 3, "accepted": [6 * 10**6, 4 * 10**6, 25 * 10**5]}, cost)
    for length in advice.lengths[1:]:
        speedup = length.speedup
        assert speedup.low < speedup.estimate < speedup.high
        assert speedup.high / speedup.low > 1.3  # although the counts are exact
        plain = length.tokens_per_round * cost.round_seconds(0, 1000) / cost.round_seconds(length.k, 1000)
        known = [note for note in advice.notes if "were predicted too" in note]
        direction = "low" if speedup.estimate > plain else "high"
        assert all(f"too {direction}" in note for note in known)
        assert bool(known) == (f"{np.exp(cost.speedup_error[0]):.2f}" != "1.00")
    chosen = advice.lengths[advice.candidate].speedup
    assert (advice.k is None) == (chosen.low <= 1 <= chosen.high)
    if advice.k is None:
        assert not advice.sure and "not decidable" in repr(advice) and "measure K = 0 and K = " in repr(advice)


def test_the_error_of_calibrated_costs_stays() -> None:
    """Its median without sign is the one that was found; half of a normal variable's values are that near."""
    for (experts, single), percent in CALIBRATED_PERCENT.items():
        sd = calibrated_error(experts=experts, batch=1 if single else 8)
        draws = np.abs(np.expm1(sd * np.random.default_rng(0).standard_normal(200_000)))
        assert 100 * np.median(draws) == pytest.approx(percent, rel=0.05)


def test_costs_are_less_known_beyond_the_batch_that_they_were_calibrated_at() -> None:
    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", "eagle3", engine="vllm"), batch=16)
    assert isinstance(cost, RooflineCost)
    cost = replace(cost, covered=Covered(cost.subject, (1, 3), (1, 4), (500, 500), (16,)))
    counts = {"drafted": [10**7] * 2, "accepted": [6 * 10**6, 4 * 10**6]}
    at, beyond = (advise(counts, replace(cost, batch=batch)).lengths[2].speedup for batch in (16, 64))
    assert 1.3 < at.high / at.low < beyond.high / beyond.low


def test_speculation_that_loses_at_few_requests_is_not_said_to_be_on_there() -> None:
    """Metal reads packed weights again for every row of a small batch, so that drafts pay from 5 to 8 requests on."""
    document = data_sheet_document(
        "m3-ultra", "llama-3.1-8b", "llama-3.2-1b", weights="q4_k_m", engine="llamacpp", dtype="float16"
    )
    source = {"drafted": [10**6] * 3, "accepted": [7 * 10**5, 5 * 10**5, 35 * 10**4]}
    even = advise(source, read_cost(document)).off_above
    assert even is not None and len(even.slower) == 1 and even.requests
    (first, last), most = even.slower[0], even.requests

    def fastest(batch: int) -> float:
        return max(length.speedup.estimate for length in advise(source, read_cost(document, batch=batch)).lengths[1:])

    assert first == 1 and fastest(1) < 1 and fastest(last) < 1 < fastest(last + 1) and fastest(most) > 1
    assert str(even).startswith(f"off at 1 to {last} and above {most} requests at once")


def test_speculation_is_off_above_the_batch_at_which_it_loses() -> None:
    document = data_sheet_document("h100", "llama-3.1-8b", "eagle3", engine="vllm@2025-03")
    source = {"drafted": [10**6] * 3, "accepted": [6 * 10**5, 36 * 10**4, 22 * 10**4]}
    even = advise(source, read_cost(document, batch=9)).off_above
    assert even is not None and even.requests and even.low is not None
    best = [
        max(length.speedup.estimate for length in advise(source, read_cost(document, batch=batch)).lengths[1:])
        for batch in (even.requests, even.requests + 1)
    ]
    assert best[0] > 1 > best[1] and even.low < even.requests
    undecided = advise(source, read_cost(document, batch=even.requests))  # 1.0 lies in the interval
    assert undecided.k is None and repr(undecided).endswith(f"predicted {undecided.off_above}")
    never = "off at any number of requests at once (95 % interval: off above 0 to 12)"
    assert str(BreakEven(0, 0, 12, 512)) == never
    assert str(BreakEven(9, 4, None, 512)) == "off above 9 requests at once (95 % interval: 4 to over 512)"
    stretches = BreakEven(46, None, None, 512, ((1, 4), (6, 6)))
    assert stretches.without_interval == "off at 1 to 4 and 6 and above 46 requests at once"
    always = "on for all numbers of requests at once up to 512"
    assert str(BreakEven(None, 7, None, 512)) == f"{always} (95 % interval: off above 7 to over 512)"
    assert str(BreakEven(None, None, None, 512)) == BreakEven(None, 7, None, 512).without_interval == always


@pytest.mark.parametrize(
    "names",
    [("h100", "llama-3.1-8b", "eagle3", None, 1, "sglang"), ("gb200", "deepseek-r1", "mtp", "nvfp4", 4, "sglang")],
)
def test_k_by_requests_at_once_is_the_best_at_each_of_them(names: tuple[Any, ...], tmp_path: Path) -> None:
    """Against an advice for each load; where the costs' known error changes, from 8 to 9 requests, too."""
    source = {"drafted": [10**4] * 3, "accepted": [7000, 4500, 3000]}
    (tmp_path / "c.json").write_text(json.dumps(source))
    flags = ("--gpu", "--target", "--drafter", "--weights", "--tp", "--engine")
    given = [part for flag, name in zip(flags, names, strict=True) if name for part in (flag, name)]
    shown = call("specsim", "advise", tmp_path / "c.json", *given, "--batch", 8).out
    (line,) = re.findall(r"K by requests at once ([\d:,]+): ", shown)
    (last,) = re.findall(r"off above (\d+) requests", shown)
    schedule, document = as_schedule(line), data_sheet_document(*names)
    changes = [batch + step for batch in schedule.lengths for step in (-1, 0)]
    for batch in sorted({1, 9, *changes} - {0}):
        lengths = advise(source, read_cost(document, batch=batch)).lengths
        best = max(lengths, key=lambda length: length.speedup.estimate)
        assert schedule.at(batch) == best.k
        assert (batch <= int(last)) == (best.k > 0)


def test_longer_drafts_than_counted_are_extrapolated_and_marked() -> None:
    """Rates that stay at 0.8: a third token is accepted in 0.512 of the rounds."""
    advice = advise({"drafted": [10_000] * 2, "accepted": [8000, 6400]}, COST)
    assert advice.k == 2 and advice.beyond[0].tokens_per_round == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert advice.beyond[0].speedup.low == pytest.approx((1 + 0.8 + 0.64 + 0.64 * 0.64) / 1.3)  # at least a fifth less
    assert "(extrapolated); serve with K = 6 to know" in repr(advice)
    blocks = advise({"drafted": [10_000] * 2, "accepted": [8000, 6400]}, COST, drafter="dflash")
    assert not blocks.beyond and "drafter of blocks predicts otherwise at another K" in " ".join(blocks.notes)
    mtp = advise({"drafted": [10_000] * 2, "accepted": [8000, 6400]}, COST, drafter="mtp")
    assert "a shorter K may be better than it looks" in " ".join(mtp.notes)


@pytest.mark.parametrize(
    ("drafter", "keys"),
    [
        ("eagle3", {"method": "eagle3", "model": "b/d"}),
        ("block:5", {"method": "dflash", "model": "b/d"}),
        ("DSpark", {"method": "dspark", "model": "b/d"}),
        ("p-eagle", {"method": "eagle3", "model": "b/d", "parallel_drafting": True}),
        ("PARD", {"method": "draft_model", "model": "b/d", "parallel_drafting": True}),
        ("mtp", {"method": "mtp"}),
        ("suffix", {"method": "suffix"}),
        ("ngram", {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 5}),
    ],
)
def test_vllms_command_names_what_the_method_needs_and_nothing_else(drafter: str, keys: dict[str, Any]) -> None:
    start, flag = server_command("vLLM", 3, target="a/t", drafter=drafter, model="b/d").split(" --speculative-config ")
    assert start == "vllm serve a/t" and json.loads(flag.strip("'")) == {**keys, "num_speculative_tokens": 3}
    assert server_command("vllm", 0, target="a/t", drafter=drafter) == start


def test_commands_of_other_engines() -> None:
    chain = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    names = {"sglang": ("a/t", "b/d"), "llamacpp": ("a/t-GGUF", "b/d-GGUF:Q8_0")}
    sglang, llama = (
        partial(server_command, engine, 3, target=target, model=model) for engine, (target, model) in names.items()
    )
    start, model = "sglang serve --model-path a/t", "--speculative-draft-model-path b/d"
    assert sglang(drafter="EAGLE3") == f"{start} {model} --speculative-algorithm EAGLE3 {chain}"
    assert sglang(drafter="mtp") == f"{start} --speculative-algorithm NEXTN {chain}"
    block = "--speculative-num-draft-tokens 4"  # SGLang takes no steps of a block but 1, and counts the last token
    assert sglang(drafter="dflash") == f"{start} {model} --speculative-algorithm DFLASH {block}"
    start = "llama-server -hf a/t-GGUF --spec-type"
    draft = "draft-simple --spec-draft-hf b/d-GGUF:Q8_0 --spec-draft-n-max 3"
    assert llama(drafter="qwen3-0.6b") == f"{start} {draft}"
    files = server_command("llamacpp", 3, target="/a/t", drafter="qwen3-0.6b", model="b/d.gguf")
    assert files == "llama-server -m /a/t --spec-type draft-simple --spec-draft-model b/d.gguf --spec-draft-n-max 3"
    assert llama(drafter="mtp") == f"{start} draft-mtp --spec-draft-n-max 3"
    refusal(lambda: llama(drafter="medusa"), "llamacpp has no drafters of kind medusa")
    # TensorRT-LLM's page on speculative decoding: decoding_type, max_draft_len and speculative_model in a file.
    config = "{speculative_config: {decoding_type: Eagle3, max_draft_len: 3, speculative_model: b/d}}"
    trt = partial(server_command, "trtllm", 3, target="a/t", model="b/d")
    assert trt(drafter="eagle3") == f"echo '{config}' > config.yaml; trtllm-serve a/t --config config.yaml"
    assert "{decoding_type: MTP, max_draft_len: 3}" in trt(drafter="mtp")  # the target's own weights
    refusal(lambda: trt(drafter="eagle"), "tensorrt-llm has no drafters of kind eagle")  # that page: Eagle3 alone


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "tensorrt-llm"])
def test_where_the_kind_of_drafter_is_unknown_none_is_guessed(engine: str) -> None:
    command = server_command(engine, 3)
    assert "<drafter>" in command and re.search("<method>|<algorithm>|<type>", command)
    assert not re.search("eagle[^-]|draft-simple", command.lower())


@pytest.mark.parametrize(
    ("engine", "plain", "shared"),
    [
        # By the documentation of engine arguments: vLLM, SGLang, trtllm-serve, llama-server (which splits over all).
        ("vllm", "vllm serve a/t", "--tensor-parallel-size 8 --quantization fp8 --kv-cache-dtype fp8 --dtype float16"),
        ("sglang", "sglang serve --model-path a/t",
         "--tp-size 8 --quantization fp8 --kv-cache-dtype fp8_e4m3 --dtype float16"),
        ("llamacpp", "llama-server -m <t.gguf>", "--split-mode tensor"),
        ("tensorrt-llm", "trtllm-serve a/t", "--tp_size 8 --config config.yaml"),
    ],
)  # fmt: skip
def test_a_command_sets_devices_and_formats_that_are_not_the_engines_own(engine: str, plain: str, shared: str) -> None:
    assert server_command(engine, 0, target="a/t") == plain
    options: dict[str, Any] = {"tensor_parallel": 8, "weights": "float8", "cache": "float8", "dtype": "float16"}
    start, _, end = server_command(engine, 0, target="a/t", **options).rpartition(plain)
    assert end == f" {shared}"
    file = "echo '{dtype: float16, kv_cache_config: {dtype: fp8}}' > config.yaml; "
    assert start == (file if engine == "tensorrt-llm" else "")
    lines = without_option(engine, "a/t", "float8", "float8")
    assert any("makes weights float8: serve a checkpoint" in line for line in lines) == (engine[0] in "lt")
    assert any("a cache in float8" in line for line in lines) == (engine == "llamacpp")
    assert without_option(engine, "a/t", {"experts": "mxfp4"}, None)[0].startswith(f"no option of {engine} makes wei")
    assert without_option(engine, "a/t", None, None) == []


def test_llama_cpp_gets_files_and_repositories_of_gguf() -> None:
    """llama-server's help: -hf <user>/<model>[:quant], cache types by name; files by -m."""
    llama = partial(server_command, "llamacpp", 0, weights="q4_k_m", cache="q8_0")
    cache = "--cache-type-k q8_0 --cache-type-v q8_0"
    assert llama(target="o/Qwen3-8B-GGUF") == f"llama-server -hf o/Qwen3-8B-GGUF:Q4_K_M {cache}"
    assert llama(target="o/Qwen3-8B-GGUF:Q4_0") == f"llama-server -hf o/Qwen3-8B-GGUF:Q4_0 {cache}"
    assert llama(target="Qwen3-8B.gguf") == f"llama-server -m Qwen3-8B.gguf {cache}"
    assert llama(target="Qwen/Qwen3-8B") == f"llama-server -m <Qwen3-8B-Q4_K_M.gguf> {cache}"  # no GGUF files there
    assert without_option("llamacpp", "o/Qwen3-8B-GGUF", "q4_k_m", "q8_0") == []


@pytest.mark.parametrize(
    ("engine", "kinds", "none"),
    [
        ("transformers", "model ngram", "medusa dflash dspark p-eagle eagle mtp block suffix"),
        ("llamacpp", "model ngram eagle3 mtp dflash", "suffix medusa pard eagle"),
        ("tensorrt-llm", "model ngram eagle3 mtp dflash pard", "suffix medusa eagle p-eagle"),
    ],
)
def test_flags_are_of_drafters_that_the_engine_has(engine: str, kinds: str, none: str) -> None:
    for kind in kinds.split():
        assert "3" in draft_length_flags(engine, 3, kind)
    for kind in none.split():
        refusal(lambda kind=kind: draft_length_flags(engine, 3, kind), f"{engine} has no drafters of kind {kind}")
        refusal(lambda kind=kind: export_flags(engine, 3, drafter=kind), f"{engine} has no drafters of kind {kind}")
    assert "prompt_lookup_num_tokens=3" in draft_length_flags("transformers", 3, "ngram")
    assert "num_assistant_tokens" not in export_flags("transformers", 3, drafter="ngram").flags
    assert "speculative_model: b/d" in export_flags("trtllm", schedule="1:3,8:2", drafter="eagle3", model="b/d").flags
    refusal(lambda: export_flags("tensorrt-llm", 3, model="b/d"), "names the drafter's kind beside its model")


VLLM_LOG = """INFO 11-20 10:00:01 [utils.py:253] non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', \
'speculative_config': {'method': 'eagle3', 'model': 'b/head', 'num_speculative_tokens': 2}}
INFO 11-20 10:00:01 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: \
150.00 tokens/s, Drafted throughput: 200.00 tokens/s, Accepted: 1500 tokens, Drafted: 2000 tokens, \
Per-position acceptance rate: 0.900, 0.600, Avg Draft acceptance rate: 75.0%
"""


@pytest.mark.parametrize(
    ("asked", "target", "drafter"),
    [
        ("", "meta-llama/Llama-3.1-8B-Instruct", ("eagle3", "b/head")),
        ("--target llama-3.1-8b --drafter eagle3", "meta-llama/Llama-3.1-8B-Instruct", ("eagle3", "b/head")),
        ("--drafter llama-3.2-1b", "meta-llama/Llama-3.1-8B-Instruct", ("draft_model", "<llama-3.2-1b>")),
        ("--drafter meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B-Instruct",
         ("draft_model", "meta-llama/Llama-3.2-1B")),
        ("--drafter eagle", "meta-llama/Llama-3.1-8B-Instruct", ("eagle", "<drafter>")),
        ("--target Qwen/Qwen3-8B", "Qwen/Qwen3-8B", ("eagle3", "<drafter>")),
        ("--target qwen3-8b", "<qwen3-8b>", ("eagle3", "<drafter>")),
    ],
)  # fmt: skip
def test_a_logs_drafter_is_not_that_of_another_target_or_kind(
    asked: str, target: str, drafter: tuple[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(VLLM_LOG)
    command = json_of(call("specsim", "advise", log, "--gpu", "h200", *asked.split(), "--json"))["commands"][-1]
    start, _, config = command.partition(" --speculative-config ")
    found = json.loads(config.strip("'"))
    assert (start, found["method"], found["model"]) == (f"vllm serve {target}", *drafter)


def test_shipped_costs_name_their_drafter(tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    counters.write_text('{"drafted": [90000, 90000], "accepted": [80000, 70000]}')
    for cost in (name for name in shipped_costs() if "eagle" in name):
        asked = ("--cost", cost, "--engine", "vllm", "--json")
        (command,) = json_of(call("specsim", "advise", counters, *asked))["commands"]
        assert f'"method": "{"eagle3" if "eagle3" in cost else "eagle"}"' in command
        for engine in ("llamacpp", "tensorrt-llm", "transformers"):  # none has EAGLE, and the last no EAGLE-3
            (other,) = json_of(call("specsim", "advise", counters, *asked[:3], engine, "--json"))["commands"]
            assert re.search("<type>|Eagle3|draft-eagle3|num_assistant_tokens", other)
    costs = tmp_path / "costs.json"
    costs.write_text('{"s_d": 0.001, "s_t": 0.010}')  # of any drafter
    (command,) = json_of(call("specsim", "advise", counters, "--cost", costs, "--engine", "vllm", "--json"))["commands"]
    assert '"method": "<method>", "model": "<drafter>"' in command


def test_advice_repeats_devices_and_formats_in_the_command(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(VLLM_LOG)
    asked = ("advise", log, "--gpu", "h100", "--tp", 2)
    for formats, options in (
        ((), ""),
        (("--weights", "fp8", "--cache", "fp8"), " --quantization fp8 --kv-cache-dtype fp8"),
        (("--target", "a/Llama-3.1-8B-FP8"), ""),  # is stored so
        (("--target", "a/Llama-3.1-8B-FP8", "--weights", "fp8"), ""),
    ):
        found = call("specsim", *asked, *formats)
        target = formats[1] if "--target" in formats else "meta-llama/Llama-3.1-8B-Instruct"
        assert f"\nvllm serve {target} --tensor-parallel-size 2{options} --speculative-config" in found.out
        assert "no option" not in found.out
    assert "note: no option of vllm makes weights int4: serve a" in call("specsim", *asked, "--weights", "int4").out


def signs(accepted: list[int], drafter: str | None = None, rounds: int = 1000) -> list[str]:
    advice = advise({"drafted": [rounds] * len(accepted), "accepted": accepted}, COST, drafter=drafter)
    return [sign.name for sign in advice.signatures]


def test_signs_of_a_fault_are_told_from_the_drafter() -> None:
    assert signs([0, 0, 0]) == ["no draft was ever accepted"]
    assert signs([1000, 1000]) == ["every draft was accepted"]
    assert signs([580, 400, 300, 220, 160, 9, 0]) == ["acceptance breaks off"]  # a block of 5 run at 7
    far = ["the first token is accepted far below what such drafters have"]
    assert signs([200, 80], "eagle3") == signs([181, 60, 20, 8, 4, 2, 1], "dflash") == far
    assert signs([29, 29, 29], rounds=29) == ["every draft was accepted"]
    assert signs([200, 80]) == signs([200, 80], "model") == signs([0, 0], rounds=19) == []
    assert signs([700, 450, 260], "eagle3") == signs([850, 700], "mtp") == []
    slow = diagnose({"drafted": [1000], "accepted": [880]}, baseline_tokens_per_s=465, tokens_per_s=260)
    assert [sign.name for sign in slow.signatures] == ["good acceptance, slow rounds"]  # 3.4 decode steps
    assert not diagnose({"drafted": [1000], "accepted": [880]}, baseline_tokens_per_s=60, tokens_per_s=92).signatures


def test_the_least_rate_of_blocks_is_that_of_the_published_lengths() -> None:
    """1 + a + ... + a^K = acceptance length; where later tokens are accepted less often, the first is at least a."""
    table = Path(specsim.__file__).parents[1] / "studies" / "published" / "data" / "speculation.csv"
    rows = csv.DictReader(table.read_text().splitlines())
    rates = [
        brentq(lambda a, k, length: sum(a**i for i in range(k + 1)) - length, 0, 1, (int(row["steps"]), length))
        for row in rows
        if row["drafter"].startswith("block") and (length := float(row["acceptance"] or 0))
    ]
    assert {FIRST_POSITION[kind] for kind in ("block", "dflash", "dspark")} == {round(min(rates), 2)}


def test_acceptance_that_fell_is_not_summed() -> None:
    advice = advise(INPUTS / "drift_log.txt", COST)
    (sign,) = advice.signatures
    assert "from 0.53 of the drafted tokens to 0.00 at line 4 of 6" in sign.evidence
    assert advice.k is None and repr(advice) == "nothing is recommended: acceptance changed while it was counted"
    steady = {"drafted": [1000], "accepted": [500]}
    rng = np.random.default_rng(0)
    windows = [{"drafted": [100], "accepted": [int(rng.binomial(100, rate))]} for rate in rng.uniform(0.3, 0.7, 10)]
    total = sum(window["accepted"][0] for window in windows)
    assert not advise({**steady, "accepted": [total], "windows": windows}, COST).signatures  # they differ, all along


def test_what_a_file_mixes_is_named(tmp_path: Path) -> None:
    counts = (INPUTS / "drift_log.txt").read_text().partition("[metrics.py")[2].splitlines()[0]
    line = "(APIServer pid={}) INFO 08-01 10:00:{:02} [metrics.py" + counts + "\n"
    log = tmp_path / "vllm.log"
    log.write_text("".join(line.format(pid, 10) for pid in (1, 2)) + line.format(1, 10))
    notes = " ".join(read_counts(log).notes)
    assert "2 processes are summed (1, 2)" in notes and "1 lines stand more than once" in notes
    models = "".join(f"(APIServer pid=1) INFO non-default args: {{'port': 1, 'model': '{name}'}}\n" for name in "ab")
    log.write_text(models + line.format(1, 10) + "Decode batch, #running-req: 3, accept len: 2.17\n")
    notes = " ".join(mixed_sources(log))
    assert "2 models are summed (a, b)" in notes and "lines of vLLM and SGLang: only one engine's are counted" in notes
    log.write_text(line.format(1, 10) + line.format(1, 20))
    assert mixed_sources(log) == []


def test_a_list_of_rates_is_told_what_to_give_instead(tmp_path: Path) -> None:
    """Both that the refusal names are read, and are of two positions of 0.72 and 0.5: 1 + 0.72 + 0.5 tokens a round."""
    rates, counters = tmp_path / "rates.json", tmp_path / "counters.json"
    rates.write_text("[0.72, 0.5]\n")
    asked = ("--cost", "vllm-llama3.1-8b-eagle3-h100", "--json")
    text = refusal(lambda: read_counts(rates), "rates.json is a list of numbers, without counts")
    counters.write_text(text[text.index("{") : text.index("}") + 1])
    length = re.findall("--accept-length .* --k 2", text)[0].split()
    for given in ([counters], length):
        found = json_of(call("specsim", "advise", *given, *asked))
        assert found["lengths"][2]["tokens_per_round"] == pytest.approx(2.22)


def test_ids_are_the_users_own(tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    counters.write_text(json.dumps({"drafted": [10**6] * 3, "accepted": [8 * 10**5, 6 * 10**5, 5 * 10**5]}))
    target, drafter = "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    asked: Any = ("advise", counters, "--gpu", "h100", "--target", target, "--drafter", drafter, "--engine", "vllm")
    (command,) = json_of(call("specsim", *asked, "--json"))["commands"]
    assert command.startswith(f"vllm serve {target} --speculative-config ") and f'"model": "{drafter}"' in command
