"""vLLM: what it is asked, what of its answers is read; slow: really run on the lab, by `nox -s engines`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from realrun.decode.sampling import Sampler
from realrun.engines.check import as_lookups, check, check_recording, recording, scheduled, settings_of
from realrun.engines.engine import Job, Setting, Sums
from realrun.engines.hugging_face import HuggingFaceEngine
from realrun.engines.vllm import VllmEngine, job_document, read_rounds, read_sums
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.engines.as_engine import output_lengths
from specsim.engines.conventions import CONVENTIONS
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.draft_length import ScheduledK
from specsim.trace.trace import Trace
from tests.specsim.engines.test_as_engine import replayed_rounds
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.tiny import tiny_pair, tiny_prompts

TOKENS, DEPTH = 20, 4
SAMPLERS = Path(__file__).parents[2] / "support" / "vllm_sampler.py"
EOS = 92  # a token of half of the tiny target's outputs, of one within an accepted draft
REQUESTS = Path(__file__).parents[2] / "specsim" / "engines" / "fixtures" / "vllm_requests_k3.json"
NAMES = "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"


def metrics_of(rounds: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """As vLLM 0.32 gives them with a request's output."""
    drafted, accepted = ([round_[column] for round_ in rounds] for column in (0, 1))
    counts = {"num_spec_steps": len(rounds), "num_draft_tokens": sum(drafted)}
    listed = {"per_step_drafted": drafted, "per_step_accepted": accepted} if rounds else {}
    return {**counts, "num_accepted_draft_tokens": sum(accepted), **listed}


def answer_of(outputs: Sequence[Sequence[int]], rounds: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
    every = [round_ for sequence in rounds for round_ in sequence]
    by_position = [sum(accepted >= depth for _, accepted in every) for depth in range(1, DEPTH + 1)]
    values = len(every), sum(drafted for drafted, _ in every), sum(by_position), by_position
    return {
        "outputs": [[*output] for output in outputs],
        "metrics": [metrics_of(sequence) for sequence in rounds],
        "counters": {f"vllm:spec_decode_{name}": value for name, value in zip(NAMES, values, strict=True)},
    }


@pytest.fixture(scope="module")
def trace() -> Trace:
    """As `realrun engine check` records for vLLM, behind the ends of some texts, too."""
    return recording(tiny_pair((EOS,)), tiny_prompts(6), VllmEngine(), DEPTH, TOKENS, lambda what, done, total: None)


def outputs_of(trace: Trace) -> list[list[int]]:
    """As vLLM gives them, with their ends of text."""
    lengths = output_lengths(trace, TOKENS).tolist()
    return [trace.token[begin : begin + n].tolist() for begin, n in zip(trace.offsets.tolist(), lengths, strict=False)]


def vllm_rounds(trace: Trace, k: int) -> list[list[tuple[int, int]]]:
    rounds = replayed_rounds(trace, FixedK(k), TOKENS, CONVENTIONS["vllm"])
    return [[(drafted, accepted) for _, drafted, accepted in sequence] for sequence in rounds]


@torch.inference_mode()
def greedy(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """What a model goes on with, by plain passes."""
    text = [*tokens]
    for _ in range(count):
        text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(tokens) :]


def test_a_recording_tells_what_is_accepted_behind_an_end_of_text(trace: Trace) -> None:
    """Every round by plain passes of both models, which know no end."""
    pair, k = tiny_pair((EOS,)), 3
    (draft,) = pair.drafter.weights(pair.target)
    ended = [s for s, output in enumerate(outputs_of(trace)) if output[-1] == EOS and len(output) < TOKENS]
    replayed = replayed_rounds(trace, FixedK(k), TOKENS, CONVENTIONS["vllm"])
    behind = 0
    assert len(ended) == 3
    for sequence in ended:
        prompt, length = tiny_prompts(6)[sequence].tokens, len(outputs_of(trace)[sequence])
        text = [*prompt, *greedy(pair.target, prompt, length + k)]
        t, rounds = 1, []
        while t < length:
            here = len(prompt) + t
            drafted = greedy(draft, text[:here], k)
            accepted = next((i for i in range(k) if drafted[i] != text[here + i]), k)
            rounds.append((t, k, accepted))
            t += accepted + 1
        behind += t > length
        assert replayed[sequence] == rounds
    assert behind > 0


@pytest.mark.parametrize("wrong", [False, True])
def test_a_check_reads_vllms_answers(trace: Trace, interpreter: Path, wrong: bool) -> None:
    rounds = vllm_rounds(trace, 3)
    if wrong:
        drafted, accepted = rounds[2][-1]  # the one that may reach behind the end
        rounds[2][-1] = drafted, (accepted + 1) % 4
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), rounds)))
    document = check(tiny_pair((EOS,)), trace, VllmEngine(), [Setting(3)], TOKENS).as_dict()
    assert json.loads(json.dumps(document)) == document
    (row,) = document["settings"]
    assert document["identical"] != wrong and row["counters_equal"] != wrong
    assert row["rounds"] == sum(map(len, rounds)) > 30 and row["rounds_identical"] == row["rounds"] - wrong
    assert document["version"] == "0.32.0" and document["lookup_rule"] is None
    job = json.loads((interpreter / "asked.json").read_text())
    assert job["prompts"] == [prompt.tokens for prompt in tiny_prompts(6)] and job["eos_token_ids"] == [EOS]
    assert job["speculation"] == {
        "num_speculative_tokens": 3, "method": "draft_model", "model": f"{job['folder']}/draft"
    }  # fmt: skip
    assert job["context"] == max(map(len, job["prompts"])) + TOKENS + 2 * 3  # as much as recordings have room for


