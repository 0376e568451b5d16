"""Scripted acceptance: real rounds on reduced shapes that go exactly as the trace's replay."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Decoded, RoundContext
from realrun.decode.sampling import Sampler
from realrun.experiment import scripted
from realrun.experiment.scripted import (
    Script,
    ScriptedDecoding,
    ScriptedDrafter,
    ScriptedSettings,
    run_scripted,
    scripted_arm,
    scripted_validation,
    with_prefix,
)
from realrun.experiment.validate import rounds_identical
from realrun.lm.kernels import use_kernels
from realrun.lm.static.llama import StaticLlama
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.shapes import random_pair
from specsim.cost.model import ConstantCost
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.registry import make_policy
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.tiny import tiny_pair, tiny_prompts

POLICIES = [
    make_policy("fixed_k", {"k": 1}),
    make_policy("fixed_k", {"k": 5}),
    make_policy("max_confidence", {"max_draft_tokens": 5}),
    make_policy("max_confidence", {"max_draft_tokens": 3, "dynamic": False}),
    make_policy("adaedl", {"max_draft_tokens": 5, "lambda0": 0.0}),
    make_policy("adaedl", {"max_draft_tokens": 5, "dynamic": False}),
    make_policy("llama_cpp", {"max_draft_tokens": 4, "p_min": 0.3}),
]
EOS = (5, 11, 17, 23, 31, 43)


@cache
def trace(eos: tuple[int, ...] = ()) -> Trace:
    """Six sequences, depth 5; with end-of-text tokens, outputs and drafts of several lengths."""
    return record(tiny_pair(eos), tiny_prompts(), RecordSettings(5, 30, Sampler("gumbel", 0.8)))


@cache
def pair(target: str = "llama-3.1-8b", draft: str = "llama-3.2-1b") -> Pair:
    return random_pair(target, draft, device="cpu", dtype="float32", smoke=True)


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "SLICE_SWEEPS", 2)


def runs_of(
    models: Pair, script: Trace, policy: ChainPolicy | None, sampler: Sampler | None = None, seed: int = 0
) -> list[Decoded]:
    """Run all sequences of a script."""
    arm = scripted_arm("", policy, models, Script(script), sampler or Sampler())
    text = np.random.default_rng(0).integers(1, 90, int(script.prompt_tokens.max())).tolist()
    runs = []
    for index in range(script.sequences):
        decoding = ScriptedDecoding(arm, script, index, text, seed)
        while not decoding.done:
            decoding.advance()
        runs.append(decoding.result)
    return runs


@pytest.mark.parametrize("eos", [(), EOS], ids=["no end", "ends"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_round_is_the_replays(policy: ChainPolicy, eos: tuple[int, ...]) -> None:
    script = trace(eos)
    if eos:
        assert (script.output_tokens < script.budget_tokens).any()  # the script ends before its budget does
    runs = runs_of(pair(), script, policy, seed=3)
    replayed = replay(script, policy, cost_table(script, ConstantCost(1e-3, 1e-2)), seed=3, log=True)
    assert rounds_identical(replayed, runs) == 1.0
    assert replayed.rounds is not None
    assert sum(len(run.rounds) for run in runs) == len(replayed.rounds)


@pytest.mark.parametrize(("target", "draft"), [("llama-2-7b", "one-layer-7b"), ("qwen3-8b", "qwen3-0.6b")])
def test_rounds_do_not_depend_on_the_models_or_the_choice(target: str, draft: str) -> None:
    logs = []
    for models, sampler in ((pair(), Sampler()), (pair(target, draft), Sampler("gumbel", 0.5))):
        logs.append([run.log() for run in runs_of(models, trace(), POLICIES[4], sampler)])
    assert logs[0] == logs[1]


def test_rounds_are_the_replays_over_the_static_cache_too() -> None:
    """As on a GPU: buffers with room for all, rolled back between sequences."""
    script = with_prefix(trace(EOS), 50)
    with use_kernels("reference"):
        assert isinstance(pair().make_drafter(())[0], StaticLlama)
        for policy in POLICIES[1::2]:
            replayed = replay(trace(EOS), policy, cost_table(trace(EOS), ConstantCost(1e-3, 1e-2)), log=True)
            assert rounds_identical(replayed, runs_of(pair(), script, policy)) == 1.0


def test_the_baseline_drafts_nothing_and_writes_every_position() -> None:
    for run, length in zip(runs_of(pair(), trace(EOS), None), trace(EOS).output_tokens, strict=True):
        assert [(one.t, one.drafted, one.accepted) for one in run.rounds] == [(t, 0, 0) for t in range(length)]


def test_an_end_of_text_token_stops_nothing() -> None:
    """Every token of the models is an end of text to their configuration, and none to a script."""
    models = pair()
    models = replace(models, eos_token_ids=tuple(range(models.target.config.vocab_size)))
    rounds = runs_of(models, trace(), POLICIES[1])[0].rounds
    assert sum(r.accepted + 1 for r in rounds) >= trace().output_tokens[0]
    assert max(r.drafted for r in rounds) == 5


def test_the_policy_sees_the_traces_features_and_nothing_of_the_models() -> None:
    script, seen = Script(trace()), []

    def keep(step: Step, depth: int) -> bool:
        seen.append((step, depth))
        return True

    drafter = ScriptedDrafter(DraftModel(pair().drafter.model, ()), script)
    drafter.begin([1, 2])
    draft = drafter.propose([1, 2, 3], RoundContext(Sampler(), 2, 7, 4), keep)
    row = trace().offsets[2] + 7
    columns = (
        trace().prob, trace().confidence, trace().entropy_nats, trace().confidence, trace().top10_confidence
    )  # fmt: skip
    expected = [(Step(*(float(x[row, i]) for x in columns)), i + 1) for i in range(3)]  # type: ignore[index]
    assert seen == expected and len(draft.tokens) == 4
    assert drafter.drafter.lm.length == 2 + 4  # type: ignore[attr-defined]  # every draft step was a real pass


def test_a_predictors_score_is_handed_on() -> None:
    scored = replace(trace(), score=trace().prob / 2)
    assert Script(scored).step(3, 2).score == scored.score[3, 1]  # type: ignore[index]


def test_the_verifier_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice of tokens per target pass, over all its logits."""
    sizes: list[int] = []
    tokens = Sampler.tokens

    def spy(self: Sampler, scaled: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        sizes.append(len(scaled))
        return tokens(self, scaled, sequence, position)

    monkeypatch.setattr(Sampler, "tokens", spy)
    runs = runs_of(pair(), trace(), POLICIES[1])
    rounds = [one for run in runs for one in run.rounds]
    assert [size for size in sizes if size > 1] == [one.drafted + 1 for one in rounds if one.drafted]


KEYS = {"kind", "version", "target", "drafter", "context", "sequences", "rows", "done", "profile", "provenance"}


def check(document: dict[str, Any], script: Trace, policies: int) -> None:
    assert document.keys() >= KEYS and document["kind"] == "specsim-scripted"
    json.dumps(document, allow_nan=False)
    assert len(document["rows"]) == policies
    for row in document["rows"]:
        assert row["rounds_identical_percent"] == 100.0
        assert row["measured"]["low"] <= row["measured"]["estimate"] <= row["measured"]["high"]
        ratio = row["predicted"]["estimate"] / row["measured"]["estimate"]
        assert row["error_percent"] == pytest.approx((ratio - 1) * 100)
        assert len(row["sequence_seconds"]) == document["sequences"]["run"]
        baseline = sum(document["autoregressive_sequence_seconds"])
        assert row["measured"]["estimate"] == pytest.approx(baseline / sum(row["sequence_seconds"]))
    errors = [abs(row["error_percent"]) for row in document["rows"]]
    assert document["median_abs_error_percent"] == pytest.approx(np.median(errors))
    # The prediction is the replay under the profile that is in the document, behind the context asked for.
    row = document["rows"][0]
    if document["sequences"]["run"] == script.sequences:
        cost = profile_from_json(document["profile"], "document")
        shifted = with_prefix(script, document["context"])
        again = predict_policy(PricedTrace(shifted, cost), make_policy(row["policy"], row["params"]))
        assert again.speedup.as_dict() == row["predicted"]


def test_given_policies_behind_a_long_context() -> None:
    steps: list[tuple[str, int, int]] = []
    settings = ScriptedSettings(context=300, policies=(POLICIES[1], POLICIES[4]), repeats=3)
    document = run_scripted(
        "llama-2-7b", "llama-68m", trace(EOS), settings,
        device="cpu", dtype="float32", smoke=True, progress=lambda *step: steps.append(step),
    )  # fmt: skip
    check(document, trace(EOS), 2)
    assert document["target"] == "llama-2-7b (reduced)" and document["context"] == 300
    assert document["profile"]["contexts"][0] >= 300
    assert document["done"] | {"spent_minutes": 0} == {
        "minutes": None, "spent_minutes": 0, "stopped_early": False, "repeats": 3, "repeats_asked": 3,
        "sequence_runs": 18, "sequence_runs_asked": 18,
    }  # fmt: skip
    assert [step for step in steps if step[0] == "run"] == [("run", done, 18) for done in range(1, 19)]
    # Four slices of the profile, one before and one after each repeat, of two sweeps each.
    assert [step for step in steps if step[0] != "run"] == [("profile", done, 8) for done in range(1, 9)]
    assert document["sequences"] == {"tuning": 0, "holdout": 6, "run": 6}


def test_tuned_policies_run_on_sequences_they_were_not_tuned_on() -> None:
    document = scripted_validation(pair(), trace(), ScriptedSettings(trials=2, repeats=3))
    check(document, trace(), len(document["rows"]))
    assert {row["role"] for row in document["rows"]} >= {"tuned", "default"}
    assert 4 in [row["params"].get("k") for row in document["rows"]]  # tuned or not, K = 4 always stands beside
    assert document["sequences"] == {"tuning": 3, "holdout": 3, "run": 3}


def test_it_stops_when_the_time_is_up_and_says_so() -> None:
    document = scripted_validation(pair(), trace(), ScriptedSettings(policies=POLICIES[:2], repeats=51, minutes=1e-3))
    check(document, trace(), 2)
    done = document["done"]
    assert done["stopped_early"] and done["sequence_runs_asked"] == 306
    assert 2 <= done["sequence_runs"] < 306 and done["repeats"] < 51
    assert 2 <= document["sequences"]["run"] <= 6


def test_positions_beyond_the_published_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(scripted, "random_pair", lambda *names, positions, **rest: made.append(positions) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_scripted("llama-2-7b", "llama-68m", trace(), ScriptedSettings(context=9000))
    assert made[0] > 9000 + 30 + 5
    found = random_pair("llama-2-7b", "llama-68m", device="cpu", dtype="float32", positions=9100, smoke=True)
    assert [m.config.max_position_embeddings for m in (found.target, found.drafter.model)] == [9100, 9100]


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(InputError, match="llama-2-7b and qwen3-0.6b have vocabularies of 32000 and 151936"):
        random_pair("llama-2-7b", "qwen3-0.6b", device="cpu", smoke=True)
    with pytest.raises(InputError, match="dtype 'int3' is unknown"):
        random_pair("llama-2-7b", "llama-68m", device="cpu", dtype="int3", smoke=True)
    with pytest.raises(InputError, match="0 repeats have no median"):
        scripted_validation(pair(), trace(), ScriptedSettings(repeats=0))
    with pytest.raises(InputError, match="device cuda:99 is not available here"):
        random_pair("llama-2-7b", "llama-68m", device="cuda:99", smoke=True)
    with pytest.raises(
        InputError, match="drafts up to 6 tokens, the trace is recorded to depth 5"
    ):  # before anything is run
        scripted_validation(pair(), trace(), ScriptedSettings(policies=[make_policy("fixed_k", {"k": 6})]))
    other = replace(tiny_pair(), target=pair().target)
    with pytest.raises(InputError, match="choose a drafter with the target's vocabulary"):
        scripted_validation(other, trace(), ScriptedSettings())


def test_the_scripted_loop_is_the_decoders_on_the_recorded_pair() -> None:
    """With the recorded models and no end of text, a decoding run and a scripted one do the same rounds."""
    models, sampler = tiny_pair(), Sampler("gumbel", 0.8)
    decoder = Decoder(models.target, DraftModel(models.drafter.model, ()), (), sampler)
    for index, run in enumerate(runs_of(models, trace(), POLICIES[4], sampler)):
        assert run.log() == decoder.decode(tiny_prompts()[index].tokens, 30, POLICIES[4], sequence=index).log()


@pytest.mark.gpu
@pytest.mark.parametrize(("target", "draft"), [("llama-2-7b", "one-layer-7b"), ("llama-3.1-8b", "llama-3.2-1b")])
def test_true_shapes_go_as_the_trace_says_on_cuda(target: str, draft: str) -> None:
    document = run_scripted(target, draft, trace(EOS), ScriptedSettings(2000, POLICIES[1:], minutes=2))
    assert {row["rounds_identical_percent"] for row in document["rows"]} == {100.0}
    assert document["provenance"]["dtype"] == "bfloat16"


def test_the_shortest_prompts_are_run_and_priced() -> None:
    """From one token on, behind which nothing is cached."""
    short = replace(trace(), prompt_tokens=np.array([1, 1, 2, 3, 9, 40]), prompt=None)
    done = scripted_validation(pair(), short, ScriptedSettings(policies=POLICIES[:1], repeats=3))
    (row,) = done["rows"]
    assert row["rounds_identical_percent"] == 100.0 and np.isfinite(row["error_percent"])
    assert done["profile"]["contexts"][0] == 2
