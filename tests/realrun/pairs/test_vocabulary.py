"""Padded embeddings, tokenizers that differ, and models that are known by their weights, not by their paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import Pair, load_pair, load_target, padding_notes
from realrun.pairs.prompts import Prompt
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.families import check_decoding
from tests.support.small_targets import quiet
from tests.support.tiny import VOCAB, tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer
from tests.support.trainings import CASES, LOOP

FEW = 90  # tokens of a tokenizer that lacks the last ones
ROWS = {"target": 112, "draft": 104}
MODES = {
    "greedy": Sampler(),
    "gumbel": Sampler("gumbel", 1.2, seed=4),
    "rejection": Sampler("rejection", 1.2, seed=4),
}
Change = Callable[[dict[str, int]], Mapping[str, int]]


def save(folder: Path, model: Any, change: Change = dict) -> str:
    """The model with a tokenizer of which this is changed; its folder."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))
    return str(folder)


def padded(model: Any, rows: int) -> Any:
    """With rows that stand for no token and are likelier than any that does."""
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[VOCAB:] = 3 * weight[1 : 1 + rows - VOCAB]
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tiny pair, as it is and padded."""
    home, pair = tmp_path_factory.mktemp("models"), tiny_pair()
    models = {"target": pair.target, "draft": pair.drafter.weights(pair.target)[0]}
    saved = {}
    for role, model in models.items():
        copies = {"plain": tiny_model(model.config.num_hidden_layers, 0), "padded": None}
        copies["plain"].load_state_dict(model.state_dict())
        saved[role] = save(home / role, copies["plain"])
        saved[f"padded {role}"] = save(home / f"padded-{role}", padded(copies["plain"], ROWS[role]))
    return saved


def load(folders: dict[str, str], target: str = "target", draft: str = "draft", **options: Any) -> Pair:
    pair = load_pair(folders.get(target, target), folders.get(draft, draft), dtype="float64", **options)
    return replace(pair, eos_token_ids=())


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_never_said_nor_drafted_nor_counted(folders: dict[str, str], mode: str) -> None:
    """A padded pair is the pair: the same recording, in every mode, and the same decoding."""
    settings = RecordSettings(3, 12, MODES[mode], 0 if mode == "rejection" else 8, 3)
    plain, with_padding = (load(folders, f"{kind}target", f"{kind}draft") for kind in ("", "padded "))
    traces = [record(pair, tiny_prompts(3), settings) for pair in (plain, with_padding)]
    assert traces[1].meta["vocabulary"] == {"tokens": VOCAB, "of": "the target's tokenizer"}
    for name in ("token", "draft_token", "prob", "confidence", "entropy_nats", "true_rank", "text_accept"):
        own, other = (getattr(trace, name) for trace in traces)
        assert (own is None) == (other is None)
        if own is not None:
            np.testing.assert_allclose(own, other, rtol=1e-6, err_msg=name)
    for number, prompt in enumerate(tiny_prompts(3)):
        runs = [
            Decoder(*pair.make_drafter(), (), MODES[mode]).decode(
                prompt.tokens, 12, make_policy("fixed_k", {"k": 3}), sequence=number
            )
            for pair in (plain, with_padding)
        ]
        assert runs[0].tokens == runs[1].tokens and runs[0].log() == runs[1].log()


def test_what_is_left_out_is_said(folders: dict[str, str]) -> None:
    pair = load(folders, "padded target", "padded draft")
    models = {"target": pair.target, "draft model": pair.drafter.weights(pair.target)[0]}
    assert padding_notes(models) == [
        f"vocabulary: 97 tokens, of the target's tokenizer; {rows - VOCAB} padding rows of the {role}'s embedding "
        "stand for no token and are left out"
        for role, rows in zip(models, ROWS.values(), strict=True)
    ]
    assert padding_notes({"target": load_target(folders["target"]).target}) == []


def test_drafters_of_a_padded_target_know_no_padding(folders: dict[str, str], tmp_path: Path) -> None:
    """What the target writes for training, the heads' rows, and the drafts."""
    pair = load_target(folders["padded target"], dtype="float64")
    CASES["medusa"].run(tmp_path, pair, loop=replace(LOOP, steps=1))
    trained = load(folders, "padded target", drafter=str(tmp_path))
    assert trained.drafter.weights(trained.target)[0].vocabulary.shape[1] == VOCAB
    check_decoding(trained)


def test_a_prompt_of_unknown_ids_is_refused(folders: dict[str, str]) -> None:
    pair = load(folders)
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    refusal(lambda: decoder.decode([1, VOCAB], 4, None), "token 97", "97 rows")


