"""What typical acceptance gains in speed and costs in likelihood, over its threshold (MEDUSA, Fig. 7).

The rule accepts what the target finds plausible, not what it would have said, so its output is
not the target's. For every threshold the same prompts are decoded with the same draft tree, and the
acceptance rate stands beside how likely the target finds the text. The paper asks a judge for
quality; here the target itself is asked, which favours dull text: greedy decoding is the likeliest of all. The
share of distinct trigrams shows where likelihood was won by repetition.

A replay knows the rates along a recorded text (`specsim.trace.typical`), and this run's are those along the texts that
the rule writes itself: given a trace, both stand side by side, and the difference is the text's drift.

The tree holds the drafter's most probable tokens, as in the paper, without noise. Loss-free greedy
decoding and loss-free sampling stand beside the rule, with the same greedy drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.decode.verify import TreeVerifier, TypicalAcceptance, match_tree
from realrun.lm.cached import CachedLM
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.provenance import provenance
from specsim.acceptance.formulas import distinct_trigrams
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.io.progress import Counter
from specsim.policy.base import Policy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from specsim.trace.typical import typically_accepted

EPSILONS = tuple(percent / 100 for percent in range(1, 26))  # the paper's


@dataclass(frozen=True)
class TypicalSettings:
    """What to compare.

    epsilons : thresholds, the paper's 0.01 to 0.25 by default; delta : of all of them, sqrt(epsilon) if None
    temperature : the paper's in Fig. 7; prompts_source : where the prompts come from, for the document
    """

    epsilons: tuple[float, ...] = EPSILONS
    delta: float | None = None
    temperature: float = 0.7
    max_new_tokens: int = 128
    seed: int = 0
    prompts_source: str = ""

    def __post_init__(self) -> None:
        if not self.epsilons:
            raise InputError("typical acceptance has no thresholds to compare; give at least one epsilon")
        for epsilon in self.epsilons:  # these refuse bad values
            TypicalAcceptance(epsilon, self.delta)
        Sampler("greedy-draft", self.temperature, self.seed)

    @property
    def arms(self) -> list[tuple[str, Sampler, TreeVerifier]]:
        """Name, sampler and verifier of everything that is compared."""
        sampling = Sampler("greedy-draft", self.temperature, self.seed)
        rules = [TypicalAcceptance(epsilon, self.delta) for epsilon in self.epsilons]
        loss_free = [("greedy", Sampler(), match_tree), ("sampling", sampling, match_tree)]
        return [*loss_free, *(("typical", sampling, rule) for rule in rules)]  # the same drafts; the rule draws nothing


def compare_typical(
    pair: Pair,
    prompts: Sequence[Prompt],
    policy: Policy,
    settings: TypicalSettings | None = None,
    progress: Counter | None = None,
    trace: Trace | None = None,
) -> dict[str, Any]:
    """Acceleration rate and likelihood of every arm, as a JSON document.

    Of each arm: tokens per target pass (acceleration_rate), and the mean log-likelihood in nats
    per token of its output under the target, at temperature 1 and at the sampling temperature; 95 % intervals over
    prompts. policy : says what is drafted. trace : of these prompts at this temperature, with the columns of typical
    acceptance; adds replayed_acceleration_rate, what its replays say of the arms that sample. Raises InputError unless
    the policy drafts trees, no deeper than the drafter can.

    References: Cai et al. 2024, arXiv:2401.10774, sections 3.3.1 and 4.3.2.
    """
    settings = settings or TypicalSettings()
    if not isinstance(policy, TreePolicy):
        raise InputError(f"policy {policy.name} drafts chains, typical acceptance judges trees; choose for example vct")
    if pair.drafter.max_depth is not None and policy.max_draft_tokens > pair.drafter.max_depth:
        raise InputError(
            f"policy {policy} drafts up to {policy.max_draft_tokens} tokens, the drafter at most "
            f"{pair.drafter.max_depth}; lower its limit"
        )
    if not prompts:
        raise InputError("typical acceptance is compared on prompts; give at least one")
    target, drafter = pair.make_drafter()
    arms, rows = settings.arms, []
    for number, (name, sampler, verifier) in enumerate(arms):
        decoder = Decoder(target, drafter, pair.eos_token_ids, sampler, tree_verifier=verifier)
        runs: list[Decoded] = []
        for sequence, prompt in enumerate(prompts):
            state = runs[-1].state if runs else None
            runs.append(
                decoder.decode(
                    prompt.tokens,
                    settings.max_new_tokens,
                    policy,
                    sequence=sequence,
                    seed=settings.seed,
                    state=state,
                )
            )
            if progress:
                progress(number * len(prompts) + sequence + 1, len(arms) * len(prompts))
        rows.append(arm_row(name, verifier, pair, prompts, runs, settings.temperature))
        if trace is not None and sampler.mode != "greedy":
            rows[-1]["replayed_acceleration_rate"] = replayed_rate(trace, policy, verifier, settings.seed)
    return {
        "kind": "specsim-typical",
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "prompts": prompt_facts(prompts, settings.prompts_source),
        "policy": policy.name,
        "params": policy.settings,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "arms": rows,
        "environment": provenance(pair.device, pair.number_type),
    }


def arm_row(
    name: str,
    verifier: TreeVerifier,
    pair: Pair,
    prompts: Sequence[Prompt],
    runs: Sequence[Decoded],
    temperature: float,
) -> dict[str, Any]:
    """Summarise an arm's runs, a run for each prompt."""
    tokens = np.array([len(run.tokens) for run in runs])
    rounds = np.array([len(run.rounds) for run in runs])
    likelihood = np.array(
        [
            log_likelihood(pair.target, prompt.tokens, run.tokens, (1.0, temperature))
            for prompt, run in zip(prompts, runs, strict=True)
        ]
    )
    thresholds: dict[str, float] = {}
    if isinstance(verifier, TypicalAcceptance):
        delta = math.sqrt(verifier.epsilon) if verifier.delta is None else verifier.delta
        thresholds = {"epsilon": verifier.epsilon, "delta": delta}
    return {
        "arm": name,
        "loss_free": not verifier.lossy,
        **thresholds,
        "tokens": int(tokens.sum()),
        "rounds": int(rounds.sum()),
        "acceleration_rate": ratio_interval(tokens, rounds).as_dict(),
        "log_likelihood_nats": ratio_interval(likelihood[:, 0], tokens).as_dict(),
        "log_likelihood_at_temperature_nats": ratio_interval(likelihood[:, 1], tokens).as_dict(),
        "distinct_trigram_share": distinct_trigrams([np.asarray(run.tokens) for run in runs]),
    }


def replayed_rate(trace: Trace, policy: Policy, verifier: TreeVerifier, seed: int) -> dict[str, Any]:
    """Tokens per target pass of an arm by the replay of a trace, and how many rounds asked for more than it holds."""
    if isinstance(verifier, TypicalAcceptance):
        trace = typically_accepted(trace, verifier.epsilon, verifier.delta)
    result = replay(trace, policy, cost_table(trace, ConstantCost(1.0, 1.0), policy), seed=seed)
    truncated = 0 if result.truncated is None else int(result.truncated.sum())
    return {**ratio_interval(result.output_tokens, result.num_rounds).as_dict(), "truncated_rounds": truncated}


@torch.inference_mode()
def log_likelihood(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperatures: Sequence[float]
) -> list[float]:
    """Compute log p(output | prompt) in nats at each temperature, by a pass of the model."""
    logits = CachedLM(model).forward([*prompt, *output[:-1]])[len(prompt) - 1 :].double()
    tokens = torch.tensor(output, device=logits.device)[:, None]
    return [float((logits / t).log_softmax(-1).gather(-1, tokens).sum()) for t in temperatures]
