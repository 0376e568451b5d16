"""`realrun engine check --temperature`: whether what an engine samples with drafts is a sample of the target.

At a temperature an engine draws noise of its own, so that its text is nobody else's. What can be compared is its law.
Let y be the output token at a position and p the target's distribution after the tokens before it. Where the engine is
lossless, log p(y) minus its expectation under p (minus the entropy) has mean 0 and variance Var_p[log p], whatever the
text before it. The sum over all positions is therefore a martingale, and divided by the root of the summed variances it
is nearly standard normal, although later tokens depend on earlier ones. Stopping at an end of text changes nothing,
because the end of text counts as a token.

Acceptance is compared in the same way: each draft that the target judges is kept with a probability that the engine's
rule gives, whatever came before. A sampler that errs without changing the mean log-probability stays unfound.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from realrun.drafters.independent import IndependentKind
from realrun.engines.check import drafted_tokens, without_ends
from realrun.engines.engine import Engine, EngineRun, Job, Setting
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.engines.conventions import Conventions
from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import NgramRule
from specsim.trace.accepted import Rule
from specsim.trace.trace import NO_TOKEN

LIMIT = 4.0  # of |z|: a healthy engine passes it once in some 16,000 checks


class Terms(NamedTuple):
    """What was observed at n places, and its mean and variance given all that came before: each [n]."""

    value: Array
    mean: Array
    variance: Array


@dataclasses.dataclass(frozen=True)
class Score:
    """The mean of what was observed beside its expectation; z: their distance in standard errors."""

    count: int
    measured: float
    expected: float
    z: float

    @property
    def passed(self) -> bool:
        return abs(self.z) < LIMIT  # False for nan

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "passed": self.passed}


def score(parts: Sequence[Terms]) -> Score:
    """Compare sums of martingale differences with their variance."""
    value, mean, variance = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    gap, spread = float((value - mean).sum()), math.sqrt(variance.sum())
    z = gap / spread if spread else math.copysign(math.inf, gap) if gap else 0.0
    return Score(len(value), float(value.mean()), float(mean.mean()), z)


def text_terms(logprobs: torch.Tensor, output: Sequence[int], ends: Sequence[int]) -> Terms:
    """Compute the log-probability of every output token, and its mean and variance under the target.

    logprobs : [n, V], the target's before each token
    ends : end-of-text tokens, which count as one token, because some engines do not tell which of them they drew
    """
    if len(ends) > 1:
        logprobs = logprobs.clone()
        logprobs[:, ends[0]] = logprobs[:, [*ends]].logsumexp(-1)
        logprobs[:, [*ends[1:]]] = -torch.inf
    tokens = torch.tensor([ends[0] if token in ends else token for token in output])
    value, probs = logprobs.gather(-1, tokens[:, None])[:, 0], logprobs.exp()
    finite = logprobs.masked_fill(probs == 0, 0.0)
    mean = (probs * finite).sum(-1)
    variance = (probs * (finite - mean[:, None]).square()).sum(-1)
    return Terms(value.numpy(), mean.numpy(), variance.numpy())


def acceptance_terms(
    chances: Array, rounds: Sequence[tuple[int | None, int]], conventions: Conventions, empty: Array
) -> Terms:
    """Compare which drafts were accepted with their chances.

    chances : [2, n, K] of the draft that starts at output position t: at its depth from 0, given that all tokens before
        it were accepted; in the first row if a drafted end of text never counts as accepted, in the second if it does
    rounds : (drafted, accepted) as the engine counts them; a round without the former is left out
    empty : [n], positions at which it drafts nothing; such rounds are left out where conventions say so
    """
    ends, n = conventions.accepts_end, chances.shape[1]
    seen, expected = [], []
    at = int(conventions.first_token == "prefill")
    for drafted, accepted in rounds:
        while not conventions.counts_empty and at < n and empty[at]:
            at += 1
        for depth in range(min(accepted + 1, drafted or 0, n - at)):
            counts = ends == "always" or (ends == "last" and depth + 1 == drafted)
            seen.append(float(depth < accepted))
            expected.append(chances[int(counts), at, depth])
        at += accepted + 1
    value, mean = np.array(seen), np.array(expected)
    return Terms(value, mean, mean * (1 - mean))


def chances_of_model(target: torch.Tensor, draft: torch.Tensor, ends: Sequence[int], depth: int, rule: Rule) -> Array:
    """Compute `chances` of `acceptance_terms` for a draft model.

    target, draft : [n, V] log-probabilities at the temperature, before each output token
    """
    width = min(target.shape[1], draft.shape[1])
    p, q = target[:, :width].exp(), draft[:, :width].exp()
    kept = {
        "greedy-draft": p * torch.nn.functional.one_hot(q.argmax(-1), width),
        "sampled-draft": torch.minimum(p, q),
        "equal-samples": p * q,
    }[rule]
    both = torch.stack([kept.sum(-1) - kept[:, [*ends]].sum(-1), kept.sum(-1)]).clamp(0, 1).numpy()
    chances = np.zeros((*both.shape, depth))
    for d in range(min(depth, both.shape[1])):
        chances[:, : both.shape[1] - d, d] = both[:, d:]
    return chances


def chances_of_lookup(
    target: torch.Tensor, prompt: Sequence[int], output: Sequence[int], ends: Sequence[int], depth: int, rule: NgramRule
) -> tuple[Array, Array]:
    """Compute `chances` and `empty` of `acceptance_terms` for prompt lookup, whose drafts the text decides."""
    n = len(output)
    tokens = lookup_trace([TokenText([*prompt], [*output], "all", n)], rule, depth).draft_token
    chances = np.zeros((2, n, depth))
    for d in range(min(depth, n)):
        at = np.flatnonzero(tokens[: n - d, d] != NO_TOKEN)
        drafted = tokens[at, d].astype(np.int64)
        chances[1, at, d] = target[torch.tensor(at + d), torch.tensor(drafted)].exp().numpy()
        chances[0, at, d] = chances[1, at, d] * ~np.isin(drafted, ends)
    return chances, tokens[:, 0] == NO_TOKEN


def logprobs_of(model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float) -> torch.Tensor:
    """Compute a model's log-probabilities [n, V] of the token at each of n output positions, in a single pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        return (logits.double() / temperature).log_softmax(-1)


