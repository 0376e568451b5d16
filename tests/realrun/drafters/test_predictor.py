"""The acceptance predictor: one score in training, recording and the real loop, of every kind of drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import realrun.pairs.pair
import realrun.proposals.chain
import realrun.proposals.target_cache
from realrun.decode.acceptance_predictor import (
    FILE,
    Predictor,
    RoundScorer,
    load_predictor,
    pending_token_states,
    save_predictor,
)
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama
from realrun.lm.static.llama import StaticLlama
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.library_text import SourceFile
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from realrun.train.predictor import (
    FactorisedPredictor,
    PredictorSettings,
    Samples,
    Tensors,
    Trainer,
    collect,
    compare,
    joined,
    quality,
    train_predictor,
)
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.clock import SetClock
from tests.support.llama_models import recorded as recorded_graphs
from tests.support.llama_models import small_model
from tests.support.pairs.inside import INSIDE, KINDS, marked, pair_of, scoring
from tests.support.small_targets import quiet
from tests.support.tiny import random_predictor, tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer

CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
choices = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())
CPU = torch.device("cpu")


def unequal_pair() -> Pair:
    """Hidden states of 48 in the target and 32 in the draft model."""
    return replace(tiny_pair(), target=small_model(vocab_size=97, max_position_embeddings=160))


@dataclasses.dataclass(frozen=True)
class ScoreReader(FixedK):
    """Drafts k tokens, and says that it reads the score."""

    name = "score_reader"
    features = ("score",)


def test_the_folded_predictor_equals_the_papers_factors() -> None:
    torch.manual_seed(0)
    factors = FactorisedPredictor(10, 24, 16, seed=3).double()
    target, draft = 3 * torch.randn(50, 24).double() + 1, torch.randn(50, 16).double() - 2
    factors.standardise(target, draft)
    factors.bias.data.fill_(0.7)
    predictor = Predictor(*(part.detach() for part in factors.fold()), {})
    for depth in (1, 2, 9, 10, 11, 30):
        # Literally: W_p [W^{min(i, 10)} H^T ; H^D], of standardised states, and a bias.
        standard = [
            (hidden - hidden.float().mean(0).double()) / hidden.float().std(0, correction=0).double()
            for hidden in (target, draft)
        ]
        joined = torch.cat([standard[0] @ factors.matrices[min(depth, 10) - 1].T, standard[1]], dim=1)
        expected = (joined @ torch.cat([factors.target_readout, factors.draft_readout]) + 0.7).sigmoid()
        scores = predictor.after(target)(draft, depth)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
        logits = factors(target, draft, torch.full((50,), depth))
        torch.testing.assert_close(logits.sigmoid(), expected, rtol=0, atol=1e-12)
        assert 0.05 < scores.std() < 0.5
    assert torch.equal(predictor.after(None)(draft[:1], 4), predictor.after(torch.zeros(1, 24))(draft[:1], 4))
    assert torch.equal(predictor.after(target)(draft[7:20], 2, begin=7), predictor.after(target)(draft, 2)[7:20])


@pytest.mark.parametrize("kind", [CachedLM, FusedLlama, StaticLlama])
@torch.inference_mode()
def test_hidden_rows_are_what_the_head_reads(kind: type[CachedLM]) -> None:
    model = small_model(max_position_embeddings=600)
    lm = kind(model)
    lm.keep_hidden = True
    assert lm.hidden is None
    lm.prefill([])
    assert lm.hidden is None
    every: list[torch.Tensor] = []
    tokens = np.random.default_rng(0).integers(0, 89, 400).tolist()
    for begin, end in [(0, 3), (3, 4), (4, 9), (9, 10), (10, 330), (330, 400)]:
        logits = lm.forward(tokens[begin:end])
        assert lm.hidden is not None and lm.hidden.shape == (end - begin, 48)
        assert torch.equal(F.linear(lm.hidden, model.lm_head.weight), logits)
        every.append(lm.hidden.clone())
    truth = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(torch.cat(every), truth, rtol=0, atol=1e-10)
    lm.truncate(200)
    lm.prefill(tokens[200:250])
    torch.testing.assert_close(lm.hidden, truth[249:250], rtol=0, atol=1e-10)
    lm.reset()
    assert lm.hidden is None
    lm.keep_hidden = False
    lm.forward([1, 2, 3])
    assert lm.hidden is None or kind is StaticLlama  # whose buffers always hold them


@torch.inference_mode()
def test_hidden_rows_of_recorded_graphs_are_those_of_the_last_pass() -> None:
    model = small_model()
    plain = CachedLM(model)
    plain.keep_hidden = True
    with recorded_graphs(model, capacity=20) as (lm, recorder):
        lm.warm([1, 2, 3], 20)
        for tokens in ([7], [8, 9], [3], [7, 7, 7], [5, 6]):
            lm.forward(tokens)
            plain.forward(tokens)
            torch.testing.assert_close(lm.hidden, plain.hidden, rtol=0, atol=1e-10)
        assert recorder.captured == 3


@choices
def test_recorded_scores_are_those_of_the_definition(sampler: Sampler) -> None:
    """H^T one position before the pending token, H^D after the tokens drafted so far; by plain passes."""
    for pair in (tiny_pair(), unequal_pair()):
        predictor = random_predictor(pair)
        prompts = [Prompt("all", [5, 9, 2]), Prompt("all", [11])]
        trace = record(replace(pair, predictor=predictor), prompts, RecordSettings(5, 12, sampler))
        assert trace.score is not None and trace.meta["predictor"] == predictor.digest
        for s, prompt in enumerate(prompts):
            output = trace.token[trace.offsets[s] : trace.offsets[s + 1]].tolist()
            for t in range(len(output)):
                row = int(trace.offsets[s]) + t
                context = [*prompt.tokens, *output[:t]]
                with torch.inference_mode():
                    h_target = torch.zeros(pair.target.config.hidden_size, dtype=torch.float64)
                    if len(context) > 1:
                        states = pair.target.model(input_ids=torch.tensor([context[:-1]])).last_hidden_state
                        h_target = states[0, -1]
                    drafted = trace.draft_token[row].tolist()
                    states = pair.drafter.model.model(input_ids=torch.tensor([[*context, *drafted]])).last_hidden_state[
                        0
                    ]
                for i in range(1, 6):
                    m = min(i, 3) - 1
                    logit = predictor.target_weight[m] @ h_target + predictor.bias[m]
                    logit = logit + predictor.draft_weight @ states[len(context) - 1 + i - 1]
                    assert abs(trace.score[row, i - 1] - float(logit.sigmoid())) < 1e-7
        assert trace.score.std() > 0.1


def test_a_policy_that_reads_scores_needs_a_predictor() -> None:
    pair = tiny_pair()
    with pytest.raises(InputError, match="--predictor") as caught:
        Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), Sampler()).decode([1, 2], 4, ScoreReader(k=2))
    assert "\n" not in str(caught.value)
    assert record(pair, tiny_prompts(1), RecordSettings(3, 4)).score is None


def test_a_predictor_survives_its_file(tmp_path: Path) -> None:
    predictor = random_predictor(tiny_pair())
    save_predictor(predictor, tmp_path / "deep" / FILE)
    for path in (tmp_path / "deep", tmp_path / "deep" / FILE):
        again = load_predictor(path)
        for name in ("target_weight", "draft_weight", "bias"):
            assert torch.equal(getattr(again, name), getattr(predictor, name).float())
        assert again.facts == predictor.facts
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [FILE]


def test_bad_predictor_files_are_refused(tmp_path: Path) -> None:
    refusal(lambda: load_predictor(tmp_path / "absent"), "absent", "realrun train predictor")
    refusal(lambda: load_predictor(tmp_path), FILE, "does not exist")
    (tmp_path / "broken").write_bytes(b"no safetensors")
    refusal(lambda: load_predictor(tmp_path / "broken"), "broken", "damaged")
    predictor = random_predictor(tiny_pair())
    tiny_pair().drafter.model.save_pretrained(tmp_path / "model")
    refusal(lambda: load_predictor(tmp_path / "model" / "model.safetensors"), "not a predictor in the format")
    save_predictor(replace(predictor, facts={}), tmp_path / "anonymous")
    refusal(lambda: load_predictor(tmp_path / "anonymous"), "malformed", "fingerprint")
    save_predictor(replace(predictor, bias=torch.zeros(2)), tmp_path / "odd")
    refusal(lambda: load_predictor(tmp_path / "odd"), "shapes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for seed, (name, layers) in enumerate((("target", 2), ("draft", 1), ("other", 1))):
        tiny_model(layers, seed=seed, dtype=torch.float32).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


def test_a_pair_is_loaded_with_its_predictor_only(folder: Path, tmp_path: Path) -> None:
    models = str(folder / "target"), str(folder / "draft")
    bare = load_pair(*models)
    assert bare.predictor is None and load_pair(*models, predictor=None).predictor is None
    predictor = random_predictor(bare)
    save_predictor(predictor, tmp_path / FILE)
    loaded = load_pair(*models, predictor=str(tmp_path)).predictor
    assert loaded is not None and loaded.facts == predictor.facts
    other = str(folder / "other")
    refusal(lambda: load_pair(models[0], other, predictor=str(tmp_path)), "other weights", bare.fingerprint)
    narrow = replace(predictor, target_weight=predictor.target_weight[:, :30])
    save_predictor(narrow, tmp_path / "narrow")
    refusal(lambda: load_pair(*models, predictor=str(tmp_path / "narrow")), "30 and 32", "32 and 32")
    refusal(lambda: load_pair(*models, predictor=str(tmp_path / "absent")), "does not exist")


def test_the_labs_predictor_belongs_to_the_lab(folder: Path) -> None:
    pair = load_pair()
    assert pair.predictor is not None and pair.predictor.target_weight.shape == (10, 256)
    assert realrun.pairs.pair.LAB_PREDICTOR.stat().st_size < 100_000
    assert load_pair(predictor="lab").predictor is not None and load_pair(predictor="none").predictor is None
    refusal(lambda: load_pair(str(folder / "target"), str(folder / "draft"), predictor="lab"), "32 and 32")


# Every kind of drafter: recorded scores, the real loop, training, costs.


DEPTH, TOKENS = 4, 24  # as many tokens as the MEDUSA heads draft
PROMPTS = [Prompt("all", [17]), *tiny_prompts(6)]  # the first has no state before its pending token
inside = pytest.mark.parametrize("kind", marked(INSIDE))
kinds = pytest.mark.parametrize("kind", marked((*KINDS, "eagle3"), ("eagle", "eagle3")))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Draft]]:
    """(sequence, output position, draft) of everything that is proposed."""
    drafts: list[tuple[int, int, Draft]] = []
    propose = DraftModel.propose

    def keep(self: DraftModel, tokens: Sequence[int], context: RoundContext, *asked: Any) -> Draft:
        draft = propose(self, tokens, context, *asked)
        drafts.append((context.sequence, context.position, draft))
        return draft

    monkeypatch.setattr(DraftModel, "propose", keep)
    return drafts


@kinds
@choices
def test_the_real_loop_computes_the_recorded_scores(
    kind: str, sampler: Sampler, drafts: list[tuple[int, int, Draft]]
) -> None:
    pair = scoring(kind)
    trace = record(pair, PROMPTS, RecordSettings(DEPTH, TOKENS, sampler))
    assert trace.score is not None and trace.score.std() > 0.1
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    for k in (1, DEPTH):
        for sequence, prompt in enumerate(PROMPTS):
            decoded = decoder.decode(prompt.tokens, TOKENS, ScoreReader(k=k), sequence=sequence)
            rows = slice(*trace.offsets[sequence : sequence + 2].tolist())
            assert decoded.tokens == trace.token[rows].tolist()
    compared = 0
    for sequence, position, draft in drafts:
        recorded = trace.score[int(trace.offsets[sequence]) + position, : len(draft.steps)].tolist()
        assert [step.score for step in draft.steps] == recorded
        compared += len(draft.steps)
    assert compared > 150


def trace_and_samples(kind: str, sampler: Sampler) -> tuple[Trace, Samples]:
    """A trace and what training collects on the same runs."""
    pair = scoring(kind)
    settings = PredictorSettings(TOKENS, DEPTH, (sampler.temperature if sampler.mode == "gumbel" else 0.0,), seed=4)
    decoder, dense = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler()), pair.make_recorder(Sampler())
    sequences = [collect(pair, decoder, dense, prompt, settings, s) for s, prompt in enumerate(PROMPTS)]
    return record(pair, PROMPTS, RecordSettings(DEPTH, TOKENS, sampler)), joined(sequences)


@kinds
@choices
def test_samples_are_the_judged_tokens_of_a_dense_trace(kind: str, sampler: Sampler) -> None:
    trace, samples = trace_and_samples(kind, sampler)
    remaining = np.repeat(trace.output_tokens, trace.output_tokens) - trace.position
    expected = {
        (t, i, i <= trace.match_len[t])
        for t in range(len(trace.token))
        for i in range(1, min(DEPTH, int(remaining[t])) + 1)
        if i - 1 <= trace.match_len[t]
    }
    columns = (samples.round.tolist(), samples.depth.tolist(), samples.label.tolist())
    assert set(zip(*columns, strict=True)) == expected and len(samples.label) == len(expected)
    starts = np.searchsorted(trace.offsets, samples.round.numpy(), side="right") - 1
    np.testing.assert_array_equal(samples.sequence.numpy(), starts)
    assert 0.1 < np.mean(columns[2]) < 0.97


@kinds
@choices
def test_samples_have_the_states_that_scores_are_made_of(
    kind: str, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (realrun.proposals.chain, realrun.proposals.target_cache):  # several chunks of positions
        monkeypatch.setattr(module, "CHUNK", 7)
    trace, samples = trace_and_samples(kind, sampler)
    predictor = scoring(kind).predictor
    assert trace.score is not None and predictor is not None
    for depth in range(1, DEPTH + 1):
        at = (samples.depth == depth).nonzero()[:, 0]
        rounds = samples.round[at]
        scores = predictor.after(samples.target_hidden[rounds])(samples.draft_hidden[at], depth)
        # States are kept in half precision for training.
        np.testing.assert_allclose(scores, trace.score[rounds.numpy(), depth - 1], rtol=0, atol=4e-3)
        np.testing.assert_allclose(samples.confidence[at], trace.confidence[rounds.numpy(), depth - 1], rtol=1e-5)
        assert len(at) > 2


@kinds
@torch.inference_mode()
def test_states_are_what_the_drafters_head_reads(kind: str) -> None:
    _, samples = trace_and_samples(kind, CHOICES["greedy"])
    pair, states = pair_of(kind), samples.draft_hidden.double()
    *_, draft = (pair.target, *pair.drafter.weights(pair.target))
    if kind == "medusa":
        logits = torch.einsum("nvd,nd->nv", draft.vocabulary[samples.depth - 1], states)
    else:
        owner = pair.target if kind == "eagle" else draft
        logits = (draft.lm_head if kind == "eagle3" else owner.get_output_embeddings())(states)
    sure = logits.softmax(-1).amax(-1).float()
    # States are in half precision; these distributions are flat.
    torch.testing.assert_close(samples.confidence, sure, rtol=0, atol=1e-3)
    assert samples.confidence.std() > 0.015


@torch.inference_mode()
def test_states_of_heads_are_those_of_the_rounds() -> None:
    """Head i's state of a judged token is made of the target's state of its round, not of the token's own place."""
    _, samples = trace_and_samples("medusa", CHOICES["greedy"])
    heads = pair_of("medusa").drafter.heads
    hidden = samples.target_hidden[samples.round].double()
    matrices = heads.residual[samples.depth - 1]
    expected = F.silu(torch.einsum("nij,nj->ni", matrices, hidden)) + hidden
    torch.testing.assert_close(samples.draft_hidden.double(), expected, rtol=0, atol=0.02)
    assert (samples.depth == DEPTH).sum() > 5


