"""`--kernels`: the run that a GPU makes, repeated on a CPU with every backend."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import realrun.cli.main
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.lm.kernels import named, use_kernels
from realrun.lm.llama import FusedLlama
from realrun.lm.static.llama import StaticLlama
from realrun.measure.record import RecordSettings
from realrun.pairs.pair import Pair
from speckernels import BACKENDS, backend_for
from speckernels.runtime.dispatch import AUTO
from specsim.io.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import make_policy
from specsim.trace.files import read_trace
from tests.support.tiny import random_prompts, tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer

CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
POLICIES = [
    make_policy("fixed_k", {"k": 3}),
    make_policy("max_confidence", {"lambda0": 0.5, "dynamic": False, "max_draft_tokens": 4}),
    make_policy("adaedl", {"gamma": 0.3, "target_rate": 0.4, "epsilon": 0.3, "max_draft_tokens": 4}),
]
# Triton decides once per process whether it interprets, by whether there is a GPU.
ON_CPU = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(name == "triton" and torch.cuda.is_available(), reason="Triton is not interpreted"),
    )
    for name in BACKENDS
]
NEW_TOKENS = 8  # interpreted kernels take a tenth of a second
Run = tuple[list[int], list[tuple[int, int, int]]]


@cache
def pair32() -> Pair:
    """The tiny pair in a type that every backend takes."""
    pair = tiny_pair()
    target, draft = tiny_model(2, 1, torch.float32), tiny_model(1, 2, torch.float32)
    target.load_state_dict(pair.target.state_dict())
    draft.load_state_dict(pair.drafter.model.state_dict())
    return replace(pair, target=target, drafter=IndependentKind(draft))


@cache
def run(kernels: str, mode: str, policy: ChainPolicy) -> Run:
    pair, sampler = pair32(), CHOICES[mode]
    with use_kernels(kernels):
        drafter = DraftModel(pair.drafter.model, ())
        decoder = Decoder(pair.target, drafter, (), sampler)
        expected = FusedLlama if kernels == "auto" else StaticLlama
        assert type(decoder.target) is type(drafter.lm) is expected
        decoded = decoder.decode(random_prompts(1, seed=1)[0], NEW_TOKENS, policy, sequence=2)
    return decoded.tokens, decoded.log()


@pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())
@pytest.mark.parametrize("kernels", ON_CPU)
def test_the_lean_statistics_are_the_operations(sampler: Sampler, kernels: str) -> None:
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    fused = sampler.statistics(logits, 1, 2)
    with use_kernels(kernels):
        statistics = sampler.statistics(logits, 1, 2)
        assert torch.equal(sampler.tokens(logits, 1, 2), fused[:, 0].long())
    assert statistics.shape == fused.shape == (3, 4)
    # Float32 sums over 97 terms.
    torch.testing.assert_close(statistics, fused, rtol=1e-5, atol=1e-6)
    exact = sampler.statistics(logits.double(), 1, 2)
    with use_kernels("reference"):
        torch.testing.assert_close(sampler.statistics(logits.double(), 1, 2), exact, rtol=1e-13, atol=1e-14)


def test_kernels_are_named_inside_the_block_only() -> None:
    assert not named() and backend_for("cpu") == "reference"
    with use_kernels("cuda"):
        assert named() and backend_for("cpu") == "cuda"
        with use_kernels("auto"):
            assert not named() and backend_for("cpu") == "reference"
        assert named() and backend_for("cpu") == "cuda"
    assert not named()


def test_kernels_are_named_by_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECKERNELS_BACKEND", "reference")
    assert named()
    monkeypatch.setenv("SPECKERNELS_BACKEND", "auto")
    assert not named()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name the tiny pair on disk and one prompt."""
    folder = tmp_path_factory.mktemp("models")
    for role, model in (("target", pair32().target), ("draft", pair32().drafter.model)):
        model.save_pretrained(folder / role)
        tiny_tokenizer().save_pretrained(folder / role)
    (folder / "prompts.jsonl").write_text(json.dumps({"text": "def f(x)", "domain": "code"}) + "\n")
    names = ["--target", str(folder / "target"), "--draft-model", str(folder / "draft")]
    return [*names, "--prompts", str(folder / "prompts.jsonl"), "--num-prompts", "1"]


def invoke(*args: object) -> Result:
    return CliRunner().invoke(realrun.cli.main.app, [str(arg) for arg in args])


@pytest.mark.parametrize("kernels", [AUTO, *ON_CPU])
def test_a_trace_says_its_kernels(kernels: str, models: list[str], tmp_path: Path) -> None:
    out = tmp_path / "trace"
    result = invoke("record", out, *models, "--max-new-tokens", 4, "--max-draft-tokens", 2, "--kernels", kernels)
    assert result.exit_code == 0, result.output
    assert read_trace(out).meta["kernels"] == ("reference" if kernels == AUTO else kernels)
    assert not named()


def test_kernels_that_cannot_do_the_work_are_refused(models: list[str], tmp_path: Path) -> None:
    options = ["--max-new-tokens", 4, "--dtype", "float64", "--kernels", "triton"]
    result = invoke("record", tmp_path / "trace", *models, *options)
    assert isinstance(result.exception, InputError)
    assert "--kernels triton" in str(result.exception) and "\n" not in str(result.exception)
    assert not (tmp_path / "trace").exists()


def test_unknown_kernels_are_refused(tmp_path: Path) -> None:
    result = invoke("record", tmp_path / "trace", "--kernels", "metal")
    assert result.exit_code == 2 and "reference" in result.output
    with pytest.raises(InputError, match="known: auto, reference, triton, cuda"), use_kernels("metal"):
        pass


def test_a_validation_says_its_kernels_and_keeps_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ValidationSettings(RecordSettings(2, 8, CHOICES["gumbel"]), trials=2, repeats=3)
    with use_kernels("reference"):
        validation = validate(tiny_pair(), tiny_prompts(4), settings, tmp_path, lambda *step: None)
    assert validation.environment["kernels"] == "reference"
    assert json.loads((tmp_path / "profile.json").read_text())["kernels"] == "reference"
    with use_kernels("cuda"), pytest.raises(InputError, match='kernels="reference", asked for "cuda"'):
        validate(tiny_pair(), tiny_prompts(4), settings, tmp_path, lambda *step: None)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("mode", CHOICES)
@pytest.mark.parametrize("kernels", [AUTO, *BACKENDS])
def test_rounds_on_a_gpu_are_those_of_the_cpu(kernels: str, mode: str, policy: ChainPolicy) -> None:
    pair = pair32()
    with use_kernels(kernels):
        target, draft = (tiny_model(layers, 1, torch.float32).to("cuda") for layers in (2, 1))
        target.load_state_dict(pair.target.state_dict())
        draft.load_state_dict(pair.drafter.model.state_dict())
        decoder = Decoder(target, DraftModel(draft, ()), (), CHOICES[mode])
        decoded = decoder.decode(random_prompts(1, seed=1)[0], NEW_TOKENS, policy, sequence=2)
    assert (decoded.tokens, decoded.log()) == run("reference", mode, policy)
