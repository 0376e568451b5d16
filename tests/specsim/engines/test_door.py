"""Files as people have them: what `specsim advise` takes them for, and right values worked out by hand.

`inputs/` has files of the forms that engines and benchmarks write, with round numbers. Accepted counts are the printed
rates times the rounds; steps without a draft are the output tokens less those of the rounds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from specsim.acceptance.sources import MOST_DRAFTED, Counters, Rounds, read_counters
from specsim.engines.counted import counted
from specsim.engines.formats.registry import read_any
from specsim.engines.import_records import read_counts, read_length
from specsim.io.errors import InputError
from tests.support.commands import assert_refused, call, json_of

INPUTS = Path(__file__).parent / "inputs"
H100 = ("--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle3", "--engine", "vllm")


class Right(NamedTuple):
    """Kind; rounds, drafted and accepted tokens; those by position; steps without a draft; requests at once."""

    kind: str
    sums: tuple[int | None, int | None, int | None]
    accepted: list[int] | None = None
    plain: int | None = None
    running: float | None = None


RIGHT = {
    "draft_by_depth.jsonl": Right("llamacpp-responses", (80, 240, 119), [60, 37, 22], 0),
    "draft_rounds.jsonl": Right("llamacpp-responses", (40, 120, 60), None, 0),
    "four_lines_log.txt": Right("llamacpp-log", (None, 360, 180)),
    "mean_len_log.txt": Right("llamacpp-log", (200, 1000, 600), None, 901 - 1 - 600 - 200),
    "mtp_p_min_log.txt": Right("llamacpp-log", (100, 220, 185), [90, 60, 35], 50),
    "llamacpp_ngram_one_in_thirty_log.txt": Right(
        "llamacpp-log", (20, 240, 120), [18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4], 580
    ),
    "router_chained_log.txt": Right("llamacpp-log", (73, 160, 120), None, 79 - 73),
    "vllm_ngram_log.txt": Right("vllm-log", (200, 600, 400), [160, 140, 100], 1400, 1),
    "vllm_ngram_drafts.prom": Right("prometheus", (1000, 3000, 2000), [800, 700, 500], 7000),
    "vllm_ngram.prom": Right("prometheus", (200, 800, 480), [160, 130, 105, 85], 7210 - 480 - 200),
    "lengths_log.txt": Right("vllm-log", (300, 1000, 300), [120, 75, 51, 33, 21]),
    "schedule_log.txt": Right("vllm-log", (200, 800, 360), [140, 100, 70, 30, 20]),
    "wrapped_log.txt": Right("vllm-log", (1000, 3000, 1600), [750, 500, 350]),
    "drift_log.txt": Right("vllm-log", (6000, 18000, 4800), [2250, 1500, 1050]),
    "load64_log.txt": Right("vllm-log", (16000, 80000, 24000), [9600, 6400, 4000, 2400, 1600], 0, 64),
    "vllm_bench.json": Right("vllm-bench", (15000, 45000, 24000), [11250, 7500, 5250], 0, 16),
    "sglang_bench.txt": Right("sglang-bench", (None, None, None), running=15.2),
    "sglang_bench.jsonl": Right("sglang-bench", (None, None, None), running=15.2),
    "dflash_bench.txt": Right("sglang-bench", (10000, None, None), running=1),
    "stream.txt": Right("vllm-requests", (43, 129, 10), [4, 3, 3], 0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_file_tells_its_kind_and_its_counts(name: str) -> None:
    right = RIGHT[name]
    kind, imported = read_any([INPUTS / name])
    assert kind == right.kind
    assert imported.counted == right.sums
    assert imported.plain_steps == right.plain
    assert imported.setup.running == right.running
    assert (imported.source is None) == (right.accepted is None)
    if right.accepted is not None:
        assert isinstance(imported.source, Counters)
        assert imported.source.accepted == pytest.approx(right.accepted, abs=20 if right.sums[0] > 10_000 else 0)
        assert imported.source.plain_steps == right.plain


@pytest.mark.parametrize("name", ["lengths_log.txt", "schedule_log.txt", "mtp_p_min_log.txt"])
def test_a_draft_cut_at_k_emits_the_printed_rates(name: str, tmp_path: Path) -> None:
    """Whatever the lengths were: one token and the rates of the first K positions; also from the file of `import`."""
    rates = {
        "lengths_log.txt": [0.40, 0.25, 0.17, 0.11, 0.07],
        "schedule_log.txt": [0.70, 0.50, 0.35, 0.15, 0.10],
        "mtp_p_min_log.txt": [0.90, 0.60, 0.35],
    }[name]
    out = tmp_path / "counters.json"
    call("specsim", "import", INPUTS / name, "--out", out)
    for source in (read_counts(INPUTS / name).source, read_counters(out)):
        assert np.cumprod(counted(source).rates) == pytest.approx(rates)
    assert_refused(
        call("specsim", "acceptance", "fit", out, "--model", "per_position", "--out", tmp_path / "m.json"),
        "drafts of several lengths",
    )


@pytest.mark.parametrize(
    ("drafted", "numbered", "plain"),
    [([3, 0, 3], False, 1), ([3, 2], True, 0), ([3, 0], True, 1), ([3, 2], False, None)],
)
def test_steps_without_a_draft_are_known_where_some_are_listed_or_rounds_are_numbered(
    drafted: list[int], numbered: bool, plain: int | None
) -> None:
    rounds = np.array(drafted)
    assert counted(Rounds(rounds, 0 * rounds, t=rounds if numbered else None)).plain_steps == plain


def test_positions_that_accept_nothing_stay() -> None:
    assert counted(read_counts(INPUTS / "zero_tail.json").source).accepted.tolist() == [500, 0, 0, 0, 0]


def test_tokens_of_a_step_are_a_mixture_of_both_kinds(tmp_path: Path) -> None:
    """tau = output tokens / all steps: 721 / 600, and 10,000 / 8,000, where rounds alone would give 36 and 10."""
    for name, tau in (("llamacpp_ngram_one_in_thirty_log.txt", 721 / 600), ("vllm_ngram_drafts.prom", 1.25)):
        document = json_of(call("specsim", "import", INPUTS / name, "--json"))
        (printed,) = [row["value"] for row in document["printed"] if row["printed"] == "tau"]
        assert printed == pytest.approx(tau)
    out = tmp_path / "c.json"
    call("specsim", "import", INPUTS / "vllm_ngram_drafts.prom", "--out", out)
    assert (read_counters(out).plain_steps, read_counters(out).output_tokens) == (7000, 10_000)


def test_the_load_of_the_file_is_that_of_the_answer() -> None:
    own = json_of(call("specsim", "advise", INPUTS / "load64_log.txt", *H100, "--json"))
    at64 = json_of(call("specsim", "advise", INPUTS / "load64_log.txt", *H100, "--batch", 64, "--json"))
    at1 = json_of(call("specsim", "advise", INPUTS / "load64_log.txt", *H100, "--batch", 1, "--json"))
    assert own["lengths"] == at64["lengths"] != at1["lengths"]
    assert own["read_as"]["running"] == 64


@pytest.mark.parametrize(("name", "k", "length"), [
    ("sglang_bench.txt", 3, 2.6), ("sglang_bench.jsonl", 3, 2.6), ("dflash_bench.txt", 7, 4.0),
    ("four_lines_log.txt", None, 2.5), ("mean_len_log.txt", None, 4.0), ("draft_rounds.jsonl", None, 2.5),
])  # fmt: skip
def test_sums_and_averages_give_their_length(name: str, k: int | None, length: float) -> None:
    source = read_counts(INPUTS / name, k=k).source
    assert isinstance(source, Counters)
    assert 1 + source.accepted.sum() / source.drafted[0] == pytest.approx(length, rel=0.01)
    if k is not None:
        with pytest.raises(InputError, match="the draft length is not told; add --k"):
            read_counts(INPUTS / name)


def test_several_benchmarks_of_a_server_are_averaged(tmp_path: Path) -> None:
    """40,000 tokens at 2.6 and 20,000 at 2.0: 2.4; the load differs, so that none is taken."""
    one = json.loads((INPUTS / "sglang_bench.jsonl").read_text())
    other = {**one, "accept_length": 2.0, "total_output_tokens": 20_000, "concurrency": 1.0}
    text = (INPUTS / "sglang_bench.txt").read_text()
    changed = text.replace("40000", "20000").replace("2.60", "2.00").replace("15.20", "1.00")
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(one)}\n{json.dumps(other)}\n")
    (tmp_path / "runs.txt").write_text(text + changed)
    for name in ("runs.jsonl", "runs.txt"):
        reading = read_counts(tmp_path / name, k=3)
        assert isinstance(reading.source, Counters) and reading.setup.running is None
        assert 1 + reading.source.accepted.sum() / reading.source.drafted[0] == pytest.approx(2.4, abs=1e-3)
        assert reading.notes[:2] == ("benchmark 1: acceptance length 2.60", "benchmark 2: acceptance length 2.00")


def test_two_numbers_off_a_screen() -> None:
    """With K = 2 the rate a solves 1 + a + a^2 = 1.75: a = 0.5."""
    source = read_length(1.75, 2).source
    assert isinstance(source, Counters)
    assert (source.accepted / source.drafted).tolist() == pytest.approx([0.5, 0.25], abs=1e-3)
    assert "read as acceptance length 2.6" in call("specsim", "advise", "--accept-length", 2.6, "--k", 3, *H100).out
    assert_refused(call("specsim", "advise", "--accept-length", 4.1, "--k", 3, *H100), "lies between 1 and K + 1 = 4")


def test_a_draft_length_that_the_file_contradicts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"drafted": [1000, 1000, 1000], "accepted": [700, 450, 300]}')
    (tmp_path / "vllm.log").write_text((INPUTS.parent / "fixtures" / "vllm_log.txt").read_text())
    for name in ("c.json", "vllm.log"):
        asked = ("advise", tmp_path / name, *H100)
        told = len(json_of(call("specsim", *asked, "--json"))["lengths"]) - 1
        assert_refused(call("specsim", *asked, "--k", told + 2), f"K = {told}; leave out --k {told + 2}")
        assert call("specsim", *asked, "--k", told).out == call("specsim", *asked).out


def test_where_nothing_is_decided_the_two_servers_to_measure_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"drafted": [10000], "accepted": [2500]}')
    lines = call("specsim", "advise", tmp_path / "c.json", *H100, "--engine", "vllm").out.splitlines()
    assert lines[-4].startswith("not decidable: K = 1 is ")
    assert lines[-3] == "the two servers to measure, K = 0 and K = 1:"
    assert lines[-2] == "vllm serve <llama-3.1-8b>" and '"num_speculative_tokens": 1' in lines[-1]
    assert_refused(call("specsim", "advise", "--accept-length", 2.6, *H100), "add --k")
    assert_refused(call("specsim", "advise", *H100), "give a file of an engine, or --accept-length 2.6 --k 3")


def test_a_shortened_line_is_there_and_lacks_its_counts() -> None:
    with pytest.raises(InputError, match=r"line 1 lacks Accepted and Drafted.*--accept-length 2.60 --k 3"):
        read_counts(INPUTS / "shortened_log.txt")


def test_more_output_than_there_was_is_refused(tmp_path: Path) -> None:
    """43 rounds put out 43 tokens at least."""
    text = (INPUTS / "stream.txt").read_text().replace('"completion_tokens":53', '"completion_tokens":35')
    (tmp_path / "stream.txt").write_text(text)
    with pytest.raises(InputError, match="43 rounds with 10 accepted tokens emit 53, more than the 35 output tokens"):
        read_counts(tmp_path / "stream.txt")


def test_two_settings_in_a_log_are_a_row_each(tmp_path: Path) -> None:
    """Rounds of K = 3 and of K = 5: the first three positions are of both."""
    log = tmp_path / "sweep.txt"
    five = (INPUTS / "load64_log.txt").read_text()
    log.write_text((INPUTS / "wrapped_log.txt").read_text() + five)
    reading = read_counts(log)
    assert isinstance(reading.source, Counters)
    assert reading.source.drafted.tolist() == [17_000, 17_000, 17_000, 16_000, 16_000]
    assert reading.source.accepted[0] == pytest.approx(9600 + 750, abs=20)
    assert [note for note in reading.notes if note.startswith("K = ")] == [
        "K = 3: 1,000 rounds, acceptance length 2.60",
        "K = 5: 16,000 rounds, acceptance length 2.50",
    ]


@pytest.mark.parametrize("wrap", [40, 77, 100, 131])
def test_a_line_wrapped_at_any_width(wrap: int, tmp_path: Path) -> None:
    """Hard, in the midst of words, and quoted as in a chat; other lines go on behind."""
    whole = " ".join((INPUTS / "wrapped_log.txt").read_text().split())
    pieces = [whole[i : i + wrap] for i in range(0, len(whole), wrap)]
    log = tmp_path / "log.txt"
    for quote in ("", "> "):
        log.write_text("".join(f"{quote}{piece}\n" for piece in pieces) + "INFO 08-01 10:00:00 [x.py:1] ready\n")
        _, imported = read_any([log])
        assert imported.counted == (1000, 3000, 1600)
        assert not imported.skipped


def test_the_models_of_sglangs_log_are_taken(tmp_path: Path) -> None:
    log = tmp_path / "sglang.txt"
    log.write_text(
        "server_args=ServerArgs(model_path='org/target', speculative_algorithm='EAGLE3', speculative_num_steps=4, "
        "speculative_draft_model_path='org/head')\n"
        "[2026-05-31 18:31:21] Decode batch. #running-req: 8, #token: 372, accept len: 2.10, "
        "gen throughput (token/s): 400.0, #queue-req: 0\n"
        "[2026-05-31 18:31:22] Decode batch. #running-req: 4, #token: 372, accept len: 2.40, "
        "gen throughput (token/s): 500.0, #queue-req: 0\n"
    )
    found = read_any([log])[1]
    setup = found.setup
    assert (setup.model, setup.drafter, setup.method, setup.draft_tokens) == ("org/target", "org/head", "EAGLE3", 4)
    assert (setup.running, setup.tokens_per_s) == (6.0, 450.0)
    assert found.averages["accept len"] == pytest.approx((8 * 2.1 + 4 * 2.4) / 12)  # by running requests


@pytest.mark.parametrize("drafter", ["None", "'deepseek-ai/DeepSeek-V3'", "'lmsys/DeepSeek-V3-NextN'", "'org/eagle'"])
def test_sglangs_eagle_without_a_draft_model_is_the_targets_mtp(drafter: str, tmp_path: Path) -> None:
    """SGLang renames NEXTN to EAGLE, and takes the target's path for a draft model's that is not given."""
    log = tmp_path / "log.txt"
    log.write_text(
        "server_args=ServerArgs(model_path='deepseek-ai/DeepSeek-V3', tp_size=8, speculative_algorithm='EAGLE', "
        f"speculative_draft_model_path={drafter}, speculative_num_steps=3, speculative_eagle_topk=1, "
        "speculative_num_draft_tokens=4)\n"
        "Decode batch. #running-req: 1, #token: 16, accept len: 2.60, cuda graph: True\n"
    )
    out = call("specsim", "advise", log, "--gpu", "h200").out
    *_, command = out.splitlines()
    algorithm = "EAGLE" if "eagle" in drafter else "NEXTN"
    assert f"DeepSeek-V3 with {algorithm}" in out and f"--speculative-algorithm {algorithm}" in command
    assert ("--speculative-draft-model-path" in command) == (algorithm == "EAGLE")


def test_the_models_of_a_log_are_taken(tmp_path: Path) -> None:
    log = tmp_path / "vllm.txt"
    start = (
        "INFO 08-01 10:00:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='org/target-8b', "
        "speculative_config=SpeculativeConfig(method='eagle3', model='org/head', num_spec_tokens=5), tokenizer='x'\n"
    )
    log.write_text(start + (INPUTS / "load64_log.txt").read_text())
    setup = read_any([log])[1].setup
    assert (setup.model, setup.drafter, setup.method, setup.kind) == ("org/target-8b", "org/head", "eagle3", "eagle3")
    reading = str(read_counts(log))
    assert reading.endswith("16,000 rounds, K = 5, 64 requests at once, org/target-8b with eagle3")
    log.write_text(start.replace("org/target-8b", "llama-3.1-8b") + (INPUTS / "load64_log.txt").read_text())
    answer = call("specsim", "advise", log, "--gpu", "h100")  # the engine is told, too, and its overhead counts
    assert answer.code == 0 and "llama-3.1-8b with eagle3" in answer.out
    assert answer.out == call("specsim", "advise", log, *H100, "--batch", 64).out


VLLM_CONFIG = "(v0.12.0) with config: model='llama-3.1-8b', speculative_config=SpeculativeConfig(method='eagle3', "
SERVED = {  # what a log's first line says, and the options of `advise` that say the same
    "vllm, arguments": (
        "non-default args: {'model': 'llama-3.1-8b', 'tensor_parallel_size': 2, 'quantization': 'fp8', "
        "'kv_cache_dtype': 'fp8', 'speculative_config': {'method': 'eagle3', 'model': 'a/b'}}",
        ["--tp", 2, "--weights", "fp8", "--cache", "fp8"],
    ),
    "vllm, engine": (
        f"{VLLM_CONFIG}model='a/b', num_spec_tokens=3), tensor_parallel_size=4, quantization=awq_marlin, "
        "kv_cache_dtype=fp8_e4m3, device_config=cuda",
        ["--tp", 4, "--weights", "int4", "--cache", "fp8"],
    ),
    "vllm, as stored": (
        f"{VLLM_CONFIG}model='a/b'), tensor_parallel_size=1, quantization=None, kv_cache_dtype=auto, decoding_config=x",
        [],
    ),
    "vllm, of the drafter": (
        "non-default args: {'model': 'llama-3.1-8b', 'speculative_config': {'method': 'eagle3', 'model': 'a/b', "
        "'quantization': 'fp8', 'draft_tensor_parallel_size': 2, 'num_speculative_tokens': 3}}",
        [],
    ),
    "sglang": (
        "server_args=ServerArgs(model_path='llama-3.1-8b', tp_size=4, dtype='auto', quantization='fp8', kv_cache_dtype="
        "'fp8_e5m2', moe_dense_tp_size=None, speculative_algorithm='EAGLE3', speculative_draft_model_path='a/b', "
        "speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)",
        ["--tp", 4, "--weights", "fp8", "--cache", "fp8"],
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_how_the_server_runs_is_taken_from_its_log(name: str, tmp_path: Path) -> None:
    first, options = SERVED[name]
    decode = "Decode batch. #running-req: 1, #token: 16, accept len: 2.10, cuda graph: True\n"
    text = decode if name == "sglang" else (INPUTS / "wrapped_log.txt").read_text()
    (tmp_path / "log.txt").write_text(f"{first}\n{text}")
    (tmp_path / "bare.txt").write_text(text)  # tells neither the models nor how they are served
    log = call("specsim", "advise", tmp_path / "log.txt", "--gpu", "h100")
    server = [*H100[:-1], "sglang", "--k", 3] if name == "sglang" else H100
    bare = call("specsim", "advise", tmp_path / "bare.txt", *server, *options)
    assert log.code == bare.code == 0, log.err + bare.err
    assert table(log.out) == table(bare.out)
    assert ("tp = " in log.out.splitlines()[0]) == bool(options)  # the line that says what was read
    given = ["--tp", 1, "--weights", "bf16", "--cache", "bf16"]
    by_hand = call("specsim", "advise", tmp_path / "bare.txt", *server, *given)
    assert table(call("specsim", "advise", tmp_path / "log.txt", "--gpu", "h100", *given).out) == table(by_hand.out)


def table(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("│")]


def test_a_quantization_that_tells_no_bytes_is_said(tmp_path: Path) -> None:
    """GPTQ has 2 to 8 bits a weight; the config.json, or a name such as -GPTQ-Int4, says which."""
    log = tmp_path / "log.txt"
    for model, said in {"llama-3.1-8b": True, "Qwen/Qwen3-32B-GPTQ-Int4": False}.items():
        drafter = "'speculative_config': {'method': 'eagle3'}"
        start = f"non-default args: {{'model': '{model}', 'quantization': 'gptq', {drafter}}}"
        log.write_text(f"{start}\n{(INPUTS / 'wrapped_log.txt').read_text()}")
        out = call("specsim", "advise", log, "--gpu", "h100").out
        assert ("the file says weights gptq, of bytes unknown" in out) == said, out
        assert "bytes unknown" not in call("specsim", "advise", log, "--gpu", "h100", "--weights", "int4").out


TABLE = """K,batch,tok/s,accept length
0,1,50,
1,1,75,1.70
3,1,90,2.30
0,16,400,
1,16,440,1.70
3,16,380,2.30
"""


@pytest.mark.parametrize("form", ["csv", "markdown", "tpot", "accept", "accept %"])
def test_a_table_of_a_sweep(form: str, tmp_path: Path) -> None:
    """Accepted at position 1: 0.70; at 2 and 3, 0.7 (r + r^2) = 0.6: r = (sqrt(1 + 4 * 0.6 / 0.7) - 1) / 2 = 0.5522."""
    table = TABLE
    if form == "markdown":
        head, *rows = [f"| {' | '.join(line.split(','))} |" for line in TABLE.splitlines()]
        table = "\n".join(["My sweep", "", head, "|---|---|---|---|", *rows])
    elif form == "tpot":
        rows = [line.split(",") for line in TABLE.splitlines()[1:]]
        lines = [f"{k};{batch};{1000 / float(speed):.4f};{length}" for k, batch, speed, length in rows]
        table = "\n".join(["num_speculative_tokens;concurrency;TPOT (ms);Accept length", *lines])
    elif form.startswith("accept"):
        table = TABLE.replace("accept length", form)
        table = table.replace("1.70", "70%").replace("2.30", "43.3333%") if "%" in form else table
    (tmp_path / "sweep.txt").write_text(table)
    reading = read_counts(tmp_path / "sweep.txt")
    assert isinstance(reading.source, Counters)
    assert reading.kind == "sweep" and reading.source.accepted.tolist() == [700, 387, 213]
    assert reading.notes[:3] == (
        "batch 1: K = 3 was measured the fastest, 1.80 times K = 0",
        "batch 16: K = 1 was measured the fastest, 1.10 times K = 0",
        "filled in: K = 2, by a single rate of acceptance between two K of the table",
    )


@pytest.mark.parametrize("known", [(1, 5), (5,), (2, 3, 5), (1, 2, 3, 4, 5)])
def test_a_sweep_of_few_k_gives_the_tokens_of_those_between(known: tuple[int, ...], tmp_path: Path) -> None:
    """Equation 1 of Leviathan et al. at a rate of 0.8, by hand: 1.8, 2.44, 2.952, 3.3616 and 3.68928 tokens."""
    tokens = (1.8, 2.44, 2.952, 3.3616, 3.68928)
    rows = "".join(f"{k},{tokens[k - 1]}\n" for k in known)
    (tmp_path / "sweep.csv").write_text(f"K,accept length\n{rows}")
    reading = read_counts(tmp_path / "sweep.csv")
    assert isinstance(reading.source, Counters)
    assert (1 + np.cumsum(reading.source.accepted) / 1000).tolist() == pytest.approx(tokens, abs=3e-3)
    between = {(1, 5): "2 to 4", (5,): "1 to 4", (2, 3, 5): "1, 4"}.get(known)
    filled = f"filled in: K = {between}, by a single rate of acceptance between two K of the table"
    assert reading.notes[:-1] == ((filled,) if between else ())


@pytest.mark.parametrize("lengths", [(1.5, 2.4), (1.0, 2.0), (2.0, 1.9)])
def test_a_sweep_that_no_rates_explain_stays_within_a_drafts_bounds(
    lengths: tuple[float, float], tmp_path: Path
) -> None:
    """A token is accepted no more often than the one before it, whatever noise a table has."""
    (tmp_path / "sweep.csv").write_text(f"K,accept length\n1,{lengths[0]}\n3,{lengths[1]}\n")
    source = read_counts(tmp_path / "sweep.csv").source
    assert isinstance(source, Counters)
    assert (np.diff(source.accepted) <= 0).all() and source.accepted[0] == round(1000 * (lengths[0] - 1))


@pytest.mark.parametrize("k", [MOST_DRAFTED, MOST_DRAFTED + 1])
def test_a_table_reaches_to_the_longest_draft(k: int, tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text(f"K,tok/s,accept length\n0,50,\n{k},75,1.7\n")
    if k > MOST_DRAFTED:
        with pytest.raises(InputError, match=f"line 3: K is '{k}'"):
            read_counts(tmp_path / "sweep.txt")
    else:
        assert len(counted(read_counts(tmp_path / "sweep.txt").source).rates) == k


def test_an_acceptance_of_1_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("K,tok/s,accept\n0,50,\n3,75,1\n")
    with pytest.raises(InputError, match="line 3: an acceptance of 1 may be a length or a rate"):
        read_counts(tmp_path / "sweep.txt")


def test_replicas_batch_their_own_requests(tmp_path: Path) -> None:
    """Of three engines with 12, 8 and no requests, those that run any have 10 at once, as their logs would say."""
    counts = {"num_drafts": 100, "num_draft_tokens": 300, "num_accepted_tokens": 150}
    lines = [f'vllm:num_requests_running{{engine="{engine}"}} {running}' for engine, running in enumerate((12, 8, 0))]
    for name, number in counts.items():
        lines += [f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {number}' for engine in (0, 1)]
    (tmp_path / "m.prom").write_text("\n".join(lines))
    imported = read_any([tmp_path / "m.prom"])[1]
    assert imported.counted == (200, 600, 300) and imported.setup.running == 10
    assert "each of 2 engines batches its own requests, 10 on average" in imported.notes


@pytest.mark.parametrize("kind", ["counters", "rounds"])
def test_what_is_imported_keeps_its_server(kind: str, tmp_path: Path) -> None:
    """The answer of the imported file is that of the log: engine, models, load and formats."""
    log = tmp_path / "log.txt"
    if kind == "counters":
        log.write_text(f"{SERVED['vllm, arguments'][0]}\n{(INPUTS / 'load64_log.txt').read_text()}")
    else:
        log = INPUTS.parent / "fixtures" / "vllm_requests_k3.json"
    imported = read_any([log])[1]
    written = tmp_path / ("c.json" if kind == "counters" else "c.parquet")
    imported.write(written)
    reading, again = read_counts(log), read_counts(written)
    assert (again.setup, again.notes, again.engine) == (reading.setup, reading.notes, "vllm")
    models = ("--gpu", "h100") if kind == "counters" else H100[:-2]
    answers = [json_of(call("specsim", "advise", path, *models, "--json")) for path in (log, written)]
    for name in ("lengths", "k", "commands", "off_above"):
        assert answers[0][name] == answers[1][name], name
    if kind == "counters":
        assert again.setup.running == 64 and again.setup.tp == 2
        written.write_text(written.read_text().replace('"running": 64.0', '"running": "many"'))
        assert_refused(call("specsim", "advise", written, *models), "c.json: setup is malformed")


def test_sums_of_drafts_that_may_end_early_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    """512 output tokens, 321 of them accepted and 1 of the prompt: 190 steps; the statistics count 190 drafts, too."""
    log = tmp_path / "log.txt"
    log.write_text(
        "slot print_timing: id  0 | task 0 | \n"
        "prompt eval time =     120.51 ms /    60 tokens (    2.01 ms per token,   497.88 tokens per second)\n"
        "       eval time =    9012.33 ms /   512 tokens (   17.60 ms per token,    56.81 tokens per second)\n"
        "draft acceptance rate = 0.55432 (  321 accepted /   579 generated)\n"
    )
    refused = "579 drafted tokens are 37 drafts of K = 16, or more that end early, as with p_min, in up to 190 steps"
    for k in (16, 8):
        assert_refused(call("specsim", "advise", log, *H100, "--k", k), refused if k == 16 else "73 drafts of K = 8")
    assert counted(read_counts(log).source).rounds == counted(read_counts(log, k=3).source).rounds == 193


def test_sums_of_drafts_of_two_lengths_give_the_tokens_of_a_step_that_were_emitted(tmp_path: Path) -> None:
    """240 tokens drafted in 107 steps, which emit 255 tokens: neither 120 drafts of 2, nor a third of steps without."""
    log = tmp_path / "log.txt"
    log.write_text(
        "slot print_timing: id  0 | task 0 | \n"
        "prompt eval time =     312.41 ms /   512 tokens (    0.61 ms per token,  1638.87 tokens per second)\n"
        "       eval time =    5120.00 ms /   256 tokens (   20.00 ms per token,    50.00 tokens per second)\n"
        "draft acceptance rate = 0.61667 (  148 accepted /   240 generated)\n"
    )
    for k in (None, 3):
        source = read_counts(log, k=k).source
        assert isinstance(source, Counters) and len(source.drafted) == 3 and source.drafted_tokens == 240
        assert counted(source).rounds == 107 and abs(source.accepted.sum() - 148) <= 1
    answer = json_of(call("specsim", "doctor", log, "--baseline-tokens-per-second", 25, "--json"))
    assert answer["tokens_per_round"]["estimate"] == pytest.approx(255 / 107, rel=0.01)
    log.write_text(log.read_text() * 12)  # a third token is missing from most drafts, and not rejected
    assert "breaks off" not in call("specsim", "doctor", log, "--baseline-tokens-per-second", 25).out


def test_what_costs_leave_out_of_a_server_is_told(tmp_path: Path) -> None:
    """Data, expert and pipeline parallelism are part of no cost and no command; the server's own are named."""
    arguments = (
        "non-default args: {'model': 'deepseek-ai/DeepSeek-V3', 'data_parallel_size': 8, 'enable_expert_parallel': "
        "True, 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 1}}\n"
    )
    log = tmp_path / "log.txt"
    log.write_text(
        f"INFO 11-20 10:00:00 [utils.py:233] {arguments}"
        "INFO 11-20 10:00:05 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 1.86, Accepted throughput: "
        "86.00 tokens/s, Drafted throughput: 100.00 tokens/s, Accepted: 860 tokens, Drafted: 1000 tokens, "
        "Per-position acceptance rate: 0.860, Avg Draft acceptance rate: 86.0%\n"
    )
    told = "costs and commands leave out the server's --data-parallel-size 8 --enable-expert-parallel"
    assert told in call("specsim", "advise", log, "--gpu", "h200", "--tp", 8).out.replace("\n", " ")
    assert_refused(call("specsim", "advise", log, "--gpu", "h200"), "the weights of deepseek-v3", told)
    log.write_text(log.read_text().replace("'method': 'mtp'", "'method': 'ngram', 'prompt_lookup_max': 4"))
    assert any('counted with "prompt_lookup_max": 4' in note for note in read_counts(log).notes)
    log.write_text(
        "server_args=ServerArgs(model_path='Qwen/Qwen3-Next-80B-A3B-Instruct', tp_size=4, dp_size=1, ep_size=4, "
        "speculative_algorithm='NEXTN', speculative_num_steps=3, speculative_eagle_topk=1)\n"
        "Decode batch. #running-req: 16, #token: 2048, token usage: 0.05, accept len: 3.10, accept rate: 0.70, "
        "gen throughput (token/s): 2600.00, #queue-req: 0\n"
    )
    assert read_counts(log).notes.count("costs and commands leave out the server's --ep-size 4: add to the command "
                                        "what it needs") == 1  # fmt: skip