@torch.inference_mode()
def test_states_of_an_early_exit_lie_on_the_true_text() -> None:
    """A judged token's state is that of one pass over the text, wherever its round began."""
    pair = pair_of("eesd")
    _, samples = trace_and_samples("eesd", CHOICES["greedy"])
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    expected = []
    for prompt in PROMPTS:
        output = decoder.decode(prompt.tokens, TOKENS, None).tokens
        expected.append(pending_token_states(pair.drafter.model, prompt.tokens, [*output, 0])[1:])
    states = torch.cat(expected)[samples.round + samples.depth - 1]
    torch.testing.assert_close(samples.draft_hidden.double(), states, rtol=0, atol=0.005)


@kinds
def test_a_profile_measures_what_a_score_costs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafted token of the scored rounds is scored once, and no other; the time shows in the profile."""
    clock, pause_s, calls, score = SetClock(monkeypatch), 0.004, 0, RoundScorer.__call__

    def slow(self: RoundScorer, draft_hidden: torch.Tensor, depth: int, begin: int = 0) -> torch.Tensor:
        nonlocal calls
        calls += 1
        clock.take(pause_s)
        return score(self, draft_hidden, depth, begin)

    monkeypatch.setattr(RoundScorer, "__call__", slow)
    contexts, depth = [8, 16], 3
    document = profile(scoring(kind), contexts=contexts, depth=depth, limit_s=0, tree_tokens=0)
    assert calls == (1 + len(contexts) * document["sweeps"]) * depth
    assert document["median_s"]["score_step"] == pytest.approx(pause_s, rel=0.01)
    calls = 0
    profile(pair_of(kind), contexts=contexts, depth=depth, limit_s=0, tree_tokens=0)
    assert calls == 0


@kinds
def test_scores_are_made_for_policies_that_read_them_only(
    kind: str, drafts: list[tuple[int, int, Draft]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = scoring(kind)
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    decoder.decode([1, 2, 3], 8, ScoreReader(k=2))
    assert all(0 < step.score < 1 for _, _, draft in drafts for step in draft.steps)

    def unwanted(*arguments: object) -> None:
        raise AssertionError("a score was computed")

    monkeypatch.setattr(RoundScorer, "__call__", unwanted)
    drafts.clear()
    plain = ScoreReader(k=2)
    object.__setattr__(plain, "features", ())
    decoder.decode([1, 2, 3], 8, plain)
    assert drafts and all(step.score == 0 for _, _, draft in drafts for step in draft.steps)


SMALL = PredictorSettings(max_new_tokens=12, max_draft_tokens=6, temperatures=(0.0, 0.8), epochs=3, batch=64)


@inside
def test_a_predictor_of_every_kind_is_trained(kind: str, tmp_path: Path) -> None:
    pair, prompts = pair_of(kind), tiny_prompts(6) * 4  # texts that the MEDUSA heads know
    document = train_predictor(pair, prompts, SMALL, tmp_path / "whole", quiet).as_dict()
    predictor = load_predictor(tmp_path / "whole")
    predictor.check(pair.target.config, pair.draft_config, pair.fingerprint)
    depth = min(SMALL.max_draft_tokens, pair.drafter.max_depth or SMALL.max_draft_tokens)
    assert len(predictor.bias) == document["settings"]["max_draft_tokens"] == depth
    assert document["drafter_kind"] == kind
    assert set(document["held_out"]) == {"predictor", "confidence", "base rate"}
    for values in document["held_out"].values():
        assert set(values) == {"log_loss_nats", "ece", "auc"} and np.isfinite(list(values.values())).all()
    trace = record(replace(pair, predictor=predictor), tiny_prompts(2), RecordSettings(DEPTH, 10))
    assert trace.score is not None and trace.meta["predictor"] == predictor.digest
    other: Pair = pair_of("model")
    refusal(
        lambda: predictor.check(other.target.config, other.draft_config, other.fingerprint),
        "other weights",
        pair.draft_name,
    )
    refusal(lambda: train_predictor(other, prompts, SMALL, tmp_path / "whole", quiet), "weights=", "--out")


# Training: samples, resuming, refusals.


def test_producing_states_of_a_one_token_prompt_begin_with_zeros() -> None:
    states = pending_token_states(tiny_pair().target, [7], [4, 5, 6])
    assert states.shape == (3, 32) and not states[0].any() and states[1].any()
    longer = pending_token_states(tiny_pair().target, [3, 7], [4, 5, 6])
    assert longer.shape == (3, 32) and longer[0].any()


def learnable(sequences: int = 30, length: int = 60) -> list[Tensors]:
    """A token is right with a chance that both models' states at its own position tell of."""
    rng, samples = np.random.default_rng(1), []
    for _ in range(sequences):
        target, draft = rng.standard_normal((length, 12)), rng.standard_normal((length, 8))
        logit = 2.0 * draft[:, 0] - draft[:, 3] + 1.5 * target[:, 2] + 1
        match = rng.random(length) < 1 / (1 + np.exp(-logit))
        judged = [
            (t, i)
            for t in range(length)
            for i in range(1, min(SETTINGS.max_draft_tokens, length - t) + 1)
            if match[t : t + i - 1].all()
        ]
        rounds, depths = torch.tensor(judged).T
        samples.append(
            {
                "target_hidden": torch.tensor(target).half(),
                "draft_hidden": torch.tensor(draft).half()[rounds + depths - 1],
                "confidence": torch.full((len(judged),), 0.5) + 0.01 * torch.rand(len(judged)),
                "round": rounds,
                "depth": depths,
                "label": torch.tensor(match)[rounds + depths - 1],
            }
        )
    return samples


