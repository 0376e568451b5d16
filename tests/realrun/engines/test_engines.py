"""Engines as the commands see them: what is missing, refused and read, and costs; slow: really run on the lab."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import realrun.engines.engine
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.engines.check import check, check_recording, recording, settings_of
from realrun.engines.dense import record_with_engine
from realrun.engines.engine import PROCESSES, Engine, EngineRun, Job, Setting, Turn
from realrun.engines.gguf_file import ids_of, paired, write_gguf
from realrun.engines.hugging_face import HuggingFaceEngine
from realrun.engines.llamacpp import LlamaCppEngine, draft_seconds, rows_of
from realrun.engines.registry import find_engine
from realrun.engines.validate import EngineCosts, Rounds, Timed, fit_costs, plan_of, turns_of, typical, validate
from realrun.engines.validate import compared as predicted_beside
from realrun.engines.validate import replayed_rounds as rounds_by_k
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.engines.as_engine import as_engine
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.trace.trace import Trace
from tests.realrun.engines.test_compare import LIMIT, made_trace
from tests.specsim.engines.test_as_engine import replayed_rounds
from tests.support.commands import assert_refused, call
from tests.support.small_targets import quiet
from tests.support.tiny import tiny_model, tiny_pair, tiny_prompts

TOKENS = 24
STATISTICS = (
    "0.00.994.797 I spec common_specu: statistics     draft-simple: #calls(b,g,a) =    1     47     47, #gen drafts = "
    "    47, #acc drafts =    19, #gen tokens =    138, #acc tokens =    47, #mean acc len = 2.00, #acc rate/pos = "
    "(0.404, 0.340, 0.255), dur(b,g,a) = 0.008, {ms}, 0.031 ms"
)


def have(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) for name in modules)


needs_llamacpp = pytest.mark.skipif(
    not have(*LlamaCppEngine.modules), reason="llama.cpp is not installed: pip install -c constraints.txt '.[engines]'"
)


class Played(Engine):
    """An engine that does as a replay says, but for what it is told to do wrong."""

    name = "llamacpp"
    takes_p_min = True

    def __init__(self, trace: Trace, *, wrong: int = 0, seconds: Sequence[float] = (0.01, 0.002)):
        self.trace, self.wrong, self.seconds = trace, wrong, seconds
        self.converted: list[Path] = []

    def version(self) -> str:
        return "1"

    def convert(self, pair: Pair, folder: Path) -> None:
        self.converted.append(folder)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        rounds = replayed_rounds(self.trace, self.policy(setting), job.max_new_tokens, self.conventions)
        counted = [[(drafted, accepted) for _, drafted, accepted in sequence] for sequence in rounds]
        for place in range(self.wrong):
            counted[place].pop()
        outputs = np.split(self.trace.token, self.trace.offsets[1:-1])
        return EngineRun([output[: job.max_new_tokens].tolist() for output in outputs], counted)

    def run_timed(
        self, job: Job, arms: Sequence[Setting], turns: Sequence[tuple[int, int]], done: Callable[[int], None]
    ) -> list[Turn]:
        run = as_engine(self.trace, self.conventions, max_output_tokens=job.max_new_tokens).trace
        results = []
        for arm, prompt in turns:
            rounds, passes = int(run.output_tokens[prompt]), 0
            if arms[arm].k:
                played = replayed_rounds(self.trace, FixedK(arms[arm].k), job.max_new_tokens, self.conventions)[prompt]
                rounds -= sum(accepted for _, _, accepted in played)
                passes = sum(drafted for _, drafted, _ in played)
            draft_s = passes * self.seconds[1]
            results.append(Turn(rounds, rounds * self.seconds[0] + draft_s, draft_s))
            done(len(results))
        return results


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(tiny_pair(), tiny_prompts(4, seed=3), RecordSettings(5, TOKENS, Sampler("greedy")))


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_check_tells_rounds_that_differ(trace: Trace, wrong: int) -> None:
    engine = Played(trace, wrong=wrong)
    document = check(tiny_pair(), trace, engine, settings_of(engine, [2, 5], []), TOKENS).as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["identical"] == (wrong == 0)
    assert [row["sequences_identical"] for row in document["settings"]] == [4 - wrong] * 2
    assert [len(row["differences"]) for row in document["settings"]] == [wrong] * 2
    assert not engine.converted[0].exists()


def test_a_shorter_limit_than_the_recordings(trace: Trace) -> None:
    engine = Played(trace)
    document = check(tiny_pair(), trace, engine, [Setting(3)], 9).as_dict()
    assert document["identical"] and document["settings"][0]["rounds"] < 4 * 9


def test_a_validation_of_an_engine_whose_costs_are_plain_predicts_it(trace: Trace) -> None:
    reports = list[tuple[str, int, int]]()
    plan = plan_of([1, 4], [2, 3], [])
    document = validate(
        tiny_pair(), trace, Played(trace), plan, TOKENS, repeats=3, progress=lambda *step: reports.append(step)
    ).as_dict()
    turns = 6 + 3 * 4 * 6  # a warm-up and three repeats of four prompts in six settings
    assert reports == [("run", number, turns) for number in range(turns + 1)]
    assert json.loads(json.dumps(document)) == document
    assert document["max_abs_error_percent"] == pytest.approx(0, abs=1e-6)
    assert document["costs"]["pass_s"] == pytest.approx(0.002)
    assert [*document["costs"]["round_s"].values()] == pytest.approx([0.01] * 3)
    assert document["noise_floor_percent"] == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_asked_is_refused(trace: Trace) -> None:
    engine = LlamaCppEngine()
    for ks, p_mins, says in (([0], [], "--k of 0"), ([17], [], "to 16"), ([3], [1.0], "--p-min of 1.0")):
        with pytest.raises(InputError, match=says):
            settings_of(engine, ks, p_mins)
    with pytest.raises(InputError, match="transformers has no rule for --p-min"):
        settings_of(HuggingFaceEngine(), [3], [0.5])
    with pytest.raises(InputError, match="llamacpp is run one sequence at a time; choose vllm, or leave --batch out"):
        settings_of(engine, [3], [], 2)
    with pytest.raises(InputError, match="transformers does not say how long its drafts take"):
        HuggingFaceEngine().run_timed(Job(Path(), [], 1, []), [], [], print)
    with pytest.raises(InputError, match="drafts of 5 tokens and outputs of 24, fewer than 6 and 24"):
        check_recording(trace, tiny_pair(), engine, 6, TOKENS, "trace")
    assert [prompt.tokens for prompt in check_recording(trace, tiny_pair(), engine, 5, 20, "trace")] == [
        prompt.tokens for prompt in tiny_prompts(4, seed=3)
    ]
    drawn = record(tiny_pair(), tiny_prompts(1), RecordSettings(2, 4, Sampler("gumbel", 0.8)))
    with pytest.raises(InputError, match="was not recorded greedily"):
        check_recording(drawn, tiny_pair(), engine, 2, 4, "trace")


def test_what_llamacpp_does_not_record_is_refused(tmp_path: Path) -> None:
    engine, settings = LlamaCppEngine(), RecordSettings(2, 4, Sampler("gumbel", 0.8))
    with pytest.raises(InputError, match="llama.cpp is recorded greedily; give --mode greedy"):
        record_with_engine(tiny_pair(), tiny_prompts(1), settings, engine)
    settings = RecordSettings(2, 4, Sampler("greedy"))
    with pytest.raises(InputError, match="llamacpp is run one sequence at a time; choose vllm, or leave --batch out"):
        record_with_engine(tiny_pair(), tiny_prompts(1), settings, engine, batch=2)
    lookups = replace(tiny_pair(), drafter=LookupKind())
    with pytest.raises(InputError, match="llama.cpp is run with draft models, and .* is of kind lookup"):
        record_with_engine(lookups, tiny_prompts(1), settings, engine)


def test_rows_of_llamacpps_drafts() -> None:
    drafts = [[[(5, 0.5, 1.0, 0.6), (6, 0.25, 2.0, 0.3)]] * 2, [[(7, 0.75, 0.5, 0.8), (8, 0.5, 0.5, 0.9)]]]
    rows = rows_of([[1, 2, 3], [4]], drafts, 2)
    assert rows[["request", "position", "token"]].tolist() == [(0, 1, 1), (0, 2, 2), (1, 1, 4)]
    assert rows["draft"].tolist() == [[5, 6], [5, 6], [7, 8]]
    assert rows["prob"][1].tolist() == [0.5, 0.25] and rows["entropy_nats"][2, 0] == 0.5
    assert rows["top10_confidence"][0].tolist() == pytest.approx([0.6, 0.3])


@pytest.mark.slow
@needs_llamacpp
def test_llamacpp_records_what_realrun_records(prompts: list[Prompt], lab_pair32: Pair) -> None:
    """Its float32 sums are others than torch's, so that probabilities differ by some 1e-5."""
    settings = RecordSettings(8, 48, Sampler("greedy"))
    made, expected = (
        record_with_engine(lab_pair32, prompts[:6], settings, LlamaCppEngine()),
        record(lab_pair32, prompts[:6], settings),
    )
    later = made.position > 0
    assert (made.token == expected.token).all() and made.offsets.tolist() == expected.offsets.tolist()
    assert (made.draft_token[later] == expected.draft_token[later]).all() and made.match_len.max() > 3
    assert np.isin(made.draft_token[later][:, :-1], lab_pair32.eos_token_ids).any()  # and drafts go on behind it
    for name in ("prob", "entropy_nats", "top10_confidence"):
        gap = np.abs(getattr(made, name) - getattr(expected, name))[later].max()
        print(name, f"largest difference {gap:.2e} of {later.sum()} positions")
        assert gap < 1e-4
    for k in (2, 3, 5):
        rounds = [replayed_rounds(each, FixedK(k), 40, LlamaCppEngine().conventions) for each in (made, expected)]
        assert rounds[0] == rounds[1]


