"""The one loop of real decoding: propose -> verify -> commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from realrun.decode.chain_verify import Verifier, verifier_for
from realrun.decode.draft import Draft, Drafter, SwitchingDrafter, TreeDrafter, layout, params_of
from realrun.decode.rounds import Decoded, Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.tree_verify import TreeVerifier, tree_verifier_for
from realrun.lm.cached import CachedLM
from realrun.lm.clock import device_clock, now
from realrun.lm.number_type import TargetPeaks
from realrun.lm.open import make_lm
from specsim.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy


class Decoder:
    """Decodes sequences with one target, with or without a drafter.

    The autoregressive baseline is this very loop with nothing drafted.

    Parameters
    ----------
    target : PreTrainedModel or CachedLM
    drafter : Drafter
        With its target's pass, as `realrun.pairs.pair.Pair.make_drafter` gives both.
    eos_token_ids : sequence of int
        Tokens that end an output.
    sampler : Sampler
        How tokens are chosen.
    verifier, tree_verifier : optional
        Of chains and of trees; the loss-free ones of this sampler unless given.

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
        """Decode one prompt, until max_new_tokens or an end-of-text token, which is emitted.

        Parameters
        ----------
        prompt : sequence of int
            Token ids, at least one.
        max_new_tokens : int
        policy : Policy or None
            None is the autoregressive baseline.
        sequence, seed : int
            Number of the sequence, which keys its noise, and the seed of the policy's own uniforms.
        state : optional
            The policy's state after the sequence before, where it carries one (`Policy.carries_state`); else the
            policy starts anew.

        Returns
        -------
        Decoded
            Tokens, rounds with their seconds, and the policy's state.

        Raises
        ------
        InputError
            If the prompt is empty or leaves no room for the output, or a model gives logits that are no numbers.
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
    ) -> tuple[Any, Draft]:
        """One round: extends `tokens` and `rounds`; the policy's new state and the draft.

        Rounds begin and end with an idle device. Between, what was drafted and what was verified has been copied to the
        host when the time is read, so that nothing is waited for twice.
        """
        if isinstance(policy, TreePolicy):
            return self._tree_round(tokens, context, policy, state, rounds)
        assert policy is None or isinstance(policy, ChainPolicy)
        start = now()
        draft = Draft()
        drafted = 0
        if context.limit > 0 and policy is not None:
            if isinstance(policy, SwitchPolicy):
                switching: Any = self.drafter  # a SwitchingDrafter, as `_prepare` has seen: asking takes its time
                state, context = switching.choose(tokens, context, policy, state)
            decide, params = policy.keep_drafting, policy.params
            proceed = True

            def keep(step: Step, depth: int) -> bool:
                nonlocal state, proceed
                proceed, state = decide(state, params, step, depth, context.policy_uniform(depth))
                return bool(proceed)

            draft = self.drafter.propose(tokens, context, keep)
            drafted = len(draft.tokens)
            if policy.drops_refused and drafted:
                if draft.asked < drafted:
                    asking = now()
                    keep(draft.steps[-1], drafted)
                    draft.asked += 1
                    draft.policy_s += now() - asking
                if not proceed:
                    draft.drop_last()
        proposed = now()
        logits = self.target.forward([tokens[-1], *draft.tokens])
        emitted = self.verifier(logits, draft, context)
        verified = now()
        verified_tokens = len(draft.tokens)
        self.logits = logits
        accepted = len(emitted) - 1
        target_hidden = self.produced_by(accepted)
        for index, token in enumerate(emitted):
            if token in self.eos_token_ids:
                emitted = emitted[: index + 1]
                accepted = min(accepted, len(emitted))
                break
        tokens.extend(emitted)
        self.target.truncate(len(tokens) - 1)
        if policy is not None and drafted:
            self.drafter.commit(len(tokens) - 1, target_hidden)
            state = policy.update(state, policy.params, verified_tokens, accepted)
        elif policy is not None and self.drafter.wants_target_hidden:  # another token is pending all the same
            self.drafter.commit(len(tokens) - 1, target_hidden)
        rounds.append(
            Round(
                t=context.position,
                drafted=drafted,
                accepted=accepted,
                verified=verified_tokens,
                last=accepted,
                draft_s=proposed - start - draft.policy_s,
                policy_s=draft.policy_s,
                verify_s=verified - proposed,
                other_s=self.clock() - verified,
                step_s=tuple(draft.step_s),
                level_nodes=tuple(draft.level_nodes),
                fed=draft.fed,
                asked=draft.asked,
                drafter=draft.drafter,
            )
        )
        return state, draft

    def _tree_round(
        self,
        tokens: list[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
        rounds: list[Round],
    ) -> tuple[Any, Draft]:
        """`round` of a tree; a plain step of the target where nothing is drafted or all of it is dropped.

        verify_s holds the compaction of the target's cache as well: it takes the longer, the larger the tree.
        """
        drafter, target = self.drafter, self.target
        assert isinstance(drafter, TreeDrafter)
        start = now()
        draft = Draft()
        if context.limit > 0:
            draft, state = drafter.propose_tree(tokens, context, policy, state)
        proposed = now()
        depth = 0
        if draft.tokens:
            depths, visible = layout(np.array(draft.parents))
            depth = int(depths[-1])  # nodes are in level order
            logits = target.forward_nodes([tokens[-1], *draft.tokens], depths.tolist(), torch.from_numpy(visible))
        else:
            logits = target.forward(tokens[-1:])
        path, own_token = self.tree_verifier(logits, draft, context)
        emitted = [*(draft.tokens[node] for node in path), own_token]
        self.logits = logits
        for index, token in enumerate(emitted):
            if token in self.eos_token_ids:
                emitted, path = emitted[: index + 1], path[: index + 1]
                break
        cached = path[: len(emitted) - 1]  # the token emitted last is the next pending one
        target_hidden = self.produced_by(path[-1] + 1 if path else 0)
        if draft.tokens:
            target.keep_nodes([0, *(node + 1 for node in cached)])
        verified = self.clock()
        tokens.extend(emitted)
        nodes = [draft.nodes[node] for node in path]
        if draft.drafted:
            drafter.commit_tree(nodes[: len(cached)], target_hidden)
            state = policy.update(state, params_of(policy), depth, len(path))
        elif drafter.wants_target_hidden:  # another token is pending, though nothing was drafted
            drafter.commit(len(tokens) - 1, target_hidden)
        rounds.append(
            Round(
                t=context.position,
                drafted=draft.drafted,
                accepted=len(path),
                verified=len(draft.tokens),
                last=path[-1] + 1 if path else 0,
                draft_s=proposed - start - draft.policy_s,
                policy_s=draft.policy_s,
                verify_s=verified - proposed,
                other_s=self.clock() - verified,
                step_s=tuple(draft.step_s),
                level_nodes=tuple(draft.level_nodes),
                fed=draft.fed,
                asked=draft.asked,
            )
        )
        return state, draft

    def produced_by(self, row: int) -> torch.Tensor | None:
        """The target's last state at this row of its last pass, if the drafter wants it and there was one."""
        hidden = self.target.hidden if self.target.keep_hidden else None
        return None if hidden is None else hidden[row]

    def _prepare(self, length: int, max_new_tokens: int, policy: Policy | None, sequence: int) -> None:
        """What a sequence needs and no clock should see: noise, room in the caches, graphs."""
        positions, model = max_new_tokens + 1, self.target.model
        self.sampler.prepare(sequence, positions, int(model.config.vocab_size), self.target.device, model.dtype)
        if isinstance(policy, TreePolicy):
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
    """A sequence that one decoder decodes round by round, prefilled when it is made; a decoder has one at a time.

    Arguments and errors are those of `Decoder.decode`.

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
            state = policy.initial_state(policy.params)
        self.state = state

    @property
    def position(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @torch.inference_mode()
    def advance(self) -> Draft:
        """One round; what it drafted."""
        decoder, before = self.decoder, len(self.tokens)
        limit = min(self.longest, self.end - len(self.tokens) - 1)
        context = RoundContext(decoder.sampler, self.sequence, self.position, limit, self.seed)
        self.state, draft = decoder.round(self.tokens, context, self.policy, self.state, self.rounds)
        self.peaks.note(decoder.logits, self.tokens, before)  # off the round's clock
        self.done = len(self.tokens) >= self.end or self.tokens[-1] in decoder.eos_token_ids
        if self.done:
            self.peaks.check(self.tokens)
        return draft

    @property
    def result(self) -> Decoded:
        """What was decoded so far."""
        return Decoded(self.tokens[self.prompt_tokens :], self.rounds, self.prefill_s, self.state)
