"""Dense recording: at every position, exactly what the drafter would propose there; interrupted, it goes on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

import realrun.measure.reuse as reuse
import realrun.proposals.chain
import specsim
from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.lm.cached import CachedLM
from realrun.measure.record import RecordSettings, elapsed_ratio, record
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.chain import along_text, branch_columns, drafted_with
from realrun.proposals.recorder import Columns, RecordRequest
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError, Interrupted
from specsim.policy.registry import POLICIES as POLICY_KINDS
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from tests.support.commands import call
from tests.support.dense_records import output_of
from tests.support.tiny import POSITIONS, random_prompts, tiny_pair, tiny_prompts, tiny_tokenizer

CHOICES = {mode: Sampler(mode, 0.8, seed=4) for mode in ("greedy", "gumbel", "greedy-draft")}
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())


@torch.inference_mode()
def step_by_step(prompt: Sequence[int], output: Sequence[int], depth: int, sampler: Sampler, sequence: int) -> Columns:
    """The definition of a dense row: the real drafter, asked at every position."""
    drafter = DraftModel(tiny_pair().drafter.model, ())
    rows: dict[str, list[object]] = {name: [] for name in ("draft_token", "match_len", "steps")}
    for t in range(len(output)):
        context = [*prompt, *output[:t]]
        drafter.begin(context[:-1])
        draft = drafter.propose(context, RoundContext(sampler, sequence, t, depth), lambda step, depth: True)
        match = 0
        while match < depth and t + match < len(output) and draft.tokens[match] == output[t + match]:
            match += 1
        rows["draft_token"].append(draft.tokens)
        rows["match_len"].append(match)
        rows["steps"].append([step[:3] for step in draft.steps])
    steps = np.asarray(rows["steps"], dtype=np.float32)
    return {
        "draft_token": np.asarray(rows["draft_token"]),
        "match_len": np.asarray(rows["match_len"]),
        **{name: steps[:, :, i] for i, name in enumerate(("prob", "confidence", "entropy_nats"))},
    }


@mode
@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_branch_columns_are_what_the_drafter_proposes(
    sampler: Sampler, chunk: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.chain, "CHUNK", chunk)
    lm = CachedLM(tiny_pair().drafter.model)
    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = output_of(tiny_pair(), prompt, 24, sampler, sequence)
        dense = branch_columns(lm, RecordRequest(prompt, output, depth, sampler, sequence))
        expected = step_by_step(prompt, output, depth, sampler, sequence)
        for name in ("draft_token", "match_len"):
            np.testing.assert_array_equal(dense[name], expected[name], name)
        for name in ("prob", "confidence", "entropy_nats"):
            assert dense[name].dtype == np.float32
            np.testing.assert_array_max_ulp(dense[name], expected[name], maxulp=1)
        np.testing.assert_array_equal(dense["token"], output)
        assert dense["match_len"].max() > 0
        # All branches are gone from the cache, the prefix is whole.
        assert lm.cache.get_seq_length() == lm.length == len(prompt) + len(output) - 1
        fresh = CachedLM(tiny_pair().drafter.model)
        with torch.inference_mode():
            fresh.prefill([*prompt, *output[:-1]])
        assert torch.equal(lm.cache.layers[0].keys, fresh.cache.layers[0].keys)


RANK_CHOICES = {
    **CHOICES,
    "nucleus": Sampler("gumbel", 0.8, seed=4, top_p=0.7),
    "top-k": Sampler("gumbel", 0.8, seed=4, top_k=10),
}


@pytest.mark.parametrize("sampler", RANK_CHOICES.values(), ids=RANK_CHOICES.keys())
def test_the_true_rank_is_the_place_in_the_order_in_which_siblings_are_drafted(sampler: Sampler) -> None:
    (prompt,) = random_prompts(1, seed=3)
    output, depth = output_of(tiny_pair(), prompt, 15, sampler, 2), 4
    dense = branch_columns(CachedLM(tiny_pair().drafter.model), RecordRequest(prompt, output, depth, sampler, 2))
    ranks = set()
    for t in range(len(output)):
        for i in range(depth):
            if t + i >= len(output):
                assert dense["true_rank"][t, i] == -1
                continue
            with torch.inference_mode():
                context = torch.tensor([[*prompt, *output[: t + i]]])
                logits = tiny_pair().drafter.model(input_ids=context, use_cache=False).logits[0, -1:]
            order = sampler.candidates(logits, 2, [t + i], logits.shape[1])[0][0].tolist()
            assert order.index(output[t + i]) == dense["true_rank"][t, i]
            assert i or (dense["true_rank"][t, 0] == 0) == (dense["match_len"][t] > 0)
            ranks.add(int(dense["true_rank"][t, i]))
    assert len(ranks) > 2


def test_of_equal_tokens_the_one_of_lowest_index_stands_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]] * 5)
    assert along_text(logits, range(5), Sampler(), 0).rank.tolist() == [3, 0, 1, 4, 2]
    # 3 and 0 are outside the nucleus: neither can be drawn.
    assert along_text(logits, range(5), Sampler("gumbel", 1.0, top_p=0.8), 0).rank[[0, 3]].tolist() == [3, 4]


@pytest.fixture(scope="module")
def eos_trace() -> tuple[Trace, list[Prompt], tuple[int, ...]]:
    """Six sequences, some of which end early."""
    prompts = tiny_prompts(6)
    outputs = [output_of(tiny_pair(), p.tokens, 20, CHOICES["gumbel"], s) for s, p in enumerate(prompts)]
    eos = (outputs[0][6], outputs[1][0])
    pair = replace(tiny_pair(), eos_token_ids=eos)
    return record(pair, prompts, RecordSettings(5, 20, CHOICES["gumbel"])), prompts, eos


def test_recorded_output_is_the_targets_own_up_to_the_end_of_text(
    eos_trace: tuple[Trace, list[Prompt], tuple[int, ...]],
) -> None:
    trace, prompts, eos = eos_trace
    for s, prompt in enumerate(prompts):
        plain = output_of(tiny_pair(), prompt.tokens, 20, CHOICES["gumbel"], s)
        ends = [t for t, token in enumerate(plain) if token in eos]
        expected = plain[: ends[0] + 1] if ends else plain
        assert trace.token[trace.offsets[s] : trace.offsets[s + 1]].tolist() == expected
    assert trace.output_tokens.min() == 1 and trace.output_tokens[0] == 7
    assert trace.domain.tolist() == [p.domain for p in prompts]
    assert trace.prompt_tokens.tolist() == [len(p.tokens) for p in prompts]
    assert trace.meta["eos_token_id"] == list(eos) and trace.meta["decoding"] == CHOICES["gumbel"].as_dict()
    assert elapsed_ratio(trace) > 1


def test_a_context_that_exceeds_the_models_is_refused() -> None:
    prompts = [Prompt("all", [1] * 100)]
    with pytest.raises(InputError, match=r"161 tokens.*160 positions") as caught:
        record(tiny_pair(), prompts, RecordSettings(max_draft_tokens=11, max_new_tokens=50))
    assert "\n" not in str(caught.value)
    trace = record(tiny_pair(), prompts, RecordSettings(max_draft_tokens=10, max_new_tokens=50))
    assert trace.output_tokens.tolist() == [50]


def test_the_files_of_prompts_are_recorded_where_any_is_known() -> None:
    settings = RecordSettings(2, 4)
    own, cut = tiny_prompts(1), Prompt("code", [1, 2, 3], "heapq.py")
    named = record(tiny_pair(), [*own, cut], settings).source
    assert named is not None and named.tolist() == ["", "heapq.py"]
    assert record(tiny_pair(), own, settings).source is None


# A recording that is interrupted goes on from the sequences that it kept.


SETTINGS = RecordSettings(4, 12, Sampler("gumbel", 0.8, seed=3), tree_nodes=8, tree_width=3)
PROMPTS = tiny_prompts(4)


def stop_after(sequences: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == sequences:
            raise KeyboardInterrupt

    return progress


def go_on(done: int, total: int) -> None: ...


def assert_same(trace: Trace, expected: Trace) -> None:
    for field in dataclasses.fields(Trace):
        if field.name in ("meta", "tree"):
            continue
        assert np.array_equal(getattr(trace, field.name), getattr(expected, field.name)), field.name
    assert trace.tree is not None and expected.tree is not None
    for field in dataclasses.fields(trace.tree):
        assert np.array_equal(getattr(trace.tree, field.name), getattr(expected.tree, field.name)), field.name


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences that were decoded."""
    met: list[int] = []
    decode = Decoder.decode

    def noted(self: Decoder, *arguments: Any, **options: Any) -> Any:
        met.append(options["sequence"])
        return decode(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "decode", noted)
    return met


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """The folder of a trace of which two sequences were recorded."""
    folder = tmp_path / "trace"
    with pytest.raises(Interrupted, match=r"2 of 4 sequences are kept in .*trace\.partial; the same command"):
        recorded_trace(tiny_pair(), PROMPTS, SETTINGS, folder, stop_after(2))
    assert not folder.exists()
    return folder


