"""Several drafters over one target: rounds, and the drafter of each, are those of the replay of a joined trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numba as nb
import numpy as np
import numpy.typing as npt
import pytest

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.measure.record import RecordSettings, record
from realrun.pairs.joined import JoinedDrafter, join_pairs
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.joined import JoinedCost
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import SWITCH_POLICIES, make_policy
from specsim.policy.switch.base import SwitchPolicy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace, join_traces
from tests.support.checks import refusal
from tests.support.drafting import Case, case_pair
from tests.support.switching import TakesTurns
from tests.support.tiny import tiny_prompts

DEPTH, TOKENS = 4, 24
LIMITS = {"k1": 3, "k2": 4, "k3": 2, "floor1": 0.2, "floor2": 0.1}
POLICIES = [
    make_policy("one_drafter", {**LIMITS, "drafter": 2}),
    make_policy("switch_match", {**LIMITS, "least": 0.4}),
    make_policy("first_that_drafts", LIMITS),
    TakesTurns(**LIMITS),
    TakesTurns(**LIMITS, carry=False),
]
MODES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.25, seed=4)}
# Beside a lookup: a draft model, and drafters that read the target's states or run its layers; both at once.
BESIDE = {name: [name] for name in ("model", "eagle", "edd", "eesd", "self-sd", "medusa")} | {"two": ["eagle", "model"]}


def prompts() -> list[Prompt]:
    """Some that repeat themselves, for the lookup."""
    return [Prompt("one", [17]), *tiny_prompts(2), *(Prompt("all", [7, 8, 9, 5] * k) for k in (2, 3))]


def pairs_of(beside: str) -> list[Pair]:
    """A lookup and those drafters over the target of the first of them."""
    names = BESIDE[beside]
    first = replace(case_pair(Case(names[0])), predictor=None)
    others = [replace(first, drafter=case_pair(Case(name)).drafter, draft_name=name) for name in names[1:]]
    return [replace(first, drafter=LookupKind(), draft_name="lookup"), first, *others]


@cache
def joined(beside: str, mode: str, eos: tuple[int, ...] = ()) -> tuple[Pair, JoinedTrace]:
    pairs = [replace(pair, eos_token_ids=eos) for pair in pairs_of(beside)]
    settings = RecordSettings(DEPTH, TOKENS, MODES[mode])
    traces = {f"{n} {pair.draft_name}": record(pair, prompts(), settings) for n, pair in enumerate(pairs)}
    return join_pairs(pairs), join_traces(traces)


def decoded(pair: Pair, mode: str, policy: Policy) -> list[Decoded]:
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, MODES[mode])
    runs, state = list[Decoded](), None
    for sequence, prompt in enumerate(prompts()):
        runs.append(decoder.decode(prompt.tokens, TOKENS, policy, sequence=sequence, seed=9, state=state))
        state = runs[-1].state
    return runs


class LackingCost(CostModel):
    """A second for every token that a draft cache lacks, and next to nothing for all else."""

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.zeros(np.shape(context))

    def catch_up(self, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.ones(np.shape(context))

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.zeros(np.shape(context))

    def autoregressive_step(self, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.ones(np.shape(context))


QUICK = [("model", "greedy"), ("eagle", "gumbel"), ("two", "greedy")]
CASES = [(beside, mode) for beside in BESIDE for mode in MODES]
cases = pytest.mark.parametrize(
    ("beside", "mode"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)


@cases
def test_rounds_and_drafters_are_those_of_the_replay(beside: str, mode: str) -> None:
    pair, trace = joined(beside, mode)
    costs = JoinedCost(tuple(ConstantCost(1e-3, 1e-2) for _ in trace.parts))
    met = set[int]()
    for policy in POLICIES:
        replayed, runs = PricedTrace(trace, costs).replay(policy, seed=9, log=True), decoded(pair, mode, policy)
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0, policy
        assert replayed.rounds is not None and len(replayed.rounds) == sum(len(run.rounds) for run in runs)
        assert replayed.policy_steps.sum() == sum(round_.asked for run in runs for round_ in run.rounds), policy
        met |= {round_.drafter for run in runs for round_ in run.rounds}
    assert met >= {*range(1, len(trace.parts) + 1)}


@cases
def test_a_drafter_catches_up_on_as_many_tokens_as_the_replay_prices(beside: str, mode: str) -> None:
    """A draft model is really fed so many tokens in its first step; drafters of states are fed theirs beside."""
    pair, trace = joined(beside, mode)
    costs = JoinedCost((ConstantCost(1e-9, 1e-9), *(LackingCost() for _ in trace.parts[1:])))
    model = BESIDE[beside] == ["model"]
    lacking = 0
    for policy in POLICIES:
        runs = decoded(pair, mode, policy)
        fed = [round_.fed - 1 for run in runs for round_ in run.rounds if round_.drafter > 1]
        lacking = max([lacking, *fed])
        if model or beside in ("eagle", "edd", "two"):
            assert PricedTrace(trace, costs).replay(policy).seconds[:, 0].sum() == pytest.approx(sum(fed), abs=1e-3)
    assert lacking > 2 or beside in ("self-sd", "medusa")  # which read the target's own


@dataclass(frozen=True)
class NothingWhereThereIsNoMatch(SwitchPolicy):
    """The lookup where it has nothing to propose, so that nothing is drafted, else the other."""

    name = "nothing"
    source = "this test"
    choose = staticmethod(nb.njit(lambda state, params, foretold: 0 if foretold[0] == 0.0 else 1))


def test_heads_draft_from_the_last_state_behind_rounds_that_drafted_nothing() -> None:
    pair, trace = joined("medusa", "greedy")
    decoder = Decoder(*pair.make_drafter(), (), MODES["greedy"])
    behind_nothing = 0
    for sequence, prompt in enumerate(prompts()):
        decoding = Decoding(decoder, prompt.tokens, TOKENS, NothingWhereThereIsNoMatch(k1=3, k2=3), sequence)
        idle = False
        while not decoding.done:
            row = int(trace.offsets[sequence]) + decoding.position
            drafted = decoding.advance().tokens
            assert drafted == trace.parts[1].draft_token[row, : len(drafted)].tolist()
            behind_nothing += idle and len(drafted) > 0
            idle = not drafted
    assert behind_nothing > 2


def test_a_text_may_end_within_a_round() -> None:
    _, whole = joined("model", "greedy")
    token = int(whole.token[whole.offsets[1] + 11])
    pair, trace = joined("model", "greedy", (token,))
    assert (trace.output_tokens < TOKENS).any()
    costs = JoinedCost(tuple(ConstantCost(1e-3, 1e-2) for _ in trace.parts))
    for policy in POLICIES:
        runs = decoded(pair, "greedy", policy)
        replayed = PricedTrace(trace, costs).replay(policy, seed=9, log=True)
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0, policy


def test_every_switching_policy_is_tried() -> None:
    assert {policy.name for policy in POLICIES} - {TakesTurns.name} == SWITCH_POLICIES.keys()


def test_what_cannot_be_joined_is_refused() -> None:
    lookup, eagle = pairs_of("eagle")
    own = replace(eagle, drafter=case_pair(Case("self-sd")).drafter, draft_name="self-sd")
    refusal(lambda: join_pairs([eagle, own]), "self-sd each take part")
    refusal(lambda: join_pairs([lookup, case_pair(Case("eesd"))]), "do not share one target")
    with pytest.raises(InputError, match="space drafts inside"):
        join_pairs([replace(lookup, target=case_pair(Case("space")).target), case_pair(Case("space"))])
    refusal(lambda: join_pairs([lookup]), "give 2 to 3")
    pair = join_pairs([lookup, eagle])
    target, drafter = pair.make_drafter()
    assert isinstance(drafter, JoinedDrafter)
    with pytest.raises(InputError, match="fixed_k needs one drafter"):
        Decoder(target, drafter, (), Sampler()).decode([5], 4, make_policy("fixed_k"))
    with pytest.raises(InputError, match="switch_match needs several drafters"):
        Decoder(*eagle.make_drafter(), (), Sampler()).decode([5], 4, make_policy("switch_match"))
    refusal(lambda: pair.make_recorder(Sampler()), "specsim join")
