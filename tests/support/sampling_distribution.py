"""Exact distributions of what is emitted: thresholds of a verifier's uniforms, and the target's own distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from realrun.decode.draft import Draft
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, Stream
from realrun.decode.verify import Verifier
from tests.support.exact_distribution import Path, continue_text

HALVINGS = 26  # of a threshold's interval
EXACT = 1e-5  # of a distribution put together from a few hundred thresholds found to 2^-26
Distribution = dict[Path, float]


def warped(logits: Sequence[float], temperature: float, top_p: float, top_k: int = 0) -> list[float]:
    """Softmax at the temperature, cut by top-k, then top-p: in plain numbers, apart from the code under test."""
    weights = np.exp(np.asarray(logits, dtype=np.float64) / temperature)
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    ranked = ranked[: top_k or None]
    probs = weights / weights[ranked].sum()
    kept, mass = [], 0.0
    for token in ranked:
        if mass >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    return [float(probs[token]) / mass if token in kept else 0.0 for token in range(len(probs))]


@dataclass(frozen=True)
class FedChoice(Sampler):
    """A sampler whose uniforms are given by hand."""

    fed: dict[tuple[Stream, int], float] = field(default_factory=dict)

    def uniform(self, stream: Stream, sequence: int, position: int, depth: int) -> float:
        return self.fed[stream, depth]


@dataclass(frozen=True)
class Tables:
    """Logits of a target and a drafter after every path, random."""

    target: Mapping[Path, torch.Tensor]
    drafter: Mapping[Path, torch.Tensor]


def random_tables(vocabulary: int, depth: int, seed: int) -> Tables:
    generator = torch.Generator().manual_seed(seed)
    paths = [p for n in range(depth + 1) for p in itertools.product(range(vocabulary), repeat=n)]

    def table() -> dict[Path, torch.Tensor]:
        rows = 1.5 * torch.randn(len(paths), vocabulary, generator=generator, dtype=torch.float64)
        return dict(zip(paths, rows, strict=True))

    return Tables(table(), table())


def threshold(decide: Callable[[float], bool], halvings: int = HALVINGS) -> float:
    """The u in [0, 1] below which a monotone decision is true."""
    if not decide(2.0**-53):
        return 0.0
    if decide(1 - 2.0**-53):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if decide(middle) else (low, middle)
    return low


def emitted_distribution(
    tables: Tables, depth: int, sampler: FedChoice, verifier: Verifier, judged_by: Sampler | None = None
) -> Distribution:
    """The distribution of the first depth + 1 tokens of a round and the target's own after it.

    Every draft is taken with its probability under q, and every decision of the verifier with
    the threshold in its uniform at which it turns. judged_by : the drafter's distribution that the
    verifier is told, if not that drawn from
    """
    vocabulary = len(tables.target[()])
    distribution: Distribution = {}

    def target(path: Path) -> list[float]:
        return warped(tables.target[path].tolist(), sampler.temperature, sampler.top_p, sampler.top_k)

    for chain in itertools.product(range(vocabulary), repeat=depth):
        accept_prob = float(
            np.prod([sampler.probs(tables.drafter[chain[:i]][None])[0, chain[i]] for i in range(depth)])
        )
        if accept_prob == 0:
            continue
        told = [(judged_by or sampler).probs(tables.drafter[chain[:i]][None])[0] for i in range(depth)]
        draft = Draft(tokens=[*chain], probs=told)
        logits = torch.stack([tables.target[chain[:i]] for i in range(depth + 1)])

        def emitted(draft: Draft = draft, logits: torch.Tensor = logits) -> list[int]:
            return verifier(logits, draft, RoundContext(sampler, 0, 0))

        def accepts(place: int, u: float, emitted: Callable[[], list[int]] = emitted) -> bool:
            sampler.fed["judge", place + 1] = u
            return len(emitted()) > place + 1

        def last_is_at_most(token: int, u: float, emitted: Callable[[], list[int]] = emitted) -> bool:
            sampler.fed["last", 0] = u
            return emitted()[-1] <= token

        sampler.fed.update({("judge", i + 1): 0.0 for i in range(depth)} | {("last", 0): 0.5})
        for place in range(depth + 1):
            # All before `place` are accepted; here, if it is a place of the draft, its token is rejected.
            accepted = threshold(lambda u, at=place: accepts(at, u)) if place < depth else 0.0
            if accepted < 1:
                if place < depth:
                    sampler.fed["judge", place + 1] = 1 - 2**-53
                cumulative = [threshold(lambda u, x=token: last_is_at_most(x, u)) for token in range(vocabulary)]
                for token, mass in enumerate(np.diff(cumulative, prepend=0.0)):
                    reached = accept_prob * (1 - accepted) * mass
                    continue_text(distribution, target, (*chain[:place], token), reached, depth + 1)
            accept_prob *= accepted
            if accept_prob == 0:
                break
            sampler.fed["judge", place + 1] = 0.0
    return distribution


def exact_distribution(tables: Tables, depth: int, sampler: Sampler) -> Distribution:
    distribution: Distribution = {}

    def target(path: Path) -> list[float]:
        return warped(tables.target[path].tolist(), sampler.temperature, sampler.top_p, sampler.top_k)

    continue_text(distribution, target, (), 1.0, depth + 1)
    return distribution
