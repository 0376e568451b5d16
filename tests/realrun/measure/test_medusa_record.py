"""MEDUSA recorded, profiled, validated: columns by their definition, rejection sampling, costs by place of a draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import realrun.experiment.run
import realrun.measure.reuse
from realrun.cli.main import app
from realrun.decode.acceptance_predictor import last_states
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.medusa import MedusaHeads, MedusaKind, head_columns
from realrun.experiment.run import ValidationSettings, validate
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import describe_target, save_drafter
from realrun.pairs.pair import Pair
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.trees import Trees, TreeSize
from specsim.compare.leaderboard import leaderboards
from specsim.cost.files import read_cost
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.policy.registry import POLICIES, make_policy
from specsim.trace.files import read_trace
from specsim.trace.outcomes import as_recorded
from tests.realrun.drafters.test_medusa import scored
from tests.realrun.measure.test_record_trees import as_names, as_record, one_by_one, paths_outside_chain
from tests.support.pairs.medusa import CHOICES, HEADS, medusa_pair
from tests.support.tiny import POSITIONS, VOCAB, tiny_prompts

ALL = {**CHOICES, "nucleus": Sampler("gumbel", 1.0, seed=5, top_p=0.6)}
choices = pytest.mark.parametrize("sampler", ALL.values(), ids=ALL.keys())
REJECTION = Sampler("rejection", 0.8, seed=4)


@choices
@pytest.mark.parametrize("prompt", [[7], [5, 9, 3, 11]], ids=["one token", "four tokens"])
def test_columns_are_what_each_head_says_at_each_position(sampler: Sampler, prompt: list[int]) -> None:
    """One head, one position at a time."""
    pair, depth, sequence = scored(medusa_pair()), 3, 2
    output = [*range(20, 31)]
    states = last_states(pair.target, [*prompt, *output])
    scorer = pair.predictor.after(torch.stack([at(states, len(prompt) + t) for t in range(11)]))
    request = RecordRequest(prompt, output, depth, sampler, sequence, scorer, TreeSize(12, 5))
    columns = head_columns(pair.target, pair.drafter.heads, request)
    trees = as_record(Trees(*(columns[f"tree_{name}"] for name in Trees._fields)), 5)
    for t in range(len(output)):
        hidden = at(states, len(prompt) + t)
        siblings = []
        for i in range(depth):
            logits = pair.drafter.heads(hidden[None])[i]
            token, *features = sampler.statistics(logits, sequence, t + i)[0].tolist()
            assert columns["draft_token"][t, i] == token
            np.testing.assert_allclose(
                [columns[name][t, i] for name in ("prob", "confidence", "entropy_nats")], features, rtol=1e-6
            )
            score = pair.predictor.after(hidden[None])(pair.drafter.heads.states(hidden[None])[i], i + 1)
            assert columns["score"][t, i] == pytest.approx(float(score), rel=1e-6)
            tokens, probs = (part[0].numpy() for part in sampler.candidates(logits, sequence, [t + i], VOCAB))
            rank = -1 if t + i >= len(output) else tokens.tolist().index(output[t + i])
            if sampler.top_p == 1.0:  # outside the nucleus all are equal, and ordered by index
                assert columns["true_rank"][t, i] == rank
            siblings.append((tokens[:5], probs[:5].astype(np.float32)))
        expected, horizon = one_by_one(lambda path, found=siblings: found[len(path)], depth, 12)
        found = as_names(trees, t)
        assert paths_outside_chain(found) == pytest.approx(paths_outside_chain(expected), rel=1e-5)
        assert sampler.top_p < 1.0 or {k: v[0] for k, v in found.items()} == {k: v[0] for k, v in expected.items()}
        assert trees.horizon[t] == pytest.approx(horizon, rel=1e-5)
    match = columns["draft_token"][:, 0] == output
    assert ((columns["match_len"] > 0) == match).all()


def at(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """The state that produced the newest of so many tokens: the one before it; zeros where there is none."""
    return states[tokens - 2] if tokens > 1 else torch.zeros_like(states[0])


def test_more_depth_than_heads_is_cut_by_the_recorder_and_refused_by_the_pass() -> None:
    trace = record(medusa_pair(), tiny_prompts(2), RecordSettings(16, 8))
    assert trace.depth == trace.meta["depth"] == HEADS and trace.meta["drafter_kind"] == "medusa"
    pair = medusa_pair()
    with pytest.raises(InputError, match="4 MEDUSA heads draft at most 4 tokens, not 5; lower the depth"):
        head_columns(pair.target, pair.drafter.heads, RecordRequest([3, 4], [5, 6], HEADS + 1, Sampler()))


# --- Rejection sampling ---------------------------------------------------------------------------


@torch.inference_mode()
def test_rejection_traces_hold_the_heads_distributions_and_the_targets_verdict() -> None:
    """accept_prob by one pass of the target over every drafted prefix."""
    pair, prompts = scored(medusa_pair()), tiny_prompts(2)
    trace = record(pair, prompts, RecordSettings(16, 12, REJECTION))
    assert trace.depth == HEADS and trace.accept_prob is not None and trace.score is not None
    for row in range(len(trace.token)):
        number = int(np.searchsorted(trace.offsets, row, side="right")) - 1
        t = int(row - trace.offsets[number])
        before = [*prompts[number].tokens, *trace.token[trace.offsets[number] : row].tolist()]
        states = last_states(pair.target, [*before, *trace.draft_token[row].tolist()])
        hidden = at(states, len(before))[None]
        judged = REJECTION.probs(pair.target.get_output_embeddings()(states[len(before) - 1 :]))
        for i in range(HEADS):
            drafted = int(trace.draft_token[row, i])
            offered = REJECTION.probs(pair.drafter.heads(hidden)[i])[0]
            assert trace.prob[row, i] == pytest.approx(float(offered[drafted]), rel=1e-5)
            assert trace.confidence[row, i] == pytest.approx(float(offered.max()), rel=1e-5)
            score = pair.predictor.after(hidden)(pair.drafter.heads.states(hidden)[i], i + 1)
            assert trace.score[row, i] == pytest.approx(float(score), rel=1e-5)
            if t + i < 12:
                accept = min(1.0, float(judged[i, drafted] / offered[drafted]))
                assert trace.accept_prob[row, i] == pytest.approx(accept, rel=1e-5)
                rank = int((offered > offered[trace.token[row + i]]).sum())
                assert trace.true_rank[row, i] == rank


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.4, 1.2])
def test_rejection_sampling_accepts_what_target_and_head_have_in_common(temperature: float) -> None:
    """A first token is accepted with chance sum(min(p, q)): in real runs, and in the outcomes that are recorded."""
    pair, prompt, times = medusa_pair(), tiny_prompts(1)[0], 200
    sampler = Sampler("rejection", temperature, 5)
    p = sampler.probs(logits_after(pair, prompt.tokens))[-1]
    hidden = at(last_states(pair.target, prompt.tokens), len(prompt.tokens))
    chance = float(torch.minimum(p, sampler.probs(pair.drafter.heads(hidden[None])[0])[0]).sum())
    assert 0.02 < chance < 0.98
    decoder, policy = Decoder(*pair.make_drafter(), (), sampler), make_policy("fixed_k", {"k": HEADS})
    runs = [decoder.decode(prompt.tokens, HEADS + 1, policy, sequence=number) for number in range(times)]
    trace = as_recorded(record(pair, [prompt] * times, RecordSettings(HEADS, HEADS + 1, sampler)))
    for accepted in ([run.rounds[0].accepted for run in runs], trace.match_len[trace.offsets[:-1]]):
        assert stats.binomtest(int(np.count_nonzero(accepted)), times, chance).pvalue > 0.001


def test_rejection_sampling_with_heads_follows_the_targets_own_distribution() -> None:
    """The token after the next, over many seeds, against the target's exact distribution of it."""
    pair, prompt = medusa_pair(), tiny_prompts(1)[0]
    sampler = Sampler("rejection", 0.5, 0)
    probs = sampler.probs(logits_after(pair, prompt.tokens))[-1]
    first = int(probs.argmax())
    second = sampler.probs(logits_after(pair, [*prompt.tokens, first]))[-1]
    decoder, policy = Decoder(*pair.make_drafter(), (), sampler), make_policy("fixed_k", {"k": HEADS})
    texts = []
    for seed in range(600):
        decoder.sampler = Sampler("rejection", 0.5, seed)
        texts.append(decoder.decode(prompt.tokens, 4, policy).tokens)
    for distribution, seen in (
        (probs, [text[0] for text in texts]),
        (second, [text[1] for text in texts if text[0] == first]),
    ):
        wanted = distribution.numpy() * len(seen)
        common, counts = wanted >= 5, np.bincount(seen, minlength=VOCAB)
        pooled = [np.append(values[common], values[~common].sum()) for values in (counts, wanted)]
        assert len(seen) > 100 and common.sum() > 2
        assert stats.chisquare(*pooled).pvalue > 0.001


