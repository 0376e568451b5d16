"""EDD, EAGLE and EAGLE-3: what a round ingests and costs, their files; rejection sampling inside the target."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import Eagle, EagleKind
from realrun.drafters.eagle3 import Eagle3, Eagle3Kind, default_config
from realrun.drafters.edd import (
    EDDKind,
    check_split,
    default_split,
    one_layer_model,
    own_state,
)
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DrafterKind
from realrun.drafters.medusa import MedusaHeads, MedusaKind
from realrun.drafters.space import SpaceKind, with_mask
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.lm.llama import FusedStack
from realrun.measure.profile import profile
from realrun.measure.sweeps import CATCH_UP
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from tests.realrun.drafters import test_eagle, test_eagle3, test_edd
from tests.support.clock import SetClock
from tests.support.drafting import rounds_of
from tests.support.pairs.medusa import CHOICES
from tests.support.pairs.state import KINDS, PROMPTS, TARGETS, TOKENS, state_pair, watch
from tests.support.small_vocabulary import SAMPLED, models, p_value
from tests.support.split_targets import target_of
from tests.support.tiny import tiny_tokenizer
from tests.support.tree_policies import CoinTree, KeepNone

slow = pytest.mark.slow
kinds = pytest.mark.parametrize("kind", KINDS)


def decoder_of(pair: Pair, sampler: Sampler) -> tuple[Decoder, StateDrafterLM]:
    target, drafter = pair.make_drafter()
    assert isinstance(drafter.lm, StateDrafterLM)
    return Decoder(target, drafter, pair.eos_token_ids, sampler), drafter.lm


def small_pair(kind: str) -> Pair:
    """A target over four tokens and a random drafter, which disagree."""
    target, _ = models()
    generator = torch.Generator().manual_seed(6)
    if kind == "space":
        target = with_mask(target, torch.randn(8, generator=generator, dtype=torch.float64))
        return Pair(target, SpaceKind(3), tiny_tokenizer(), "small", kind, ())
    drafts: dict[str, Any] = {"edd": one_layer_model, "eagle": Eagle, "medusa": MedusaHeads}
    draft = drafts[kind](target, 3 if kind == "medusa" else 6).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(2.0)
            if kind == "medusa":  # whose heads begin as the target's own
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    kinds: dict[str, DrafterKind] = {
        "edd": EDDKind(draft, 1), "eagle": EagleKind(draft), "medusa": MedusaKind(draft)
    }  # fmt: skip
    return Pair(target, kinds[kind], tiny_tokenizer(), "small", kind, ())


REJECTION = [
    ("edd", "vct", {"width": 2, "depth": 2}),
    ("eagle", "fixed_k", {"k": 3}),
    ("medusa", "vct", {"width": 2, "depth": 3}),
    ("space", "fixed_k", {"k": 3}),
    pytest.param("edd", "fixed_k", {"k": 3}, marks=slow),
    pytest.param("eagle", "vct", {"width": 2, "depth": 2}, marks=slow),
]


@pytest.mark.parametrize(("kind", "name", "settings"), REJECTION)
@pytest.mark.parametrize("samples", [200, pytest.param(1500, marks=slow)])
def test_rejection_sampling_follows_the_target(kind: str, name: str, settings: dict[str, Any], samples: int) -> None:
    decoder = Decoder(*small_pair(kind).make_drafter(), (), SAMPLED)
    assert p_value(decoder, make_policy(name, settings), samples) > 1e-3


REFERENCES = {
    "edd": test_edd.reference, "eagle": test_eagle.reference, "eagle-vllm": test_eagle.reference,
    "eagle3": test_eagle3.reference,
}  # fmt: skip
POLICIES = [
    make_policy("fixed_k", {"k": 4}),
    make_policy("vct", {"width": 2, "depth": 4}),
    CoinTree(),
    KeepNone(2),
]


@pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("name", [TARGETS[0], *(pytest.param(name, marks=slow) for name in TARGETS[1:])])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", REFERENCES)
@torch.inference_mode()
def test_every_row_equals_the_librarys_without_a_cache(kind: str, policy: Policy, name: str, sampler: Sampler) -> None:
    """Along chains and branches of trees, over rounds that accept much or little, or draft nothing."""
    pair = state_pair(kind, name)
    for prompt in PROMPTS[:2]:
        decoder, lm = decoder_of(pair, sampler)
        rows = watch(lm)
        rounds = [round_ for _, round_, _ in rounds_of(decoder, prompt.tokens, policy, 7)]
        assert any(round_.accepted < round_.drafted for round_ in rounds[:-1])
        assert max(len(row.drafted) for row in rows) >= policy.max_draft_tokens - 1
        for row in rows:
            expected = REFERENCES[kind](pair, row.context, row.drafted)
            torch.testing.assert_close(row.logits, expected, rtol=0, atol=1e-10)


# --- What a round ingests, and what it costs ---------------------------------------------------


@kinds
def test_a_round_ingests_at_once_what_the_last_one_accepted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EDD keeps no row of the last round; EAGLE's of the pending token was made of a true feature and stays.

    EAGLE-3's first token has no row.
    """
    filled: list[int] = []
    fill = FusedStack.fill
    monkeypatch.setattr(FusedStack, "fill", lambda self, x, *rest: filled.append(len(x)) or fill(self, x, *rest))
    loop, _ = decoder_of(state_pair(kind), Sampler())
    accepted = set()
    for prompt in PROMPTS[1:]:
        filled.clear()
        decoded = loop.decode(prompt.tokens, TOKENS, make_policy("fixed_k", {"k": 4}))
        ingested = [r.accepted + (kind == "edd") for r in decoded.rounds if r.t + r.accepted + 1 < TOKENS - 1]
        accepted.update(r.accepted for r in decoded.rounds)
        first = len(prompt.tokens) - 1 - {"edd": 0, "eagle": 1, "eagle3": 2}[kind]
        assert filled == [rows for rows in (first, *ingested) if rows]
    assert len(accepted) > 3