@pytest.mark.parametrize(("start", "what"), [(b"\xff\xfeI\0N\0", "text in UTF-16"), (b"\x1f\x8b\x08\0", "compressed")])
def test_files_in_other_encodings_are_named(start: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(start)
    assert_refused(call("specsim", "advise", tmp_path / "server.log", *H100), f"server.log is {what}")


def test_the_table_of_prometheus_own_page(tmp_path: Path) -> None:
    """Pasted as it is, and in a table of a thread: two engines, 22 + 18 drafts of 3, 30 + 20 accepted."""
    label = '{engine="%d", instance="10.0.0.1:8000", model_name="m"}'
    counts = {"drafts": (22, 18), "draft_tokens": (66, 54), "accepted_tokens": (30, 20)}
    rows = [
        (f"vllm:spec_decode_num_{name}_total{label % engine}", value)
        for name, values in counts.items()
        for engine, value in enumerate(values)
    ]
    for form in ("{} | {}", "{}\t{}", "| {} | {} |", "{} {} 1764000000000"):
        (tmp_path / "metrics.txt").write_text("".join(form.format(*row) + "\n" for row in rows))
        kind, imported = read_any([tmp_path / "metrics.txt"])
        assert kind == "prometheus" and imported.counted == (40, 120, 50)


BENCH = """============ Serving Benchmark Result ============
Successful requests:                     10
Maximum request concurrency:             8
Total input tokens:                      5000
Total generated tokens:                  2110
Output token throughput (tok/s):         420.00
"""
DRAFTS = """Drafts:                                  1000
Draft tokens:                            3000
Accepted tokens:                         1100
Per-position acceptance (%):
  Position 0:                            60.00
  Position 1:                            30.00
  Position 2:                            20.00
"""


def test_doctor_takes_the_throughput_of_files(tmp_path: Path) -> None:
    """2.1 tokens a step at 420 tok/s and 500 without: 0.84 times, 2.5 decode steps."""
    (tmp_path / "with.txt").write_text(BENCH + DRAFTS)
    (tmp_path / "without.txt").write_text(BENCH.replace("420.00", "500.00"))
    (tmp_path / "without.json").write_text(json.dumps({"output_throughput": 500.0}))
    guide = {"benchmarks": [{"metrics": {"output_tokens_per_second": {"successful": {"mean": 500.0}}}}]}
    (tmp_path / "guidellm.json").write_text(json.dumps(guide))
    right = "0.84x (16 % slower): each step yields 2.10 tokens but costs as much as 2.50 normal decode steps"
    baselines = [("--baseline", tmp_path / name) for name in ("without.txt", "without.json", "guidellm.json")]
    for baseline in (*baselines, ("--baseline-tokens-per-second", 500)):
        assert right in call("specsim", "doctor", tmp_path / "with.txt", *baseline).out
    typed = ("--accept-length", 2.1, "--k", 3, "--tokens-per-second", 420, "--baseline-tokens-per-second", 500)
    assert right in call("specsim", "doctor", *typed).out
    assert_refused(call("specsim", "doctor", tmp_path / "with.txt"), "Add --baseline-tokens-per-second (or --baseline")
    advice = json_of(call("specsim", "advise", tmp_path / "with.txt", *H100, "--json"))
    assert advice["asked"]["context"] == advice["read_as"]["context"] == round((5000 + 2110 / 2) / 10)
    assert json_of(call("specsim", "advise", INPUTS / "load64_log.txt", *H100, "--json"))["asked"]["context"] == 1000
    for name in ("without.txt", "guidellm.json"):
        assert_refused(call("specsim", "advise", tmp_path / name, *H100), "which counts no drafts; save the server's")


def vllm_base(limit: int, requests: int) -> str:
    return BENCH.replace(" 8\n", f" {limit}\n").replace(" 10\n", f" {requests}\n")


def sglang_base(running: float) -> str:
    lines = f"Max request concurrency: 16\nConcurrency: {running}\n"
    return vllm_base(0, 200).replace("Maximum request concurrency:             0\n", lines)


def guidellm_base(**running: object) -> str:
    return json.dumps(
        {"benchmarks": [{"metrics": {"output_tokens_per_second": {"successful": {"mean": 500}}, **running}}]}
    )


@pytest.mark.parametrize(
    ("baseline", "load"),
    [
        (vllm_base(8, 200), "same"),
        (vllm_base(16, 10), "same"),  # of 10 requests in all, no more than 10 can run at once
        (vllm_base(5, 10), "5"),
        (vllm_base(16, 200), "16"),
        (sglang_base(9.9), "same"),
        (sglang_base(15.2), "15.2"),
        ('{"output_throughput": 500.0, "max_concurrency": 32, "completed": 80}', "32"),
        ('{"output_throughput": 500.0, "max_concurrency": null, "completed": 80}', "unknown"),
        (guidellm_base(request_concurrency={"successful": {"mean": 31.5}}), "31.5"),
        (guidellm_base(), "unknown"),
    ],
)
def test_doctor_compares_no_rates_of_other_loads(baseline: str, load: str, tmp_path: Path) -> None:
    """A benchmark of 8 requests at once, beside one of as many, of more or fewer, or of unknown many."""
    own, base = tmp_path / "with.txt", tmp_path / "base"
    own.write_text(BENCH + DRAFTS)
    base.write_text(baseline)
    answer = call("specsim", "doctor", own, "--baseline", base)
    if load not in ("same", "unknown"):
        assert_refused(answer, f"{own} is of 8 requests at once, {base} of {load}: their rates do not compare")
    else:
        assert answer.code == 0
        assert (f"{base}: how many requests ran at once is not told" in answer.out) == (load == "unknown")
    typed = call("specsim", "doctor", own, "--baseline", base, "--tokens-per-second", 420)
    assert typed.code == 0 and "not told" not in typed.out


def test_a_log_tells_its_throughput() -> None:
    """Two intervals at 100 tok/s: 1.25 tokens a step, and 1.125 decode steps at 90 without."""
    answer = call("specsim", "doctor", INPUTS / "vllm_ngram_log.txt", "--baseline-tokens-per-second", 90)
    assert "each step yields 1.25 tokens and costs as much as 1.12 normal decode steps" in answer.out


def llamacpp_log(*lines: tuple[int, int, str]) -> str:
    """Lines of slots and requests: a request's start, or its end with 180 of 360 drafted tokens of 300, in 6 s."""
    ends = (
        "print_timing: id  {} | task {} | \nprompt eval time =     200.00 ms /    30 tokens\n"
        "       eval time =    6000.00 ms /   300 tokens (   20.00 ms per token,    50.00 tokens per second)\n"
        "slot print_timing: id  {} | task {} | \ndraft acceptance rate = 0.50000 (  180 accepted /   360 generated), "
        "mean acceptance length = 2.50"
    )
    forms = {"start": "launch_slot_: id  {} | task {} | processing task", "end": ends}
    return "".join(f"slot {forms[what].format(slot, task, slot, task)}\n" for slot, task, what in lines)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([(0, 12, "end")], True),
        ([(0, 12, "end"), (0, 133, "end")], True),
        ([(3, 0, "start"), (3, 0, "end"), (2, 121, "start"), (2, 121, "end")], True),  # slots in turns
        ([(3, 0, "start"), (2, 1, "start"), (3, 0, "end"), (2, 1, "end")], False),  # both at once
        ([(3, 0, "end"), (2, 121, "end")], False),  # of two slots, whose starts are not in the log
    ],
)
def test_a_log_of_llamacpp_tells_its_throughput(lines: list[tuple[int, int, str]], told: bool, tmp_path: Path) -> None:
    """300 tokens in 6,000 ms are the 50 tokens per second that the log prints; 2.5 tokens a step at 40 without."""
    (tmp_path / "log.txt").write_text(llamacpp_log(*lines))
    answer = call("specsim", "doctor", tmp_path / "log.txt", "--k", 3, "--baseline-tokens-per-second", 40)
    if told:
        assert "50 tok/s while decoding, 40 without speculation" in answer.out
        assert "1.25x (25 % faster): each step yields 2.50 tokens and costs as much as 2.00 normal" in answer.out
    else:
        assert_refused(answer, "what is its throughput? Add --tokens-per-second")


