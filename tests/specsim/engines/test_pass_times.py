"""Costs of pass times that people have, against sums by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specsim.cost.files import read_cost
from specsim.engines.advise import advise
from tests.support.commands import Result, assert_refused, call, json_of

HAND = '{"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2}'
# llama.cpp#16894: 32 steps of 1, 2 and 4 sequences in 0.405, 0.469 and 0.570 s.
BATCHED = """main: n_kv_max = 20480, n_batch = 2048
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   512 |     32 |    1 |    544 |    0.337 |  1518.90 |    0.405 |    79.04 |    0.742 |   733.22 |
|   512 |     32 |    2 |   1088 |    0.639 |  1603.62 |    0.469 |   136.37 |    1.108 |   982.06 |
|   512 |     32 |    4 |   2176 |    1.248 |  1640.90 |    0.570 |   224.52 |    1.818 |  1196.79 |
|  4096 |     32 |    1 |   4128 |    2.684 |  1526.12 |    0.428 |    74.77 |    3.112 |  1326.52 |
"""
LINES = '{"n_kv_max": 2048, "pp": 512, "tg": 32, "pl": 2, "n_kv": 1088, "t_pp": 0.6, "t_tg": 0.469, "speed": 982.1}\n'
BENCH = """| model          |       size |  params | backend | ngl | test  |           t/s |
| llama 7B Q4_0  |   3.83 GiB |  7.24 B | Metal   |  99 | pp 1  |  63.62 ± 0.54 |
| llama 7B Q4_0  |   3.83 GiB |  7.24 B | Metal   |  99 | pp2   |  25.92 ± 0.09 |
| llama 7B Q4_0  |   3.83 GiB |  7.24 B | Metal   |  99 | pp512 | 700.00 ± 1.00 |
"""
SWEEP = """K, batch, tok/s, accept length
0, 1, 31.0,
2, 1, 48.0, 2.5
4, 1, 44.0, 3.3
"""
TIMING = "I slot print_timing: id 0 | task 1 | "
PLAIN_LOG = f"{TIMING}eval time =    3000.00 ms /   101 tokens (   29.70 ms per token)\n"  # 100 steps of 30 ms
# 201 tokens, 100 accepted: 100 steps in 4,600 ms, of which 200 drafted tokens took 600.
DRAFT_LOG = f"""{TIMING}eval time =    4600.00 ms /   201 tokens (   22.89 ms per token)
{TIMING}draft acceptance = 0.50000 (  100 accepted /   200 generated)
I statistics draft-mtp: #calls(b,g,a) = 1 100 100, #gen drafts = 100, #acc drafts = 80, #gen tokens = 200, #acc tokens = 100, dur(b,g,a) = 0.004, 600.000, 0.091 ms
"""  # noqa: E501
GPU = ("--gpu", "rtx-3090", "--target", "qwen3-8b", "--drafter", "qwen3-0.6b", "--weights", "q4_k_m")


def calibrate(folder: Path, texts: Sequence[str], *options: str) -> Result:
    files = [folder / f"measured{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    measured = [part for file in files for part in ("--measured", file)]
    return call("specsim", "cost", "calibrate", *measured, "--out", folder / "out.json", *options)


def calibrated(folder: Path, *texts: str, gpu: tuple[str, ...] = ()) -> dict[str, Any]:
    return dict(json_of(calibrate(folder, texts, *gpu, "--overwrite", "--json")))


@pytest.mark.parametrize(
    ("texts", "pass_ms", "draft_ms"),
    [
        ((HAND,), {"1": 8.5, "2": 13.5, "5": 20.7}, 1.2),
        ((BATCHED, HAND.replace('{"1": 8.5, "2": 13.5, "5": 20.7}', "{}")),
         {"1": 12.6562, "2": 14.6562, "4": 17.8125}, 1.2),
        ((LINES, '{"pass_ms": {"1": 12.0}, "draft_ms": 1.5}'), {"1": 12.0, "2": 14.6562}, 1.5),
        ((BENCH, '{"pass_ms": {}, "draft_ms": 1}'), {"1": 15.7183, "2": 77.1605}, 1.0),
        ((SWEEP,), {"1": 32.2581, "3": 52.0833, "5": 75.0}, 0.0),  # 2.5 tokens a round at 48 a second
        ((DRAFT_LOG, PLAIN_LOG), {"1": 30.0, "3": 40.0}, 3.0),
        ((DRAFT_LOG.replace("4600.00", "7600.00").replace("201", "301"), PLAIN_LOG), {"1": 30.0, "3": 40.0}, 3.0),
        ((DRAFT_LOG.replace("200 generated", "181 generated"), PLAIN_LOG), {"1": 30.0, "3": 40.0}, 3.0),
        ((DRAFT_LOG.replace("4600.00", "4960.00").replace("201", "213"), PLAIN_LOG), {"1": 30.0, "3": 40.0}, 3.0),
        ((DRAFT_LOG.replace("4600.00", "5040.00").replace("201", "212"), PLAIN_LOG), {"1": 30.0, "3": 40.0}, 3.0),
    ],
    ids=["by hand", "llama-batched-bench", "its JSON lines", "llama-bench", "a sweep", "llama-server's logs",
         "a log with 100 steps without a draft", "9.5 % fewer in the requests", "12 of 112 steps without a draft",
         "11 of 111, which are not told apart"],
)  # fmt: skip
def test_pass_times_are_read_from_what_people_have(
    texts: tuple[str, ...], pass_ms: dict[str, float], draft_ms: float, tmp_path: Path
) -> None:
    document = calibrated(tmp_path, *texts)
    assert document["pass_ms"] == pytest.approx(pass_ms, rel=1e-5) and document["draft_ms"] == draft_ms
    assert read_cost(tmp_path / "out.json").round_seconds(0, 10) == pytest.approx(pass_ms["1"] / 1e3, rel=1e-5)


def test_a_k_follows_from_pass_times() -> None:
    """By hand: a round of K = 3 takes a pass over 4 tokens, 13.5 + 2/3 of 7.2 ms, and 3 draft steps of 1.2."""
    counters = {"drafted": [1000] * 4, "accepted": [870, 726, 561, 447]}
    found = advise(counters, json.loads(HAND))
    speedups = [float(length.speedup) for length in found.lengths]
    assert speedups[3] == pytest.approx(3.157 * 8.5 / (13.5 + 2 / 3 * 7.2 + 3.6), rel=1e-3) and found.k == 3
    once = read_cost({"pass_ms": {"1": 8.5, "5": 20.5}, "draft_ms": 0, "round_ms": 4})
    assert once.round_seconds(4, 0) == pytest.approx(24.5e-3) and once.round_seconds(2, 0) == pytest.approx(18.5e-3)
    cost = read_cost(json.loads(HAND))
    assert float(cost.verify(8, 0)) == pytest.approx((20.7 + 3 * 2.4) / 1e3)
    assert "extrapolated: passes of up to 8 tokens, measured to 5" in cost.notes(7, (0, 0))


def test_the_data_sheet_gives_what_was_not_measured(tmp_path: Path) -> None:
    document = calibrated(tmp_path, BATCHED, gpu=GPU)
    assert document["pass_ms"]["4"] == pytest.approx(17.8125) and document["draft_ms"] > 0
    assert "drafting a token (draft_ms) by the data sheet" in document["source"]
    larger = ("--gpu", "rtx-3090", "--target", "qwen3.6-27b", "--drafter", "mtp", *GPU[6:], "--engine", "llamacpp")
    fitted = calibrated(tmp_path, SWEEP, gpu=larger)
    assert fitted["form"] == "roofline" and "3 measured points" in fitted["source"]


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        ((HAND, '{"pass_ms": {"2": 17.0}, "draft_ms": 3}'), ("a pass over 2 tokens takes 13.5 and 17 ms",
                                                           "drafting a token takes 1.2 and 3 ms")),
        ((HAND.replace("20.7", "9.9"),), ("5 tokens took 9.9 ms, 2 took 13.5 ms",)),
    ],
    ids=["of one size", "a wider pass that is faster"],
)  # fmt: skip
def test_measurements_that_contradict_each_other_are_named(
    texts: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    out = " ".join(calibrate(tmp_path, texts).out.split())
    assert all(text in out and "contradict each other" in out for text in named)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (BATCHED, "no time of drafting a token"), (DRAFT_LOG, "no time of a decode step"),
        ('{"pass_ms": {"0": 1}, "draft_ms": 1}', "is impossible"), ('{"pass_ms": {"a": 1}}', "over 'a' tokens"),
        ('{"pass_ms": {"1": 2}, "draft_ms": -1}', "negative, 0 or not finite"), ("nothing", "holds no pass times"),
        ("K, tok/s, accept length\n2, 48, 2.5\n", "needs times at K = 0"),
        (DRAFT_LOG.replace("201", "401"), "draft nothing"),
        (DRAFT_LOG.split("I statistics")[0], "has no line `statistics"),
        (DRAFT_LOG.replace("200 generated", "150 generated"), "give its whole log"),
        (DRAFT_LOG.replace("200 generated", "179 generated"), "give its whole log"),  # 10.5 % fewer
        (DRAFT_LOG.replace("201", "213"), "12 of 112 steps draft nothing"),  # 10.7 %
    ],
)  # fmt: skip
def test_files_that_do_not_tell_are_refused(text: str, refusal: str, tmp_path: Path) -> None:
    file, out = tmp_path / "measured.txt", ("--out", tmp_path / "out.json")
    file.write_text(text)
    assert_refused(call("specsim", "cost", "calibrate", "--measured", file, *out), refusal)


def test_files_and_points_are_not_mixed(tmp_path: Path) -> None:
    file, command = tmp_path / "measured.json", ("specsim", "cost", "calibrate", "--out", tmp_path / "out.json")
    file.write_text(HAND)
    assert_refused(call(*command, "--measured", file, "--measured", "tpot_ms=4"), "files and points; give either")
    assert_refused(call(*command, "--measured", tmp_path / "none.txt"), "does not exist")
    assert_refused(call(*command, "example:lab-deep-model", "--measured", file), "no form roofline")