class Missing(LlamaCppEngine):
    modules = ("xllamacpp_of_no_one", "json")


def test_what_is_not_installed_is_named_with_what_to_type() -> None:
    with pytest.raises(InputError) as caught:
        Missing().check_installed()
    assert str(caught.value) == (
        "llamacpp needs xllamacpp_of_no_one, not installed here: pip install -c constraints.txt '.[engines]'"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("check --engine tgi", "engine 'tgi' is not run here; choose one of llamacpp"),
        ("check --engine transformers --k 0,2", "--k of 0, 2; give numbers from 1 to 16"),
        ("check --engine transformers --k two", "--k 'two' is not a list of whole numbers"),
        ("check --engine transformers --trace somewhere --num-prompts 3", "--trace already decides --num-prompts"),
        (
            "check --engine transformers --batch 2",
            "transformers is run one sequence at a time; choose vllm, or leave --batch out",
        ),
        ("check --engine transformers --batch 2 --schedule 1:3 --k 3", "--schedule already decides --k"),
        ("check --engine transformers --batch 2 --schedule 1:x", "schedule '1:x' is not a list of BATCH:K"),
        ("validate --engine tgi", "engine 'tgi' is not run here"),
    ],
)
def test_commands_refuse_in_one_line(options: str, says: str) -> None:
    assert_refused(call("realrun", "engine", *options.split()), says)