@pytest.mark.parametrize(("speed", "told"), [(10.0, True), (1000.0, False)])
def test_a_server_far_slower_than_its_hardware_is_named(speed: float, told: bool, tmp_path: Path) -> None:
    """64 requests: the log's own 4,000 tok/s is near what these costs predict, 10 tok/s is not."""
    log = (INPUTS / "load64_log.txt").read_text()
    slow = re.sub(r"(generation throughput|Drafted throughput|Accepted throughput): [\d.]+", rf"\1: {speed}", log)
    (tmp_path / "log.txt").write_text(slow)
    assert ("far slower than these costs" in call("specsim", "advise", tmp_path / "log.txt", *H100).out) == told
    assert "far slower" not in call("specsim", "advise", INPUTS / "load64_log.txt", *H100).out


def test_lmdeploys_line_is_vllms_but_for_its_requests(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(
        "[2025-11-20 10:00:00 DP0] Avg prompt throughput: 9.0 tokens/s, Avg generation throughput: 260.0 tokens/s, "
        "Finished: 3 reqs, Unfinished: 8 reqs, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, Prefix "
        "cache hit rate: 0.0%, SpecDecoding metrics: Draft acceptance rate: 53.33%, Mean acceptance length: 2.60, "
        "Accepted: 1600 tokens, Drafted: 3000 tokens, Per-position acceptance rate: 0.750, 0.500, 0.350\n"
    )
    _, imported = read_any([tmp_path / "log.txt"])
    assert (imported.engine, imported.counted, imported.setup.running) == ("lmdeploy", (1000, 3000, 1600), 8)


@pytest.mark.parametrize(("rule", "note"), [("block", "accepts a draft as a whole"), ("synthetic", "was scripted")])
def test_acceptance_that_is_not_token_by_token_is_named(rule: str, note: str, tmp_path: Path) -> None:
    start = f"non-default args: {{'speculative_config': {{'method': 'mtp', 'rejection_sample_method': '{rule}'}}}}\n"
    (tmp_path / "log.txt").write_text(start + (INPUTS / "wrapped_log.txt").read_text())
    assert note in " ".join(read_counts(tmp_path / "log.txt").notes)


SPEC_DECODE = """--------------------------------------------------
total_num_output_tokens: 2000
num_drafts: 1000
num_draft_tokens: 2000
num_accepted_tokens: 950
mean acceptance length: 1.95
--------------------------------------------------
acceptance at token 0: 0.60
acceptance at token 1: 0.35
"""


def test_what_vllms_example_prints(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text(SPEC_DECODE)
    kind, imported = read_any([tmp_path / "out.txt"])
    assert kind == "vllm-bench" and imported.counted == (1000, 2000, 950)
    assert isinstance(imported.source, Counters) and imported.source.accepted.tolist() == [600, 350]


@pytest.mark.parametrize(("text", "kind", "rounds", "accepted"), [
    ("n_draft   = 5\nn_predict = 261\nn_drafted = 260\nn_accept  = 208\naccept    = 80.000%\n", "log", 52, 208),
    ("  code  pred= 101 draft= 120 acc=  60 rate=0.500 tok/s=30.1\n", "log", 40, 60),
    ('{"results": [{"name": "a", "predicted_n": 101, "draft_n": 120, "draft_n_accepted": 60}]}', "responses", 40, 60),
])  # fmt: skip
def test_what_programs_beside_llama_server_print(
    text: str, kind: str, rounds: int, accepted: int, tmp_path: Path
) -> None:
    """260 tokens in drafts of 5; 120 in the 40 steps that 101 tokens with 60 accepted leave."""
    (tmp_path / "out.txt").write_text(text)
    reading = read_counts(tmp_path / "out.txt")
    assert isinstance(reading.source, Counters) and reading.kind == f"llamacpp-{kind}"
    assert reading.source.drafted[0] == rounds and reading.source.accepted.sum() == pytest.approx(accepted, abs=2)


def test_sglangs_server_info(tmp_path: Path) -> None:
    info = {
        "model_path": "org/target",
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "internal_states": [{"avg_spec_accept_length": 2.5, "last_gen_throughput": 300.0}],
    }
    path = tmp_path / "server_info.json"
    path.write_text(json.dumps(info))
    reading = read_counts(path)
    assert isinstance(reading.source, Counters)
    assert 1 + reading.source.accepted.sum() / reading.source.drafted[0] == pytest.approx(2.5, abs=2e-3)
    assert (reading.setup.model, reading.setup.kind, reading.setup.draft_tokens) == ("org/target", "eagle3", 3)
    path.write_text(json.dumps({**info, "speculative_eagle_topk": 4}))
    with pytest.raises(InputError, match="sums of draft trees"):
        read_counts(path)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("speculative_num_steps=5, speculative_eagle_topk=8, speculative_num_draft_tokens=32", "sglang"),
        ("speculative_num_steps=5, speculative_num_draft_tokens=32", "sglang"),  # a chain of 5 has 6, with the root
        ("'speculative_token_tree': '[(0,), (1,), (0, 0)]'", "vllm"),
        ("speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4", ""),
        ("'speculative_token_tree': '[(0,), (0, 0), (0, 0, 0)]'", ""),
    ],
)
def test_a_log_of_draft_trees_is_not_read_as_a_chain(given: str, instead: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    if "token_tree" in given:
        start = f"non-default args: {{'model': 'a/b', 'speculative_config': {{'method': 'eagle3', {given}}}}}\n"
        log.write_text(start + (INPUTS / "wrapped_log.txt").read_text())
    else:
        start = f"server_args=ServerArgs(model_path='a/b', speculative_algorithm='EAGLE3', {given})\n"
        log.write_text(f"{start}Decode batch. #running-req: 1, #token: 16, accept len: 3.10, cuda graph: True\n")
    if not instead:
        assert isinstance(read_counts(log).source, Counters)
        return
    flag = {"sglang": "run SGLang with --speculative-eagle-topk 1", "vllm": "run vLLM without speculative_token_tree"}
    refused = f"draft trees do not give acceptance by position; {flag[instead]}"
    assert_refused(call("specsim", "advise", log, *H100), refused)
    doctor = call("specsim", "doctor", log, "--tokens-per-second", 100, "--baseline-tokens-per-second", 50)
    assert_refused(doctor, refused)
    assert flag[instead] in call("specsim", "import", log).out


@pytest.mark.parametrize("totals", [{"output_tokens": 1000}, {"output_tokens": 9000, "plain_steps": 10}])
def test_counters_whose_tokens_contradict_them_are_refused(totals: dict[str, int]) -> None:
    """1,000 rounds of K = 3 that accept 1,180 tokens put out 2,180."""
    document = json.loads((INPUTS / "counters3.json").read_text())
    assert read_counters({**document, "output_tokens": 2180, "plain_steps": 0}).output_tokens == 2180
    with pytest.raises(InputError, match=r"output tokens are not of 1,000 rounds with 1,180 accepted"):
        read_counters({**document, **totals})


def test_without_costs_the_question_is_which_gpu(tmp_path: Path) -> None:
    asked = call("specsim", "advise", INPUTS / "wrapped_log.txt")
    assert_refused(asked, "1,000 rounds, K = 3; which GPU is it? Add --gpu, such as --gpu h100 --target ... --drafter")


def test_a_file_of_nothing_is_refused_in_a_line(tmp_path: Path) -> None:
    for text in ("started\n", ""):
        (tmp_path / "notes.txt").write_text(text)
        assert_refused(call("specsim", "advise", tmp_path / "notes.txt", *H100), "holds nothing that an engine")
    assert_refused(call("specsim", "advise", tmp_path / "none.log", *H100), "none.log does not exist; give a trace,")
