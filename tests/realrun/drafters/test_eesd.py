"""EESD's early exit: loss-free, sharing the target's lower layers, replayed round for round, kept on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.rounds import Decoded, Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.eesd import EarlyExit, EarlyExitDrafter, EarlyExitLM, EESDKind, as_model
from realrun.lm.cached import CachedLM
from realrun.lm.split_target import SplitTarget
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
from specsim.trace.trace import Trace
from tests.realrun.decode.test_tree_decode import CoinTree, KeepNone, Wide
from tests.realrun.drafters.test_predictor import random_predictor
from tests.support.small_targets import small_target
from tests.support.split_targets import LAYERS, NAMES, close_to, counted, stacked, target_of
from tests.support.tiny import random_prompts, tiny_prompts, tiny_tokenizer

DEPTH, TOKENS = 6, 24
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
CHAINS: list[tuple[str, dict[str, Any]]] = [
    ("fixed_k", {"k": 1}),
    ("fixed_k", {"k": 4}),
    ("beta_ts", {"alpha0": 3.0, "max_draft_tokens": DEPTH}),
    ("cali_ts", {"max_draft_tokens": DEPTH}),
    ("adaedl", {"gamma": 0.2, "lambda0": 0.3, "dynamic": False, "max_draft_tokens": DEPTH}),
    ("max_confidence", {"lambda0": 0.3, "target_rate": 0.4, "epsilon": 0.3, "max_draft_tokens": DEPTH}),
]
TREES: list[tuple[str, dict[str, Any]]] = [
    ("vct", {"width": 2, "depth": 4}),
    ("cartesian", {"s1": 4, "s2": 2, "s3": 1, "s4": 1}),
    ("sparse_tree", {"children": (4.0, 3.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)}),
    ("eagle2", {"nodes": 8, "depth": 4, "top_k": 3}),
    ("pct", {"cost_ratio": 0.1, "leaf_threshold": 0.05, "width": 4, "max_depth": DEPTH}),
    ("cape", {"width_30": 5, "width_60": 3, "width_80": 2, "depth": 4}),
    ("beta_ts_tree", {"alpha0": 3.0, "beam": 2, "width": 3, "max_depth": 3}),
]
ARMS = [make_policy(*spec) for spec in (*CHAINS, *TREES)]
EXITS = [(1, 0), (1, 1), (1, 2), (2, 1), (3, 1), (2, 2)]  # (N, E)
CASES = [
    *[("llama", *shape) for shape in EXITS],
    *[("qwen2-sdpa", *shape) for shape in EXITS[:2]],
    *[(name, 2, 1) for name in NAMES if name not in ("llama", "qwen2-sdpa")],
]
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES)
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
arms = pytest.mark.parametrize("policy", ARMS, ids=str)


@cache
def exit_of(target: Any, split: int, exit_layers: int) -> EarlyExit:
    """One that has learned something: it differs from the layers, norm and head that it started as."""
    torch.manual_seed(5)
    early_exit = EarlyExit(target, split, exit_layers).eval().requires_grad_(False)
    for parameter in early_exit.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    early_exit.head.weight *= 3.0  # surer of itself, so that policies which read probabilities draft on
    return early_exit


@cache
def pair_of(case: tuple[str, int, int], eos: tuple[int, ...] = ()) -> Pair:
    name, split, exit_layers = case
    target = target_of(name)
    draft = as_model(target, exit_of(target, split, exit_layers))
    pair = Pair(target, EESDKind(draft, split), tiny_tokenizer(), name, "early exit", eos)
    return replace(pair, predictor=random_predictor(pair))


@cache
@torch.inference_mode()
def plain_output(name: str, prompt: tuple[int, ...], sampler: Sampler, sequence: int) -> list[int]:
    """The target alone, without a cache and without the loop under test."""
    tokens = list(prompt)
    for position in range(TOKENS):
        logits = target_of(name)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(int(sampler.tokens(logits, sequence, position)))
    return tokens[len(prompt) :]


def decoder_of(case: tuple[str, int, int], sampler: Sampler, eos: tuple[int, ...] = ()) -> Decoder:
    return Decoder(*pair_of(case, eos).make_drafter(), eos, sampler)


@mode
@cases
def test_output_is_the_targets_own(sampler: Sampler, case: tuple[str, int, int]) -> None:
    loop = decoder_of(case, sampler)
    for policy in (*ARMS, CoinTree(), KeepNone(2), Wide(0), None):
        for sequence, prompt in enumerate(random_prompts(2, seed=1)):
            expected = plain_output(case[0], tuple(prompt), sampler, sequence)
            budget = (TOKENS, 3)[sequence]  # above the draft length, and below
            decoded = loop.decode(prompt, budget, policy, sequence=sequence)
            assert decoded.tokens == expected[:budget], policy


@mode
@cases
@pytest.mark.parametrize("place", [0, 11])
def test_decoding_ends_with_the_end_of_text(sampler: Sampler, case: tuple[str, int, int], place: int) -> None:
    (prompt,) = random_prompts(1, seed=5)
    plain = plain_output(case[0], tuple(prompt), sampler, 0)
    eos = (plain[place],)
    loop = decoder_of(case, sampler, eos)
    for policy in ARMS:
        decoded = loop.decode(prompt, TOKENS, policy)
        assert decoded.tokens == plain[: plain.index(eos[0]) + 1], policy


def test_drafts_are_accepted_and_rejected_on_these_pairs() -> None:
    """Else the claims here would say little: each kind of policy, each target, and beside the chain of a tree."""
    chain, tree = make_policy("fixed_k", {"k": 4}), make_policy("vct", {"width": 2, "depth": 4})
    off_chain = 0
    for case in CASES:
        for sampler in CHOICES.values():
            loop = decoder_of(case, sampler)
            for policy in (chain, tree):
                runs = [loop.decode(p, TOKENS, policy, sequence=s) for s, p in enumerate(random_prompts(4, seed=1))]
                rounds = [r for run in runs for r in run.rounds]
                accepted = {r.accepted for r in rounds}
                assert 0 in accepted and len(accepted) > 2, case
                off_chain += len({r.last for r in rounds} - {0, 1, 3, 7, 15})
    assert off_chain > 3 * len(CASES)


def rounds_of(loop: Decoder, prompt: Sequence[int], policy: Policy, count: int) -> Iterator[tuple[Any, Round, Draft]]:
    """Prefill now, then run round by round: the tokens after each, the round, and what was drafted."""
    drafter = loop.drafter
    tokens, rounds = list(prompt), list[Round]()
    loop._prepare(len(prompt) + 60, 60, policy, 0)
    loop.target.reset()
    loop.target.prefill(tokens[:-1])
    drafter.begin(tokens[:-1], loop.produced_by(-1))

    def run() -> Iterator[tuple[Any, Round, Draft]]:
        state = policy.initial_state(policy.params)
        for _ in range(count):
            t = len(tokens) - len(prompt)
            state, draft = loop.round(
                tokens, RoundContext(loop.sampler, 0, t, policy.max_draft_tokens, 5), policy, state, rounds
            )
            yield tokens, rounds[-1], draft

    return run()


@mode
@cases
def test_after_every_round_the_shared_cache_equals_a_fresh_prefill(
    sampler: Sampler, case: tuple[str, int, int]
) -> None:
    """Keys, values and states of the first N layers, keys and values of the others, and the exit layer's own."""
    name, split, exit_layers = case
    close, pair = close_to(name), pair_of(case)
    (prompt,) = random_prompts(1, seed=9)
    lacking = set()
    with torch.inference_mode():
        for policy in (*ARMS, CoinTree(), KeepNone(2)):
            loop = decoder_of(case, sampler)
            target, drafter = loop.target, loop.drafter
            assert isinstance(target, SplitTarget) and isinstance(drafter, EarlyExitDrafter)
            for tokens, *_ in rounds_of(loop, prompt, policy, 8):
                length = len(tokens) - 1
                assert target.length == length and not target.ahead and not target.nodes_ahead
                assert target.nodes == drafter.lm.nodes == 0
                fresh = CachedLM(pair.target)
                logits = pair.target(
                    input_ids=torch.tensor([tokens[:length]]), past_key_values=fresh.cache, output_hidden_states=True
                )
                torch.testing.assert_close(target.states[:length], logits.hidden_states[split][0], **close)
                held = [*stacked(target.lower, length), *stacked(target.upper, length)]
                assert len(held) == LAYERS
                for (keys, values), layer in zip(held, fresh.cache.layers, strict=True):
                    torch.testing.assert_close(keys, layer.keys[0], **close)
                    torch.testing.assert_close(values, layer.values[0], **close)
                lm = drafter.lm
                assert isinstance(lm, EarlyExitLM)
                lacking.add(length - lm.length)
                alone = CachedLM(pair.drafter.model)
                alone.prefill(tokens[: lm.length])
                own = stacked(lm.exit, lm.length)
                assert len(own) == exit_layers
                for (keys, values), layer in zip(own, alone.cache.layers[split:], strict=True):
                    torch.testing.assert_close(keys, layer.keys[0], **close)
                    torch.testing.assert_close(values, layer.values[0], **close)
    assert lacking >= {0, 1}  # what the drafter never fed, and was accepted, its exit layer lacks


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
        for policy in (*ARMS[:6], make_policy("fixed_k", {"k": DEPTH})):
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
        for policy in (*ARMS[6:], CoinTree()):
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