class Nowhere(Engine):
    name = "nowhere"


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run_nowhere ended with 1: .*No module named 'run_nowhere'") as caught:
        Nowhere().process({}, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_process_says_how_many_turns_it_has_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "def run(job):\n    print('done 1'); print('loaded, done'); print('done 2')\n    return job"
    (tmp_path / "run_nowhere.py").write_text(script)
    shutil.copy(PROCESSES / "run.py", tmp_path)
    monkeypatch.setattr(realrun.engines.engine, "PROCESSES", tmp_path)
    reports = list[int]()
    assert Nowhere().process({"k": 3}, tmp_path, done=reports.append) == {"k": 3}
    assert reports == [1, 2]


def test_seconds_of_drafts_are_those_since_the_last_request_of_the_same_server() -> None:
    lines = ["noise", *(STATISTICS.format(ms=ms) for ms in ("100.0", "40.5", "250.0", "41.0")), "dur(b,g,a)"]
    turns = [(1, True), (0, False), (2, True), (1, True), (2, True), (0, False)]
    assert draft_seconds(lines, turns) == pytest.approx([0.1, 0, 0.0405, 0.15, 0.0005, 0])
    with pytest.raises(InputError, match="statistics of 4 requests of 3"):
        draft_seconds(lines, turns[1:])


def test_token_ids_are_read_from_a_text() -> None:
    assert ids_of("t12t0t2047") == [12, 0, 2047] and ids_of("") == []


def test_rows_that_are_rotated_together_become_neighbours() -> None:
    """Of two heads of size 6: row i and row i + 3 of a head, as Hugging Face has them, side by side."""
    rows = np.arange(12.0)[:, None]
    assert paired(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.slow
@needs_llamacpp
def test_models_that_gguf_is_not_written_for_are_refused(tmp_path: Path) -> None:
    model = tiny_model(1, seed=0)
    with pytest.raises(InputError, match="4 end-of-text tokens; GGUF has room for 3"):
        write_gguf(model, [0, 1, 2, 3], tmp_path / "a.gguf")
    model.config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4}
    with pytest.raises(InputError, match="of type llama, rope llama3, is not written"):
        write_gguf(model, [0], tmp_path / "a.gguf")


@pytest.mark.slow
@needs_llamacpp
@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_holds_the_model(tmp_path: Path) -> None:
    """As transformers, whose reader is another's work, finds it."""
    model = tiny_model(2, seed=5, dtype=torch.float32)
    write_gguf(model, [0], tmp_path / "model.gguf")
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    ids = torch.arange(40)[None] % 97
    with torch.inference_mode():
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-5)
    assert read.config.eos_token_id == 0