@torch.inference_mode()
def logits_after(pair: Pair, tokens: list[int]) -> torch.Tensor:
    return pair.target(input_ids=torch.tensor([tokens])).logits[0]


# --- Costs and the main job -----------------------------------------------------------------------


def wide_pair() -> Pair:
    """Heads whose products, over a large vocabulary, are what takes time."""
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
    )
    torch.manual_seed(1)
    target = LlamaForCausalLM(config).double().eval()
    return replace(medusa_pair(), target=target, drafter=MedusaKind(MedusaHeads(target, HEADS).requires_grad_(False)))


def test_the_first_draft_step_holds_all_heads() -> None:
    document = profile(wide_pair(), contexts=[8, 40], depth=16, repeats=8, tree_tokens=4)
    for quantile in ("p25_s", "median_s"):
        steps = np.array(document[quantile]["draft_step"])
        assert steps.shape == (HEADS, 2)
        assert (steps[1:] < 0.3 * steps[0]).all()
        assert (np.array(document[quantile]["catch_up"]) < 0.3 * steps[0]).all()  # there is no cache to catch up
        assert len(document[quantile]["verify"]) == HEADS + 1
    profile_from_json(document, "just measured")


@pytest.mark.parametrize("heads", [1, 2])
def test_trees_are_measured_as_deep_as_the_heads_go(heads: int) -> None:
    document = profile(medusa_pair(heads=heads), contexts=[8, 40], depth=16, repeats=2, tree_tokens=20)
    tree = document["median_s"]["tree"]
    assert len(document["median_s"]["draft_step"]) == heads and tree["sizes"][-1] == 20
    assert np.isfinite(tree["wider"]).all() and (np.array(tree["verify"]) > 0).all()
    if heads == 1:  # no pass of one head ingests more than the pending token
        assert (np.array(tree["wider"]) == tree["wider"][0]).all()


