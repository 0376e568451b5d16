"""Importers on what engines really wrote: the same run through all of an engine's formats gives the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.sources import Counters, Rounds, read_counters, read_rounds, read_source, verified_by_depth
from specsim.engines.as_engine import counters_of
from specsim.engines.formats.reading import json_records
from specsim.engines.formats.records import ImportedRecords, Skipped, aiperf_records
from specsim.engines.formats.registry import read_format
from specsim.engines.rates import Printed, counters, counts_of_rates, part_of
from specsim.io.errors import InputError
from tests.specsim.engines.test_as_engine import COUNTED
from tests.support.commands import assert_refused, call, json_of

FIXTURES = Path(__file__).parent / "fixtures"
LOG = (FIXTURES / "llamacpp_log_k3.txt").read_text().splitlines(keepends=True)


def read(kind: str, *names: str) -> ImportedRecords:
    return read_format(kind, [FIXTURES / name for name in names])


def rounds_of(imported: ImportedRecords) -> Rounds:
    assert isinstance(imported.source, Rounds)
    return imported.source


def counts_of(imported: ImportedRecords) -> Counters:
    assert isinstance(imported.source, Counters)
    return imported.source


def log_without(path: Path, *words: str) -> Path:
    path.write_text("".join(line for line in LOG if not any(word in line for word in words)))
    return path


def sums(imported: ImportedRecords) -> tuple[int, int, int, list[int]]:
    totals = imported.totals
    return totals.rounds, totals.drafted, totals.accepted, totals.by_depth.accepted.tolist()


def by_hand(engine: str, k: str) -> tuple[list[int], list[int]]:
    """Drafted and accepted of all rounds of a recorded run, see test_as_engine."""
    drafted, accepted = (
        [int(digit) for sequence in COUNTED[engine][k] for digit in sequence[column]] for column in (0, 1)
    )
    return drafted, accepted


def test_every_round_of_a_llamacpp_log() -> None:
    imported = read("llamacpp-log", "llamacpp_log_k3.txt")
    rounds = rounds_of(imported)
    assert (rounds.drafted.tolist(), rounds.accepted.tolist()) == by_hand("llamacpp", "3")
    assert imported.requests == 12 and imported.output_tokens == (96,) * 12 and not imported.skipped
    assert rounds.sequence_id is not None
    assert (rounds.t[rounds.sequence_id == 0][:4]).tolist() == [1, 5, 8, 9]


def test_llamacpp_says_the_same_in_all_of_its_formats(tmp_path: Path) -> None:
    """Rounds, statistics, every request's line and a scrape: 475 drafts of 1,414 tokens; 308, 207 and 144 accepted."""
    by_format = {
        "rounds": read("llamacpp-log", "llamacpp_log_k3.txt"),
        "statistics": read_format("llamacpp-log", [log_without(tmp_path / "a", "draft tokens")]),
        "requests": read_format("llamacpp-log", [log_without(tmp_path / "b", "draft tokens", "statistics")]),
        "scrape": read("prometheus", "llamacpp_metrics_k3.prom"),
    }
    assert {name: sums(imported) for name, imported in by_format.items()} == dict.fromkeys(
        by_format, (475, 1414, 659, [308, 207, 144])
    )
    exact = counters_of(rounds_of(by_format["rounds"])).drafted
    assert exact.tolist() == [475, 473, 466]
    for name in ("statistics", "requests", "scrape"):
        assert "11 tokens less than 475 drafts of 3" in " ".join(by_format[name].notes)
        off = abs(counts_of(by_format[name]).drafted / exact - 1).max()
        assert 0 < off < 0.008, name  # as its note says
    for imported in (read("llamacpp-responses", "llamacpp_responses_k3.jsonl"), by_format["rounds"]):
        assert imported.requests == 12 and imported.output_tokens == (96,) * 12
    assert read("llamacpp-responses", "llamacpp_responses_k3.jsonl").sums == (None, 1414, 659)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"a": 1}', '{"b": 2}', "{broken", '{"c": 3}'], "line 3"),
        (['{"a": 1}', "[2]"], "record 2 is not an object"),
        (['data: {"id": "x"}', "", "data: {broken", 'data: {"id": "x"}'], "line 3"),
        (['data: {"id": "x"}', "data: [1]"], "line 2: the stream's chunk is not an object"),
    ],
)
def test_the_place_of_what_cannot_be_read_is_named(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=message):
        json_records([tmp_path / "log.jsonl"], Skipped(), invalid="export again")


