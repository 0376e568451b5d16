"""Verification of chains and trees is loss-free: by enumeration through the verifiers, and by samples of the loop."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

import speckernels
from realrun.decode import verify
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, Siblings
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, draw
from realrun.decode.verify import (
    TypicalAcceptance,
    Verifier,
    check_siblings,
    match_tree,
    match_verifier,
    reject_tree,
    rejection_verifier,
    tree_verifier_for,
)
from realrun.lm.cached import CachedLM
from realrun.lm.kernels import use_kernels
from specsim.io.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import make_policy
from tests.support.exact_distribution import Path, continue_text, distance, drafts, path_to
from tests.support.sampling_distribution import (
    EXACT,
    Distribution,
    FedChoice,
    Tables,
    emitted_distribution,
    exact_distribution,
    random_tables,
    threshold,
    warped,
)
from tests.support.small_vocabulary import SAMPLED, models, p_value


def broken_replacement(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Draws the replacement of a rejected token from p (errata C1)."""
    emitted, (sampler, sequence, position, *_) = rejection_verifier(logits, draft, context), context
    last = draw(sampler.probs(logits[len(emitted) - 1 :][:1]), [sampler.uniform("last", sequence, position, 0)])
    return [*emitted[:-1], int(last)]


def broken_ratio(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Accepts where u < q/p."""
    sampler, sequence, position, *_ = context
    target = sampler.probs(logits)
    accepted = 0
    for place, token in enumerate(draft.tokens):
        u = sampler.uniform("judge", sequence, position, place + 1)
        if not u * target[place, token] < draft.probs[place][token]:
            break
        accepted += 1
    weights = target[accepted]
    if accepted < len(draft.tokens):
        weights = (weights - draft.probs[accepted]).clamp(min=0)
    last = draw(weights[None], [sampler.uniform("last", sequence, position, 0)])
    return [*draft.tokens[:accepted], int(last)]


@pytest.mark.parametrize(
    ("vocabulary", "depth", "temperature", "top_p", "top_k", "seed"),
    [
        (6, 1, 1.0, 1.0, 0, 0),
        (6, 1, 0.6, 0.8, 0, 1),
        (3, 2, 1.3, 1.0, 0, 2),
        (4, 2, 1.0, 0.75, 0, 3),
        (3, 3, 0.8, 0.9, 0, 4),
        (6, 1, 0.8, 1.0, 3, 5),
        (4, 2, 0.8, 0.95, 3, 6),
    ],
)
def test_the_distribution_of_what_a_chain_emits_is_the_targets(
    vocabulary: int, depth: int, temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    tables = random_tables(vocabulary, depth, seed)
    sampler = FedChoice("rejection", temperature, 0, top_p, top_k)
    distribution = emitted_distribution(tables, depth, sampler, rejection_verifier)
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT)
    assert distance(distribution, exact_distribution(tables, depth, sampler)) < EXACT


def test_a_drafter_that_is_not_cut_is_loss_free_too_if_the_verifier_knows() -> None:
    """Top-p of the target alone decides the distribution; that of the drafter only what is accepted."""
    tables, sampler = random_tables(4, 1, 5), FedChoice("rejection", 1.0, 0, 0.7)
    whole = FedChoice("rejection", 1.0, 0, 1.0, fed=sampler.fed)

    def verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        return rejection_verifier(logits, draft, context._replace(sampler=sampler))

    distribution = emitted_distribution(tables, 1, whole, verifier)  # beyond the round, tokens follow the whole target
    expected = {}
    for first, chance in enumerate(warped(tables.target[()].tolist(), 1.0, 0.7)):
        expected[first,] = chance
    first_token = Counter[Path]()
    for path, chance in distribution.items():
        first_token[path[:1]] += chance
    assert distance(dict(first_token), expected) < EXACT


BROKEN = {
    "replacement from p": (broken_replacement, None),
    "u < q/p": (broken_ratio, None),
    "top-p of p alone": (rejection_verifier, FedChoice("rejection", 0.9, 0, 1.0)),
}


@pytest.mark.parametrize(("verifier", "judged_by"), BROKEN.values(), ids=BROKEN.keys())
def test_enumeration_catches_a_broken_verifier(verifier: Verifier, judged_by: Sampler | None) -> None:
    tables, sampler = random_tables(4, 1, 7), FedChoice("rejection", 0.9, 0, 0.8)
    assert (
        distance(emitted_distribution(tables, 1, sampler, verifier, judged_by), exact_distribution(tables, 1, sampler))
        > 0.02
    )


# --- The real loop -----------------------------------------------------------------------------

SAMPLES = 1200


class RememberedLM(CachedLM):
    """A model whose plain pass over a text is made once and remembered, so that thousands of decodings are quick."""

    def __init__(self, model: LlamaForCausalLM, known: dict[Path, torch.Tensor]):
        super().__init__(model)
        self.known = known

    def reset(self) -> None:
        self.length, self.text = 0, Path()

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        self.text = (*self.text[: self.length], *tokens)
        return torch.stack([self.after(self.text[: self.length + n + 1]) for n in range(len(tokens))][-keep:])

    def after(self, text: Path) -> torch.Tensor:
        if text not in self.known:
            self.known[text] = self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        return self.known[text]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


KNOWN: tuple[dict[Path, torch.Tensor], dict[Path, torch.Tensor]] = ({}, {})


def remembering_decoder(sampler: Sampler, verifier: Verifier | None) -> Decoder:
    target, drafter = models()
    decoder = Decoder(target, DraftModel(drafter, ()), (), sampler, verifier)
    decoder.target = RememberedLM(target, KNOWN[0])
    assert isinstance(decoder.drafter, DraftModel)
    decoder.drafter.lm = RememberedLM(drafter, KNOWN[1])
    return decoder


POLICIES = [
    None,
    make_policy("fixed_k", {"k": 3}),
    make_policy("max_confidence", {"lambda0": 0.6, "dynamic": False, "max_draft_tokens": 3}),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_many_samples_of_the_loop_follow_the_target(policy: ChainPolicy | None) -> None:
    assert p_value(remembering_decoder(SAMPLED, None), policy, SAMPLES) > 1e-3


@dataclass(frozen=True)
class ToldTheUncut(Sampler):
    """Drafts from the nucleus and says that it drew from all tokens."""

    def draft(
        self, logits: torch.Tensor, sequence: int, position: int, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().draft(logits, sequence, position, depth)[0], (logits / self.temperature).softmax(-1)


@pytest.mark.parametrize(
    ("sampler", "verifier"),
    [
        (SAMPLED, broken_replacement),
        (SAMPLED, broken_ratio),
        (ToldTheUncut("rejection", 1.2, seed=5, top_p=0.8), None),
    ],
    ids=BROKEN.keys(),
)
def test_samples_catch_a_broken_verifier(sampler: Sampler, verifier: Verifier | None) -> None:
    assert p_value(remembering_decoder(sampler, verifier), POLICIES[1], samples=500) < 1e-6


KINDS: tuple[Siblings, ...] = ("iid", "without_replacement", "top_k")
HALVINGS = 36  # of a threshold's interval
EXACT_OF_TREES = 1e-9  # of a distribution put together from some twenty thresholds per draft, each found to 2^-36


def random_tree(nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a tree of any shape."""
    return [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(nodes)]


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


# --- Multi-branch rejection: the distribution of the output, by enumeration ---------------------------------


def outcomes(
    draft: Draft, sampler: FedChoice, verify: Callable[[], tuple[list[int], int]], vocabulary: int
) -> Distribution:
    """Of what the verifier emits for one draft, from the threshold of each of its decisions."""

    def feed(node: int, u: float) -> None:
        sampler.fed["judge", node + 1] = u

    def accepts(node: int, u: float) -> bool:
        feed(node, u)
        return node in verify()[0]

    def last_is_at_most(token: int, u: float) -> bool:
        sampler.fed["last", 0] = u
        return verify()[1] <= token

    distribution: Distribution = {}

    def branch(node: int, chance: float) -> None:
        if chance == 0:
            return
        if node == len(draft.tokens):
            path = verify()[0]
            assert all(draft.parents[b] == a for a, b in itertools.pairwise([-1, *path]))
            cuts = [
                threshold(lambda u, token=token: last_is_at_most(token, u), HALVINGS) for token in range(vocabulary)
            ]
            for token, prob in enumerate(np.diff(cuts, prepend=0.0)):
                emitted = (*(draft.tokens[n] for n in path), token)
                distribution[emitted] = distribution.get(emitted, 0.0) + chance * float(prob)
            return
        below = threshold(lambda u: accepts(node, u), HALVINGS)
        for u, part in ((2.0**-53, below), (1 - 2.0**-53, 1 - below)):
            feed(node, u)
            branch(node + 1, chance * part)

    for node in range(len(draft.tokens)):
        feed(node, 0.5)
    sampler.fed["last", 0] = 0.5
    branch(0, 1.0)
    return distribution


def tree_distribution(
    tables: Tables,
    parents: Sequence[int],
    kind: Siblings,
    sampler: FedChoice,
    judged_as: Siblings | None = None,
    prune: Callable[[Draft], Draft] = lambda draft: draft,
) -> Distribution:
    """The distribution of the first tokens, one more than the tree is deep, of one round and the target's own after it.

    judged_as : the kind of siblings that the verifier assumes, if not that of the drafting
    """
    length, vocabulary = max(depths_of(parents)) + 1, len(tables.target[()])

    def probs(table: dict[Path, torch.Tensor], path: Path) -> list[float]:
        return warped(table[path].tolist(), sampler.temperature, sampler.top_p)

    distribution: Distribution = {}
    for tokens, chance in drafts(kind, parents, lambda path: probs(tables.drafter, path)):  # type: ignore[arg-type]
        assumed = judged_as or kind
        drawn_from = [sampler.probs(tables.drafter[path_to(parent, tokens, parents)][None])[0] for parent in parents]
        draft = Draft(tokens, [*parents], siblings=assumed, probs=[] if assumed == "top_k" else drawn_from)
        draft = prune(draft)
        rows = [tables.target[path_to(node, draft.tokens, draft.parents)] for node in range(-1, len(draft.tokens))]
        logits = torch.stack(rows)
        context = RoundContext(sampler, 0, 0)
        emitted = outcomes(draft, sampler, lambda: reject_tree(logits, draft, context), vocabulary)  # noqa: B023
        for path, prob in emitted.items():
            continue_text(distribution, lambda path: probs(tables.target, path), path, chance * prob, length)
    return distribution


TREES = {
    "three siblings": ([-1, -1, -1], 3, 0.9, 1.0),
    "cut to the nucleus": ([-1, -1], 4, 1.2, 0.7),  # some of it runs out without replacement
    "two levels": ([-1, -1, 0, 0, 1], 3, 0.8, 1.0),
    "three levels": ([-1, -1, 0, 1, 1, 2], 2, 1.1, 1.0),
    "one child each": ([-1, 0], 3, 1.0, 0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TREES)
def test_the_distribution_of_what_is_emitted_is_the_targets(shape: str, kind: Siblings) -> None:
    parents, vocabulary, temperature, top_p = TREES[shape]
    depth = max(depths_of(parents))
    tables = random_tables(vocabulary, depth, seed=len(shape))
    sampler = FedChoice("rejection", temperature, 0, top_p)
    distribution = tree_distribution(tables, parents, kind, sampler)
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT_OF_TREES)
    assert distance(distribution, exact_distribution(tables, depth, sampler)) < EXACT_OF_TREES


def drawn_siblings(q: torch.Tensor, kind: Siblings, uniforms: Sequence[float]) -> list[int]:
    """Tokens drawn from q, without replacement each from what the earlier ones left of it."""
    tokens, left = list[int](), q.clone()
    for u in uniforms:
        tokens.append(int(draw(left[None], [u])))
        if kind == "without_replacement":
            left[tokens[-1]] = 0
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_many_drafted_and_judged_trees_follow_the_target(kind: Siblings) -> None:
    """Draws and judgements with the uniforms of real runs, two children of the root and one of each of these."""
    samples, sampler, tables = 2000, Sampler("rejection", 2.0, seed=3), random_tables(3, 2, seed=4)
    distribution = exact_distribution(tables, 1, sampler)
    counts = Counter[Path]()
    for sequence in range(samples):
        root = tables.drafter[()][None]
        if kind == "top_k":
            tokens: list[int] = sampler.candidates(root, sequence, [0], 2)[0][0].tolist()
            logits = torch.stack([tables.drafter[token,] for token in tokens])
            leaves, probs = sampler.candidates(logits, sequence, [1, 1], 1)[0], list[torch.Tensor]()
        else:
            uniforms = [sampler.uniform("draft", sequence, 0, node) for node in range(1, 5)]
            q = sampler.probs(root)
            tokens = drawn_siblings(q[0], kind, uniforms[:2])
            below = sampler.probs(torch.stack([tables.drafter[token,] for token in tokens]))
            leaves, probs = draw(below, uniforms[2:])[:, None], [q[0], q[0], *below]
        draft = Draft([*tokens, *leaves[:, 0].tolist()], [-1, -1, 0, 1], siblings=kind, probs=probs, drafted=4)
        rows = [tables.target[path_to(node, draft.tokens, draft.parents)] for node in range(-1, 4)]
        path, token = reject_tree(torch.stack(rows), draft, RoundContext(sampler, sequence, 0))
        emitted = (*(draft.tokens[node] for node in path), token)
        if len(emitted) == 1:  # the next round: nothing drafted
            emitted = (token, reject_tree(tables.target[token,][None], Draft(), RoundContext(sampler, sequence, 1))[1])
        counts[emitted[:2]] += 1
    expected = np.array([distribution[path] for path in distribution]) * samples
    assert expected.min() > 5 and counts.keys() <= distribution.keys()
    assert stats.chisquare([counts[path] for path in distribution], expected).pvalue > 1e-3


SKEWED = Tables(
    {path: torch.tensor([1.0, 4.0, 3.0, 8.0], dtype=torch.float64).log() for path in [(), (0,), (1,), (2,), (3,)]},
    {path: torch.tensor([9.0, 2.0, 4.0, 1.0], dtype=torch.float64).log() for path in [(), (0,), (1,), (2,), (3,)]},
)


@pytest.mark.parametrize(
    ("drawn", "judged_as", "bias"),
    [("without_replacement", "iid", 0.2), ("top_k", "iid", 0.6), ("top_k", "without_replacement", 0.4)],
)
def test_enumeration_catches_the_wrong_rule(drawn: Siblings, judged_as: Siblings, bias: float) -> None:
    sampler = FedChoice("rejection")
    expected = exact_distribution(SKEWED, 1, sampler)
    assert distance(tree_distribution(SKEWED, [-1, -1, -1], drawn, sampler), expected) < EXACT_OF_TREES
    assert distance(tree_distribution(SKEWED, [-1, -1, -1], drawn, sampler, judged_as), expected) > bias


@pytest.mark.parametrize("kind", KINDS)
def test_enumeration_catches_a_forgotten_residual(kind: Siblings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token drawn from p after rejections."""
    judge_children, sampler = verify.judge_children, FedChoice("rejection")

    def forgetful(
        draft: Draft, children: Sequence[int], target: torch.Tensor, judge: Callable[[int], float]
    ) -> tuple[int | None, torch.Tensor]:
        return judge_children(draft, children, target, judge)[0], target

    monkeypatch.setattr(verify, "judge_children", forgetful)
    assert distance(tree_distribution(SKEWED, [-1, -1], kind, sampler), exact_distribution(SKEWED, 1, sampler)) > 0.05


def most_probable_sibling(draft: Draft) -> Draft:
    """Only the sibling of the largest probability under the draft."""
    q = [9, 2, 4, 1]
    best = max(range(len(draft.tokens)), key=lambda node: q[draft.tokens[node]])
    return Draft([draft.tokens[best]], [-1], siblings=draft.siblings, probs=draft.probs[best : best + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_out_drawn_siblings_by_what_was_drawn_biases(kind: Siblings) -> None:
    """Why such drafts are refused; siblings that were not drawn may be left out."""
    sampler = FedChoice("rejection")
    distribution = tree_distribution(SKEWED, [-1, -1], kind, sampler, prune=most_probable_sibling)
    bias = distance(distribution, exact_distribution(SKEWED, 1, sampler))
    assert bias < EXACT_OF_TREES if kind == "top_k" else bias > 0.05


# --- Multi-branch rejection: chains, kernels, mismatches -------------------------------------------


def random_draft(kind: Siblings, parents: list[int], vocabulary: int, seed: int) -> tuple[torch.Tensor, Draft]:
    """A draft that the target's logits [k + 1, V] resemble, of this kind."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(parents) + 1, vocabulary, generator=generator, dtype=torch.float64)
    q = (logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64)).softmax(-1)
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        left = q[parent + 1].clone()
        if kind != "iid":
            left[[tokens[n] for n in range(node) if parents[n] == parent]] = 0
        tokens.append(int(left.argmax() if kind == "top_k" else torch.multinomial(left, 1, generator=generator)))
    return logits, Draft(tokens, parents, siblings=kind, probs=[q[p + 1] for p in parents] if kind != "top_k" else [])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_on_a_chain_tree_rejection_is_chain_rejection(kernels: str) -> None:
    lengths = set()
    with use_kernels(kernels):
        for seed, kind in itertools.product(range(60), ("iid", "without_replacement")):
            logits, draft = random_draft(kind, [*range(-1, seed % 6 - 1)], 12, seed)  # type: ignore[arg-type]
            sampler = Sampler("rejection", 0.9, seed)
            path, token = reject_tree(logits, draft, RoundContext(sampler, 1, 2))
            assert path == [*range(len(path))]
            emitted = [*(draft.tokens[node] for node in path), token]
            assert emitted == rejection_verifier(logits, draft, RoundContext(sampler, 1, 2))
            lengths.add(len(path))
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kernels", "cases"), [("reference", 100), ("triton", 3)])
def test_the_lean_walk_is_the_kernels(kind: Siblings, kernels: str, cases: int) -> None:
    lengths = set()
    for seed in range(cases):
        generator = torch.Generator().manual_seed(seed)
        logits, draft = random_draft(kind, random_tree(seed % 13, generator), 9, seed)
        sampler = Sampler("rejection", 0.8, seed, 0.95 if kind == "top_k" else 1.0)
        walked = reject_tree(logits, draft, RoundContext(sampler, 0, 5))
        with use_kernels(kernels):
            assert reject_tree(logits, draft, RoundContext(sampler, 0, 5)) == walked
        lengths.add(len(walked[0]))
    assert cases < 10 or len(lengths) > 2


@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
def test_a_token_that_cannot_have_been_drawn_is_passed_over(kind: Siblings) -> None:
    q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    logits = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log().expand(4, -1)
    draft = Draft([2, 0, 1], [-1, -1, 0], siblings=kind, probs=[q, q, q])
    sampler = FedChoice("rejection", fed={("judge", 1): 0.0, ("judge", 2): 0.9, ("judge", 3): 0.0, ("last", 0): 0.1})
    # 0 is rejected, and (p - q)+ has token 2 alone.
    assert reject_tree(logits, draft, RoundContext(sampler, 0, 0)) == ([], 2)
    sampler.fed["judge", 2] = 0.0
    assert reject_tree(logits, draft, RoundContext(sampler, 0, 0)) == ([1], 0)


def test_a_draft_that_does_not_know_how_it_was_drafted_is_refused() -> None:
    q = torch.full((3,), 1 / 3)
    bad = {
        "carries 0 distributions for 2 tokens": Draft([0, 1], [-1, -1]),  # the most probable, called draws
        "carries 1 distributions for 2": Draft([0, 1], [-1, -1], siblings="without_replacement", probs=[q]),
        "not drawn": Draft([0, 1], [-1, -1], siblings="top_k", probs=[q, q]),
        "unknown": Draft([0], [-1], siblings="beam", probs=[q]),  # type: ignore[arg-type]
        "3 of 5 nodes": Draft([0, 1], [-1, -1], probs=[q, q], drafted=5),
    }
    for message, draft in bad.items():
        for kernels in ("auto", "reference"):
            with use_kernels(kernels), pytest.raises(InputError, match=message) as caught:
                reject_tree(torch.zeros(3, 3), draft, RoundContext(Sampler("rejection"), 0, 0))
            assert "\n" not in str(caught.value)
    check_siblings(Draft([0, 1], [-1, -1], siblings="top_k", drafted=5))
    check_siblings(Draft([0, 1], [-1, -1], probs=[q, q], drafted=2))


# --- Matching ------------------------------------------------------------------------------------


def matched_trees(cases: int, sampler: Sampler) -> Iterator[tuple[torch.Tensor, Draft, list[int]]]:
    """Logits, random trees over few tokens, so that siblings repeat, and the target's choice after each row."""
    for seed in range(cases):
        generator = torch.Generator().manual_seed(seed)
        parents = random_tree(int(torch.randint(0, 30, (), generator=generator)), generator)
        logits = torch.randn(len(parents) + 1, 4, generator=generator)
        tokens = torch.randint(0, 4, (len(parents),), generator=generator).tolist()
        positions = [40, *(40 + depth for depth in depths_of(parents))]
        chosen = [int(sampler.tokens(row[None], 3, at)) for row, at in zip(logits, positions, strict=True)]
        yield logits, Draft(tokens, parents), chosen


@pytest.mark.parametrize("sampler", [Sampler(), Sampler("gumbel", 0.8, 2), Sampler("gumbel", 1.2, 3, 0.7)], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_matching_takes_the_longest_path_of_the_targets_choices(sampler: Sampler, kernels: str) -> None:
    lengths, repeated = [], 0
    for logits, draft, chosen in matched_trees(150, sampler):
        paths: list[list[int]] = [[]]  # the path to the pending token, then to each node
        for node, parent in enumerate(draft.parents):
            paths.append([*paths[parent + 1], node])
        matched = [
            path for path in paths if all(draft.tokens[node] == chosen[draft.parents[node] + 1] for node in path)
        ]
        with use_kernels(kernels):
            path, token = match_tree(logits, draft, RoundContext(sampler, 3, 40))
        assert path == max(matched, key=len)  # the first of equals
        assert token == chosen[path[-1] + 1 if path else 0]
        lengths.append(len(path))
        siblings = [*zip(draft.parents, draft.tokens, strict=True)]
        repeated += any(siblings.count(siblings[node]) > 1 for node in path)
    assert repeated > 10 and max(lengths) > 3 and min(lengths) == 0


def test_the_mode_picks_the_verifier() -> None:
    assert tree_verifier_for(Sampler("rejection")) is reject_tree
    assert tree_verifier_for(Sampler()) is tree_verifier_for(Sampler("gumbel")) is match_tree
    target, drafter = models()
    for sampler, verifier in ((SAMPLED, rejection_verifier), (Sampler(), match_verifier)):
        assert Decoder(target, DraftModel(drafter, ()), (), sampler).verifier is verifier
    assert not match_tree.lossy and not reject_tree.lossy and TypicalAcceptance().lossy


# --- Typical acceptance --------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
@pytest.mark.parametrize(
    ("sampler", "verifier"),
    [
        (Sampler("gumbel", 0.7, 1), TypicalAcceptance()),
        (Sampler("rejection", 1.3, 1), TypicalAcceptance(0.2, 0.5)),
        (Sampler("gumbel", 1.0, 1, 0.8), TypicalAcceptance(0.3)),
    ],
    ids=str,
)
def test_typical_acceptance_is_the_kernels_rule(sampler: Sampler, verifier: TypicalAcceptance, kernels: str) -> None:
    """By the operation's reference, from statistics in numpy."""
    lengths = set()
    for logits, draft, _ in matched_trees(100 if kernels != "triton" else 6, Sampler()):
        probs = np.array([warped(row, sampler.temperature, sampler.top_p) for row in logits.double().tolist()])
        with np.errstate(divide="ignore"):
            logs = torch.tensor(np.log(probs))
        verified = speckernels.typical_acceptance(
            torch.tensor([[0, *draft.tokens]]),
            torch.tensor([[-1, *(parent + 1 for parent in draft.parents)]], dtype=torch.int32),
            logs[None],
            torch.zeros(1, len(logits)),
            torch.special.entr(torch.tensor(probs)).sum(-1)[None].float(),
            logits.argmax(-1)[None],
            verifier.epsilon,
            math.sqrt(verifier.epsilon) if verifier.delta is None else verifier.delta,
        )
        accepted = int(verified.accepted[0])
        with use_kernels(kernels):
            path, token = verifier(logits, draft, RoundContext(sampler, 0, 0))
        assert [0, *(node + 1 for node in path)] == verified.path[0, : accepted + 1].tolist()
        assert token == verified.emitted[0, accepted]
        lengths.add(len(path))
    assert kernels == "triton" or len(lengths) > 3


def test_typical_acceptance_by_hand() -> None:
    """p = (0.6, 0.2, 0.2): H = 0.950 nats, exp(-H) = 0.387."""
    logits = torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64).log().expand(2, -1)
    draft, sampler = Draft([1], [-1]), Sampler("gumbel", 1.0)
    for epsilon, delta, path in (
        (0.19, 9.0, [0]),
        (0.21, 9.0, []),
        (1.0, 0.51, [0]),
        (1.0, 0.52, []),
        (0.26, None, [0]),
    ):
        assert TypicalAcceptance(epsilon, delta)(logits, draft, RoundContext(sampler, 0, 0)) == (path, 0)
    assert TypicalAcceptance(0.28)(logits, draft, RoundContext(sampler, 0, 0)) == ([], 0)  # sqrt(0.28) * 0.387 = 0.205


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_probability_at_the_threshold_is_not_typical(kernels: str) -> None:
    """Section 3.3.1 accepts what exceeds it: of 4 equal tokens each has exactly a quarter."""
    draft, context = Draft([1], [-1]), RoundContext(Sampler("gumbel", 1.0), 0, 0)
    with use_kernels(kernels):
        for epsilon, path in ((0.25, []), (0.2499, [0])):
            assert TypicalAcceptance(epsilon, 100.0)(torch.zeros(2, 4), draft, context)[0] == path


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_typical_acceptance_of_a_greedy_choice_is_matching(kernels: str) -> None:
    with use_kernels(kernels):
        for logits, draft, _ in matched_trees(60, Sampler()):
            expected = match_tree(logits, draft, RoundContext(Sampler(), 3, 40))
            assert TypicalAcceptance()(logits, draft, RoundContext(Sampler(), 3, 40)) == expected
