"""Signs of a fault in counts of accepted drafts, each with what to check: is it a bug, or the drafter?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import SLACK, Counters, Source
from specsim.engines.counted import UNKNOWN_PHI, Counted

FEWEST = 20  # rounds, or tokens of a position, that can show anything
USUAL, CLIFF = 0.3, 0.3  # a usual first position, and the part of the rate before that a cliff falls below
FALL, ERRORS = 0.5, 5.0  # the part that acceptance falls below at a point in time, and by how many standard errors
SLOW_ROUND, GOOD = 2.0, 0.5  # decode steps of a round at K = 1, and the acceptance at which it is a fault
FAR = 0.5  # of the least published rate
# Least acceptance of the first position that is published, by kind of drafter: EAGLE vllm#24343, EAGLE-3 vllm#24243
# (0.57 to 0.81), MTP vllm#48892 and spark-vllm-docker#343 (0.76 to 0.97). Of block drafters only acceptance lengths are
# published; this rate at every position gives the shortest of them (studies/published/data/speculation.csv).
FIRST_POSITION = {"eagle": 0.63, "eagle3": 0.57, "mtp": 0.76, **dict.fromkeys(("block", "dflash", "dspark"), 0.63)}


class Signature(NamedTuple):
    """A sign of a fault.

    name, evidence, check : what it is, where it shows, and what to look at
    in_time : whether acceptance changed while it was counted, so that no K follows from the sum
    """

    name: str
    evidence: str
    check: str
    in_time: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}; check {self.check}"


def find_signatures(
    counts: Counted, source: Source, drafter: str | None = None, *, round_tokens: float | None = None
) -> tuple[Signature, ...]:
    """Find the signs of faults that counts show.

    drafter : its kind, such as "eagle3"
    round_tokens : measured duration of a round, in decode steps
    """
    windows = source.windows if isinstance(source, Counters) else ()
    fall = _fall(windows)
    return fall or tuple(_by_position(counts, drafter, round_tokens, whole=_whole(source)))


def _whole(source: Source) -> bool:
    """Whether nearly all drafts are as long as the longest, so that a fall by position is one of acceptance."""
    if not isinstance(source, Counters) or source.drafted_tokens is None:
        return True
    return int(source.drafted.sum()) - source.drafted_tokens <= SLACK * int(source.drafted[0])


def _by_position(
    counts: Counted, drafter: str | None, round_tokens: float | None, *, whole: bool
) -> Iterator[Signature]:
    rates, verified, rounds = counts.rates, counts.verified, int(counts.rounds)
    if rounds < FEWEST:
        return
    first = float(rates[0])
    if not counts.accepted.any():
        yield Signature(
            "no draft was ever accepted",
            f"0 in {rounds:,} rounds",
            "that the drafter belongs to this target (vocabulary, revision, chat template) and has its weights; with "
            "separate prefill servers or a prefix cache, whether the drafter gets the prompt's states; whether K "
            "exceeds what the engine captured in CUDA graphs",
        )
        return
    if (counts.accepted >= counts.verified).all():
        yield Signature(
            "every draft was accepted",
            f"a rate of exactly 1.000 in {rounds:,} rounds",
            "the text: outputs that repeat themselves, or a target that is its own drafter; measure other prompts",
        )
        return
    for i in range(1, len(rates)):
        cliff = rates[i - 1] >= USUAL and rates[i] < CLIFF * rates[i - 1] and verified[i] >= FEWEST
        if whole and first >= USUAL and cliff:
            yield Signature(
                "acceptance breaks off",
                f"position {i} is accepted at {rates[i - 1]:.2f}, position {i + 1} at {rates[i]:.2f}",
                f"how many tokens the drafter was trained to draft: K = {len(rates)} may exceed its block (block_size, "
                f"num_nextn_predict_layers); try K = {i}",
            )
            break
    if round_tokens is not None and len(rates) == 1 and first >= GOOD and round_tokens > SLOW_ROUND:
        yield Signature(
            "good acceptance, slow rounds",
            f"{100 * first:.0f} % accepted, but a round at K = 1 costs {round_tokens:.2f} decode steps",
            "whether the drafter runs outside CUDA graphs (enforce_eager, graph sizes), on the CPU, or unquantised",
        )
    usual = FIRST_POSITION.get(drafter or "", 0.0)
    error = float(np.sqrt(counts.phi * first * (1 - first) / verified[0]))
    if first + 2 * error < FAR * usual:
        yield Signature(
            "the first token is accepted far below what such drafters have",
            f"{first:.2f}, published for {drafter}: {usual:.2f} and more",
            "that the drafter was trained for this target and revision, the chat template, and real prompts (not "
            f"random tokens){f', and for blocks of K = {len(rates)}' * (drafter in ('block', 'dflash', 'dspark'))}",
        )


def _fall(windows: tuple[Counters, ...]) -> tuple[Signature, ...]:
    """The point in time at which acceptance fell, if intervals before and after differ by more than they do inside."""
    if len(windows) < 2:
        return ()
    drafted, accepted = (
        np.array([float(getattr(window, name).sum()) for window in windows]) for name in ("drafted", "accepted")
    )
    found: list[tuple[float, int, float, float]] = []
    for at in range(1, len(windows)):
        parts = [slice(0, at), slice(at, None)]
        means = [float(accepted[part].sum() / drafted[part].sum()) for part in parts]
        # Of both sides, what intervals differ by inside, and no less than what requests usually differ by.
        variances = [
            (
                ((accepted[part] - mean * drafted[part]) ** 2).sum()
                + UNKNOWN_PHI * mean * (1 - mean) * drafted[part].sum()
            )
            / drafted[part].sum() ** 2
            for part, mean in zip(parts, means, strict=True)
        ]
        errors = (means[0] - means[1]) / max(float(np.sqrt(sum(variances))), 1e-12)
        found.append((errors, at, means[0], means[1]))
    errors, at, before, after = max(found)
    if errors < ERRORS or after > FALL * before:
        return ()
    return (
        Signature(
            "acceptance fell while it was counted",
            f"from {before:.2f} of the drafted tokens to {after:.2f} at line {at + 1} of {len(windows)}",
            "what changed then: a restart, other prompts, an evicted prefix cache, memory pressure; advice on the sum "
            "of both would hold for neither",
            in_time=True,
        ),
    )
