"""The acceptance predictor: one score in training, recording and the real loop."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import realrun.pairs.pair
from realrun.decode.acceptance_predictor import FILE, Predictor, load_predictor, save_predictor
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama
from realrun.lm.static.llama import StaticLlama
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt
from realrun.train.predictor import FactorisedPredictor
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from tests.support.checks import refusal
from tests.support.llama_models import recorded as recorded_graphs
from tests.support.llama_models import small_model
from tests.support.pairs.scores import random_predictor
from tests.support.tiny import tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer

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
