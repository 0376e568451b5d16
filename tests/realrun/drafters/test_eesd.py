"""EESD's early exit: what it says, what it is made of, and how often it runs the layers that it shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.eesd import EarlyExit, as_model
from realrun.lm.split_target import SplitTarget
from realrun.pairs.pair import Pair
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from tests.support.drafting import Case, case_pair, rounds_of
from tests.support.small_targets import small_target
from tests.support.split_targets import LAYERS, NAMES, counted, target_of
from tests.support.tiny import random_prompts
from tests.support.tree_policies import CoinTree

DEPTH = 6
CHAINS = [
    *(make_policy("fixed_k", {"k": k}) for k in (1, 2, 4, DEPTH)),
    make_policy("adaedl", {"gamma": 0.2, "lambda0": 0.3, "dynamic": False, "max_draft_tokens": DEPTH}),
]
TREES = [
    make_policy("vct", {"width": 2, "depth": 4}),
    make_policy("eagle2", {"nodes": 8, "depth": 4, "top_k": 3}),
    CoinTree(),
]
EXITS = [(1, 0), (1, 1), (1, 2), (2, 1), (3, 1), (2, 2)]  # (N, E)
CASES = [
    *[("llama", *shape) for shape in EXITS],
    *[("qwen2-sdpa", *shape) for shape in EXITS[:2]],
    *[(name, 2, 1) for name in NAMES if name not in ("llama", "qwen2-sdpa")],
]
QUICK = [
    ("llama", 1, 1),
    ("llama", 2, 2),
    ("qwen2-sdpa", 1, 1),
    ("mistral-eager", 2, 1),
]  # the others are slow together
assert set(QUICK) <= set(CASES)
cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=[f"{name}-N{split}-E{exits}" for name, split, exits in CASES],
)


def pair_of(case: tuple[str, int, int]) -> Pair:
    return case_pair(Case("eesd", *case))


def decoder_of(case: tuple[str, int, int], sampler: Sampler) -> Decoder:
    return Decoder(*pair_of(case).make_drafter(), (), sampler)


@cases
def test_the_drafter_says_what_an_independent_model_of_its_layers_says(case: tuple[str, int, int]) -> None:
    pair, rounds = pair_of(case), 0
    (prompt,) = random_prompts(1, seed=3)
    loop = decoder_of(case, Sampler())
    with torch.inference_mode():
        before = list(prompt)
        for tokens, _, draft in rounds_of(loop, prompt, make_policy("fixed_k", {"k": 4}), 8):
            text = list(before)
            for token, step in zip(draft.tokens, draft.steps, strict=True):
                probs = pair.drafter.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].softmax(-1)
                assert int(probs.argmax()) == token
                assert step.prob == pytest.approx(float(probs.max()), abs=1e-6)
                text.append(token)
            before, rounds = list(tokens), rounds + 1
    assert rounds == 8


@cases
def test_verification_runs_only_the_upper_layers_for_what_was_drafted(
    case: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows through the projections of every layer, whoever runs it.

    In a chain of k tokens the drafter feeds the pending one and the first k - 1 drafted ones to the lower layers. So
    verification runs those for one token, the last drafted, in one call, and the upper layers for k + 1.
    """
    _, split, exit_layers = case
    lower, upper = range(split), range(split, LAYERS)
    own = range(LAYERS, LAYERS + exit_layers)
    pair = pair_of(case)
    (prompt,) = random_prompts(1, seed=9)
    drafted = set()
    with torch.inference_mode():
        for policy in CHAINS:
            loop = decoder_of(case, Sampler("gumbel", 0.8, seed=4))
            layers = [*pair.target.model.layers, *pair.drafter.model.model.layers[split:]]
            lacked = 0
            steps = rounds_of(loop, prompt, policy, 8)
            for _ in range(8):
                with counted(layers, monkeypatch) as whole, pytest.MonkeyPatch.context() as patch:
                    verified = Phase(loop.target, layers, patch)
                    _, round_, _ = next(steps)
                k = round_.drafted
                assert whole.of(lower) == {(k + 1, k + 1)}  # every token once
                assert whole.of(upper) == {(k + 1, 1)} == verified.rows.of(upper)
                assert verified.rows.of(lower) == {(1, 1)} and not verified.rows.rows.keys() & {(i, "mlp") for i in own}
                if exit_layers:
                    assert whole.of(own) == {(k + lacked, k)}
                lacked = int(round_.accepted == k)
                drafted.add(k)
    assert len(drafted) > 3