@cache
def recorded(
    case: tuple[str, int, int], sampler: Sampler, eos_from_output: bool
) -> tuple[Pair, Sequence[Prompt], Trace]:
    prompts, eos = tiny_prompts(3, seed=7), ()
    if eos_from_output:
        plain = [plain_output(case[0], tuple(p.tokens), sampler, s) for s, p in enumerate(prompts)]
        eos = tuple({output[2 + 4 * s] for s, output in enumerate(plain)})
    pair = pair_of(case, eos)
    return pair, prompts, record(pair, prompts, RecordSettings(DEPTH, TOKENS, sampler, 500, 6))


@mode
@cases
@pytest.mark.parametrize("eos_from_output", [False, True])
def test_replay_repeats_every_real_round(sampler: Sampler, case: tuple[str, int, int], eos_from_output: bool) -> None:
    pair, prompts, trace = recorded(case, sampler, eos_from_output)
    assert (trace.output_tokens < TOKENS).any() == eos_from_output
    assert trace.meta["drafter_kind"] == "eesd"
    check_replay(pair, prompts, trace, [*ARMS, CoinTree(0.1)])


def check_replay(pair: Pair, prompts: Sequence[Prompt], trace: Trace, policies: Sequence[Policy]) -> None:
    sampler = Sampler(**trace.meta["decoding"])
    loop = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    seen: Counter[int] = Counter()
    for policy in policies:
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), seed=9, log=True)
        runs, state = list[Decoded](), None
        for index, prompt in enumerate(prompts):
            budget = int(trace.budget_tokens[index])
            runs.append(loop.decode(prompt.tokens, budget, policy, sequence=index, seed=9, state=state))
            state = runs[-1].state
        assert replayed.truncated is None or not replayed.truncated.any(), policy
        assert rounds_identical(replayed, runs) == 1.0, policy
        assert replayed.rounds is not None and len(replayed.rounds) == sum(len(run.rounds) for run in runs)
        assert output_identical(trace, runs) == 1.0, policy
        seen.update(r.accepted for run in runs for r in run.rounds)
    assert seen[0] and seen[1]


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