SETTINGS = PredictorSettings(max_draft_tokens=4, epochs=12, patience=3, batch=64, lr=3e-3)


def test_training_learns_what_there_is_to_learn(tmp_path: Path) -> None:
    samples = joined(learnable())
    trainer = Trainer(samples, SETTINGS, tmp_path / "c.safetensors", CPU)
    before = trainer.loss("validation")
    trainer.run(quiet)
    result = compare(samples, trainer.folded())
    assert result["predictor"]["log_loss_nats"] < result["base rate"]["log_loss_nats"] - 0.08
    assert result["predictor"]["log_loss_nats"] < result["confidence"]["log_loss_nats"] - 0.08
    assert result["predictor"]["auc"] > 0.75 and 0.4 < result["confidence"]["auc"] < 0.6
    assert min(row["validation_nats"] for row in trainer.history) < before
    parts = [samples.part(name) for name in ("train", "validation", "held out")]
    assert all(len(part) > 0 for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(samples.label)))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("interrupt_at", [5])
def test_a_resumed_training_has_the_same_loss_curve(tmp_path: Path, interrupt_at: int) -> None:
    samples = joined(learnable(12, 40))
    whole = Trainer(samples, SETTINGS, tmp_path / "whole.safetensors", CPU)
    whole.run(quiet)
    assert len(whole.history) > interrupt_at

    def kill(what: str, done: int, total: int) -> None:
        if done == interrupt_at:
            raise Killed

    with pytest.raises(Killed):
        Trainer(samples, SETTINGS, tmp_path / "parts.safetensors", CPU).run(kill)
    resumed = Trainer(samples, SETTINGS, tmp_path / "parts.safetensors", CPU)
    assert len(resumed.history) == interrupt_at
    resumed.run(quiet)
    assert resumed.history == whole.history
    assert resumed.folded().digest == whole.folded().digest