@dataclasses.dataclass(frozen=True)
class LosslessRow:
    """What was observed in a setting. text, acceptance : of output tokens, and of judged drafts if there were any"""

    setting: Setting
    rounds: int
    drafted: int | None
    accepted: int
    text: Score
    acceptance: Score | None

    def as_dict(self) -> dict[str, Any]:
        counts = {"rounds": self.rounds, "drafted": self.drafted, "accepted": self.accepted}
        acceptance = {"count": 0, "passed": True} if self.acceptance is None else self.acceptance.as_dict()
        scores = {"text": self.text.as_dict(), "acceptance": acceptance}
        return {"setting": str(self.setting), **self.setting.as_dict(), **counts, **scores}


@dataclasses.dataclass(frozen=True)
class LosslessCheck:
    """Sampled text and acceptance beside the target's distribution. rule : of acceptance; source : of the prompts"""

    engine: Engine
    target: str
    drafter: str
    temperature: float
    rule: Rule
    prompts: Sequence[Prompt]
    source: str
    max_new_tokens: int
    rows: list[LosslessRow]

    @property
    def lossless(self) -> bool:
        """Whether every text passes."""
        return all(row.text.passed for row in self.rows)

    @property
    def passed(self) -> bool:
        """Whether text and acceptance pass."""
        return self.lossless and all(row.acceptance is None or row.acceptance.passed for row in self.rows)

    @property
    def verdict(self) -> str:
        who = f"{self.engine.name} {self.engine.version()} at temperature {self.temperature:g}"
        if not self.lossless:
            worst = _worst([(row.text, row.setting) for row in self.rows])
            return f"not lossless: {who} puts out tokens of mean log-probability {worst}"
        if not self.passed:
            worst = _worst([(row.acceptance, row.setting) for row in self.rows if row.acceptance is not None])
            rule = f"the rule {self.rule} is not followed"
            return f"lossless, but {rule}: {who} accepts a share of {worst}"
        return f"lossless: {who}, every |z| is below {LIMIT:g}"

    def as_dict(self) -> dict[str, Any]:
        """Make what `realrun engine check --temperature --json` prints."""
        return {
            "engine": self.engine.name,
            "version": self.engine.version(),
            "target": self.target,
            "drafter": self.drafter,
            "temperature": self.temperature,
            "rule": self.rule,
            "prompts": prompt_facts(self.prompts, self.source),
            "max_new_tokens": self.max_new_tokens,
            "settings": [row.as_dict() for row in self.rows],
            "lossless": self.lossless,
            "passed": self.passed,
            "verdict": self.verdict,
        }