def save(folder: Path, target: Any, split: int, exit_layers: int, changes: Any = ()) -> Path:
    facts = {"target": describe_target(target, "tiny/target"), "layers": split, "exit_layers": exit_layers}
    facts.update(changes)
    return save_drafter(folder, "eesd", exit_of(target, split, exit_layers).state_dict(), facts)


@pytest.mark.parametrize("case", [("llama", 1, 0), ("qwen2-sdpa", 2, 1), ("mistral-eager", 1, 2)], ids=str)
def test_a_drafter_survives_its_file(case: tuple[str, int, int], tmp_path: Path) -> None:
    name, split, exit_layers = case
    target, draft = target_of(name), pair_of(case).drafter.model
    path = save(tmp_path / "drafter", target, split, exit_layers)
    for place in (path, path.parent):
        its_target, loaded = load_drafter(place, target)
        assert isinstance(loaded, EESDKind) and loaded.split == split and its_target is target
        assert not loaded.model.training
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        with torch.inference_mode():
            assert torch.equal(loaded.model(input_ids=ids).logits, draft(input_ids=ids).logits)
    tensors = load_file(path)
    assert sum(t.numel() for t in tensors.values()) == sum(
        p.numel() for p in exit_of(target, split, exit_layers).parameters()
    )


def refused(path: Path, target: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_drafter(path, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_of_another_target_are_refused(tmp_path: Path) -> None:
    target = small_target("llama", layers=LAYERS)
    path = save(tmp_path, target, 2, 1)
    again = "train one with `realrun train eesd`"
    for other, what in (
        (small_target("qwen3", layers=LAYERS), "the architecture LlamaForCausalLM, this target has Qwen3ForCausalLM"),
        (small_target("llama", layers=5), "layers 4, this target has 5"),
    ):
        message = refused(path, other)
        assert "was trained on tiny/target with " + what in message and again in message
    wide = small_target("llama", layers=LAYERS)
    wide.config.vocab_size = 98
    assert "the vocabulary size 97, this target has 98" in refused(path, wide)
    changed = small_target("llama", layers=LAYERS)
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight[0, 0] += 1.0
    message = refused(path, changed)
    assert "was trained on tiny/target with weights " in message and again in message


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    target = target_of("llama")
    assert "does not exist" in refused(tmp_path / "none", target)
    path = save(tmp_path / "whole", target, 2, 1)
    content = path.read_bytes()
    for place, damaged in enumerate((b"", content[:100], content[:-10], b"x" * 200)):
        file = tmp_path / f"{place}.safetensors"
        file.write_bytes(damaged)
        assert "is damaged" in refused(file, target)
    for number, changes in enumerate(({"exit_layers": 2}, {"layers": 4}, {"layers": "two"}, {"exit_layers": 0})):
        assert refused(save(tmp_path / f"{number}", target, 2, 1, changes), target)
    tensors = exit_of(target, 2, 1).state_dict()
    del tensors["norm.weight"]
    facts = {"target": describe_target(target, "t"), "layers": 2, "exit_layers": 1}
    assert "does not fit its target" in refused(save_drafter(tmp_path / "less", "eesd", tensors, facts), target)
    del facts["layers"]
    tensors = exit_of(target, 2, 1).state_dict()
    assert "does not fit its target" in refused(save_drafter(tmp_path / "mute", "eesd", tensors, facts), target)