def test_it_goes_on_and_ends_with_the_same_trace(interrupted: Path, decoded: list[int]) -> None:
    trace = recorded_trace(tiny_pair(), PROMPTS, SETTINGS, interrupted, go_on)
    assert decoded == [2, 3]
    assert_same(trace, record(tiny_pair(), PROMPTS, SETTINGS))
    assert_same(read_trace(interrupted), trace)
    assert [path.name for path in interrupted.parent.iterdir()] == ["trace"]
    assert trace.meta["record_seconds"]["generate"] > 0


@pytest.mark.parametrize("eos", [(), (7, 30)])
@pytest.mark.parametrize("together", [2, 3, 12])
def test_prompts_decoded_at_once_give_the_same_trace(
    together: int, eos: tuple[int, ...], tmp_path: Path, decoded: list[int]
) -> None:
    """Of any lengths, and where some are there already; the first alone is decoded by itself."""
    pair, prompts, settings = tiny_pair(eos), tiny_prompts(9), replace(SETTINGS, sampler=Sampler())
    alone = record(pair, prompts, settings)
    decoded.clear()
    assert_same(record(pair, prompts, settings, together=together), alone)
    assert decoded == [0]
    with pytest.raises(Interrupted):
        recorded_trace(pair, prompts, settings, tmp_path / "trace", stop_after(4), together=together)
    assert_same(recorded_trace(pair, prompts, settings, tmp_path / "trace", go_on, together=together), alone)
    assert decoded == [0, 0, 4]