KINDS = ("fixed_k", "adaedl", "beta_ts", "eagle2", "cartesian", "sparse_tree")


@pytest.mark.slow
@pytest.mark.parametrize("names", [pytest.param(KINDS, id="some"), pytest.param(tuple(POLICIES), id="all")])
def test_the_main_job_and_the_leaderboard_stay_within_the_heads(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.experiment.run, "TUNING_REPEATS", 4)
    kinds = tuple(POLICIES[name] for name in names)
    deeper = RecordSettings(16, 24, CHOICES["gumbel"], 256, 10)  # than there are heads
    settings = ValidationSettings(deeper, kinds=kinds, trials=4, repeats=1)

    def job() -> dict[str, Any]:
        return validate(medusa_pair(), tiny_prompts(), settings, tmp_path, lambda *step: None)

    document = job()
    assert {row["policy"] for row in document["rows"]} >= set(names) - {"cali_ts", "space_k"}
    for row in document["rows"]:
        assert make_policy(row["policy"], row["params"]).max_draft_tokens <= HEADS
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0, row["label"]
        # Of outputs as long as the baseline's the relation is exact.
        assert row["acceleration_over_overhead"] == pytest.approx(row["measured"]["estimate"], rel=1e-9)
        assert row["acceleration_over_overhead_off_percent"] == pytest.approx(0, abs=1e-6) and row["overhead"] > 1
    assert document["k_curve"]["k"] == [*range(1, HEADS + 1)]
    skipped = {entry["policy"]: entry["reason"] for entry in document["skipped"]}
    assert skipped["eagle2, 50 nodes, depth 6"] == "depth = 6 is more than the 4 tokens drafted here"
    assert not any("\n" in reason for reason in skipped.values())

    monkeypatch.setattr(
        realrun.measure.reuse, "record", None
    )  # the trace is used again, though it is shallower than asked
    assert job()["rows"]
    trace, cost = read_trace(tmp_path / "trace"), read_cost(tmp_path / "profile.json")
    (board,) = leaderboards({"medusa": trace}, [cost], kinds=kinds, trials=4, replays=1, sensitivity=False, jobs=1)
    assert board.max_draft == HEADS and {row.policy.name for row in board.rows} >= set(names) - {"cali_ts", "space_k"}


def test_the_commands_print_as_many_places_as_there_are_heads(tmp_path: Path) -> None:
    pair = medusa_pair()
    pair.target.save_pretrained(tmp_path / "target")
    pair.tokenizer.save_pretrained(tmp_path / "target")
    facts = {"target": describe_target(pair.target, "tiny"), "heads": HEADS}
    save_drafter(tmp_path / "heads", "medusa", pair.drafter.heads.state_dict(), facts)
    prompts = tmp_path / "prompts.jsonl"
    texts = [json.dumps({"text": f"number {i} and so on", "domain": "code"}) for i in range(3)]
    prompts.write_text("\n".join(texts))
    pairing = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "heads"), "--dtype", "float64"]
    runner = CliRunner()
    measuring = ["--contexts", "8,20", "--repeats", "2", "--tree-nodes", "4"]
    result = runner.invoke(app, ["profile", str(tmp_path / "p.json"), *pairing, *measuring])
    assert result.exit_code == 0, result.output
    assert "verify 5" in result.output and "verify 17" not in result.output
    recording = ["--prompts", str(prompts), "--num-prompts", "3", "--max-new-tokens", "9", "--tree-nodes", "40"]
    result = runner.invoke(app, ["record", str(tmp_path / "trace"), *pairing, *recording])
    assert result.exit_code == 0, result.output
    trace = read_trace(tmp_path / "trace")
    assert trace.depth == HEADS and trace.tree is not None and trace.meta["drafter"] == "heads"
