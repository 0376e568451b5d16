"""What every drafter promises, over all of `DRAFTERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import Eagle
from realrun.drafters.edd import VDMKind, one_layer_model, own_state
from realrun.drafters.eesd import EarlyExit
from realrun.drafters.lookup import LookupKind
from realrun.drafters.medusa import MedusaHeads
from realrun.drafters.registry import DRAFTERS
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.recording.record import RecordSettings, record
from realrun.validation.validate import output_identical, rounds_identical
from specsim.cost.model import ConstantCost
from specsim.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.pairs.inside import pair_of, target_of
from tests.support.pairs.medusa import CHOICES
from tests.support.pairs.space import space_pair
from tests.support.tiny import tiny_pair, tiny_prompts

TOKENS, DEPTH, WIDTH = 20, 3, 3
PROMPTS = [Prompt("one", [17]), *tiny_prompts(2, seed=7)]  # the first has no state before its pending token
CHAINS = [make_policy("fixed_k", {"k": DEPTH}), make_policy("adaedl", {"lambda0": 0.2, "max_draft_tokens": DEPTH})]
TREES = [make_policy("vct", {"width": 2, "depth": DEPTH})]
WHOLE_TREE = sum(WIDTH**level for level in range(1, DEPTH + 1))

PAIRS: dict[str, Callable[[], Pair]] = {
    **{kind: lambda kind=kind: pair_of(kind) for kind in ("model", "eesd", "medusa", "edd", "eagle", "self-sd")},  # type: ignore[misc]
    "vdm": lambda: replace(tiny_pair(), drafter=VDMKind(one_layer_model(tiny_pair().target))),
    "space": space_pair,
    "prompt-lookup": lambda: replace(tiny_pair(), drafter=LookupKind()),
}
kinds = pytest.mark.parametrize("kind", DRAFTERS)
modes = pytest.mark.parametrize("mode", CHOICES)

# Tensors and facts of a drafter file.
State = tuple[Mapping[str, torch.Tensor], dict[str, Any]]
FILES: dict[str, Callable[[Any], State]] = {
    "eesd": lambda target: (EarlyExit(target, 1).state_dict(), {"layers": 1, "exit_layers": 1}),
    "medusa": lambda target: (MedusaHeads(target, 3).state_dict(), {"heads": 3}),
    "edd": lambda target: (own_state(one_layer_model(target)), {"states_after": 1}),
    "vdm": lambda target: (own_state(one_layer_model(target)), {}),
    "eagle": lambda target: (Eagle(target).state_dict(), {}),
    "self-sd": lambda target: ({}, {"attention": [0], "mlp": [1]}),
    "space": lambda target: ({"mask": torch.zeros(int(target.config.hidden_size)).double()}, {"masks": 3}),
}


def test_every_drafter_is_here() -> None:
    assert PAIRS.keys() == DRAFTERS.keys()
    assert FILES.keys() == {name for name, kind in DRAFTERS.items() if kind.origin == "file"}
    for name, make in PAIRS.items():
        assert type(make().drafter) is DRAFTERS[name]


def policies_for(pair: Pair) -> list[Policy]:
    return [*CHAINS, *(TREES if pair.drafter.trees else [])]


@cache
@torch.inference_mode()
def own_output(kind: str, mode: str) -> list[list[int]]:
    """The target's own, without a cache and without the loop."""
    outputs = []
    for sequence, prompt in enumerate(PROMPTS):
        tokens = list(prompt.tokens)
        for position in range(TOKENS):
            logits = PAIRS[kind]().target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
            tokens.append(int(CHOICES[mode].tokens(logits, sequence, position)))
        outputs.append(tokens[len(prompt.tokens) :])
    return outputs


@kinds
@modes
def test_the_output_is_the_targets_own_and_replay_repeats_every_round(kind: str, mode: str) -> None:
    pair, sampler = PAIRS[kind](), CHOICES[mode]
    nodes = WHOLE_TREE if pair.drafter.trees else 0
    trace = record(pair, PROMPTS, RecordSettings(DEPTH, TOKENS, sampler, tree_nodes=nodes, tree_width=WIDTH))
    assert trace.meta["drafter_kind"] == pair.drafter.name and trace.meta["drafter_facts"] == pair.drafter.facts
    for policy in policies_for(pair):
        decoder = Decoder(*pair.make_drafter(), (), sampler)
        runs = [
            decoder.decode(prompt.tokens, TOKENS, policy, sequence=sequence, seed=9)
            for sequence, prompt in enumerate(PROMPTS)
        ]
        assert [run.tokens for run in runs] == own_output(kind, mode)
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), seed=9, log=True)
        assert replayed.truncated is None or not replayed.truncated.any()
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0


