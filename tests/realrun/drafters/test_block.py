"""Block drafters: one pass per round, blocks of every size, mask embeddings, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.block import Block, BlockKind
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import load_drafter, split_block
from realrun.pairs.pair import Pair, fit_vocabulary, load_pair
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.drafting import Case, own_output
from tests.support.pairs.state import BLOCKS, PROMPTS, state_pair
from tests.support.published import layouts, write
from tests.support.split_targets import target_of
from tests.support.tiny import tiny_tokenizer

TRAINED, TOKENS = 4, 20
FORMS = {"dflash": "llama", "p-eagle": "qwen2-sdpa", "dspark": "qwen3"}  # and the target that it drafts for in tests


def of_blocks(form: str, drafted: int) -> Pair:
    pair = state_pair("block", FORMS[form])
    assert (pair.drafter.facts["form"], pair.drafter.trees) == (("dflash", False) if form == "dspark" else (form, True))
    return replace(pair, drafter=pair.drafter.of(drafted))


def recorded(pair: Pair, depth: int, sampler: Sampler) -> Trace:
    return record(pair, PROMPTS[:3], RecordSettings(depth, TOKENS, sampler))


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
@pytest.mark.parametrize("form", FORMS)
def test_every_block_size_is_recorded_as_it_is_decoded(form: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round takes a single pass; only P-EAGLE drafts the same first tokens in a smaller block."""
    passes = list[int]()
    run = Block.run

    def counted(self: Block, *arguments: Any) -> torch.Tensor:
        passes.append(len(arguments[0]))
        return run(self, *arguments)

    sampler = Sampler() if mode == "greedy" else Sampler("rejection", 0.5, seed=4)
    tokens = dict[int, Any]()
    for drafted in range(1, TRAINED + 1):
        pair = of_blocks(form, drafted)
        trace = recorded(pair, 16, sampler)
        assert trace.meta["depth"] == drafted == trace.meta["drafter_facts"]["block"]
        tokens[drafted] = trace.draft_token
        if mode == "rejection":  # every run draws its own text
            continue
        policy = make_policy("fixed_k", {"k": drafted})
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), log=True)
        with monkeypatch.context() as patch:
            patch.setattr(Block, "run", counted)
            decoder = Decoder(*pair.make_drafter(), (), sampler)
            runs = [decoder.decode(p.tokens, TOKENS, policy, sequence=i) for i, p in enumerate(PROMPTS[:3])]
        for number, (prompt, one) in enumerate(zip(PROMPTS, runs, strict=False)):
            own = own_output(Case("block", FORMS[form]), tuple(prompt.tokens), sampler, number, TOKENS)
            assert one.tokens == own
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0
        assert sum(passes) == sum(round_.drafted > 0 for one in runs for round_ in one.rounds)
        passes.clear()
    if mode == "greedy":
        nested = [np.array_equal(tokens[k], tokens[TRAINED][:, :k]) for k in range(1, TRAINED + 1)]
        assert nested == [form == "p-eagle"] * (TRAINED - 1) + [True]


def test_a_folder_names_the_size_of_its_blocks(tmp_path: Any) -> None:
    target = target_of("llama")
    folder = write(layouts()["speculators-dflash"], tmp_path / "drafter")
    assert split_block(f"{folder}:3") == (str(folder), 3) and split_block("lab:eesd") == ("lab:eesd", None)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    whole, three = (load_pair(str(tmp_path / "target"), drafter=f"{folder}{of}") for of in ("", ":3"))
    assert (whole.drafter.max_depth, three.drafter.max_depth, three.draft_name) == (5, 3, "drafter")
    assert whole.fingerprint != three.fingerprint  # the same weights draft otherwise
    for of, says in ((6, "trained for 1 to 5"), (0, "trained for 1 to 5")):
        with pytest.raises(InputError, match=says):
            load_pair(str(tmp_path / "target"), drafter=f"{folder}:{of}")
    other = write(layouts()["specforge-eagle3"], tmp_path / "eagle3")
    refusal(lambda: load_drafter(other, target, 3), "of kind eagle3, which drafts no blocks; leave :3 out")


def test_trees_need_no_tree_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = state_pair("block")
    lm = pair.drafter.make_passes(pair.target)[1]
    monkeypatch.setattr(pair.target.config, "_attn_implementation", "flash_attention_2")
    lm.check_trees()


@torch.inference_mode()
def test_a_mask_token_that_the_tokenizer_lacks_has_its_embedding() -> None:
    """The vocabulary is cut to the tokenizer's tokens; published mask tokens are often in the padding."""
    target = target_of("llama")
    padding, config = torch.randn(2, 32).double(), BLOCKS["llama"]
    wide = type(target)(target.config).double()
    wide.load_state_dict(target.state_dict())
    wide.resize_token_embeddings(99)
    wide.get_input_embeddings().weight[97:] = padding
    narrow = fit_vocabulary(wide, 97, 97)
    assert torch.equal(Block(narrow, {**config, "mask": 98}).mask, padding[1])
    assert torch.equal(Block(narrow, {**config, "mask": 5}).mask, narrow.get_input_embeddings().weight[5])
    refusal(lambda: Block(narrow, {**config, "mask": 99}), "mask token is 99 and this target has 97 embeddings")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"states_after": [3, 5]}, "reads states after 3, 5 of its target's layers, and this target has 4"),
        ({"states_after": [3, 1]}, "reads states after 3, 1"),
        ({"hidden_size": 64}, "hidden size 64, this target 32"),
    ],
)
def test_another_target_is_refused(config: dict[str, Any], says: str) -> None:
    refusal(lambda: BlockKind.load(target_of("llama"), {}, {"config": {**BLOCKS["llama"], **config}}), match=says)