class Phase:
    """What layers do in a target's pass alone; `rows` is filled by its next one."""

    def __init__(self, target: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("forward", "forward_nodes"):
            monkeypatch.setattr(target, name, self.watched(getattr(target, name), layers, monkeypatch))

    def watched(self, forward: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
        def run(*arguments: Any) -> torch.Tensor:
            with counted(layers, monkeypatch) as self.rows:
                return forward(*arguments)  # type: ignore[no-any-return]

        return run


@cases
def test_verification_of_a_tree_runs_the_lower_layers_for_its_unexpanded_nodes_alone(
    case: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, split, exit_layers = case
    lower, upper, own = range(split), range(split, LAYERS), range(LAYERS, LAYERS + exit_layers)
    pair = pair_of(case)
    (prompt,) = random_prompts(1, seed=9)
    saved = 0
    with torch.inference_mode():
        for policy in TREES:
            loop = decoder_of(case, Sampler("gumbel", 0.8, seed=4))
            layers = [*pair.target.model.layers, *pair.drafter.model.model.layers[split:]]
            steps = rounds_of(loop, prompt, policy, 8)
            for _ in range(8):
                lacked = loop.target.length - loop.drafter.lm.length if loop.target.length else 0  # type: ignore[attr-defined]
                with counted(layers, monkeypatch) as whole, pytest.MonkeyPatch.context() as patch:
                    verified = Phase(loop.target, layers, patch)
                    _, round_, draft = next(steps)
                expanded = sum(draft.level_nodes)  # with the root
                slot = loop.drafter._grower.slot  # type: ignore[attr-defined]
                leaves = sum(slot[node] < 0 for node in draft.nodes) if draft.drafted else 0
                fed = max(expanded, 1)  # the root at least, by whom it may be
                assert sum(draft.level_nodes[1:]) + leaves >= round_.verified
                assert whole.rows[0, "mlp"] == fed + leaves
                assert {whole.rows[i, part] for i in lower for part in ("attention", "mlp")} == {fed + leaves}
                assert whole.of(upper) == {(round_.verified + 1, 1)} == verified.rows.of(upper)
                in_verification = leaves if expanded else 1
                assert verified.rows.of(lower) == {(in_verification, int(in_verification > 0))}
                if exit_layers:
                    assert {whole.rows[i, "mlp"] for i in own} == {expanded + lacked if expanded else 0}
                saved += round_.verified + 1 - in_verification
    assert saved > 50


@pytest.mark.parametrize("name", NAMES)
def test_the_baseline_passes_every_layer_once_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of((name, 1, 1))
    loop, layers = decoder_of((name, 1, 1), Sampler()), list(pair.target.model.layers)
    with torch.inference_mode():
        loop.target.prefill([5, 6])
        tokens: list[int] = [5, 6, 7]
        with counted(layers, monkeypatch) as rows:
            for t in range(9):
                loop.round(tokens, RoundContext(loop.sampler, 0, t, 0, 0), None, None, [])
    assert rows.of(range(LAYERS)) == {(9, 9)}


@pytest.mark.parametrize("exit_layers", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2-sdpa"])
def test_an_early_exit_starts_as_the_targets_last_layers(name: str, exit_layers: int) -> None:
    target = target_of(name)
    early_exit = EarlyExit(target, 2, exit_layers)
    last = target.model.layers[LAYERS - exit_layers :]
    for own, theirs in zip(
        (*early_exit.layers, early_exit.norm, early_exit.head),
        (*last, target.model.norm, target.get_output_embeddings()),
        strict=True,
    ):
        for a, b in zip(own.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    trained = sum(parameter.numel() for parameter in early_exit.parameters())
    layer = sum(parameter.numel() for parameter in target.model.layers[0].parameters())
    assert trained == exit_layers * layer + target.model.norm.weight.numel() + target.lm_head.weight.numel()


def test_an_early_exit_that_does_not_fit_is_refused() -> None:
    target = target_of("llama")
    for layers in (0, LAYERS, 9):
        with pytest.raises(InputError, match=f"^an early exit after {layers} of 4 layers; choose 1 to 3$"):
            EarlyExit(target, layers)
    for exit_layers in (-1, 2):
        with pytest.raises(InputError, match=f"^{exit_layers} early-exit layers; choose 0 to 1$"):
            EarlyExit(target, 3, exit_layers)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-sdpa"])
def test_as_a_model_it_shares_the_targets_weights_and_leaves_the_target_alone(name: str) -> None:
    target = small_target(name.partition("-")[0], layers=LAYERS)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        before, config = target(input_ids=ids).logits.clone(), target.config.to_dict()
        inner, layers = target.model, [*target.model.layers]
        early_exit = EarlyExit(target, 2, 2).eval()
        model: Any = as_model(target, early_exit)
        early_exit.norm.weight += 1.0
        early_exit.head.weight += 1.0
        early_exit.layers[0].mlp.down_proj.weight += 1.0
        for number in (0, 1):
            assert model.model.layers[number] is target.model.layers[number]
        assert model.model.embed_tokens is target.model.embed_tokens
        assert [*model.model.layers[2:]] == [*early_exit.layers] and model.lm_head is early_exit.head
        assert target.config.to_dict() == config and target.config is not model.config
        assert target.model is inner and [*target.model.layers] == layers
        assert torch.equal(target(input_ids=ids).logits, before)
    assert model.config.num_hidden_layers == 4 and model.config.tie_word_embeddings is False
    assert target.get_output_embeddings() is not model.get_output_embeddings()
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    own = sum(p.numel() for p in model.parameters() if p.data_ptr() not in shared)
    assert own == sum(parameter.numel() for parameter in early_exit.parameters())


def test_the_model_of_a_target_whose_weights_a_lean_pass_has_joined_owns_its_layers() -> None:
    """The fused pass makes the projections views of one matrix; copies of them must not be."""
    target = small_target("llama", layers=LAYERS)
    SplitTarget(target, 1)
    early_exit = EarlyExit(target, 1)
    theirs = {p.untyped_storage().data_ptr() for p in target.parameters()}
    assert not theirs & {p.untyped_storage().data_ptr() for p in early_exit.parameters()}
