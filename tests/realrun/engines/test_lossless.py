"""Whether an engine's samples are the target's: samplers written here pass, and their faults are found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from scipy import stats

from realrun.decode.sampling import Mode, Sampler
from realrun.drafters.independent import IndependentKind
from realrun.engines.compare import ANY_COST
from realrun.engines.engine import Engine, EngineRun, Job, Setting
from realrun.engines.hugging_face import HuggingFaceEngine
from realrun.engines.llamacpp import LlamaCppEngine
from realrun.engines.lossless import check_lossless, score, text_terms
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.engines.as_engine import as_engine, rounds_of
from specsim.engines.lossless import check_known, find_fault
from specsim.io.arrays import Array, Floats
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.priced import PricedTrace
from specsim.trace.accepted import Rule
from specsim.trace.trace import Trace
from tests.realrun.engines.test_engines import needs_llamacpp
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.tiny import tiny_model, tiny_pair

VOCAB, TEMPERATURE, LIMIT = 12, 0.8, 60
END = 3
TEXTS = 4  # of every prompt


def test_z_of_exact_samples_is_standard_normal() -> None:
    """Drawn by torch.multinomial from a tiny model; most texts end early, by either of two ends of text."""
    torch.manual_seed(1)
    model, texts, length, ends = tiny_model(2, seed=1), 4096, 8, [5, 9]
    ending = 2 * torch.isin(torch.arange(97), torch.tensor(ends))
    ids = torch.full((texts, 1), 7)
    with torch.inference_mode():
        for _ in range(length):
            logits = 2 * model(ids).logits[:, -1] + ending
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        logprobs = (2 * model(ids).logits[:, :-1] + ending).log_softmax(-1)
    terms = []
    for row, output in zip(logprobs, ids[:, 1:].tolist(), strict=True):
        stop = next((i + 1 for i, token in enumerate(output) if token in ends), length)
        terms.append(text_terms(row[:stop], output[:stop], ends))
    assert sum(len(each.value) < length for each in terms) > texts / 4
    z = np.array([score(terms[at : at + 8]).z for at in range(0, texts, 8)])
    assert abs(z.mean()) < 4 / np.sqrt(len(z)) and abs(z.var() - 1) < 4 * np.sqrt(2 / len(z))


class Bigrams:
    """A model whose next token depends on the last one alone."""

    def __init__(self, logits: Array):
        self.logits = torch.tensor(logits)

    def __call__(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        return SimpleNamespace(logits=self.logits[input_ids])


def bigrams() -> tuple[Array, Array]:
    rng = np.random.default_rng(4)
    target = 1.5 * rng.standard_normal((VOCAB, VOCAB))
    target[:, END] = -1.5
    return target, target + 0.8 * rng.standard_normal((VOCAB, VOCAB))


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Sampling(Engine):
    """Samples by bigrams with drafts, rightly or with a fault; counts rounds as vLLM does."""

    name = "vllm"

    def __init__(self, how: Literal["right", "ratio", "warm"], drafts: Rule, seed: int, says: Rule | None):
        self.how, self.drafts, self.seed, self.says = how, drafts, seed, says or drafts

    @property
    def draft_rule(self) -> Rule:
        return self.says

    def version(self) -> str:
        return "of a test"

    def convert(self, pair: Pair, folder: Path) -> None:
        pass

    def policy(self, setting: Setting) -> ChainPolicy:
        return FixedK(setting.k)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        target, draft = (softmax(logits / job.temperature) for logits in bigrams())
        warm = softmax(bigrams()[0])  # temperature 1, at drafted tokens alone
        rng = np.random.default_rng((self.seed, job.seed))

        def drawn(probs: Array) -> int:
            return int(rng.choice(VOCAB, p=probs / probs.sum()))

        def judged(last: int, x: int) -> int:
            """The token that is put out where x was drafted; x itself if it is accepted."""
            p, q = (warm if self.how == "warm" else target)[last], draft[last]
            if self.how == "ratio":
                y = drawn(p)
                return x if rng.random() < q[x] / p[y] else y
            if self.drafts != "sampled-draft":
                return drawn(p)
            return x if rng.random() < p[x] / q[x] else drawn(np.maximum(p - q, 0))

        outputs, all_rounds = [], []
        for prompt in job.prompts:
            output, rounds = [drawn(target[prompt[-1]])], []
            while len(output) < job.max_new_tokens and END not in output:
                accepted = 0
                while accepted < setting.k:
                    q = draft[output[-1]]
                    x = int(q.argmax()) if self.drafts == "greedy-draft" else drawn(q)
                    output.append(judged(output[-1], x))
                    if output[-1] != x:
                        break
                    accepted += 1
                else:
                    output.append(drawn(target[output[-1]]))
                rounds.append((setting.k, accepted))
            stop = output.index(END) if END in output else len(output)
            outputs.append(output[: min(stop + 1, job.max_new_tokens)])
            all_rounds.append(rounds)
        return EngineRun(outputs, all_rounds)


def checked(engine: Engine) -> dict[str, Any]:
    target, draft = bigrams()
    pair = replace(tiny_pair((END,)), target=Bigrams(target), drafter=IndependentKind(Bigrams(draft)))  # type: ignore[arg-type]
    prompts = [Prompt("all", [1 + number % 2, 4 + number % 8]) for number in range(60)]
    return check_lossless(pair, prompts, engine, [Setting(1), Setting(4)], LIMIT, TEMPERATURE).as_dict()


@pytest.mark.parametrize("drafts", get_args(Rule))
def test_a_right_sampler_passes_ten_times_of_ten(drafts: Rule) -> None:
    documents = [checked(Sampling("right", drafts, seed, None)) for seed in range(10)]
    assert all(document["passed"] and document["lossless"] for document in documents)
    assert documents[0]["verdict"] == "lossless: vllm of a test at temperature 0.8, every |z| is below 4"
    assert json.loads(json.dumps(documents[0])) == documents[0]
    for row in documents[0]["settings"]:
        assert row["text"]["count"] > 1500 and row["acceptance"]["count"] > 500


@pytest.mark.parametrize(
    ("how", "drafts"),
    [("ratio", "sampled-draft"), ("warm", "greedy-draft"), ("warm", "sampled-draft")],
    ids=["judges the draft model beside another token", "wrong temperature", "wrong temperature, sampled drafts"],
)
def test_faults_are_found(how: Literal["ratio", "warm"], drafts: Rule) -> None:
    for seed in range(3):
        document = checked(Sampling(how, drafts, seed, None))
        assert not document["lossless"] and not document["passed"]
        assert document["verdict"].startswith("not lossless: vllm of a test at temperature 0.8 puts out tokens of mean")


def test_another_rule_than_said_is_told_from_a_fault() -> None:
    document = checked(Sampling("right", "sampled-draft", 1, "greedy-draft"))
    assert document["lossless"] and not document["passed"]
    assert document["verdict"].startswith("lossless, but the rule greedy-draft is not followed: vllm of a test at")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--temperature 0", "temperature"),
        ("--temperature 0.8 --p-min 0.5", "--temperature already decides --p-min"),
        ("--temperature 0.8 --drafts", "--temperature already decides --drafts"),
        ("--temperature 0.8 --drafter somewhere", "--temperature checks draft models and prompt lookup"),
    ],
)
def test_what_is_not_checked_at_a_temperature(options: str, says: str) -> None:
    assert_refused(call("realrun", "engine", "check", "--engine", "transformers", *options.split()), says)


def test_recording_in_an_engine_known_to_fail_is_refused(interpreter: Path) -> None:
    refused = call("realrun", "record", str(interpreter / "out"), *["--engine", "vllm", "--mode", "greedy-draft"])
    assert_refused(refused, "vllm 0.32.0 is not lossless at a temperature on this device (cpu): the temperatures")
    refusal(lambda: check_known("vllm", "0.33.0+cpu", "cpu"), "vllm 0.33.0+cpu is not lossless")
    check_known("vllm", "0.33.0", "cuda")
    assert find_fault("openvino", "2026.4.1", "cpu")


@pytest.fixture(scope="module")
def traces(prompts: list[Prompt], lab_pair32: Pair) -> dict[str, list[Trace]]:
    """By how drafts are made."""
    modes: tuple[Mode, ...] = ("greedy-draft", "rejection")
    return {
        mode: [
            record(lab_pair32, prompts[:10], RecordSettings(5, LIMIT, Sampler(mode, TEMPERATURE, seed)))
            for seed in range(TEXTS)
        ]
        for mode in modes
    }


def accepted_and_rounds(traces: Sequence[Trace], engine: Engine, k: int) -> Floats:
    """Accepted tokens and rounds of every prompt, [2, n], in replays of all traces."""
    total: Floats = np.zeros((2, traces[0].sequences))
    for trace in traces:
        played = as_engine(trace, engine.conventions, max_output_tokens=LIMIT).trace
        log = PricedTrace(played, ANY_COST).replay(engine.policy(Setting(k)), log=True).rounds
        assert log is not None
        rounds = rounds_of(log, played, engine.conventions)
        assert rounds.sequence_id is not None
        for row, weights in zip(total, (rounds.accepted, None), strict=True):
            row += np.bincount(rounds.sequence_id, weights, len(row))
    return total


def z_of_ratios(a: Floats, b: Floats) -> float:
    """Difference of two ratios of sums [2, n] over the same prompts, in standard errors that both have a part in."""
    ratios = [x[0].sum() / x[1].sum() for x in (a, b)]
    apart = [(x[0] - ratio * x[1]) / x[1].mean() for x, ratio in zip((a, b), ratios, strict=True)]
    return float((ratios[0] - ratios[1]) / stats.sem(apart[0] - apart[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mode"),
    [pytest.param(LlamaCppEngine(), "greedy-draft", marks=needs_llamacpp), (HuggingFaceEngine(), "rejection")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_engine_is_lossless_and_accepts_what_a_replay_under_its_rule_gives(
    engine: Engine,
    mode: str,
    prompts: list[Prompt],
    lab_pair32: Pair,
    traces: dict[str, list[Trace]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both draw texts of their own, four for every prompt. Under the other rule a replay gives something else."""
    few, runs, run = prompts[:10], {}, engine.run

    def noted(job: Job, setting: Setting) -> EngineRun:
        runs[setting.k] = run(job, setting)
        return runs[setting.k]

    monkeypatch.setattr(engine, "run", noted)
    document = check_lossless(
        lab_pair32, few * TEXTS, engine, [Setting(k) for k in (1, 3, 5)], LIMIT, TEMPERATURE
    ).as_dict()
    assert document["passed"] and all(row["acceptance"]["count"] > 250 for row in document["settings"]), document
    for k, found in runs.items():
        own = np.array([(sum(accepted for _, accepted in rounds), len(rounds)) for rounds in found.rounds])
        theirs = own.reshape(TEXTS, len(few), 2).sum(0).T.astype(float)
        z = {by: z_of_ratios(theirs, accepted_and_rounds(traces[by], engine, k)) for by in traces}
        assert abs(z.pop(mode)) < 4
        assert k > 1 or all(abs(other) > 4 for other in z.values())


@pytest.mark.slow
def test_transformers_is_lossless_with_prompt_lookup(prompts: list[Prompt], lab_pair32: Pair) -> None:
    engine = HuggingFaceEngine()
    document = check_lossless(lab_pair32, prompts[:6], engine, [Setting(3)], 48, TEMPERATURE, lookup=True).as_dict()
    assert document["passed"] and document["settings"][0]["acceptance"]["count"] > 20, document