def test_drawn_texts_are_decoded_one_by_one(decoded: list[int]) -> None:
    drawn = replace(SETTINGS, sampler=Sampler("gumbel", 0.8, seed=4))
    record(tiny_pair(), PROMPTS, drawn, together=4)
    assert decoded == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["000001.npz", "recording.json"])
def test_what_a_kill_or_a_disk_damaged_is_recorded_again(interrupted: Path, decoded: list[int], name: str) -> None:
    path = interrupted.with_name("trace.partial") / name
    path.write_bytes(path.read_bytes()[:100])
    trace = recorded_trace(tiny_pair(), PROMPTS, SETTINGS, interrupted, go_on)
    assert decoded == ([1, 2, 3] if name.endswith("npz") else [0, 1, 2, 3])
    assert_same(trace, record(tiny_pair(), PROMPTS, SETTINGS))


@pytest.mark.parametrize("changed", [{"max_new_tokens": 11}, {"sampler": Sampler("gumbel", 0.8, seed=4)}])
def test_sequences_of_other_settings_are_not_taken(
    interrupted: Path, decoded: list[int], changed: dict[str, Any]
) -> None:
    settings = dataclasses.replace(SETTINGS, **changed)
    trace = recorded_trace(tiny_pair(), PROMPTS, settings, interrupted, go_on)
    assert decoded == [0, 1, 2, 3]
    assert_same(trace, record(tiny_pair(), PROMPTS, settings))


