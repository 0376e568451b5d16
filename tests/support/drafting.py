"""Pairs of every drafter over several architectures, and their rounds, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.edd import VDMKind
from realrun.drafters.eesd import EarlyExit, EESDKind, as_model
from realrun.drafters.lookup import LookupKind
from realrun.drafters.self_sd import SelfSDKind
from realrun.lm.variants import SkippedSublayers
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.policy.base import Policy
from tests.support.mtp import mtp_pair
from tests.support.pairs.medusa import medusa_pair
from tests.support.pairs.space import space_pair, word_prompts
from tests.support.pairs.state import PROMPTS, state_pair
from tests.support.small_targets import small_target
from tests.support.split_targets import target_of
from tests.support.tiny import random_predictor, tiny_pair, tiny_prompts, tiny_tokenizer


@cache
@torch.inference_mode(False)
@torch.no_grad()
def exit_of(target: Any, split: int, exit_layers: int) -> EarlyExit:
    """It differs from the layers, norm and head that it started as."""
    torch.manual_seed(5)
    early_exit = EarlyExit(target, split, exit_layers).eval().requires_grad_(False)
    for parameter in early_exit.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    early_exit.head.weight *= 3.0  # surer of itself, so that policies which read probabilities draft on
    return early_exit


@cache
def eesd_pair(name: str, split: int, exit_layers: int) -> Pair:
    target = target_of(name)
    draft = as_model(target, exit_of(target, split, exit_layers))
    return Pair(target, EESDKind(draft, split), tiny_tokenizer(), name, "early exit", ())


TOKENS = 24
SKIPS = SkippedSublayers(frozenset({2}), frozenset({2}))


class Case(NamedTuple):
    """A drafter over a target; of EESD's, after `split` layers and with layers of its own."""

    kind: str
    target: str = "llama"
    split: int = 1
    exit_layers: int = 1

    def __str__(self) -> str:
        shape = f"-N{self.split}-E{self.exit_layers}" if self.kind == "eesd" else ""
        return f"{self.kind}-{self.target}{shape}"


@cache
def self_sd_pair(architecture: str = "llama", skips: SkippedSublayers = SKIPS) -> Pair:
    """A random target whose draft agrees with it about as often as not."""
    target = small_target(architecture, layers=4)
    return Pair(target, SelfSDKind(skips), tiny_tokenizer(), "tiny/target", "tiny/self-sd", ())


def pair_without_scores(case: Case) -> Pair:
    match case.kind:
        case "eesd":
            return eesd_pair(case.target, case.split, case.exit_layers)
        case "self-sd":
            return self_sd_pair(case.target)
        case "medusa":
            return medusa_pair(case.target)
        case "edd" | "eagle" | "eagle-vllm" | "eagle3" | "block":
            return state_pair(case.kind, case.target)
        case "vdm":
            return replace(tiny_pair(), drafter=VDMKind(tiny_pair().drafter.model))
        case "space":
            return space_pair()
        case "mtp":
            return mtp_pair()
        case "prompt-lookup":
            return replace(tiny_pair(), drafter=LookupKind())
    return tiny_pair()


@cache
def case_pair(case: Case) -> Pair:
    """With random scores where the drafter has states to make them of."""
    pair = pair_without_scores(case)
    return replace(pair, predictor=random_predictor(pair)) if pair.drafter.has_states else pair


def prompts_of(kind: str) -> list[Prompt]:
    """Prompts after which this kind's drafters are right at times; if possible, a prompt is a single token."""
    match kind:
        case "medusa":
            return tiny_prompts()[:3]
        case "space":
            return word_prompts()[:4]
        case "prompt-lookup":  # greedy decoding of the tiny target ends in loops
            return [Prompt("one", [17]), *tiny_prompts(2), *(Prompt("all", [7, 8, 9, 5] * k) for k in (2, 3))]
    return PROMPTS[:3]


@cache
@torch.inference_mode()
def own_output(case: Case, prompt: tuple[int, ...], sampler: Sampler, sequence: int, count: int = TOKENS) -> list[int]:
    """What the target says, without a cache and without the loop."""
    tokens, target = list(prompt), pair_without_scores(case).target
    for position in range(count):
        logits = target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(int(sampler.tokens(logits, sequence, position)))
    return tokens[len(prompt) :]


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