SHORT = PredictorSettings(max_new_tokens=10, max_draft_tokens=4, temperatures=(0.0, 0.8), epochs=2, batch=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("predictor") / "out"
    return out, train_predictor(tiny_pair(), tiny_prompts(20), SHORT, out, quiet).as_dict()


@pytest.mark.parametrize(("what", "done"), [("decode", 3), ("decode", 16), ("decode", 18), ("train", 1)])
def test_killed_while_collecting_or_training_it_goes_on(
    what: str, done: int, trained: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    calls: list[int] = []

    def kill(now: str, number: int, total: int) -> None:
        if (now, number) == (what, done):
            raise Killed

    def count(now: str, number: int, total: int) -> None:
        calls.append(number)

    with pytest.raises(Killed):
        train_predictor(tiny_pair(), tiny_prompts(20), SHORT, tmp_path / "out", kill)
    document = train_predictor(tiny_pair(), tiny_prompts(20), SHORT, tmp_path / "out", count).as_dict()
    expected = trained[1]
    assert document["history"] == expected["history"] and document["held_out"] == expected["held_out"]
    assert load_predictor(tmp_path / "out").digest == load_predictor(trained[0]).digest
    if (what, done) in (("decode", 18), ("train", 1)):
        assert 1 not in calls[: calls.index(16)]  # the first file of states was not made again


def test_what_was_trained_can_be_used(trained: tuple[Path, dict[str, object]]) -> None:
    out, document = trained
    predictor = load_predictor(out)
    pair = tiny_pair()
    predictor.check(pair.target.config, pair.draft_config, pair.fingerprint)
    assert predictor.target_weight.shape == (4, 32)  # as many matrices as depths were seen
    assert predictor.facts["sequences"] == 20 and predictor.facts["held_out"] == document["held_out"]
    trace = record(replace(pair, predictor=predictor), tiny_prompts(2), RecordSettings(6, 10))
    assert trace.score is not None and np.isfinite(trace.score).all()


def test_quality_of_known_scores() -> None:
    figures = quality([0.8] * 10 + [0.2] * 5, [1] * 8 + [0] * 2 + [1] + [0] * 4)
    assert figures["ece"] == pytest.approx(0, abs=1e-12)
    assert figures["auc"] == pytest.approx((8 * 4 + 0.5 * (8 * 2 + 1 * 4)) / (9 * 6))
    assert figures["log_loss_nats"] == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.2)))


def test_too_few_prompts_and_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    refusal(lambda: train_predictor(tiny_pair(), tiny_prompts(9), SHORT, tmp_path / "x", quiet), "too few")
    for bad in ({"max_draft_tokens": 0}, {"temperatures": ()}, {"epochs": 0}):
        refusal(lambda bad=bad: PredictorSettings(**bad), "redictor")
    refusal(lambda: PredictorSettings(temperatures=(-1.0,)), "temperature=-1")


def test_the_lab_learns_from_training_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def files(split: str) -> list[SourceFile]:
        asked.append(split)
        return [SourceFile(f"{split}_{i}.py", f"{split} number {i}\n" * 40) for i in range(6)]

    monkeypatch.setattr("realrun.pairs.prompts.library_files", files)
    for split, word in (("train", "t r a i n"), ("held_out", "h e l d")):
        prompts = lab_prompts(tiny_tokenizer(), 4, 40, split=split)  # type: ignore[arg-type]
        assert all(word in tiny_tokenizer().decode(prompt.tokens) for prompt in prompts)
    assert asked == ["train", "held_out"]