def test_an_old_trace_stays_until_the_new_one_is_whole(interrupted: Path) -> None:
    pair = tiny_pair()
    old = recorded_trace(pair, PROMPTS, SETTINGS, interrupted, go_on)
    longer = dataclasses.replace(SETTINGS, max_new_tokens=14)
    with pytest.raises(Interrupted, match="3 of 4"):
        recorded_trace(pair, PROMPTS, longer, interrupted, stop_after(3), overwrite=True)
    assert_same(read_trace(interrupted), old)
    new = recorded_trace(pair, PROMPTS, longer, interrupted, go_on, overwrite=True)
    assert_same(new, record(pair, PROMPTS, longer))


def test_the_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["record", tmp_path / "trace", "--drafter", "prompt-lookup", "--num-prompts", 3, "--max-new-tokens", 6]
    monkeypatch.setattr(reuse, "record", lambda *given, **named: record(*given[:3], stop_after(1), *given[4:], **named))
    result = call("realrun", *arguments)
    assert result.code == 130 and result.out == ""
    partial = tmp_path / "trace.partial"
    assert result.err.splitlines()[-1] == (
        f"interrupted: 1 of 3 sequences are kept in {partial}; the same command goes on"
    )
    monkeypatch.setattr(reuse, "record", record)
    assert call("realrun", *arguments).code == 0
    assert read_trace(tmp_path / "trace").sequences == 3 and not partial.exists()


# The shipped example traces are what `realrun record` gives.


DIFFERING = 1  # sequences at most, where another processor's rounding turns a near tie around


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lab-eagle", "lab-lookup", "lab-model"])
def test_an_example_is_what_recording_gives(name: str, tmp_path: Path) -> None:
    shipped = specsim.read_trace(f"example:{name}")
    meta = shipped.meta
    drafter = meta["drafter"].removeprefix("lab/").replace("draft", "model")
    tree = meta.get("tree") or {"nodes": 0, "width": 10}
    arguments = {
        "target": meta["target"],
        "drafter": drafter,
        "num-prompts": meta["prompts"]["count"],
        "max-new-tokens": meta["max_new_tokens"],
        "max-draft-tokens": meta["depth"],
        "mode": meta["decoding"]["mode"],
        "temperature": meta["decoding"]["temperature"],
        "seed": meta["decoding"]["seed"],
        "tree-nodes": tree["nodes"],
        "tree-width": tree["width"],
    }
    options = [part for key, value in arguments.items() for part in (f"--{key}", value)]
    assert call("realrun", "record", tmp_path / "again", *options).code == 0
    again = specsim.read_trace(tmp_path / "again")
    assert again.meta["prompts"] == meta["prompts"] and again.meta["weights"] == meta["weights"]
    assert np.array_equal(again.output_tokens, shipped.output_tokens)
    same = (again.token == shipped.token) & (again.match_len == shipped.match_len)
    of_row = np.repeat(np.arange(shipped.sequences), shipped.output_tokens)
    assert len(np.unique(of_row[~same])) <= DIFFERING
    if shipped.tree is not None:
        assert again.tree is not None and again.tree.nodes == shipped.tree.nodes
    at = same & (shipped.draft_token[:, 0] >= 0)
    assert np.allclose(again.prob[at, 0], shipped.prob[at, 0], atol=1e-4)


# Rejection sampling: probabilities as plain passes give them, and a real run's distribution.


CHOICE = Sampler("rejection", 0.8, seed=4, top_p=0.9)
DEPTH = 4


def columns_for(prompt: list[int], count: int, depth: int, sequence: int = 0, sampler: Sampler = CHOICE) -> Columns:
    pair = tiny_pair()
    output = output_of(pair, prompt, count, sampler, sequence)
    chances = [plain_probs(pair.target, [*prompt, *output[:t]], sampler)[token] for t, token in enumerate(output)]
    request = RecordRequest(prompt, output, depth, sampler, sequence, target_prob=np.array(chances))
    return branch_columns(CachedLM(pair.drafter.model), request, CachedLM(pair.target))