def without_last(vocab: dict[str, int]) -> dict[str, int]:
    return {token: number for token, number in vocab.items() if number < FEW}


def swapped(vocab: dict[str, int]) -> dict[str, int]:
    return {**vocab, "A": vocab["B"], "B": vocab["A"]}


def test_tokens_that_differ_are_named(folders: dict[str, str], tmp_path: Path) -> None:
    fewer = save(tmp_path / "fewer", tiny_model(1, 2), without_last)
    other = save(tmp_path / "other", tiny_model(1, 2), swapped)
    refusal(
        lambda: load(folders, draft=fewer),
        "differ in 7 tokens",
        "'y' (90 and none)",
        "...",
        "--allow-tokenizer-difference",
    )
    refusal(lambda: load(folders, draft=other), "2 tokens", "'A' (34 and 35), 'B' (35 and 34)")
    for target, draft in (("target", other), (other, "target")):
        refusal(
            lambda target=target, draft=draft: load(folders, target, draft, allow_tokenizer_difference=True),
            "in what an id stands for",
            "'A'",
            "'B'",
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lacking", ["draft", "target"])
def test_a_tokenizer_may_lack_the_last_tokens_of_the_other(
    folders: dict[str, str], tmp_path: Path, lacking: str, mode: str
) -> None:
    """The target says what it says alone; what the draft model does not know it reads and never proposes."""
    draft = tiny_model(1, 2)
    draft.load_state_dict({k: v for k, v in tiny_pair().target.state_dict().items() if ".layers.1." not in k})
    if lacking == "draft":
        draft.resize_token_embeddings(FEW)
        pair = load(folders, draft=save(tmp_path, draft, without_last), allow_tokenizer_difference=True)
        prompts = [Prompt("all", [VOCAB - 1, 5, VOCAB - 2, 7]), *tiny_prompts(2)]
        size, known = VOCAB, FEW
    else:
        target = tiny_pair().target
        copied = tiny_model(2, 0)
        copied.load_state_dict(target.state_dict())
        copied.resize_token_embeddings(FEW)
        pair = load(folders, save(tmp_path, copied, without_last), "draft", allow_tokenizer_difference=True)
        prompts = [Prompt("all", [5, 6, 7])]
        size = known = FEW
    assert pair.target.config.vocab_size == pair.draft_config.vocab_size == size
    trace = record(pair, prompts, RecordSettings(3, 12, MODES[mode]))
    assert trace.draft_token.max() < known and trace.token.max() < size
    assert np.isfinite(trace.entropy_nats).all()
    decoder = Decoder(*pair.make_drafter(), (), MODES[mode])
    for number, prompt in enumerate(prompts):
        decoded = decoder.decode(prompt.tokens, 12, make_policy("fixed_k", {"k": 3}), sequence=number)
        assert max(decoded.tokens) < size
    if mode == "greedy":
        check_decoding(pair, prompts)


def test_models_are_known_by_their_weights_not_by_their_paths(folders: dict[str, str], tmp_path: Path) -> None:
    """A trace, and a training that goes on."""
    moved = {role: str(shutil.copytree(folders[role], tmp_path / f"another-{role}")) for role in ("target", "draft")}
    original, same = load(folders), load(moved)
    assert original.target_name != same.target_name
    settings, prompts, folder = RecordSettings(3, 6), tiny_prompts(2), tmp_path / "trace"
    trace = recorded_trace(original, prompts, settings, folder, lambda done, total: None)
    again = recorded_trace(same, prompts, settings, folder, lambda done, total: None)
    assert again.meta["provenance"] == trace.meta["provenance"]
    other = load(folders, draft="target")
    refusal(
        lambda: recorded_trace(other, prompts, settings, folder, lambda done, total: None), "weights", "draft there"
    )
    for pair in (original, same):
        CASES["eesd"].run(tmp_path / "eesd", pair, loop=LOOP, progress=quiet)


def test_a_model_whose_cache_cannot_be_rolled_back_is_refused_before_its_weights_are_read(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2)
    mamba = save(tmp_path / "mamba", MambaForCausalLM(config))
    (tmp_path / "mamba" / "model.safetensors").unlink()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a b c"}\n')
    for target, draft in ((mamba, folders["draft"]), (folders["target"], mamba)):
        done = call(
            "realrun", "record", tmp_path / "t", "--target", target, "--draft-model", draft, "--prompts", prompts
        )
        assert_refused(done, "mamba models", "rolled back")
    text = tmp_path / "text"
    done = call("realrun", "train", "eesd", "--target", mamba, "--text", text, "--out", tmp_path / "e")
    assert_refused(done, "mamba models", "rolled back")