@pytest.mark.slow
@needs_llamacpp
def test_llamacpp_does_what_the_replay_says(prompts: list[Prompt], lab_pair32: Pair) -> None:
    trace = record(lab_pair32, prompts[:4], RecordSettings(8, 48, Sampler("greedy")))
    engine = LlamaCppEngine()
    document = check(lab_pair32, trace, engine, settings_of(engine, [1, 3, 8], [0.3, 0.75]), 40).as_dict()
    assert document["identical"], document
    rows = document["settings"]
    assert all(row["rounds_identical"] == row["rounds"] for row in rows if not row["near_ties"])
    assert all(row["counters_equal"] for row in rows) and sum(row["rounds"] for row in rows) > 200


@pytest.mark.slow
@needs_llamacpp
def test_llamacpp_says_what_its_rounds_take(prompts: list[Prompt], lab_pair32: Pair) -> None:
    trace = record(lab_pair32, prompts[:2], RecordSettings(4, 24, Sampler("greedy")))
    document = validate(lab_pair32, trace, LlamaCppEngine(), plan_of([1, 4], [3], [0.5]), 24, repeats=3).as_dict()
    assert [row["setting"] for row in document["rows"]] == [
        "no speculation", "K = 1", "K = 4", "K = 3", "K = 4, p_min = 0.5"
    ]  # fmt: skip
    assert all(row["measured_tokens_per_second"] > 0 for row in document["rows"])
    assert document["costs"]["round_s"]["0"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers", "openvino", "onnxruntime", "mlx"])
@pytest.mark.parametrize("lookup", [False, True], ids=["draft model", "prompt lookup"])
def test_an_engine_does_what_the_replay_says(prompts: list[Prompt], lab_pair32: Pair, name: str, lookup: bool) -> None:
    try:
        engine = find_engine(name)
    except InputError as error:
        pytest.skip(str(error))
    if lookup and engine.lookup_rule is None:
        pytest.skip("it has no prompt lookup")
    trace = recording(lab_pair32, prompts[:4], engine, 5, 40, quiet)
    document = check(lab_pair32, trace, engine, settings_of(engine, [2, 5], []), 40, lookup=lookup).as_dict()
    assert document["identical"], document
    assert all(row["rounds_identical"] == row["rounds"] > 20 for row in document["settings"])


# Costs of rounds from an engine's own seconds, and tokens per second predicted from them.


TRUE = EngineCosts(draft_s=0.002, pass_s=0.001, verified=(0, 2, 4, 8), round_s=(0.010, 0.012, 0.013, 0.019))


def rounds_of(k: int) -> Rounds:
    """Fifty rounds of K tokens, the last few of which are shorter, as at the end of a text."""
    verified = np.minimum(k, np.maximum(0, 49 - np.arange(50)))
    return Rounds(verified.copy(), verified) if k else Rounds(np.zeros(50, np.int64), np.zeros(50, np.int64))


def timed(rounds: Rounds) -> Timed:
    draft_s = TRUE.draft_s * np.count_nonzero(rounds.passes) + TRUE.pass_s * rounds.passes.sum()
    return Timed(rounds, TRUE.seconds(rounds), float(draft_s))


def test_costs_come_back_from_seconds() -> None:
    fitted = fit_costs([timed(rounds_of(k)) for k in (0, 2, 4, 8)], [2, 4, 8])
    assert fitted.verified == TRUE.verified
    assert [fitted.draft_s, fitted.pass_s, *fitted.round_s] == pytest.approx([TRUE.draft_s, TRUE.pass_s, *TRUE.round_s])


def test_rounds_without_drafts_alone_are_priced_by_their_own_seconds() -> None:
    """A single number of verified tokens is known: every round takes as long as it says."""
    rounds = [timed(rounds_of(0)) for _ in range(3)]
    fitted = fit_costs(rounds, [])
    assert fitted.verified == (0,) and fitted.seconds(rounds[0].rounds) == pytest.approx(rounds[0].whole_s)


def test_a_round_between_and_beyond_lies_on_the_line() -> None:
    def alone(passes: int, verified: int) -> float:
        return TRUE.seconds(Rounds(np.array([passes]), np.array([verified])))

    assert alone(0, 0) == pytest.approx(0.010)  # nothing is drafted, so no draft begins
    assert alone(1, 0) == pytest.approx(0.010 + 0.003)  # a token that was dropped
    assert alone(1, 1) == pytest.approx(0.011 + 0.003)
    assert alone(6, 6) == pytest.approx(0.016 + 0.008)
    assert alone(10, 10) == pytest.approx(0.022 + 0.012)


def test_predicted_beside_measured() -> None:
    """On a machine without noise that is as the costs say, all is predicted but for a setting made slower."""
    plan = plan_of([1, 4], [2, 3], [0.5])
    assert [str(arm) for arm in plan.arms] == [
        "no speculation", "K = 1", "K = 4", "K = 2", "K = 3", "K = 4, p_min = 0.5", "no speculation"
    ]  # fmt: skip
    trace, engine = made_trace(), LlamaCppEngine()
    rounds = [rounds_by_k(trace, engine, arm, LIMIT) for arm in plan.arms]
    slower = {plan.arms.index(Setting(2)): 1.25}
    by_arm = [
        [Turn(LIMIT, TRUE.seconds(sequence) * slower.get(arm, 1.0), 0.0) for sequence in sequences]
        for arm, sequences in enumerate(rounds)
    ]
    document = predicted_beside(plan, by_arm, rounds, TRUE).as_dict()
    assert document["noise_floor_percent"] == pytest.approx(0, abs=1e-9)
    errors = {row["setting"]: row["error_percent"] for row in document["rows"]}
    assert errors.pop("K = 2") == pytest.approx(25)
    assert [*errors.values()] == pytest.approx([0.0] * 5)
    assert [row["profiled"] for row in document["rows"]] == [True] * 3 + [False] * 3
    assert document["median_abs_error_percent"] == pytest.approx(0) and document[
        "max_abs_error_percent"
    ] == pytest.approx(25)
    assert document["rows"][0]["measured_tokens_per_second"] == pytest.approx((LIMIT / (LIMIT - 1)) / 0.010)
    settings = {row["setting"]: row["measured_speedup"]["estimate"] for row in document["rows"] if not row["profiled"]}
    choice = document["choice"]
    assert choice["measured"] == max(settings, key=lambda name: settings[name])
    lead = settings[choice["measured"]] - settings[choice["forecast"]]
    assert choice["regret"]["estimate"] == pytest.approx(lead)


def test_rounds_of_a_replay_are_those_of_the_engine() -> None:
    trace, engine = made_trace(), LlamaCppEngine()
    plain = rounds_by_k(trace, engine, Setting(0), LIMIT)
    assert [len(sequence.passes) for sequence in plain] == [LIMIT - 1] * 3 and not any(
        sequence.passes.any() for sequence in plain
    )
    dropping = rounds_by_k(trace, engine, Setting(4, 0.5), LIMIT)
    dropped = np.concatenate([sequence.passes - sequence.verified for sequence in dropping])
    assert {*dropped.tolist()} == {0, 1}


def test_all_settings_take_turns_on_every_prompt() -> None:
    turns = turns_of(4, 3, 3, seed=1)
    assert turns[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    blocks = [turns[at : at + 4] for at in range(4, len(turns), 4)]
    assert [{prompt for _, prompt in block} for block in blocks] == [{0}, {1}, {2}] * 3
    assert all({arm for arm, _ in block} == {0, 1, 2, 3} for block in blocks)
    assert len({tuple(arm for arm, _ in block) for block in blocks}) > 1
    results = [Turn(9, float(i), 0.0) for i in range(len(turns))]
    chosen = typical(turns, results, 4, 3)
    assert chosen[2][1].whole_s == float(4 + 4 * 4 + blocks[4].index((2, 1)))  # the middle one; warm-up does not count


@pytest.mark.parametrize(
    ("profiled", "ks", "p_mins", "says"),
    [
        ([3], [2], [], "--profile-k of 3; give two"),
        ([1, 3], [3], [], "K = 3 is both profiled and predicted"),
        ([1, 3], [], [], "nothing to predict"),
        ([0, 3], [2], [], "from 1 on"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(profiled: list[int], ks: list[int], p_mins: list[float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan_of(profiled, ks, p_mins)