def test_a_check_of_lookups(trace: Trace, interpreter: Path) -> None:
    engine = VllmEngine()
    played = as_lookups(trace, engine.lookup_rule, DEPTH, past_end=True)
    rounds = vllm_rounds(played, DEPTH)
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), rounds)))
    document = check(tiny_pair((EOS,)), trace, engine, [Setting(DEPTH)], TOKENS, lookup=True).as_dict()
    assert document["identical"] and document["settings"][0]["rounds"] == sum(map(len, rounds)) > 5
    assert document["lookup_rule"] == {"min_ngram": 2, "max_ngram": 3, "occurrence": "first", "at_end": "stop"}
    assert json.loads((interpreter / "asked.json").read_text())["speculation"] == {
        "num_speculative_tokens": DEPTH, "method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3
    }  # fmt: skip


def test_a_check_that_met_no_draft_says_so(trace: Trace, interpreter: Path) -> None:
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), [[] for _ in range(6)])))
    setting = Setting(3, batch=6, schedule=ScheduledK({1: 0}))  # as where texts end together and K is 0 until then
    document = check(tiny_pair((EOS,)), trace, VllmEngine(), [setting], TOKENS).as_dict()
    row = document["settings"][0]
    assert row["sequences_identical"] == 6 and row["rounds"] == 0 and not document["identical"]


def test_a_check_of_batches(trace: Trace, interpreter: Path) -> None:
    """All at once, so that each round is as the load of the first steps is: of a K that all have."""
    setting = scheduled(VllmEngine(), {1: 3}, 6)
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), vllm_rounds(trace, 3))))
    document = check(tiny_pair((EOS,)), trace, VllmEngine(), [setting], TOKENS).as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["identical"] and document["settings"][0]["rounds_identical"] > 30
    assert document["settings"][0]["setting"] == "K by batch 1:3, 6 at once"
    job = json.loads((interpreter / "asked.json").read_text())
    assert job["batch"] == 6 and job["speculation"]["num_speculative_tokens_per_batch_size"] == [[1, 6, 3]]


def test_a_schedule_is_asked_by_ranges() -> None:
    setting = scheduled(VllmEngine(), {4: 0, 1: 5, 3: 3}, 8)
    assert setting == Setting(5, batch=8, schedule=ScheduledK({1: 5, 3: 3, 4: 0}))
    speculation = job_document(Job(Path("here"), [[1, 2]], 10, []), setting, VllmEngine.lookup_rule)["speculation"]
    assert speculation["num_speculative_tokens"] == 5
    assert speculation["num_speculative_tokens_per_batch_size"] == [[1, 2, 5], [3, 3, 3], [4, 8, 0]]


def test_rounds_are_those_of_detailed_metrics() -> None:
    """As a server gave them."""
    requests = json.loads(REQUESTS.read_text())
    metrics = [request.get("spec_decode_metrics", request) for request in requests]
    rounds = [read_rounds(metric, number) for number, metric in enumerate(metrics)]
    assert sum(map(len, rounds)) == sum(metric["num_spec_steps"] for metric in metrics) > 20
    assert read_rounds(None, 1) == [] and read_rounds(metrics_of([]), 1) == []
    without = {name: value for name, value in metrics[0].items() if not name.startswith("per_step")}
    refusal(lambda: read_rounds(without, 7), "request 7: vLLM lists no rounds; take a version with per-request metrics")
    refusal(lambda: read_rounds(metrics[0] | {"num_draft_tokens": 1}, 7), "request 7: vLLM counts")


def test_counters_before_the_first_draft_are_zero() -> None:
    assert read_sums({}) == Sums(0, 0, 0, [])
    counters = answer_of([], [[(3, 3), (3, 1)], [(2, 0)]])["counters"]
    assert read_sums(counters) == Sums(3, 8, 4, [2, 1, 1, 0])