def test_a_line_of_debug_level_repeats_no_round(tmp_path: Path) -> None:
    """Requests without their first rounds: a log with both lines of a round, and with the second alone."""
    both = read("llamacpp-log", "llamacpp_log_debug.txt")
    lines = (FIXTURES / "llamacpp_log_debug.txt").read_text().splitlines(keepends=True)
    alone = tmp_path / "log"
    alone.write_text("".join(line for line in lines[1:] if "new n_tokens" in line))
    drafted, accepted = by_hand("llamacpp", "3")
    assert both.requests == 2
    count = both.totals.rounds
    assert rounds_of(both).accepted.tolist() == accepted[88 - count : 88]
    assert rounds_of(both).drafted.tolist() == drafted[88 - count : 88]
    assert rounds_of(read_format("llamacpp-log", [alone])).accepted.tolist() == accepted[88 - count : 87]
    assert "2 requests without their last line" in both.notes[1]


def test_of_a_log_that_begins_late_whole_requests_are_read(tmp_path: Path) -> None:
    late = tmp_path / "log"
    late.write_text("".join(LOG[10:]) + "0.07 I slot operator(): id 0 | task 466 | accepted  1/ 3 dra")
    imported = read_format("llamacpp-log", [late])
    assert imported.requests == 11 and len(rounds_of(imported).drafted) == 475 - 47
    assert imported.skipped == {
        "lines that were cut off or have another form": 1,
        "requests whose rounds are not all in the log": 1,
    }
    late.write_text("".join(LOG) + "0.07 I slot operator(): id 0 | task 500 | accepted  x/ 3 draft tokens\n")
    assert read_format("llamacpp-log", [late]).skipped == {"lines that were cut off or have another form": 1}


OLDER = {
    "2025": (
        "slot print_timing: id 0 | task 7 | draft acceptance rate = 0.57576 (  171 accepted /   297 generated)\n",
        (None, 297, 171),
    ),
    "lookup": (
        "statistics ngram_mod: #calls = 81, #gen drafts = 15, #acc drafts = 15, #gen tokens = 960, #acc tokens = 730\n",
        (15, 960, 730),
    ),
}


@pytest.mark.parametrize("version", OLDER)
def test_llamacpp_of_before(version: str, tmp_path: Path) -> None:
    line, wanted = OLDER[version]
    log = tmp_path / "log"
    log.write_text(line)
    imported = read_format("llamacpp-log", [log])
    assert imported.source is None and imported.sums == wanted and "LLAMA_TRACE" in imported.instead
    assert_refused(call("specsim", "import", "llamacpp-log", log, "--out", tmp_path / "c.json"), "LLAMA_TRACE=1")


def test_statistics_of_two_processes_are_added_and_of_two_drafters_named(tmp_path: Path) -> None:
    log = log_without(tmp_path / "log", "draft tokens", "task")
    once = log.read_text()
    log.write_text(once * 2)
    assert sums(read_format("llamacpp-log", [log]))[:3] == (950, 2828, 1318)
    log.write_text(once + once.replace("draft-simple", "ngram-mod"))
    both = read_format("llamacpp-log", [log])
    assert sums(both)[:3] == (950, 2828, 1318) and both.setup.method == "draft-simple+ngram-mod"
    assert "ngram-mod: 475 drafts, 1,414 tokens drafted, 659 accepted" in both.notes


@pytest.mark.parametrize(
    ("drafts", "drafted", "accepted"), [(0, 138, 47), (47, 0, 0), (47, 138, 139), (0, 138, 0), (0, 0, 5)]
)
def test_statistics_that_cannot_be_are_refused(drafts: int, drafted: int, accepted: int, tmp_path: Path) -> None:
    line = FIXTURES.joinpath("llamacpp_log_k3.txt").read_text().splitlines()[50]
    for name, real, changed in (("gen drafts", 47, drafts), ("gen tokens", 138, drafted), ("acc tokens", 47, accepted)):
        line = re.sub(rf"#{name} =\s+{real}", f"#{name} = {changed}", line)
    (tmp_path / "log").write_text(line + "\n")
    message = f"{accepted} of {drafted} tokens accepted in {drafts} drafts are impossible"
    assert_refused(call("specsim", "import", "llamacpp-log", tmp_path / "log"), message)