def drafts_of(pair: Pair, prompt: list[int], tokens: int, policy: Policy) -> tuple[list[int], list[tuple[int, Draft]]]:
    """The greedy output, and of each round its position and what was drafted."""
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    propose, drafts = decoder.drafter.propose, list[Draft]()

    def watched(*arguments: Any) -> Draft:
        drafts.append(propose(*arguments))
        return drafts[-1]

    decoder.drafter.propose = watched  # type: ignore[method-assign]
    run = decoder.decode(prompt, tokens, policy)
    return run.tokens, [*zip((r.t for r in run.rounds), drafts, strict=False)]


@kinds
def test_after_every_round_it_drafts_as_after_a_fresh_prefill(kind: str) -> None:
    """Whatever earlier rounds left in its caches and the target's."""
    pair, policy = PAIRS[kind](), CHAINS[0]
    for prompt in PROMPTS:
        output, rounds = drafts_of(pair, prompt.tokens, TOKENS, policy)
        assert len(rounds) > 2
        for t, draft in rounds[1:]:
            _, [(_, fresh), *_] = drafts_of(pair, [*prompt.tokens, *output[:t]], DEPTH + 1, policy)
            count = len(draft.tokens)
            assert fresh.tokens[:count] == draft.tokens
            for own, theirs in zip(fresh.steps, draft.steps, strict=False):
                assert own == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@kinds
def test_rejection_sampling_is_recorded_or_refused_in_one_line(kind: str) -> None:
    pair = PAIRS[kind]()
    if kind not in ("self-sd", "edd", "eagle", "prompt-lookup"):
        trace = record(pair, PROMPTS, RecordSettings(DEPTH, 6, Sampler("rejection", 0.8, seed=2)))
        assert trace.approximate and (trace.accept_prob > 0).any()
        return
    with pytest.raises(InputError, match="in greedy and Gumbel mode only; choose one of them$") as caught:
        pair.make_recorder(Sampler("rejection"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", FILES)
def test_it_survives_its_file(kind: str, tmp_path: Path) -> None:
    """What the file held is what the drafter has, in the target's type, and the given target is as it was."""
    target = target_of()
    tensors, facts = FILES[kind](target)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (value + 0.02 * torch.randn(value.shape, generator=generator, dtype=value.dtype)).detach()
        for name, value in tensors.items()
    }
    before = {name: value.clone() for name, value in target.state_dict().items()}
    path = save_drafter(tmp_path, kind, tensors, {"target": describe_target(target, "tiny"), **facts})
    for place in (path, tmp_path):
        its_target, drafter = load_drafter(place, target)
        assert type(drafter) is DRAFTERS[kind]
        modules = [its_target, *drafter.weights(its_target)]
        assert not any(module.training for module in modules)
        held = [value for module in modules for value in module.state_dict().values()]
        for value in tensors.values():
            assert any(torch.equal(value, one) or (one.ndim == 2 and torch.equal(value, one[-1])) for one in held)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in before.items())
    pair = replace(tiny_pair(), target=its_target, drafter=drafter)
    prompt, plain = PROMPTS[1].tokens, Decoder(*pair.make_drafter(), (), Sampler())
    assert plain.decode(prompt, 8, CHAINS[0]).tokens == plain.decode(prompt, 8, None).tokens


@pytest.mark.parametrize("kind", FILES)
def test_another_target_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    target = target_of()
    tensors, facts = FILES[kind](target)
    path = save_drafter(tmp_path, kind, tensors, {"target": describe_target(target, "tiny"), **facts})
    changed = target_of()
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight[0, 0] += 1.0
    for other, says in ((changed, "weights"), (target_of(layers=2), "layers 3")):
        with pytest.raises(
            InputError, match=f"was trained on tiny with {says}.*train one with `realrun train"
        ) as caught:
            load_drafter(path, other)
        assert "\n" not in str(caught.value)