def test_what_cannot_be_asked_is_refused(trace: Trace) -> None:
    engine = VllmEngine()
    refusal(lambda: settings_of(engine, [3], [0.5]), "vllm has no rule for --p-min")
    for lengths, batch, says in (
        ({1: 3}, 1, "--schedule is of batches; give --batch"),
        ({1: 0, 2: 0}, 4, "--schedule drafts up to 0 tokens; give 1 to 16"),
        ({2: 3}, 4, "give a draft length of 0 or more from batch 1 on"),
    ):
        with pytest.raises(InputError, match=says):
            scheduled(engine, lengths, batch)
    with pytest.raises(
        InputError, match="transformers is run one sequence at a time; choose vllm, or leave --batch out"
    ):
        scheduled(HuggingFaceEngine(), {1: 3}, 4)
    pair = tiny_pair((EOS,))
    assert len(check_recording(trace, pair, engine, DEPTH, TOKENS, "trace")) == 6
    short = record(pair, tiny_prompts(6), RecordSettings(DEPTH, TOKENS + DEPTH, Sampler("greedy")))
    with pytest.raises(InputError, match=r"trace: vllm also accepts drafts past .* and \d of 6 sequences are rec"):
        check_recording(short, pair, engine, DEPTH, TOKENS, "trace")
    assert len(check_recording(short, pair, HuggingFaceEngine(), DEPTH, TOKENS, "trace")) == 6


def test_an_environment_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECSIM_VLLM_PYTHON", sys.executable)
    assert_refused(
        call("realrun", "engine", "check", "--engine", "vllm"),
        f"{sys.executable} is not a Python with vLLM; make one with `nox -s vllm`, or name another in "
        "SPECSIM_VLLM_PYTHON",
    )
    monkeypatch.delenv("SPECSIM_VLLM_PYTHON")
    monkeypatch.chdir(tmp_path)
    program = tmp_path / ".nox" / "vllm" / "bin" / "python"  # somebody else's, in a folder that was only entered
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\ntouch ran\necho 0.32\n")
    program.chmod(0o755)
    with contextlib.suppress(InputError):  # where the source tree has none
        VllmEngine().check_installed()
    assert not (tmp_path / "ran").exists()


def recorded(pair: Pair, prompts: Sequence[Prompt], engine: VllmEngine) -> Trace:
    return recording(pair, prompts, engine, 5, 40, lambda what, done, total: None)


@pytest.mark.slow
@pytest.mark.parametrize("lookup", [False, True], ids=["draft model", "prompt lookup"])
def test_vllm_does_what_the_replay_says(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, lookup: bool
) -> None:
    """One text of these ends before the limit, within a draft."""
    trace = recorded(lab_pair32, prompts[:4], vllm)
    assert output_lengths(trace, 40).min() < 40
    document = check(lab_pair32, trace, vllm, settings_of(vllm, [5], []), 40, lookup=lookup).as_dict()
    assert document["identical"], document
    (row,) = document["settings"]
    assert row["rounds_identical"] == row["rounds"] > 20 and row["counters_equal"]


@pytest.mark.slow
def test_vllms_batches_are_the_simulated_servers(vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair) -> None:
    trace = recorded(lab_pair32, prompts[:7], vllm)
    document = check(lab_pair32, trace, vllm, [scheduled(vllm, {1: 5, 3: 2, 4: 0}, 4)], 40).as_dict()
    assert document["identical"], document
    (row,) = document["settings"]
    assert row["rounds_identical"] == row["rounds"] > 20 and row["counters_equal"]


@pytest.mark.slow
def test_its_samplers_accept_by_the_rule(vllm: VllmEngine, tmp_path: Path) -> None:
    """Those of both model runners, in Triton's interpreter; block verification of greedy drafts has the same rule."""
    result = tmp_path / "result.json"
    subprocess.run([vllm.python, str(SAMPLERS), "3000", str(result)], check=True)
    found = json.loads(result.read_text())
    target, draft = (np.array(found[name]) / np.sum(found[name], 1, keepdims=True) for name in ("target", "draft"))
    for name, rounds in found["rounds"].items():
        drafted, emitted = np.array(rounds["drafted"]), np.array(rounds["emitted"])
        before, judged = np.zeros(len(drafted), int), np.full(len(drafted), True)
        for x, y in zip(drafted.T, emitted.T, strict=False):
            p, q = target[before, x][judged], draft[before, x][judged]
            chance = p if name.endswith("greedy") else np.minimum(1, p / q)
            z = ((x == y)[judged] - chance).sum() / np.sqrt((chance * (1 - chance)).sum())
            assert abs(z) < 4 or name == "block probabilistic", (name, z)
            for last in {*before[judged]}:
                counts = np.bincount(y[judged & (before == last)], minlength=len(target))
                if counts.sum() > 300:
                    assert stats.chisquare(counts, target[last] * counts.sum()).pvalue > 1e-4, (name, last)
            before, judged = x, judged & (x == y)
