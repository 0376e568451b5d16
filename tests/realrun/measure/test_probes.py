"""Probes beside arms: of what is missing and nothing else, along the text, in caches that stay right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import realrun.measure.sweeps as probes
from realrun.decode.rounds import Round
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.lm.llama import FusedLlama
from realrun.measure.rounds import pass_tokens
from realrun.measure.stream import Stream
from realrun.measure.sweeps import Probe, ProbedText, Prober
from realrun.pairs.pair import Pair
from tests.support.pairs.inside import pair_of
from tests.support.pairs.medusa import medusa_pair
from tests.support.pairs.space import space_pair
from tests.support.tiny import VOCAB, tiny_pair

PROMPT = [5, 6, 7, 8]
OUTPUT = np.random.default_rng(2).integers(1, VOCAB, 30).tolist()
LONGEST = len(PROMPT) + len(OUTPUT)
ENOUGH = 3
NOTHING = Probe(99)  # a probe that is none of anybody's


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ENOUGH", ENOUGH)


def lookup_pair() -> Pair:
    return replace(tiny_pair(), drafter=LookupKind())


PAIRS = {
    "model": tiny_pair,
    "prompt-lookup": lookup_pair,
    "medusa": medusa_pair,
    "medusa of one head": lambda: medusa_pair(heads=1),
    "space": space_pair,
    **{kind: (lambda kind=kind: pair_of(kind)) for kind in ("eesd", "self-sd", "edd")},
}


def prober_of(pair: Pair, depth: int = 2, tree_tokens: int = 3) -> Prober:
    prober = Prober(pair, depth=depth, tree_tokens=tree_tokens, sampler=Sampler(), seed=0)
    prober.warm(LONGEST)
    return prober


def probed_text(
    prober: Prober, met: Sequence[Stream], probed: Stream, texts_left: int = 1, output: Sequence[int] = OUTPUT
) -> ProbedText:
    return ProbedText(prober, met, probed, PROMPT, output, texts_left)


def run_to_its_end(text: ProbedText) -> int:
    turns = 0
    while not text.done:
        text.advance()
        turns += 1
    return turns


def lacking(prober: Prober, stream: Stream) -> list[Any]:
    """What there are too few samples of, of all that a profile of this pair can hold."""
    wanted: list[tuple[Any, ...]] = [("verify", 1)]
    for probe in prober.chains:
        wanted += (
            [("tree verify", pass_tokens(probe.masks, probe.tokens))]
            if probe.masks
            else [("verify", probe.tokens + 1), ("draft", probe.tokens)]
        )
    for size in prober.sizes:
        wanted += [("verify", 1) if size == 1 else ("tree verify", size)]
        wanted += [("tree draft", size)] * (prober.drafter.max_depth != 1)
    return [what for what in wanted if stream.count(*what) < ENOUGH]


@pytest.mark.parametrize("kind", PAIRS)
def test_probes_fill_what_is_missing_of_every_drafter(kind: str) -> None:
    prober = prober_of(PAIRS[kind](), tree_tokens=0 if kind in ("prompt-lookup", "space") else 3)
    met, probed = Stream(), Stream()
    text = probed_text(prober, [met], probed)
    owed = text.owed
    assert 0 < owed == run_to_its_end(text)
    assert not lacking(prober, probed) and probed_text(prober, [met], probed).done
    assert not any(met.points.values())


def test_probes_are_spread_over_the_texts_to_come() -> None:
    prober = prober_of(tiny_pair(), depth=4, tree_tokens=0)
    probed = Stream()
    turns = [run_to_its_end(probed_text(prober, [], probed, texts_left)) for texts_left in (4, 3, 2, 1)]
    assert not lacking(prober, probed)
    assert turns[0] == -(-5 * ENOUGH // 4) and max(turns) == turns[0]  # of nothing drafted, and of four lengths


def full(prober: Prober, but: Probe) -> Stream:
    """Enough samples of every probe but this one."""
    stream = Stream()
    round_ = Round(0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 1.0, fed=1, asked=1)
    for _ in range(ENOUGH):
        stream.add_baseline(round_, 20)
        for probe in prober.chains:
            if probe != but:  # whose place other drafts reach, unlike its number of tokens
                steps = (1.0,) * probe.tokens
                stream.add(replace(round_, drafted=probe.tokens, verified=probe.tokens, step_s=steps), 20)
        for size in prober.sizes:
            stream.add(replace(round_, verified=size - 1, step_s=(1.0, 1.0), level_nodes=(1, size)), 20, tree=True)
    return stream


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_only_what_the_arms_do_too_seldom_is_probed(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prober = prober_of(tiny_pair(), depth=4)
    arms = [full(prober, Probe(tokens)) for _ in range(2)]
    probed, ran = Stream(), Counter[Probe]()
    run = Prober.run

    def noted(self: Prober, probe: Probe, stream: Stream, behind: int = 0) -> None:
        ran[probe] += 1
        run(self, probe, stream, behind)

    monkeypatch.setattr(Prober, "run", noted)
    run_to_its_end(probed_text(prober, arms, probed))
    assert ran == {Probe(tokens): ENOUGH}
    assert len(probed.points["verify", tokens + 1]) == ENOUGH


def test_nothing_is_probed_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    prober = prober_of(tiny_pair(), depth=4)
    arms, probed = [full(prober, NOTHING) for _ in range(2)], Stream()
    for name in ("begin", "run", "extend"):
        monkeypatch.setattr(Prober, name, None)  # calling it would raise
    text = probed_text(prober, arms, probed)
    assert text.done and text.position == 0 and not any(probed.points.values())


def test_what_one_arm_alone_does_is_probed_as_well() -> None:
    """So that its times can be predicted without its own."""
    prober = prober_of(tiny_pair(), depth=2, tree_tokens=0)
    everything, probed = full(prober, NOTHING), Stream()
    assert probed_text(prober, [everything, Stream()], probed).owed == 3 * ENOUGH
    assert probed_text(prober, [everything, full(prober, Probe(2))], probed).owed == ENOUGH
    assert probed_text(prober, [everything, everything], probed).done


@pytest.mark.parametrize("output", [OUTPUT, OUTPUT[:2], OUTPUT[:1]], ids=len)
@pytest.mark.parametrize("kind", ["model", "edd", "medusa", "self-sd"])
@torch.inference_mode()
def test_caches_are_those_of_the_text_as_far_as_it_came(kind: str, output: list[int]) -> None:
    """Also where there are more probes than tokens."""
    prober, fresh = prober_of(PAIRS[kind](), depth=3), prober_of(PAIRS[kind](), depth=3)
    text = probed_text(prober, [], Stream(), output=output)
    positions = [text.position]
    while not text.done:
        text.advance()
        positions.append(text.position)
        if text.done:
            break
        assert prober.tokens == [*PROMPT, *output[: text.position]]
        fresh.begin(prober.tokens)
        assert prober.context == prober.target.length == fresh.target.length
        assert prober.drafter.lm.length == fresh.drafter.lm.length
        for own, other in ((prober.target, fresh.target), (prober.drafter.lm, fresh.drafter.lm)):
            if isinstance(own, FusedLlama) and isinstance(other, FusedLlama):
                for was, now in ((other.keys, own.keys), (other.values, own.values)):
                    cached = slice(0, own.length)
                    torch.testing.assert_close(now[:, :, cached], was[:, :, cached], rtol=0, atol=1e-12)
    assert positions == sorted(positions) and positions[-1] == len(output)


def test_probes_take_both_kinds_of_a_first_step() -> None:
    """A draft cache that lags behind has a token more to ingest."""
    prober = prober_of(tiny_pair(), depth=3, tree_tokens=0)
    probed = Stream()
    run_to_its_end(probed_text(prober, [], probed))
    assert probed.points["behind",] and probed.points["draft", 1]
    assert {context for context, _ in probed.points["behind",]} <= set(range(len(PROMPT) - 1, LONGEST))


def test_a_table_of_what_was_probed_has_no_gap() -> None:
    prober = prober_of(tiny_pair(), depth=3, tree_tokens=4)
    probed = Stream()
    run_to_its_end(probed_text(prober, [], probed))
    prober.begin(PROMPT)
    prober.baseline(probed, 2)
    for table in probed.tables([3, LONGEST], prober.depth, prober.sizes, masks=False).values():
        for part in (table["draft_step"], table["verify"], table["autoregressive"], table["tree"]["verify"]):
            assert np.min(part) > 0
