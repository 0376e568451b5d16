"""Models that give NaN or overflow are refused, with the layer where it begins; -inf logits are legal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.lm.cached import CachedLM
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.tiny import tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer

MODES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8), "rejection": Sampler("rejection", 0.8)}
POLICIES = {
    "baseline": None,
    "chain": make_policy("fixed_k", {"k": 3}),
    "tree": make_policy("eagle2", {"top_k": 2, "depth": 2, "nodes": 6}),
}


def spoiled(model: Any, weight: str = "model.layers.0.mlp.down_proj.weight") -> Any:
    """Ten NaN weights in one layer."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        dict(model.named_parameters())[weight].view(-1)[3:13] = torch.nan
    return model


def pair_of(which: str) -> Pair:
    pair = tiny_pair()
    target, draft = pair.target, pair.drafter.model
    target, draft = (spoiled(target), draft) if which == "target" else (target, spoiled(draft))
    return Pair(target, IndependentKind(draft), tiny_tokenizer(), "t", "d", ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_nothing_is_recorded_of_a_model_that_gives_nan(which: str, mode: str) -> None:
    settings = RecordSettings(max_draft_tokens=3, max_new_tokens=8, sampler=MODES[mode])
    message = refusal(lambda: record(pair_of(which), tiny_prompts(2), settings))
    assert (
        f"the {which} " in message and "first in layer model.layers.0.mlp.down_proj" in message and "float64" in message
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_nothing_is_decoded_with_a_model_that_gives_nan(which: str, policy: str, mode: str) -> None:
    pair = pair_of(which)
    decoder = Decoder(*pair.make_drafter(), (), MODES[mode])

    def decode() -> None:
        decoder.decode([5, 6, 7], 8, POLICIES[policy])

    if (which, policy) == ("drafter", "baseline"):
        decode()
    else:
        assert f"the {which} " in refusal(decode)


def test_an_overflow_in_float16_is_found_where_it_begins() -> None:
    """Weights that float32 holds easily: their product is above 65,504."""
    model = tiny_model(2, seed=1, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3e4)
        model.model.layers[1].mlp.gate_proj.weight.mul_(3e4)
    decoder = Decoder(CachedLM(model), tiny_pair().make_drafter()[1], (), Sampler())
    decoder.decode([5, 6, 7], 8, None)
    half = copy.deepcopy(model).half()
    decoder = Decoder(CachedLM(half), tiny_pair().make_drafter()[1], (), Sampler())
    message = refusal(lambda: decoder.decode([5, 6, 7], 8, None))
    assert "model.layers.1." in message and "float16" in message and "--dtype float32" in message


def test_logits_of_minus_infinity_are_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model gives them that rules tokens out."""
    pair = tiny_pair()
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    plain = CachedLM.forward

    def forward(self: CachedLM, tokens: Any) -> torch.Tensor:
        return plain(self, tokens).clone().index_fill_(1, torch.tensor([1, 2]), -torch.inf)

    monkeypatch.setattr(CachedLM, "forward", forward)
    tokens = decoder.decode([5, 6, 7], 8, POLICIES["chain"]).tokens
    assert len(tokens) == 8 and not {1, 2} & {*tokens}


def test_the_command_says_model_layer_and_number_type_in_one_line(tmp_path: Path) -> None:
    pair = tiny_pair()
    for name, model in (("target", spoiled(pair.target)), ("draft", pair.drafter.model)):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "p.jsonl").write_text('{"text": "abcdef"}\n')
    given = ["--target", tmp_path / "target", "--draft-model", tmp_path / "draft", "--prompts", tmp_path / "p.jsonl"]
    result = call("realrun", "record", tmp_path / "trace", *given, "--max-new-tokens", 8, "--dtype", "float32")
    assert_refused(result, tmp_path / "target", "model.layers.0.mlp.down_proj", "float32")
    assert not (tmp_path / "trace").exists()
