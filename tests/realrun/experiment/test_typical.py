"""Typical acceptance compared: the arms are what they say, rates and likelihoods are counted anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from realrun.cli.main import app
from realrun.decode.decoder import Decoder
from realrun.decode.verify import TypicalAcceptance
from realrun.experiment.typical_acceptance import EPSILONS, TypicalSettings, compare_typical, log_likelihood
from realrun.pairs.drafter_files import describe_target, save_drafter
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from specsim.replaying.intervals import ratio_interval
from tests.support.checks import refusal
from tests.support.pairs.medusa import HEADS, medusa_pair, own_texts
from tests.support.tiny import tiny_prompts

POLICY = make_policy("cartesian", {"s1": 4, "s2": 3, "s3": 2, "s4": 1})
SETTINGS = TypicalSettings((0.001, 0.01, 0.1), 1.0, 0.5, 40, 4)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return compare_typical(medusa_pair(), tiny_prompts(), POLICY, SETTINGS)


def test_the_papers_thresholds_are_the_default() -> None:
    assert EPSILONS[0] == 0.01 and EPSILONS[-1] == 0.25 and len(EPSILONS) == 25
    verifiers = [verifier for _, _, verifier in TypicalSettings().arms]
    assert verifiers[2:] == [TypicalAcceptance(epsilon) for epsilon in EPSILONS]
    assert [verifier.lossy for verifier in verifiers] == [False, False, *[True] * 25]


def test_the_document_holds_every_arm(document: dict[str, Any]) -> None:
    arms = document["arms"]
    assert [arm["arm"] for arm in arms] == ["greedy", "sampling", *["typical"] * 3]
    assert [arm["loss_free"] for arm in arms] == [True, True, False, False, False]
    assert [(arm["epsilon"], arm["delta"]) for arm in arms[2:]] == [(0.001, 1.0), (0.01, 1.0), (0.1, 1.0)]
    assert document["policy"] == "cartesian" and document["temperature"] == 0.5 and document["prompts"]["count"] == 6
    json.dumps(document, allow_nan=False)
    for arm in arms:
        for key in ("acceleration_rate", "log_likelihood_nats", "log_likelihood_at_temperature_nats"):
            assert arm[key]["low"] <= arm[key]["estimate"] <= arm[key]["high"]
        assert arm["tokens"] == 6 * 40
        assert arm["acceleration_rate"]["estimate"] == pytest.approx(arm["tokens"] / arm["rounds"])


def test_a_higher_threshold_is_slower_and_likelier(document: dict[str, Any]) -> None:
    greedy, sampling, *typical = document["arms"]
    rates = [arm["acceleration_rate"]["estimate"] for arm in typical]
    assert rates[0] > rates[1] > rates[2] + 0.5 and rates[2] > 1
    likelihoods = [arm["log_likelihood_nats"]["estimate"] for arm in typical]
    assert likelihoods[0] < likelihoods[1] - 0.1 < likelihoods[2]
    assert greedy["log_likelihood_nats"]["estimate"] > sampling["log_likelihood_nats"]["estimate"] + 0.3
    assert greedy["distinct_trigram_share"] < 0.7 * sampling["distinct_trigram_share"]


@pytest.mark.parametrize("arm", [0, 1, 2])
def test_rates_and_likelihoods_are_those_of_the_decoded_texts(document: dict[str, Any], arm: int) -> None:
    """The loss-free arms' texts are the target's own; the likelihood is a plain pass without a cache."""
    pair = medusa_pair()
    name, sampler, verifier = SETTINGS.arms[arm]
    decoder = Decoder(*pair.make_drafter(), (), sampler, tree_verifier=verifier)
    runs = [decoder.decode(p.tokens, 40, POLICY, sequence=i, seed=4) for i, p in enumerate(tiny_prompts())]
    texts = [run.tokens for run in runs]
    if name != "typical":
        assert texts == own_texts(pair, sampler, 40)
    row = document["arms"][arm]
    assert row["rounds"] == sum(len(run.rounds) for run in runs)
    for temperature, key in ((1.0, "log_likelihood_nats"), (0.5, "log_likelihood_at_temperature_nats")):
        sums = [
            likelihood(prompt.tokens, text, temperature) for prompt, text in zip(tiny_prompts(), texts, strict=True)
        ]
        assert row[key] == pytest.approx(ratio_interval(sums, [40] * 6).as_dict(), abs=1e-9)


@torch.inference_mode()
def likelihood(prompt: list[int], text: list[int], temperature: float) -> float:
    logits = medusa_pair().target(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
    probs = np.exp(logits.numpy() / temperature)
    probs /= probs.sum(axis=1, keepdims=True)
    return float(sum(np.log(probs[len(prompt) - 1 + i, token]) for i, token in enumerate(text)))


def test_the_rule_judges_the_most_probable_tokens_without_noise() -> None:
    """Two seeds draft and write the same."""
    rows = [
        compare_typical(medusa_pair(), tiny_prompts(2), POLICY, replace(SETTINGS, seed=seed))["arms"][1:3]
        for seed in (1, 2)
    ]
    assert rows[0][1] == rows[1][1] and rows[0][0] != rows[1][0]


def test_a_text_of_one_token_has_its_log_probability() -> None:
    pair = medusa_pair()
    with torch.inference_mode():
        logits = pair.target(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    (value,) = log_likelihood(pair.target, [5, 6, 7], [9], (0.5,))
    assert value == pytest.approx(float((2 * logits).log_softmax(-1)[9]), abs=1e-12)


@pytest.mark.parametrize(
    ("policy", "prompts", "message"),
    [
        (make_policy("fixed_k", {"k": 3}), 2, "fixed_k drafts chains, typical acceptance judges trees"),
        (make_policy("vct", {"width": 1, "depth": 5}), 2, "drafts up to 5 tokens, the drafter at most 4; lower"),
        (POLICY, 0, "give at least one"),
    ],
)
def test_what_cannot_be_compared_is_refused(policy: Any, prompts: int, message: str) -> None:
    refusal(lambda: compare_typical(medusa_pair(), tiny_prompts(6)[:prompts], policy, SETTINGS), match=message)


@pytest.mark.parametrize(
    "bad",
    [
        {"epsilons": ()},
        {"epsilons": (-0.1,)},
        {"epsilons": (float("inf"),)},
        {"delta": float("nan")},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    refusal(lambda: TypicalSettings(**bad), match="threshold|typical acceptance|temperature")


def test_the_command_prints_and_writes_the_comparison(tmp_path: Path) -> None:
    pair, runner = medusa_pair(), CliRunner()
    pair.target.save_pretrained(tmp_path / "target")
    pair.tokenizer.save_pretrained(tmp_path / "target")
    facts = {"target": describe_target(pair.target, "tiny"), "heads": HEADS}
    save_drafter(tmp_path / "heads", "medusa", pair.drafter.heads.state_dict(), facts)
    texts = [json.dumps({"text": f"number {i} and so on", "domain": "code"}) for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(texts))
    base = ["typical", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "heads")]
    base += ["--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "2", "--max-new-tokens", "12"]
    result = runner.invoke(app, [*base, "--epsilons", "0.05,0.2", "--json", "--out", str(tmp_path / "typical.json")])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document == json.loads((tmp_path / "typical.json").read_text())
    assert [arm.get("epsilon") for arm in document["arms"]] == [None, None, 0.05, 0.2]
    assert make_policy(document["policy"], document["params"]).max_draft_tokens <= HEADS
    result = runner.invoke(app, [*base, "--epsilons", "0.2", "--policy", "vct", "--set", "width=2"])
    assert result.exit_code == 0, result.output
    assert "vct, 2 prompts" in result.output and "typical, epsilon 0.2, delta 0.447" in result.output
    texts = ["record", str(tmp_path / "trace"), *base[1:], "--temperature", "0.7", "--tree-nodes", "40"]
    result = runner.invoke(app, [*texts, "--typical", "--tree-width", "2", "--max-draft-tokens", "4"])
    assert result.exit_code == 0, result.output
    read = ["typical", *base[1:5], "--trace", str(tmp_path / "trace"), "--policy", "vct"]
    read += ["--set", "width=2", "--set", "depth=4", "--epsilons", "0.05"]
    result = runner.invoke(app, [*read, "--json"])
    assert result.exit_code == 0, result.output
    greedy, sampling, typical = json.loads(result.output)["arms"]
    assert sampling["replayed_acceleration_rate"] == {**sampling["acceleration_rate"], "truncated_rounds": 0}
    assert "replayed_acceleration_rate" not in greedy and typical["replayed_acceleration_rate"]["estimate"] >= 1
    assert "by replay" in runner.invoke(app, read).output
    with pytest.raises(InputError, match="--trace already decides --temperature"):
        runner.invoke(app, [*read, "--temperature", "0.7"], catch_exceptions=False)
    with pytest.raises(InputError, match="--epsilons 'high' is not a list of numbers"):
        runner.invoke(app, [*base, "--epsilons", "high"], catch_exceptions=False)