@kinds
def test_a_profile_counts_it_as_part_of_the_first_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pause_s, rows = SetClock(monkeypatch), 0.008, Counter[int]()
    fill, propose = FusedStack.fill, DraftModel.propose
    inside = False

    def slow_fill(self: FusedStack, x: torch.Tensor, *rest: Any) -> None:
        if inside:
            rows[len(x)] += 1
            clock.take(pause_s)
        fill(self, x, *rest)

    def proposing(self: Any, *asked: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return propose(self, *asked)
        finally:
            inside = False

    monkeypatch.setattr(FusedStack, "fill", slow_fill)
    monkeypatch.setattr(DraftModel, "propose", proposing)
    document = profile(state_pair(kind), contexts=[8, 30], depth=3, limit_s=0, tree_tokens=0)
    for table in ("median_s", "p25_s", "p75_s"):
        assert document[table]["catch_up"] == [0.0, 0.0]
    for context in range(2):
        first, *others = (step[context] for step in document["median_s"]["draft_step"])
        assert max(others) < 0.1 * pause_s
        assert (first if kind == "edd" else document["p75_s"]["draft_step"][0][context]) >= pause_s
    # As many as the longest draft, and of EDD's the row of the token that was pending; and what is caught up on.
    behind = {tokens for tokens in CATCH_UP if tokens < 30}
    assert set(rows) == set(range(1, 5 if kind == "edd" else 4)) | behind


# --- Files ----------------------------------------------------------------------------------------


def save(folder: Path, kind: str, target: Any, draft: Any, **facts: Any) -> Path:
    tensors = own_state(draft) if kind in ("edd", "vdm") else draft.state_dict()
    return save_drafter(folder, kind, tensors, {"target": describe_target(target, "tiny/target"), **facts})


def draft_of(kind: str, target: Any, seed: int = 3) -> Any:
    if kind == "eagle3":
        return Eagle3(target, seed=seed).eval()
    return (Eagle(target, seed) if kind == "eagle" else one_layer_model(target, seed)).eval()


@pytest.mark.parametrize("kind", ["edd", "vdm", "eagle", "eagle3"])
def test_files_that_do_not_fit_their_target_are_refused(kind: str, tmp_path: Path) -> None:
    target = target_of("llama")
    facts = {"edd": {"states_after": 2}, "eagle3": {"config": default_config(target)}}.get(kind, {})

    def refused(says: str, place: Path) -> None:
        with pytest.raises(InputError, match=says) as caught:
            load_drafter(place, target)
        assert "\n" not in str(caught.value)

    tensors = draft_of(kind, target)
    state = own_state(tensors) if kind in ("edd", "vdm") else tensors.state_dict()
    described = {"target": describe_target(target, "t")}
    parts = {"eagle": ["fuse.bias"], "eagle3": ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"]}
    for missing in parts.get(kind, ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]):
        less = {name: value for name, value in state.items() if name != missing}
        refused("does not fit its target", save_drafter(tmp_path / "less", kind, less, {**described, **facts}))
    if kind == "edd":
        refused(r"does not fit its target \('states_after'\)", save_drafter(tmp_path / "mute", kind, state, described))
        deep = save(tmp_path / "5", kind, target, tensors, states_after=5)
        refused("states after 5 of 4 layers; choose 1 to 4", deep)


def test_fingerprints_tell_them_apart() -> None:
    pairs = [state_pair(kind) for kind in KINDS]
    edd, eagle, eagle3 = pairs
    pairs += [
        replace(edd, drafter=EDDKind(edd.drafter.decoder, 3)),
        replace(edd, drafter=IndependentKind(edd.drafter.decoder)),
        replace(eagle, drafter=EagleKind(draft_of("eagle", eagle.target))),
        replace(eagle3, drafter=Eagle3Kind(draft_of("eagle3", eagle3.target))),
    ]
    assert len({pair.fingerprint for pair in pairs}) == len(pairs)
    assert edd.drafter.facts == {"states_after": 2} and eagle.drafter.facts == {}
    assert eagle3.drafter.facts == {"states_after": [1, 2, 3]}


def test_the_default_states_are_the_fourth_to_last() -> None:
    """Of a list that starts with the embeddings, 32 layers have number 29 there (errata B9)."""
    target = copy.deepcopy(target_of("llama"))
    for layers, split in ((32, 29), (40, 37), (4, 1), (2, 1), (1, 1)):
        target.config.num_hidden_layers = layers
        assert default_split(target) == split
        states = range(layers + 1)
        assert split == max(1, states[-4] if layers > 2 else 1)
    for split in (0, 5, -1):
        target.config.num_hidden_layers = 4
        with pytest.raises(InputError, match=f"states after {split} of 4 layers; choose 1 to 4"):
            check_split(target, split)
