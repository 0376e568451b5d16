"""Models with recurrent layers: dropped tokens leave no trace, rounds match the replay, refusals say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.drafters.lookup import LookupKind
from realrun.experiment.validate import error_parts, rounds_identical
from realrun.lm.cached import CachedLM
from realrun.lm.choice import library_lm
from realrun.lm.recurrent import RecurrentLM
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.joined import join_pairs
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.joined import JoinedCost
from specsim.cost.model import ConstantCost
from specsim.cost.profile import profile_from_json
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.joined import join_traces
from tests.support.checks import refusal
from tests.support.families import MAKERS, check_decoding, family_model, outcome, shallow_draft
from tests.support.small_targets import alone
from tests.support.tiny import POSITIONS, VOCAB, tiny_model, tiny_prompts

TEXT = np.random.default_rng(5).integers(1, VOCAB, 30).tolist()
CUTS = (10, 1, 4, 5, 1, 9)
SERVED = [
    "Qwen3.5", "Qwen3-Next", "Granite-4 H", "Nemotron-H", "Falcon-H1", "LFM2", "Kimi-Linear", "OLMo hybrid", "Bamba",
    "Zamba2",
]  # fmt: skip
QUICK = ("Qwen3.5", "Falcon-H1", "Nemotron-H", "LFM2")
# Only transformers' algorithm for several tokens raises short time steps.
CLOSE = {"Nemotron-H": 2e-3, "Zamba2": 2e-3}


def families(*quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in SERVED]


def hybrid_pair(family: str = "Qwen3.5", draft: Any = None) -> Pair:
    target = family_model(family)
    return replace(alone(target), drafter=IndependentKind(shallow_draft(target) if draft is None else draft))


def fed(lm: CachedLM, dropped: int = 0, singly: bool = False) -> torch.Tensor:
    """Logits [n, V] of TEXT in passes of CUTS; before each, `dropped` tokens are fed, jointly or singly, and cut."""
    logits, refed = [], 0
    for end, size in zip(np.cumsum(CUTS).tolist(), CUTS, strict=True):
        start = end - size
        for part in [[token] for token in TEXT[:dropped]] if singly else [TEXT[:dropped]] if dropped else []:
            lm.forward(part)
        lm.truncate(start)
        refed += lm.refed
        logits.append(lm.forward(TEXT[start:end]))
    assert refed == 0
    return torch.cat(logits)


@pytest.mark.parametrize("family", families(*QUICK))
@torch.inference_mode()
def test_dropped_tokens_leave_no_trace(family: str) -> None:
    model = family_model(family)
    plain = fed(library_lm(model))
    for lm, singly in ((library_lm(model), False), (library_lm(model, drafting=True), True)):
        assert torch.equal(fed(lm, 3, singly), plain)
    library = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert float((plain - library).abs().max()) < CLOSE.get(family, 2e-5)


@torch.inference_mode()
def test_a_target_feeds_the_accepted_tokens_again_and_a_draft_model_none() -> None:
    """Of tokens 10 to 15, two stay: a target feeds these again; a draft model has the states of every token."""
    model = family_model("Qwen3.5")
    target, draft, plain = RecurrentLM(model), RecurrentLM(model, every_pass=True), RecurrentLM(model)
    for lm in (target, draft):
        lm.prefill(TEXT[:10])
    target.forward(TEXT[10:16])
    for token in TEXT[10:16]:
        draft.forward([token])
    target.truncate(12)
    draft.truncate(12)
    assert (target.refed, target.length, target.text) == (2, 12, TEXT[:12])
    assert (draft.refed, draft.length, draft.text) == (0, 12, TEXT[:12])
    plain.prefill(TEXT[:10])
    plain.forward(TEXT[10:12])
    assert torch.equal(target.forward([7]), plain.forward([7]))
    target.truncate(3)  # before any copied states: the whole text is fed again
    assert target.refed == 3 and target.forward([7]).isfinite().all()


@pytest.mark.parametrize("maker", ["draft model", "prompt lookup"])
@pytest.mark.parametrize("family", families("Qwen3.5"))
def test_text_is_the_targets_own_and_rounds_are_the_replays(family: str, maker: str, tmp_path: Path) -> None:
    assert outcome(family, maker, tmp_path) == "chains"


@pytest.mark.parametrize("recurrent", ["target", "drafter"])
def test_a_pair_may_have_recurrent_layers_in_one_model_alone(recurrent: str) -> None:
    llama = tiny_model(2, seed=1)
    pair = (
        hybrid_pair(draft=llama)
        if recurrent == "target"
        else replace(alone(llama), drafter=IndependentKind(family_model("Qwen3.5")))
    )
    check_decoding(pair)
    trace = record(pair, tiny_prompts(1), RecordSettings(2, 4))
    assert trace.meta["recurrent_layers"] == [recurrent]
    assert ("second_pass" in trace.meta) == (recurrent == "target")
    assert not pair.trees


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
def test_a_recording_holds_what_the_draft_model_proposes_at_every_position(mode: str) -> None:
    """As after a new prefill of the text up to that position; in rejection mode, only the probabilities."""
    pair, prompt, depth = hybrid_pair(), tiny_prompts(1)[0].tokens, 4
    trace = record(pair, [Prompt("code", prompt)], RecordSettings(depth, 12, Sampler(mode)))
    model, text = pair.drafter.model, trace.token.tolist()
    for t in range(len(text)):
        tokens = [*prompt, *text[:t]]
        for i in range(depth):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            token = int(trace.draft_token[t, i])
            assert trace.prob[t, i] == pytest.approx(float(logits.softmax(-1)[token]), rel=1e-3)
            if mode == "greedy":
                assert token == int(logits.argmax())
            tokens.append(token)


@pytest.mark.parametrize("drafters", [1, 2])
def test_rounds_that_reject_have_a_second_pass_and_replays_charge_it(drafters: int) -> None:
    """At 10 ms per pass: 10 ms more for each rejection that does not end the text."""
    pair, prompts, settings = hybrid_pair(), tiny_prompts(3, seed=7), RecordSettings(3, 20)
    policy, trace, cost = make_policy("fixed_k", {"k": 3}), record(pair, prompts, settings), ConstantCost(1e-3, 1e-2)
    if drafters == 2:
        pairs = [replace(pair, drafter=LookupKind(), draft_name="prompt-lookup"), pair]
        trace = join_traces({"lookup": record(pairs[0], prompts, settings), "model": trace})
        pair, cost = join_pairs(pairs), JoinedCost((cost, cost))
        policy = make_policy("switch_match", {"k1": 3, "k2": 3, "k3": 3})
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    runs = [decoder.decode(prompt.tokens, 20, policy, sequence=number) for number, prompt in enumerate(prompts)]
    again = 0
    for run in runs:
        for round_ in run.rounds:
            over = round_.t + round_.accepted + 1 == len(run.tokens)
            assert round_.refed == (round_.accepted + 1 if round_.accepted < round_.verified and not over else 0)
            assert (round_.refeed_s > 0) == (round_.refed > 0) and round_.refeed_s < round_.verify_s
            again += round_.refed > 0
    priced = PricedTrace(trace, cost)
    replayed = priced.replay(policy, log=True)
    assert rounds_identical(replayed, runs) == 1.0
    assert 0 < again < replayed.num_rounds.sum()
    assert replayed.seconds[:, 2].sum() == pytest.approx(1e-2 * (replayed.num_rounds.sum() + again))
    errors = error_parts(priced, replayed, [run.rounds for run in runs]).as_dict()
    took_s = sum(round_.seconds for run in runs for round_ in run.rounds)
    assert errors["second_pass"]["rounds"] == again
    assert errors["second_pass"]["predicted"] == pytest.approx(again / took_s)


def test_a_profile_measures_the_second_pass_of_a_target_with_recurrent_layers_alone() -> None:
    document = profile(hybrid_pair(), contexts=[8, 16], depth=3, limit_s=0)
    cost = profile_from_json(document, "just measured")
    assert np.shape(document["mean_s"]["refeed"]) == (3, 2)
    assert cost.refeed(2, [12]).item() == pytest.approx(np.mean(document["mean_s"]["refeed"][1]))
    lookup = replace(alone(tiny_model(2, seed=1)), drafter=LookupKind())
    assert "refeed" not in profile(lookup, contexts=[8, 16], depth=3, limit_s=0)["mean_s"]


@pytest.mark.parametrize("maker", sorted({*MAKERS} - {"draft model", "prompt lookup", "MEDUSA-1", "MEDUSA-2"}))
def test_other_drafters_are_refused_with_the_reason(maker: str, tmp_path: Path) -> None:
    assert "recurrent layers" in outcome("Qwen3.5", maker, tmp_path)


def test_trees_and_models_that_cannot_go_on_are_refused_with_the_reason(tmp_path: Path) -> None:
    pair, tree = hybrid_pair(), make_policy("vct", {"width": 2, "depth": 2})
    for other in (pair, hybrid_pair(draft=tiny_model(2, seed=1)), replace(pair, target=tiny_model(2, seed=1))):
        refusal(lambda other=other: record(other, tiny_prompts(1), RecordSettings(2, 4, tree_nodes=6)), "one state")
        decoder = Decoder(*other.make_drafter(), (), Sampler())
        refusal(lambda decoder=decoder: decoder.decode([5, 6], 4, tree), "qwen3_5_text models have recurrent layers")
    trace = record(pair, tiny_prompts(1), RecordSettings(2, 4))
    refusal(lambda: replay(trace, tree, cost_table(trace, ConstantCost(1e-3, 1e-2), tree)), "recurrent layers")
    assert "begin anew" in outcome("Jamba", "prompt lookup", tmp_path)
    refusal(lambda: RecurrentLM(family_model("Qwen3.5")).forward([5] * (POSITIONS + 1)), "positions")
