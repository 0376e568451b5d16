"""The loop of real decoding: propose -> verify -> commit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from realrun.decode.draft import Draft, Drafter, SwitchingDrafter, TreeDrafter, layout, params_of
from realrun.decode.rounds import Decoded, Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.verify import TreeVerifier, Verifier, tree_verifier_for, verifier_for
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.lm.clock import device_clock, now
from realrun.lm.number_type import TargetPeaks
from specsim.io.errors import InputError
from specsim.policy.base import BIASED, Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.kernel import step_functions


class Acceptance(NamedTuple):
    """Result of a round's verification, up to the end of the text.

    emitted : the accepted tokens and a token of the target's own
    path : places of the accepted tokens in the draft
    depth : length of the verified chain, or depth of the tree
    target_hidden : the target's last state [d] that produced the newest token, if the drafter wants it
    """

    emitted: list[int]
    path: Sequence[int]
    depth: int
    target_hidden: torch.Tensor | None

    @property
    def cached(self) -> Sequence[int]:
        """List the accepted tokens that stay in caches: the token emitted last is the next pending token."""
        return self.path[: len(self.emitted) - 1]


class Decoder:
    """Decodes sequences with a target, with or without a drafter.

    The autoregressive baseline is the same loop with nothing drafted.

    Parameters
    ----------
    target : PreTrainedModel or CachedLM
    drafter : Drafter
        Made with its target's pass by `realrun.pairs.pair.Pair.make_drafter`.
    eos_token_ids : sequence of int
        Tokens that end an output.
    sampler : Sampler
        How tokens are chosen.
    verifier, tree_verifier : optional
        Verifiers of chains and of trees (default: the lossless verifiers of this sampler).

    Examples
    --------
    >>> import realrun
    >>> from specsim import make_policy
    >>> pair = realrun.load_pair(drafter="prompt-lookup")
    >>> decoder = realrun.Decoder(*pair.make_drafter(), pair.eos_token_ids, realrun.Sampler())
    >>> drafted = decoder.decode([5, 6, 7], 8, make_policy("fixed_k", {"k": 2}))
    >>> drafted.tokens == decoder.decode([5, 6, 7], 8, None).tokens
    True
    """

    def __init__(
        self,
        target: PreTrainedModel | CachedLM,
        drafter: Drafter,
        eos_token_ids: Sequence[int],
        sampler: Sampler,
        verifier: Verifier | None = None,
        tree_verifier: TreeVerifier | None = None,
    ):
        self.target = target if isinstance(target, CachedLM) else make_lm(target)
        self.drafter = drafter
        self.eos_token_ids = frozenset(eos_token_ids)
        self.sampler = sampler
        self.verifier = verifier or verifier_for(sampler)
        self.tree_verifier = tree_verifier or tree_verifier_for(sampler)
        self.clock = device_clock(self.target.device)
        self.logits: torch.Tensor | None = None  # of the last pass

    def decode(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        policy: Policy | None,
        *,
        sequence: int = 0,
        seed: int = 0,
        state: Any = None,
    ) -> Decoded:
        """Decode a prompt until max_new_tokens or an end-of-text token, which is emitted.

        prompt : token ids, at least 1
        policy : none is the autoregressive baseline
        sequence, seed : number of the sequence, which keys its noise, and the seed of the policy's uniforms
        state : the policy's state after the previous sequence, used if the policy carries it over
            (`Policy.carries_state`)

        Returns tokens, rounds with their seconds, and the policy's state.

        Raises InputError if the prompt is empty or leaves no room for the output, or a model's logits are NaN or
        infinite.
        """
        decoding = Decoding(self, prompt, max_new_tokens, policy, sequence, seed, state)
        while not decoding.done:
            decoding.advance()
        return decoding.result

    def round(
        self,
        tokens: list[int],
        context: RoundContext,
        policy: Policy | None,
        state: Any,
        rounds: list[Round],
        end: int = sys.maxsize,
    ) -> tuple[Any, Draft]:
        """Run a round: extend `tokens` and `rounds`; return the policy's new state and the draft.

        The sequence ends at `end` tokens or at an end-of-text token. Recurrent states are not restored then.

        Rounds begin and end with an idle device. In between, drafted and verified tokens have been copied to the host
        when the time is read, so that nothing is waited for twice. Where nothing is drafted, or all of a tree is
        dropped, this is a plain step of the target. verify_s of a tree includes the compaction of the target's cache,
        which takes the longer, the larger the tree.
        """
        start = now()
        if isinstance(policy, TreePolicy):
            draft, state = self._draft_tree(tokens, context, policy, state)
            proposed = now()
            accepted = self._verify_tree(tokens, draft, context)
            verified = self.clock()
        else:
            assert policy is None or isinstance(policy, ChainPolicy)
            draft, state = self._draft_chain(tokens, context, policy, state)
            proposed = now()
            accepted = self._verify_chain(tokens, draft, context)
            verified = now()
        tokens.extend(accepted.emitted)
        refed, restored = 0, verified
        if not self.target.recurrent:
            self.target.truncate(len(tokens) - 1)
        elif len(tokens) < end and tokens[-1] not in self.eos_token_ids:
            self.target.truncate(len(tokens) - 1)
            refed = self.target.refed
            restored = self.clock() if refed else verified
        if policy is not None and draft.drafted:
            if isinstance(policy, TreePolicy):
                nodes, params = [draft.nodes[node] for node in accepted.cached], params_of(policy)
                cast(TreeDrafter, self.drafter).commit_tree(nodes, accepted.target_hidden)
            else:
                params = policy.params
                self.drafter.commit(len(tokens) - 1, accepted.target_hidden)
            state = step_functions(policy).update(state, params, accepted.depth, len(accepted.path))
        elif policy is not None and self.drafter.wants_target_hidden:  # another token is pending all the same
            self.drafter.commit(len(tokens) - 1, accepted.target_hidden)
        rounds.append(
            Round(
                t=context.position,
                drafted=draft.drafted,
                accepted=len(accepted.path),
                verified=len(draft.tokens),
                last=accepted.path[-1] + 1 if accepted.path else 0,
                draft_s=proposed - start - draft.policy_s,
                policy_s=draft.policy_s,
                verify_s=restored - proposed,
                other_s=self.clock() - restored,
                step_s=tuple(draft.step_s),
                level_nodes=tuple(draft.level_nodes),
                fed=draft.fed,
                asked=draft.asked,
                drafter=draft.drafter,
                refed=refed,
                refeed_s=restored - verified,
            )
        )
        return state, draft

    def _draft_chain(
        self, tokens: list[int], context: RoundContext, policy: ChainPolicy | None, state: Any
    ) -> tuple[Draft, Any]:
        if policy is None or context.limit == 0:
            return Draft(), state
        if isinstance(policy, SwitchPolicy):  # `_prepare` has checked the drafter, which takes its time
            state, context = cast(SwitchingDrafter, self.drafter).choose(tokens, context, policy, state)
        decide, params = step_functions(policy).keep_drafting, policy.params
        proceed = True

        def keep(step: Step, depth: int) -> bool:
            nonlocal state, proceed
            proceed, state = decide(state, params, step, depth, context.policy_uniform(depth))
            return bool(proceed)

        draft = self.drafter.propose(tokens, context, keep)
        draft.drafted = len(draft.tokens)
        if policy.drops_refused and draft.drafted:
            if draft.asked < draft.drafted:
                asking = now()
                keep(draft.steps[-1], draft.drafted)
                draft.asked += 1
                draft.policy_s += now() - asking
            if not proceed:
                draft.drop_last()
        return draft, state

    def _draft_tree(
        self, tokens: list[int], context: RoundContext, policy: TreePolicy, state: Any
    ) -> tuple[Draft, Any]:
        if context.limit == 0:
            return Draft(), state
        return cast(TreeDrafter, self.drafter).propose_tree(tokens, context, policy, state)

    def _verify_chain(self, tokens: list[int], draft: Draft, context: RoundContext) -> Acceptance:
        self.logits = self.target.forward([tokens[-1], *draft.tokens])
        emitted = self.verifier(self.logits, draft, context)
        path = range(len(emitted) - 1)
        target_hidden = self.produced_by(len(path))
        count = self._count_to_end(emitted)
        return Acceptance(emitted[:count], path[:count], len(draft.tokens), target_hidden)

    def _verify_tree(self, tokens: list[int], draft: Draft, context: RoundContext) -> Acceptance:
        """Verify a tree in a single pass of the target, which keeps the accepted nodes in its cache."""
        target, depth = self.target, 0
        if draft.tokens:
            depths, visible = layout(np.array(draft.parents))
            depth = int(depths[-1])  # nodes are in level order
            self.logits = target.forward_nodes([tokens[-1], *draft.tokens], depths.tolist(), torch.from_numpy(visible))
        else:
            self.logits = target.forward(tokens[-1:])
        path, own_token = self.tree_verifier(self.logits, draft, context)
        target_hidden = self.produced_by(path[-1] + 1 if path else 0)
        emitted = [*(draft.tokens[node] for node in path), own_token]
        count = self._count_to_end(emitted)
        accepted = Acceptance(emitted[:count], path[:count], depth, target_hidden)
        if draft.tokens:
            target.keep_nodes([0, *(node + 1 for node in accepted.cached)])
        return accepted

    def _count_to_end(self, emitted: Sequence[int]) -> int:
        """Count the emitted tokens up to the first end-of-text token, and with it."""
        return next((i for i, token in enumerate(emitted, start=1) if token in self.eos_token_ids), len(emitted))

    def produced_by(self, row: int) -> torch.Tensor | None:
        """Give the target's state [d] at this row of its last pass; None if the drafter does not want it."""
        hidden = self.target.hidden if self.target.keep_hidden else None
        return None if hidden is None else hidden[row]

    def _prepare(self, length: int, max_new_tokens: int, policy: Policy | None, sequence: int) -> None:
        """Prepare before timing starts what a sequence needs: noise, room in the caches, graphs."""
        positions, model = max_new_tokens + 1, self.target.model
        self.sampler.prepare(sequence, positions, int(model.config.vocab_size), self.target.device, model.dtype)
        if isinstance(policy, TreePolicy):
            self.target.check_trees()
            largest = policy.max_verified_nodes + 1
            self.target.warm(range(1, largest + 1), length + largest)
        else:
            longest = 0 if policy is None else min(policy.max_draft_tokens, max_new_tokens - 1)
            self.target.warm(range(1, longest + 2), length)
        if policy is not None:
            needed = "several drafters" if isinstance(policy, SwitchPolicy) else "one drafter"
            if isinstance(policy, SwitchPolicy) != isinstance(self.drafter, SwitchingDrafter):
                raise InputError(
                    f"policy {policy.name} needs {needed}, which this decoder has not; choose another policy"
                )
            if self.sampler.mode == "rejection" and policy.biases_sampled_drafts():
                raise InputError(f"policy {policy.name}: {BIASED}")
            self.drafter.prepare(length, self.sampler, sequence, positions, policy.features)
        if isinstance(policy, TreePolicy):
            if not isinstance(self.drafter, TreeDrafter):
                raise InputError(f"policy {policy.name} drafts trees, this drafter chains only; choose another policy")
            self.drafter.prepare_tree(policy, length)
        self.target.keep_hidden = policy is not None and self.drafter.wants_target_hidden

    def _check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        vocabulary = int(self.target.model.config.vocab_size)
        if max(prompt) >= vocabulary:
            raise InputError(
                f"the prompt has token {max(prompt)}, the target's embedding {vocabulary} rows; use its own tokenizer"
            )
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens}; ask for at least 1")
        if len(prompt) + max_new_tokens > self.target.max_positions:
            raise InputError(
                f"prompt of {len(prompt)} and output of {max_new_tokens} tokens exceed the model's "
                f"{self.target.max_positions} positions; shorten one of them"
            )