def _worst(scores: Sequence[tuple[Score, Setting]]) -> str:
    found, setting = max(((s, at) for s, at in scores if not s.passed), key=lambda pair: abs(pair[0].z))
    means = f"{found.measured:.3f} where {found.expected:.3f} is expected"
    return f"{means} (z = {found.z:.1f}, {setting})"


def check_lossless(
    pair: Pair,
    prompts: Sequence[Prompt],
    engine: Engine,
    settings: Sequence[Setting],
    max_new_tokens: int,
    temperature: float,
    *,
    lookup: bool = False,
    seed: int = 0,
    source: str = "",
    progress: Progress = lambda what, done, total: None,
) -> LosslessCheck:
    """Sample with an engine's drafts, and compare text and acceptance with what the target's distribution gives.

    source : where the prompts are from
    seed : of the first prompt in the first setting; all others have seeds of their own

    Top-k and top-p are off.

    Raises InputError if the pair cannot be converted, the engine fails, or it puts out nothing.
    """
    if not 0 < temperature < 100:
        raise InputError(f"--temperature of {temperature:g} is outside (0, 100); leave it out to compare greedy rounds")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        job = Job(
            Path(name), [prompt.tokens for prompt in prompts], max_new_tokens, pair.eos_token_ids, lookup, temperature
        )
        engine.convert(pair, job.folder)
        for done, setting in enumerate(settings):
            progress("run", done, len(settings))
            seeded = job._replace(seed=seed + done * len(prompts))
            rows.append(_row(pair, engine, seeded, setting, engine.run(seeded, setting)))
        progress("run", len(settings), len(settings))
    drafter, rule = "prompt lookup" if lookup else pair.draft_name, engine.rule_of(lookup=lookup)
    return LosslessCheck(engine, pair.target_name, drafter, temperature, rule, prompts, source, max_new_tokens, rows)


def _row(pair: Pair, engine: Engine, job: Job, setting: Setting, run: EngineRun) -> LosslessRow:
    terms = list(_terms(pair, engine, job, setting, run))
    if not terms:
        raise InputError(f"{engine.name} put out nothing, {setting}; give other prompts, or more --max-new-tokens")
    texts, drafts = zip(*terms, strict=True)
    accepted = sum(accepted for rounds in run.rounds for _, accepted in rounds)
    judged = score(drafts) if any(len(each.value) for each in drafts) else None
    return LosslessRow(setting, sum(map(len, run.rounds)), drafted_tokens(run), accepted, score(texts), judged)


def _terms(pair: Pair, engine: Engine, job: Job, setting: Setting, run: EngineRun) -> Iterator[tuple[Terms, Terms]]:
    """Yield the terms of each prompt's text and of its drafts."""
    ends = [*job.eos_token_ids]
    assert job.lookup or isinstance(pair.drafter, IndependentKind)
    outputs = without_ends(run, set(ends)).outputs
    for prompt, tokens, rounds in zip(job.prompts, outputs, run.rounds, strict=True):
        output = [*tokens, ends[0]] if ends and len(tokens) < job.max_new_tokens else tokens
        if not output:
            continue
        target = logprobs_of(pair.target, prompt, output, job.temperature)
        empty = np.zeros(len(output), bool)
        if job.lookup:
            assert engine.lookup_rule is not None
            chances, empty = chances_of_lookup(target, prompt, output, ends, setting.k, engine.lookup_rule)
        else:
            draft = logprobs_of(pair.drafter.weights(pair.target)[0], prompt, output, job.temperature)
            chances = chances_of_model(target, draft, ends, setting.k, engine.draft_rule)
        yield text_terms(target, output, ends), acceptance_terms(chances, rounds, engine.conventions, empty)
