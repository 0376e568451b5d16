"""What every drafter promises, over all of `DRAFTERS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.drafters.block import Block
from realrun.drafters.eagle import Eagle
from realrun.drafters.eagle3 import Eagle3, default_config
from realrun.drafters.edd import one_layer_model, own_state
from realrun.drafters.eesd import EarlyExit, EarlyExitLM
from realrun.drafters.medusa import MedusaHeads
from realrun.drafters.registry import DRAFTERS
from realrun.drafters.space import MaskedTarget
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama
from realrun.lm.split_target import SplitTarget
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.drafting import TOKENS, Case, case_pair, own_output, prompts_of, rounds_of
from tests.support.pairs.inside import target_of
from tests.support.pairs.state import BLOCKS, PROMPTS
from tests.support.small_targets import small_target
from tests.support.split_targets import NAMES, close_to, stacked
from tests.support.tiny import tiny_pair
from tests.support.tree_policies import CoinTree, KeepNone, Wide

DEPTH, WIDTH = 4, 3
WHOLE_TREE = sum(WIDTH**level for level in range(1, DEPTH + 1))
LIMIT = {"max_draft_tokens": DEPTH}
FIXED = ("fixed_k", {"k": DEPTH})
CHAINS: list[tuple[str, dict[str, Any]]] = [
    ("fixed_k", {"k": 1}),
    ("beta_ts", {"alpha0": 3.0, **LIMIT}),
    ("adaedl", {"gamma": 0.2, "lambda0": 0.3, "dynamic": False, **LIMIT}),
    ("adaedl", {"lambda0": 0.2, **LIMIT}),
    ("max_confidence", {"lambda0": 0.3, "target_rate": 0.4, "epsilon": 0.3, **LIMIT}),
    ("space_k", {"k": DEPTH}),
    ("cali_ts_confidence", {"slope": 0.7, "sigma_m": 0.3, **LIMIT}),
]
OF_TEN = [("llama_cpp", {"p_min": p_min, **LIMIT}) for p_min in (0.3, 0.5)]  # of what drafters know of ten tokens
SCORED = [("cali_ts", LIMIT), ("cali_ts", {"theta": "per_round", "sigma_m": 0.3, **LIMIT})]
TREES: list[tuple[str, dict[str, Any]]] = [  # of trees no wider than WIDTH
    ("vct", {"width": 2, "depth": DEPTH}),
    ("cartesian", {"s1": 3, "s2": 2, "s3": 2, "s4": 1}),
    ("sparse_tree", {"children": (3.0, 3.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)}),
    ("optimal_tree", {"children": (3.0, 2.0, 2.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)}),
    ("eagle2", {"nodes": 8, "depth": DEPTH, "top_k": WIDTH}),
    ("pct", {"cost_ratio": 0.1, "leaf_threshold": 0.05, "width": WIDTH, "max_depth": DEPTH}),
    ("cape", {"width_30": 3, "width_60": 2, "width_80": 2, "depth": DEPTH}),
    ("beta_ts_tree", {"alpha0": 3.0, "beam": 2, "width": WIDTH, "max_depth": DEPTH}),
]
SCORED_TREES: list[tuple[str, dict[str, Any]]] = [
    ("cali_ts_tree", {"theta": theta, "sigma_m": 0.3, "beam": 2, "width": WIDTH, "max_depth": DEPTH})
    for theta in ("per_token", "per_round")
]
VCT = make_policy(*TREES[0])

kinds = pytest.mark.parametrize("kind", DRAFTERS)
MODES = {
    "greedy": Sampler(),
    "gumbel": Sampler("gumbel", 0.8, seed=4),
    "greedy-draft": Sampler("greedy-draft", 0.3, seed=4),  # calm, because it accepts less than shared noise
}
# Calmer: a lookup needs texts that repeat themselves, a tiny early exit a target that is sure of its choice.
CALM = {"prompt-lookup": 0.25, "eesd": 0.3}

# Fused parts and the library's, early exits of several shapes.
QUICK = [
    *[Case(kind) for kind in DRAFTERS],
    *[Case("eesd", *shape) for shape in (("llama", 2, 2), ("qwen2-sdpa", 1, 1), ("mistral-eager", 2, 1))],
    *[Case(kind, target) for kind in ("medusa", "self-sd") for target in ("qwen2", "mistral")],
    Case("edd", "qwen2-sdpa"),
    Case("eagle", "qwen3"),
    Case("eagle3", "qwen2-sdpa"),
    Case("block", "qwen2-sdpa"),
]
SLOW = [
    *[Case("eesd", "llama", *shape) for shape in ((1, 0), (1, 2), (2, 1), (3, 1))],
    Case("eesd", "qwen2-sdpa", 1, 0),
    *[Case("eesd", target, 2, 1) for target in NAMES if target not in ("llama", "qwen2-sdpa", "mistral-eager")],
    *[Case("edd", target) for target in ("qwen3", "mistral-sdpa")],
    *[Case("eagle", target) for target in ("qwen2-sdpa", "mistral-sdpa")],
    *[Case("eagle3", target) for target in ("qwen3", "mistral-sdpa")],
    Case("block", "qwen3"),
]


def sampler_of(case: Case, mode: str) -> Sampler:
    sampler = MODES[mode]
    return replace(sampler, temperature=CALM.get(case.kind, sampler.temperature)) if mode != "greedy" else sampler


def modes_of(case: Case) -> list[str]:
    """Greedy drafts on one target a kind: the other tiny pairs seldom agree by them."""
    return [mode for mode in MODES if mode != "greedy-draft" or case == Case(case.kind)]


def policies_of(case: Case) -> list[Policy]:
    drafter = case_pair(case).drafter
    scored = [*OF_TEN, *SCORED] if drafter.has_states else []
    scored_trees = SCORED_TREES if drafter.has_states else []
    specs = [*CHAINS, *scored, *([*TREES, *scored_trees] if drafter.trees else [])]
    return [*(make_policy(*spec) for spec in specs), *([CoinTree()] if drafter.trees else [])]


def share_of(case: Case, mode: str) -> list[Policy]:
    """Of the quick cases of a kind, in all modes, each policy is tried in a single case."""
    together = [(quick, mode) for quick in QUICK if quick.kind == case.kind for mode in modes_of(quick)]
    return policies_of(case)[together.index((case, mode)) :: len(together)]


def covering(*, all_policies: bool = False) -> Any:
    """Quick cases in all modes, ending early in some of them; all else, and all policies, are slow."""
    pairs = [(case, mode) for case in QUICK for mode in modes_of(case)]
    chosen = [(case, mode, (number // 2 + number) % 2 == 1) for number, (case, mode) in enumerate(pairs)]
    every = [(case, mode, ends) for case in (*QUICK, *SLOW) for mode in modes_of(case) for ends in (False, True)]
    rest = every if all_policies else [values for values in every if values not in chosen]
    quick = [pytest.param(*values, *([False] if all_policies else [])) for values in chosen]
    slow = [pytest.param(*values, *([True] if all_policies else []), marks=pytest.mark.slow) for values in rest]
    names = ("case", "mode", "ends", *(["everything"] if all_policies else []))
    return pytest.mark.parametrize(names, [*quick, *slow], ids=str)


# Tensors and facts of a drafter file.
State = tuple[Mapping[str, torch.Tensor], dict[str, Any]]
FILES: dict[str, Callable[[Any], State]] = {
    "eesd": lambda target: (EarlyExit(target, 1).state_dict(), {"layers": 1, "exit_layers": 1}),
    "medusa": lambda target: (MedusaHeads(target, 3).state_dict(), {"heads": 3}),
    "edd": lambda target: (own_state(one_layer_model(target)), {"states_after": 1}),
    "vdm": lambda target: (own_state(one_layer_model(target)), {}),
    "eagle": lambda target: (Eagle(target).state_dict(), {}),
    "eagle3": lambda target: (Eagle3(target).state_dict(), {"config": dict(default_config(target))}),
    "block": lambda target: (Block(target, BLOCKS["llama"]).state_dict(), {"config": BLOCKS["llama"]}),
    "self-sd": lambda target: ({}, {"attention": [0], "mlp": [1]}),
    "space": lambda target: ({"mask": torch.zeros(int(target.config.hidden_size)).double()}, {"masks": 3}),
}


def test_every_drafter_is_here() -> None:
    assert {case.kind for case in QUICK} == DRAFTERS.keys()
    assert FILES.keys() == {name for name, kind in DRAFTERS.items() if kind.origin == "file"}
    for kind in DRAFTERS:
        tried = [
            policy for case in QUICK if case.kind == kind for mode in modes_of(case) for policy in share_of(case, mode)
        ]
        assert len(tried) == len(policies_of(Case(kind))) and all(policy in tried for policy in policies_of(Case(kind)))


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_a_case_is_of_its_kind(case: Case) -> None:
    assert type(case_pair(case).drafter) is DRAFTERS[case.kind]


def outputs_of(case: Case, mode: str, ends: bool) -> tuple[tuple[int, ...], list[list[int]]]:
    """Tokens that end a text, and the target's own outputs, up to these."""
    sampler, prompts = sampler_of(case, mode), prompts_of(case.kind)
    outputs = [own_output(case, tuple(prompt.tokens), sampler, number) for number, prompt in enumerate(prompts)]
    eos: tuple[int, ...] = ()
    if ends:  # with a token that is drafted and accepted where it first stands, or else drafted up to there
        _, trace = recorded(case, mode, False)
        first = [
            (at, at + t, text[t])
            for at, text in zip(trace.offsets.tolist(), outputs, strict=False)
            for t in range(1, TOKENS - 1)
            if text[t] not in text[:t]
        ]
        drafted = [token for _, row, token in first if trace.match_len[row]]
        drafted = drafted or [token for at, row, token in first if (trace.draft_token[at : row + 1] == token).any()]
        eos = (drafted[len(drafted) // 2] if drafted else outputs[1][11],)
    counts = [min([i + 1 for i, token in enumerate(text) if token in eos], default=TOKENS) for text in outputs]
    return eos, [text[:count] for text, count in zip(outputs, counts, strict=True)]


@cache
def recorded(case: Case, mode: str, ends: bool) -> tuple[Pair, Trace]:
    """With whole trees, of every drafter that drafts any; no policy leaves them."""
    sampler, prompts = sampler_of(case, mode), prompts_of(case.kind)
    eos, outputs = outputs_of(case, mode, ends)
    pair = replace(case_pair(case), eos_token_ids=eos)
    nodes = WHOLE_TREE if pair.drafter.trees else 0
    trace = record(pair, prompts, RecordSettings(DEPTH, TOKENS, sampler, nodes, WIDTH))
    assert trace.meta["drafter_kind"] == pair.drafter.name and trace.meta["drafter_facts"] == pair.drafter.facts
    texts = [text.tolist() for text in np.split(trace.token, trace.offsets[1:-1])]
    assert texts == outputs
    assert (trace.output_tokens < TOKENS).any() == ends
    if ends:  # drafts end with it, too; those of a lookup repeat what stood before
        assert case.kind == "prompt-lookup" or np.isin(trace.draft_token, pair.eos_token_ids).any()
    else:  # a pair that always or never agrees would prove little
        assert 0.05 < (trace.match_len > 0).mean() < 0.95 and (trace.match_len > 1).sum() > 5
    return pair, trace


@covering(all_policies=True)
def test_the_output_is_the_targets_own_and_replay_repeats_every_round(
    case: Case, mode: str, ends: bool, everything: bool
) -> None:
    pair, trace = recorded(case, mode, ends)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler_of(case, mode))
    accepted, beside = Counter[int](), 0
    for policy in [make_policy(*FIXED), *(policies_of(case) if everything else share_of(case, mode))]:
        table = cost_table(trace, ConstantCost(1e-3, 1e-2), policy)
        replayed = replay(trace, policy, table, seed=9, log=True)
        runs, state = list[Decoded](), None
        for sequence, prompt in enumerate(prompts_of(case.kind)):
            runs.append(decoder.decode(prompt.tokens, TOKENS, policy, sequence=sequence, seed=9, state=state))
            state = runs[-1].state
        assert replayed.truncated is None or not replayed.truncated.any(), policy
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0, policy
        assert replayed.rounds is not None and len(replayed.rounds) == sum(len(run.rounds) for run in runs)
        accepted.update(round_.accepted for run in runs for round_ in run.rounds)
        beside += sum(round_.accepted == 1 < round_.last for run in runs for round_ in run.rounds)
    assert ends or (accepted[0] and accepted[1])
    assert beside or not (everything and pair.drafter.trees) or ends


@covering()
def test_decoding_ends_with_the_budget_or_the_end_of_text(case: Case, mode: str, ends: bool) -> None:
    """Above the draft length and below it, and at once."""
    sampler, pair = sampler_of(case, mode), case_pair(case)
    number, prompt = 1, prompts_of(case.kind)[1].tokens
    plain = own_output(case, tuple(prompt), sampler, number)
    for policy in (make_policy(*FIXED), *([VCT, KeepNone(2), Wide(0)] if pair.drafter.trees else []), None):
        for eos in ((plain[0],), (plain[11],)) if ends else ((),):
            decoder = Decoder(*replace(pair, eos_token_ids=eos).make_drafter(), eos, sampler)
            for budget in (TOKENS, 1, 3):
                count = min([plain.index(token) + 1 for token in eos], default=TOKENS)
                decoded = decoder.decode(prompt, budget, policy, sequence=number)
                assert decoded.tokens == plain[: min(budget, count)], policy


def layers_of(lm: CachedLM, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [Hkv, length, D] of every layer that this pass has a cache of."""
    if isinstance(lm, MaskedTarget):
        return layers_of(lm.inner, length)
    if isinstance(lm, SplitTarget):
        return [*stacked(lm.lower, length), *stacked(lm.upper, length)]
    if isinstance(lm, EarlyExitLM):
        return stacked(lm.exit, length)
    if isinstance(lm, StateDrafterLM):
        return stacked(lm.stack, length - lm.shift)
    if isinstance(lm, FusedLlama):
        return [(keys[:, :length], values[:, :length]) for keys, values in zip(lm.keys, lm.values, strict=True)]
    if type(lm) is CachedLM:
        return [(layer.keys[0, :, :length], layer.values[0, :, :length]) for layer in lm.cache.layers]
    return []  # Self-SD's has the target's; others have none


def library_layers(model: Any, tokens: list[int], **asked: bool) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Any]:
    """The same by the library alone, and what else was asked for."""
    cache = DynamicCache()
    output = model(input_ids=torch.tensor([tokens]), past_key_values=cache, **asked)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers], output


def fresh_layers(pair: Pair, lm: CachedLM, context: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the drafter's own layers hold after these tokens, by the library where it has such a model."""
    if isinstance(lm, StateDrafterLM):
        target, drafter = pair.make_drafter()
        target.prefill(context)
        drafter.lm.prefill(context[: lm.state_rows])
        return layers_of(drafter.lm, lm.state_rows)
    model = getattr(pair.drafter, "model", getattr(pair.drafter, "decoder", None))
    own = len(layers_of(lm, lm.length))
    return library_layers(model, context[: lm.length])[0][-own:] if own else []


@covering()
@torch.inference_mode()
def test_after_every_round_the_caches_equal_a_fresh_prefill(case: Case, mode: str, ends: bool) -> None:
    """Keys and values of all layers, the target's and the drafter's own; also where drafters share the states."""
    pair, prompt = case_pair(case), prompts_of(case.kind)[2].tokens
    close = close_to(case.target)
    rejected, lacking = 0, set()
    trees = [VCT, CoinTree(), KeepNone(2)] if pair.drafter.trees else []
    for policy in (make_policy(*FIXED), *trees):
        loop = Decoder(*pair.make_drafter(), (), sampler_of(case, mode))
        target, lm = loop.target, getattr(loop.drafter, "lm", None)
        for tokens, done, draft in rounds_of(loop, prompt, policy, 6):
            context = tokens[:-1]
            assert target.length == len(context) and target.nodes == 0
            assert len(draft.step_s) == (len(draft.level_nodes) if policy in trees else len(draft.tokens))
            expected, output = library_layers(pair.target, context, output_hidden_states=True)
            held = [*zip(layers_of(target, len(context)), expected, strict=True)]
            if isinstance(target, SplitTarget):
                assert not target.ahead and not target.nodes_ahead
                states = target.states[: len(context)].chunk(len(target.splits), dim=1)
                for own, split in zip(states, target.splits, strict=True):
                    own = target.norm(own) if split == len(expected) else own  # the library's last are normed
                    torch.testing.assert_close(own, output.hidden_states[split][0], **close)
            if lm is not None and lm is not target and lm.length:
                assert lm.nodes == 0
                lacking.add(len(context) - lm.length)
                held += zip(layers_of(lm, lm.length), fresh_layers(pair, lm, context), strict=True)
            for own, other in held:
                torch.testing.assert_close(own, other, **close)
            rejected += done.accepted < done.drafted
    assert rejected > (3 if trees else 0)
    if case.kind in ("model", "eesd", "vdm"):
        assert lacking >= {0, 1}  # what the drafter never fed, and was accepted, its layers lack


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


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_after_every_round_it_drafts_as_after_a_fresh_prefill(case: Case) -> None:
    """Whatever earlier rounds left in its caches and the target's."""
    pair, policy = case_pair(case), make_policy(*FIXED)
    for prompt in prompts_of(case.kind):
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
    pair = case_pair(Case(kind))
    if kind != "prompt-lookup":
        trace = record(pair, prompts_of(kind), RecordSettings(DEPTH, 6, Sampler("rejection", 0.8, seed=2)))
        assert trace.sampled_by_rejection and (trace.text_accept > 0).any()
        return
    with pytest.raises(
        InputError, match="is not recorded in rejection mode; --mode greedy-draft accepts the same drafts$"
    ) as caught:
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
            assert any(torch.equal(value, own) or (own.ndim == 2 and torch.equal(value, own[-1])) for own in held)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in before.items())
    pair = replace(tiny_pair(), target=its_target, drafter=drafter)
    prompt, plain = PROMPTS[1].tokens, Decoder(*pair.make_drafter(), (), Sampler())
    assert plain.decode(prompt, 8, make_policy("fixed_k", {"k": 3})).tokens == plain.decode(prompt, 8, None).tokens


@pytest.mark.parametrize("kind", FILES)
def test_another_target_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    target = target_of()
    tensors, facts = FILES[kind](target)
    path = save_drafter(tmp_path, kind, tensors, {"target": describe_target(target, "tiny"), **facts})
    changed = target_of()
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight[0, 0] += 1.0
    wide = target_of()
    wide.config.vocab_size += 1
    cases = [
        (changed, "weights"),
        (target_of(layers=2), "layers 3, this target has 2"),
        (small_target("qwen3"), "the architecture LlamaForCausalLM, this target has Qwen3ForCausalLM"),
        (wide, "the vocabulary size 97, this target has 98"),
    ]
    for other, says in cases:
        with pytest.raises(
            InputError, match=f"was trained on tiny with {says}.*train a drafter with `realrun train"
        ) as caught:
            load_drafter(path, other)
        assert "\n" not in str(caught.value)