class Decoding:
    """A sequence that a decoder decodes round by round; a decoder decodes a single sequence at a time.

    Making it prefills the prompt. Arguments and errors are those of `Decoder.decode`.

    position : output tokens so far
    done : whether the budget or the end of the text is reached
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        max_new_tokens: int,
        policy: Policy | None,
        sequence: int = 0,
        seed: int = 0,
        state: Any = None,
    ):
        decoder._check(prompt, max_new_tokens)
        self.decoder, self.policy, self.sequence, self.seed = decoder, policy, sequence, seed
        self.tokens, self.prompt_tokens = list(prompt), len(prompt)
        self.end = len(prompt) + max_new_tokens
        self.longest = 0 if policy is None else policy.max_draft_tokens
        self.rounds: list[Round] = []
        self.done = False
        self.peaks = TargetPeaks(decoder.target)
        decoder._prepare(self.end, max_new_tokens, policy, sequence)
        start = decoder.clock()
        decoder.target.reset()
        decoder.target.prefill(self.tokens[:-1])
        if policy is not None:
            decoder.drafter.begin(self.tokens[:-1], decoder.produced_by(-1))
        self.prefill_s = decoder.clock() - start
        if policy is not None and (state is None or not policy.carries_state):
            state = step_functions(policy).initial_state(policy.params)
        self.state = state

    @property
    def position(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @torch.inference_mode()
    def advance(self) -> Draft:
        """Run a round; returns its draft."""
        decoder, before = self.decoder, len(self.tokens)
        limit = min(self.longest, self.end - len(self.tokens) - 1)
        context = RoundContext(decoder.sampler, self.sequence, self.position, limit, self.seed)
        self.state, draft = decoder.round(self.tokens, context, self.policy, self.state, self.rounds, self.end)
        self.peaks.note(decoder.logits, self.tokens, before)  # not timed
        self.done = len(self.tokens) >= self.end or self.tokens[-1] in decoder.eos_token_ids
        if self.done:
            self.peaks.check(self.tokens)
        return draft

    @property
    def result(self) -> Decoded:
        """Give everything decoded so far."""
        return Decoded(self.tokens[self.prompt_tokens :], self.rounds, self.prefill_s, self.state)