LONG, TIMES = 60_000, 3  # characters of a line, and lines; a quadratic expression took seconds for each
PIECES = [
    ("", "task 1 |  eval time = "), ("", "statistics a: #calls "), ("", "statistics  #calls #gen drafts = 1, "),
    ("statistics a: #calls ", "#gen drafts = 1, "), ("statistics a: #calls #gen drafts = 1, ", "#gen tokens = 1, "),
    ("", "#acc rate/pos = (0.1, "), ("", "task 1 | accepted  1/ "), ("task 1 | accepted ", " "), ("build: ", "1"),
    ("", "task 1 | draft acceptance = 0.5 (1 accepted / "), ("", "Decode batch. "), ("Decode batch. ", "accept len: "),
    ("", "SpecDecoding metrics: Per-position acceptance rate: 0.1, "), ("", "Draft acceptance rate: 1.1"),
    ("SpecDecoding metrics: Per-position acceptance rate: 0.1", ", 0.1"), ("SpecDecoding metrics: ", "Drafted: 1"),
    ("", "LLM engine (v"), ("", "Number of accepted tokens: 1, "), ("Drafts:", " "), ("    Position ", "1"),
    ("vllm:spec_decode_num_drafts{", "a"), ("vllm:spec_decode_num_drafts{", '"'), ("vllm:spec_decode{", "} "),
    ("vllm:spec_decode_num_drafts{", 'a="\\"'), ("a: x", " "), ("", "a: "), ("", " "), ("", "a"),
]  # fmt: skip
TEXTS = ["llamacpp-log", "sglang-log", "vllm-log", "vllm-bench", "prometheus"]