@torch.inference_mode()
def plain_probs(model: LlamaForCausalLM, tokens: list[int], sampler: Sampler) -> np.ndarray:
    """What is sampled from after these tokens: one pass without cache or mask, warped in numpy."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double().numpy()
    probs = np.exp((logits - logits.max()) / sampler.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    outside = order[np.cumsum(probs[order]) - probs[order] >= sampler.top_p]
    probs[outside] = 0
    return np.asarray(probs / probs.sum())


@pytest.mark.parametrize("sampler", [CHOICE, Sampler("rejection", 1.3, seed=1)], ids=str)
def test_features_and_acceptance_equal_plain_passes_over_every_branch(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.chain, "CHUNK", 4)  # of nine positions
    pair, count = tiny_pair(), 9
    (prompt,) = random_prompts(1, seed=6)
    columns = columns_for(prompt, count, DEPTH, sampler=sampler)
    output = columns["token"].tolist()
    certain = 0
    for t, i in itertools.product(range(count), range(DEPTH)):
        branch = columns["draft_token"][t].tolist()
        context, token = [*prompt, *output[:t], *branch[:i]], branch[i]
        q = plain_probs(pair.drafter.model, context, sampler)
        assert q[token] > 0
        own = kept = 0.0
        if t + i < count:
            text, y = [*prompt, *output[: t + i]], output[t + i]
            own = plain_probs(pair.drafter.model, text, sampler)[y]
            kept = min(1.0, own / plain_probs(pair.target, text, sampler)[y])
        certain += kept == 1.0
        assert columns["text_prob"][t, i] == pytest.approx(own, rel=1e-5)
        assert columns["text_accept"][t, i] == pytest.approx(kept, rel=1e-5)
        assert columns["prob"][t, i] == pytest.approx(q[token], rel=1e-5)
        assert columns["confidence"][t, i] == pytest.approx(q.max(), rel=1e-5)
        entropy = -(q[q > 0] * np.log(q[q > 0])).sum()
        assert columns["entropy_nats"][t, i] == pytest.approx(entropy, rel=1e-5, abs=1e-6)
        rank = (q > q[output[t + i]]).sum() if t + i < count and branch[:i] == output[t : t + i] else None
        if rank is not None and q[output[t + i]] > 0:
            assert columns["true_rank"][t, i] == rank
    assert 3 < certain < count * DEPTH  # both cases are there


def test_the_match_is_what_equals_the_output() -> None:
    (prompt,) = random_prompts(1, seed=2)
    columns = columns_for(prompt, 30, DEPTH)
    output = columns["token"].tolist()
    for t, row in enumerate(columns["draft_token"].tolist()):
        match = 0
        while match < DEPTH and t + match < 30 and row[match] == output[t + match]:
            match += 1
        assert columns["match_len"][t] == match
        # A token that the drafter never drafts was never accepted.
        assert (columns["text_prob"][t, :match] > 0).all()
    assert 0 < columns["match_len"].mean() < DEPTH


def test_positions_and_sequences_draft_independently() -> None:
    (prompt,) = random_prompts(1, seed=3)
    drafts = [columns_for(prompt, 20, DEPTH, sequence)["draft_token"] for sequence in range(2)]
    assert (drafts[0][0] != drafts[1][0]).any()  # the same context, another sequence
    rows = torch.full((4000, 5), 0.2, dtype=torch.float64)
    wanted, following = torch.zeros(4000, dtype=torch.int64), torch.zeros(4000, dtype=torch.bool)
    first, second = (drafted_with(rows, rows, wanted, following, RoundContext(CHOICE, 0, 0), depth) for depth in (1, 2))
    for other in (second, first.roll(1)):  # another depth, the next position
        table = np.histogram2d(first.numpy(), other.numpy(), bins=5)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_drafts_drawn_with_the_output_follow_q_and_its_acceptance(seed: int) -> None:
    """Over outputs x ~ p: d is distributed as q and accepted with min(1, p/q), and d = x iff accepted."""
    n, vocabulary = 20_000, 5
    generator = torch.Generator().manual_seed(seed)
    q, p = (1.5 * torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)
    wanted = torch.multinomial(p, n, replacement=True, generator=generator)
    yes = torch.ones(n, dtype=torch.bool)
    sampler = Sampler("rejection", 1.0, seed)
    drafted = drafted_with(q.expand(n, -1), p.expand(n, -1), wanted, yes, RoundContext(sampler, 0, 0), 1)
    accepted = drafted == wanted
    table = np.stack([np.bincount(drafted[part], minlength=vocabulary) for part in (accepted, ~accepted)]).ravel()
    distribution = torch.cat([torch.minimum(p, q), (q - p).clamp(min=0)]).numpy()
    assert not table[distribution == 0].any()
    assert stats.chisquare(table[distribution > 0], n * distribution[distribution > 0]).pvalue > 1e-3
    off_path = drafted_with(q.expand(n, -1), p.expand(n, -1), wanted, ~yes, RoundContext(sampler, 0, 0), 1)
    counts = np.bincount(off_path, minlength=vocabulary)
    assert stats.chisquare(counts, n * q.numpy()).pvalue > 1e-3


# --- Replay beside real runs ---------------------------------------------------------------------

POLICIES = [make_policy("fixed_k", {"k": 1}), make_policy("fixed_k", {"k": 5})]


@cache
def tiny_trace() -> Trace:
    return record(tiny_pair(), tiny_prompts(40, seed=1), RecordSettings(5, 32, Sampler("rejection", 0.8, seed=3)))


def test_a_recorded_trace_is_valid_and_says_what_it_is(tmp_path: Path) -> None:
    write_trace(tiny_trace(), tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    assert trace.sampled_by_rejection and trace.text_accept is not None
    assert trace.meta["decoding"] == {"mode": "rejection", "temperature": 0.8, "seed": 3}
    assert 0.4 < trace.meta["first_token_accepted_share"] < 0.9
    first = trace.text_accept[:, 0]
    # The share of first tokens that were accepted, against what their probabilities say.
    sd = np.sqrt((first * (1 - first)).sum()) / len(first)
    assert abs((trace.match_len > 0).mean() - first.mean()) < 4 * sd


def test_replay_of_recorded_outcomes_follows_real_runs() -> None:
    """Rounds of every prompt: real runs with other seeds differ by sampling alone."""
    trace, prompts, sampler = tiny_trace(), tiny_prompts(40, seed=1), Sampler("rejection", 0.8)
    decoders = [Decoder(*tiny_pair().make_drafter(), (), replace(sampler, seed=seed)) for seed in (101, 102)]
    for policy in POLICIES:
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2))).num_rounds
        real = [
            np.mean([len(decoder.decode(prompt.tokens, 32, policy, sequence=s).rounds) for decoder in decoders])
            for s, prompt in enumerate(prompts)
        ]
        difference = replayed - np.array(real)
        assert 0 < abs(difference.mean()) < 2 * difference.std(ddof=1) / np.sqrt(len(prompts))


def markov_model(logits: np.ndarray) -> LlamaForCausalLM:
    """Make a model of 3 tokens whose logits [3, 3] depend on the last token alone: its only block adds nothing."""
    sizes = {"vocab_size": 3, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=1, max_position_embeddings=POSITIONS, rms_norm_eps=1e-12)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in (block := model.model.layers[0]).self_attn.o_proj.weight, block.mlp.down_proj.weight:
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(3, 4))
        # The norm doubles a unit vector of 4 numbers.
        model.lm_head.weight.copy_(torch.nn.functional.pad(torch.tensor(logits.T) / 2, (0, 1)))
    return model


def expected_rounds(p: np.ndarray, draft: np.ndarray, k: int, budget: int) -> np.ndarray:
    """Enumerate the mean number of rounds after each token [3], where an engine keeps a draft x with p(x).

    A rejected x is replaced by a draw of p without x. p : [3, 3]; draft : [3], the drafter's choice after each token
    """
    rounds = np.zeros((budget + 1, 3))
    for left in range(1, budget + 1):
        for start in range(3):
            rounds[left, start], last, reached = 1.0, start, 1.0
            for emitted in range(1, min(k, left - 1) + 1):
                x = draft[last]
                without = np.where(np.arange(3) == x, 0.0, p[last])
                replaced = (1 - p[last, x]) * without / without.sum()
                rounds[left, start] += reached * replaced @ rounds[left - emitted]
                last, reached = x, reached * p[last, x]
            rounds[left, start] += reached * p[last] @ rounds[left - min(k, left - 1) - 1]
    return rounds[budget]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_greedy_drafts_are_kept_as_engines_keep_them(temperature: float) -> None:
    target = np.array([[1.6, 0.0, -0.5], [0.3, 0.8, 0.0], [-1.0, 0.4, 0.9]])
    drafter = target + np.array([[0.0, 0.2, 0.1], [0.9, -0.4, 0.0], [0.2, 0.1, 0.3]])
    models, budget, count = (markov_model(target), markov_model(drafter)), 100, 60
    pair = Pair(models[0], IndependentKind(models[1]), tiny_tokenizer(), "markov", "markov", ())
    prompts = [Prompt("all", [1, number % 3]) for number in range(count)]
    trace = record(pair, prompts, RecordSettings(6, budget, Sampler("greedy-draft", temperature, seed=1)))
    p = np.exp(target / temperature)
    p /= p.sum(axis=1, keepdims=True)
    for k in (1, 3, 6):
        rounds = replay(trace, make_policy("fixed_k", {"k": k}), cost_table(trace, ConstantCost(1e-3, 1e-2))).num_rounds
        difference = rounds - expected_rounds(p, drafter.argmax(axis=1), k, budget)[np.arange(count) % 3]
        assert abs(difference.mean()) < 4 * difference.std(ddof=1) / np.sqrt(count), k


def test_an_end_of_text_ends_what_is_accepted() -> None:
    """Nothing is accepted beyond a recorded end; emitted tokens never exceed the output."""
    plain = columns_for(random_prompts(1, seed=9)[0], 20, 3)
    eos = int(plain["token"][8])
    pair, prompts = tiny_pair((eos,)), tiny_prompts(6, seed=9)
    trace = record(pair, prompts, RecordSettings(5, 30, CHOICE))
    assert trace.text_accept is not None
    ended = trace.output_tokens < trace.budget_tokens
    assert ended.any()
    left = np.repeat(trace.offsets[1:], trace.output_tokens) - np.arange(len(trace.token))
    beyond = np.arange(5) >= left[:, None]
    assert (trace.text_accept[beyond] == 0).all()
    result = replay(trace, POLICIES[1], cost_table(trace, ConstantCost(1e-3, 1e-2)))
    assert (result.accepted + result.num_rounds >= result.output_tokens).all()
    assert (result.accepted <= result.output_tokens).all()


def test_real_runs_in_rejection_mode_draw_their_own_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tiny_prompts(6)
    settings = ValidationSettings(RecordSettings(3, 16, CHOICE), (POLICY_KINDS["fixed_k"],), trials=2)
    seeds: list[int] = []

    def noted(decoder: Decoder, *args: Any) -> Decoding:
        seeds.append(decoder.sampler.seed)
        return Decoding(decoder, *args)

    monkeypatch.setattr("realrun.experiment.timing.Decoding", noted)
    document = validate(tiny_pair(), prompts, settings, tmp_path / "out").as_dict()
    first = read_trace(tmp_path / "out" / "trace").meta["decoding"]["seed"]
    assert set(seeds) == {first, first + 1, first + 2}  # each repeat decodes a text of its own
    for row in document["rows"]:
        assert row["rounds_identical_percent"] is None and row["output_identical_percent"] is None
        assert np.isfinite(row["error_percent"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "agree in distribution" in page and "top-p 0.9" in page and "n.a." in page