@pytest.mark.parametrize("kind", TEXTS)
def test_long_lines_take_no_longer_than_many_short_ones(kind: str, tmp_path: Path) -> None:
    """Lines that make some expression start over at each of their pieces."""
    log = tmp_path / "log"
    for start, piece in PIECES:
        log.write_text((start + piece * ((LONG - len(start)) // len(piece)) + "x\n") * TIMES)
        with pytest.raises(InputError):
            read_format(kind, [log])


@pytest.mark.parametrize(
    ("kind", "fixture", "lines"), [("llamacpp-log", "llamacpp_log_k3.txt", 100), ("vllm-log", "vllm_log.txt", 1)]
)
def test_a_line_of_many_megabytes_is_left_out_and_counted(kind: str, fixture: str, lines: int, tmp_path: Path) -> None:
    log, plain = tmp_path / "log", tmp_path / "plain"
    plain.write_text("".join((FIXTURES / fixture).read_text().splitlines(keepends=True)[:lines]))
    log.write_text("Decode batch. statistics " * 400_000 + "\n" + plain.read_text() + "x" * 100_000)
    imported, wanted = read_format(kind, [log]), read_format(kind, [plain])
    assert sums(imported) == sums(wanted)
    assert dict(imported.skipped) == {**wanted.skipped, "lines of more than 65,536 characters": 2}


def vllm_line(drafted: np.ndarray, accepted: np.ndarray, k: int) -> str:
    """As vLLM prints an interval of these rounds."""
    shares = ", ".join(f"{(accepted >= i).sum() / len(drafted):.3f}" for i in range(1, k + 1))
    return (
        f"(EngineCore pid=7) INFO 11-22 08:20:35 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: "
        f"{1 + accepted.sum() / len(drafted):.2f}, Accepted throughput: 4.35 tokens/s, "
        f"Drafted throughput: 9.86 tokens/s, Accepted: {accepted.sum()} tokens, Drafted: {drafted.sum()} tokens, "
        f"Per-position acceptance rate: {shares}, "
        f"Avg Draft acceptance rate: {100 * accepted.sum() / drafted.sum():.1f}%\n"
    )


def test_vllm_says_the_same_in_all_of_its_formats(tmp_path: Path) -> None:
    """Its metrics of every request; a log and scrapes of the same rounds, as vLLM prints them."""
    requests = read("vllm-requests", "vllm_requests_k3.json")
    drafted, accepted = map(np.array, by_hand("vllm", "3"))
    assert np.array_equal(rounds_of(requests).accepted, accepted) and np.array_equal(
        rounds_of(requests).drafted, drafted
    )
    log, before, after = tmp_path / "log", tmp_path / "before", tmp_path / "after"
    log.write_text("".join(vllm_line(drafted[part], accepted[part], 3) for part in (slice(0, 200), slice(200, None))))
    for path, part in ((before, slice(0, 90)), (after, slice(0, None))):
        counts = {
            "drafts": len(drafted[part]),
            "draft_tokens": drafted[part].sum(),
            "accepted_tokens": accepted[part].sum(),
        }
        lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value:.1f}' for name, value in counts.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        for i in range(3):
            lines.append(f'{name}{{engine="0",position="{i}"}} {(accepted[part] > i).sum():.1f}')
            lines.append(f'{name.replace("total", "created")}{{engine="0",position="{i}"}} 1.7e+09')
        path.write_text("\n".join(lines))
    summary = tmp_path / "summary.jsonl"
    records = json.loads((FIXTURES / "vllm_requests_k3.json").read_text())
    for record in records:
        del record["per_step_accepted"], record["per_step_drafted"]
    summary.write_text("".join(json.dumps({"metrics": {"speculative_decoding": record}}) + "\n" for record in records))
    wanted = len(drafted), drafted.sum(), accepted.sum(), [int((accepted > i).sum()) for i in range(3)]
    assert wanted[:3] == (481, 1443, 674)
    records_read = [requests, read_format("vllm-log", [log]), read_format("vllm-requests", [summary])]
    for imported in (*records_read, read_format("prometheus", [after])):
        assert sums(imported) == wanted
    since = read_format("prometheus", [before, after])
    assert sums(since)[:3] == (391, 391 * 3, accepted[90:].sum())
    start = tmp_path / "start"  # before the first request, series with labels do not exist
    start.write_text('vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n')
    assert sums(read_format("prometheus", [start, after])) == wanted
    with pytest.raises(InputError, match="the server restarted between the scrapes"):
        read_format("prometheus", [after, before])


def test_a_real_line_of_vllm_gives_its_counts(tmp_path: Path) -> None:
    """Of the third, of prompt lookup, some drafts are short: 469 / 228 = 2.057 is printed as 2.06, 469 / 227 is not."""
    wanted = [(338, 1014, 430, [208, 133, 89]), (247, 1235, 376, [142, 89, 60, 48, 37]), (228, 908, 469)]
    for line, counts in zip((FIXTURES / "vllm_log.txt").read_text().splitlines(), wanted, strict=True):
        (tmp_path / "log").write_text(line + "\n" + line[: len(line) - 30])
        imported = read_format("vllm-log", [tmp_path / "log"])
        assert sums(imported)[: len(counts)] == counts
        assert imported.skipped == {"lines that were cut off or have another form": 1}
    several = read("vllm-log", "vllm_log.txt")
    assert sums(several)[:3] == (338 + 247 + 228, 1014 + 1235 + 908, 430 + 376 + 469)
    assert [note[:19] for note in several.notes if note.startswith("K =")] == [
        "K = 3: 338 rounds, ",
        "K = 4: 228 rounds, ",
        "K = 5: 247 rounds, ",
    ]


def test_counters_under_a_schedule_are_not_divided_by_drafts() -> None:
    """The rounds say that 17 of 526 drafted a third token; as its share of 526 its 11 would be 2 %, not 65 %."""
    scrape, pmin = (
        read("prometheus", f"{name}.prom") for name in ("vllm_metrics_schedule", "llamacpp_metrics_k7_pmin")
    )
    assert re.search(r"differ in length \(1,103 tokens in 526 drafts of up to 5\).*cut at K.*detailed", scrape.notes[0])
    assert re.search(r"differ in length \(607 tokens in 293 drafts of up to 7\).*LLAMA_TRACE", pmin.notes[0])
    assert sums(scrape) == (526, 1103, 626, [349, 252, 11, 8, 6])  # as all engines' numbers, but no rate of specsim's
    assert "specsim acceptance" not in scrape.to_frame().printed.tolist()
    imported = read("vllm-requests", "vllm_requests_schedule.json")
    assert sums(imported) == (526, 1103, 626, [349, 252, 11, 8, 6])
    accepted, verified = verified_by_depth(rounds_of(imported))
    assert counters_of(rounds_of(imported)).drafted.tolist() == [526, 526, 17, 17, 17]
    assert verified[2] < 17 and accepted[2] == 11


def test_tensorrt_llm_counts_both_by_position(tmp_path: Path) -> None:
    path = tmp_path / "scrape"
    rows = [("drafted", 0, 500), ("drafted", 1, 100), ("accepted", 0, 300), ("accepted", 1, 40)]
    path.write_text(
        "trtllm_spec_decode_num_draft_tokens_total 600\ntrtllm_spec_decode_acceptance_length 1.7\n"
        + "".join(f'trtllm_spec_decode_{what}_tokens_total{{token_position="{i}"}} {n}\n' for what, i, n in rows)
    )
    counted = counts_of(read_format("prometheus", [path]))
    assert (counted.drafted.tolist(), counted.accepted.tolist()) == ([500, 100], [300, 40])


def test_other_metrics_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scrape"
    cases = {
        "python_info 1\n": "no counters of speculation",
        "vllm:spec_decode_num_drafts_total 5\nllamacpp:spec_decode_num_drafts_total 5\n": "is of llamacpp and vllm",
        "vllm:spec_decode_num_drafts_total 0.5\n": "is 0.5, not a count",
        "vllm:spec_decode_num_drafts_total nan\n": "is nan, not a count",
        "".join(
            f'trtllm_spec_decode_{what}_tokens_total{{token_position="{i}"}} {count}\n'
            for what, i, count in (("drafted", 0, 500), ("accepted", 0, 300), ("accepted", 1, 40))
        ): r"\[500\] drafted and \[300, 40\] accepted by position is impossible",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_format("prometheus", [path])
    lines = [f'sglang:{what}{{model_name="m"}} {value}' for what, value in
             (("spec_accept_length", 2.5), ("num_running_reqs", 4), ("token_usage", 0.3))]  # fmt: skip
    path.write_text("\n".join(lines))
    gauges = read_format("prometheus", [path])
    assert gauges.averages == {"accept len": 2.5} and gauges.setup.running == 4 and gauges.setup.model == "m"
    whole = (FIXTURES / "llamacpp_metrics_k3.prom").read_text()
    path.write_text(whole[: whole.rindex("4")])  # 144 becomes 14
    with pytest.raises(InputError, match="659 accepted tokens, but 529 by position"):
        read_format("prometheus", [path])


def test_neutral_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    for kind, name in (("llamacpp-log", "llamacpp_log_k3.txt"), ("vllm-requests", "vllm_requests_schedule.json")):
        imported = read(kind, name)
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in aiperf_records(imported)))
        again = read_format("aiperf", [path])
        assert again.engine == imported.engine and again.output_tokens == imported.output_tokens
        for column in ("drafted", "accepted", "sequence_id", "t"):
            own, other = (getattr(rounds_of(records), column) for records in (imported, again))
            assert (own is None and other is None) or np.array_equal(own, other), column
    alone = {**json.loads(path.read_text().splitlines()[0]), "acceptance_histogram": {"1": 1}, "num_spec_steps": 1}
    alone |= {"num_accepted_draft_tokens": 1, "num_draft_tokens": 2, "num_spec_tokens": 2, "completion_tokens": 3}
    alone |= {"per_step_accepted": [1], "per_step_drafted": [2]}
    (tmp_path / "alone.jsonl").write_text(json.dumps(alone))
    (written,) = aiperf_records(read_format("aiperf", [tmp_path / "alone.jsonl"]))
    assert written["num_spec_tokens"] == 2 and written["acceptance_histogram"] == {"1": 1}
    wrapped = tmp_path / "wrapped.jsonl"
    lines = [json.dumps({"spec_decode_acceptance": json.loads(line)}) for line in path.read_text().splitlines()]
    wrapped.write_text("\n".join([*lines, '{"spec_decode_acceptance": null}', lines[0][:40]]))
    unwrapped = read_format("aiperf", [wrapped])
    assert sums(unwrapped) == (526, 1103, 626, [349, 252, 11, 8, 6])
    assert unwrapped.skipped == {"lines cut off at the end of a file": 1, "requests without speculation": 1}


def test_histograms_by_draft_length_are_exact_under_a_schedule(tmp_path: Path) -> None:
    """Without them the same summary says that drafts differ in length, as K was 5 or 2."""
    records = json.loads((FIXTURES / "vllm_requests_schedule.json").read_text())
    path = tmp_path / "a.json"
    for record in records:
        steps = list(zip(record.pop("per_step_drafted"), record.pop("per_step_accepted"), strict=True))
        record["acceptance_histogram_by_draft_length"] = {
            str(k): [sum(step == (k, a) for step in steps) for a in range(k + 1)] for k in {k for k, _ in steps}
        }
    path.write_text(json.dumps(records))
    counted = counts_of(read_format("vllm-requests", [path]))
    assert counted.drafted.tolist() == [526, 526, 17, 17, 17] and counted.accepted.tolist() == [349, 252, 11, 8, 6]
    records[0]["acceptance_histogram_by_draft_length"]["2"][0] += 1
    path.write_text(json.dumps(records))
    with pytest.raises(InputError, match="record 1: its histograms contradict each other"):
        read_format("vllm-requests", [path])
    nothing = {"acceptance_histogram": [4], "acceptance_histogram_by_draft_length": {"0": [4]}, "num_spec_steps": 4}
    (tmp_path / "b.json").write_text(json.dumps({**nothing, "num_accepted_draft_tokens": 0, "num_draft_tokens": 0}))
    with pytest.raises(InputError, match="nothing was drafted"):
        read_format("vllm-requests", [tmp_path / "b.json"])
    for record in records:
        del record["acceptance_histogram_by_draft_length"]
    path.write_text(json.dumps(records))
    assert counts_of(read_format("vllm-requests", [path])).drafted_tokens == 1103


SPOILT = {
    "acceptance_histogram": ([28, 3, 4, 12], "is not of 48 steps with 50 accepted"),
    "num_accepted_draft_tokens": (49, "is not of 48 steps with 49 accepted"),
    "num_draft_tokens": (40, "50 of 40 drafted tokens accepted"),
    "num_spec_tokens": (0, "0 a step"),
    "per_step_drafted": ([3] * 47, "drafts in 47 rounds but accepts in 48"),
    "per_step_accepted": ([4] + [0] * 47, "accepts 4 of 3 drafted tokens in round 1"),
    "num_spec_steps": ("48", "Expected `int`"),
}


@pytest.mark.parametrize("key", SPOILT)
def test_metrics_that_contradict_themselves_are_refused(key: str, tmp_path: Path) -> None:
    value, message = SPOILT[key]
    records = json.loads((FIXTURES / "vllm_requests_k3.json").read_text())
    records[0][key] = value
    (tmp_path / "a.json").write_text(json.dumps(records))
    with pytest.raises(InputError, match=message):
        read_format("vllm-requests", [tmp_path / "a.json"])


def test_an_error_names_the_file_and_the_record(tmp_path: Path) -> None:
    good, spoilt = FIXTURES / "vllm_requests_k3.json", tmp_path / "b.json"
    records = json.loads(good.read_text())
    records[1]["num_spec_tokens"] = 0
    spoilt.write_text(json.dumps(records))
    with pytest.raises(InputError, match=f"^{re.escape(str(spoilt))}, record 2: "):
        read_format("vllm-requests", [good, spoilt])


def test_requests_of_several_samples_and_positions_of_rounds(tmp_path: Path) -> None:
    """Where output tokens are told, rounds have positions; where they contradict the rounds, they have none."""
    records = json.loads((FIXTURES / "vllm_requests_k3.json").read_text())
    path = tmp_path / "a.jsonl"

    def written(tokens: int) -> ImportedRecords:
        responses: list[dict[str, object]] = [{"metrics": {"speculative_decoding": None}}]
        for record in records:
            responses.append({"usage": {"completion_tokens": tokens}, "metrics": {"speculative_decoding": record}})
        path.write_text("".join(json.dumps(response) + "\n" for response in responses))
        return read_format("vllm-requests", [path])

    imported = written(96)
    assert [*imported.skipped.values()] == [1] and imported.output_tokens == (96,) * 12
    t = rounds_of(imported).t
    assert t[:3].tolist() == [1, 5, 8]
    assert rounds_of(written(120)).t is None


def test_rates_become_the_only_counts_that_fit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        rounds = int(rng.integers(50, 900))
        counts = np.sort(rng.integers(0, rounds + 1, size=4))[::-1]
        rates = [Printed.of(f"{times / rounds:.3f}") for times in counts]
        fitting = counts_of_rates(rates, rounds, int(counts.sum()))
        assert fitting.accepted.tolist() == counts.tolist() and fitting.off_by == 0
        drafted, length = 4 * rounds, Printed.of(f"{1 + counts.sum() / rounds:.2f}")
        part = part_of(length, rates, drafted, int(counts.sum()))
        assert part.rounds == rounds and part.counted.accepted.tolist() == counts.tolist()


def test_of_more_rounds_counts_are_within_what_is_said() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        rounds = int(rng.integers(10_000, 10_000_000))
        counts = np.sort(rng.integers(0, rounds + 1, size=4))[::-1]
        fitting = counts_of_rates([Printed.of(f"{times / rounds:.3f}") for times in counts], rounds, int(counts.sum()))
        assert abs(fitting.accepted - counts).max() <= fitting.off_by
        assert fitting.accepted.sum() == counts.sum() and (np.diff(fitting.accepted) <= 0).all()


def test_rates_that_fit_no_counts() -> None:
    half = [Printed.of("0.500"), Printed.of("0.250")]
    assert counts_of_rates(half, 100, 75) is not None
    assert counts_of_rates(half, 100, 76) is None
    assert counts_of_rates([Printed.of("0.250"), Printed.of("0.500")], 100, 75) is None
    assert counts_of_rates([Printed.of("0.505")], 10, 5) is None
    assert part_of(Printed.of("3.00"), half, 200, 75) is None
    assert part_of(Printed.of("1.00"), [Printed.of("0.000")] * 2, 0, 0) is None  # nothing drafted, hence no round


def test_two_positions_of_drafts_of_any_length_are_exact() -> None:
    counted, notes = counters(100, 130, [60, 20], "import rounds")
    assert (counted.drafted.tolist(), counted.accepted.tolist(), notes) == ([100, 30], [60, 20], [])
    three, notes = counters(100, 230, [60, 20, 10], "import rounds")
    assert (three.drafted.tolist(), three.drafted_tokens) == ([100] * 3, 230) and "import rounds" in notes[0]
    with pytest.raises(InputError, match="grow with the position"):
        counters(100, 300, [10, 20, 20], "")


def test_from_a_log_to_a_model(tmp_path: Path) -> None:
    out, model = tmp_path / "rounds.parquet", tmp_path / "model.json"
    text = call("specsim", "import", "llamacpp-log", FIXTURES / "llamacpp_log_k3.txt", "--out", out).out
    assert (
        f"specsim acceptance fit {out}" in text and "mean len" in text and "2.387" in text and "2.395" in text
    )  # 1,152 / 481
    assert len(read_rounds(out).drafted) == 475 and read_rounds(out).t is not None
    fitted = json_of(call("specsim", "acceptance", "fit", out, "--model", "per_position", "--out", model, "--json"))
    assert fitted["parameters"]["alpha"] == pytest.approx([308 / 475, 207 / 308, 144 / 203])
    counted = tmp_path / "counters.json"
    summary = json_of(
        call("specsim", "import", "prometheus", FIXTURES / "llamacpp_metrics_k3.prom", "--out", counted, "--json")
    )
    assert summary["engine"] == "llamacpp" and summary["rounds"] == 475 and summary["holds"] == "counters"
    document = json.loads(counted.read_text())
    assert (
        document["first_token"] == "prefill" and document["last_draft"] == "min(K, remaining - 1)" and document["notes"]
    )
    assert isinstance(read_source(counted), Counters) and read_counters(counted).accepted.tolist() == [308, 207, 144]
    import pyarrow.parquet as pq

    origin = json.loads(pq.read_schema(out).metadata[b"specsim.import"])
    assert origin["engine"] == "llamacpp" and "1 + accepted tokens" in origin["definition"]


def test_a_name_that_other_commands_would_not_read_is_refused(tmp_path: Path) -> None:
    log, scrape = FIXTURES / "llamacpp_log_k3.txt", FIXTURES / "llamacpp_metrics_k3.prom"
    assert_refused(call("specsim", "import", "llamacpp-log", log, "--out", tmp_path / "a.json"), ".parquet")
    assert_refused(call("specsim", "import", "prometheus", scrape, "--out", tmp_path / "a.parquet"), ".json")
    assert_refused(call("specsim", "import", "prometheus", scrape, "--out", tmp_path / "a.jsonl"), "requests")
    assert_refused(call("specsim", "import", "prometheus", tmp_path / "none"), "none does not exist")
    assert_refused(call("specsim", "import", "tgi", scrape), "unknown input format 'tgi'; Formats: llamacpp-log")
    (tmp_path / "a.json").write_text("{}")
    assert_refused(call("specsim", "import", "prometheus", scrape, "--out", tmp_path / "a.json"), "--overwrite")
