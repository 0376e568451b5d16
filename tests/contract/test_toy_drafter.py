"""A user's own drafter is a file and a line in DRAFTERS: this drafter repeats the last token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind, Origin
from realrun.drafters.registry import DRAFTERS
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.experiment.validate import output_identical, rounds_identical, same_text_rounds_identical
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair, load_pair
from realrun.proposals.positionwise import positionwise_columns
from realrun.proposals.recorder import Columns, Recorder, RecordRequest
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.policy.registry import CHAIN_POLICIES, make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.quick import quick_measurements
from tests.support.tiny import tiny_pair, tiny_prompts

# --- What a user writes ----------------------------------------------------------------------------


def certain(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Logits [n, V] that are sure of these tokens [n]."""
    logits = torch.full((len(tokens), vocabulary), -torch.inf, dtype=torch.float64, device=tokens.device)
    return logits.scatter(-1, tokens[:, None], 0.0)


class RepeatLM(CachedLM):
    """A pass that says again what it was fed; there is nothing to cache."""

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        return certain(torch.tensor(tokens[-keep:], device=self.device), int(self.model.config.vocab_size))

    def _crop(self, end: int) -> None: ...


@dataclass(frozen=True)
class RepeatProposals:
    """The token before every output position [T], proposed at every depth."""

    last: torch.Tensor
    vocabulary: int

    def states(self, step: int) -> torch.Tensor:
        return self.last[:, None]

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return certain(states[:, 0], self.vocabulary)


@dataclass(frozen=True, eq=False)
class RepeatKind(DrafterKind):
    """Any target has it."""

    name: ClassVar[str] = "repeat"
    origin: ClassVar[Origin] = "target"
    trees: ClassVar[bool] = False
    has_states: ClassVar[bool] = False

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        return target, cls()

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        return make_lm(target), DraftModel(RepeatLM(target), eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        def recorder(request: RecordRequest) -> Columns:
            last = torch.tensor([request.prompt[-1], *request.output[:-1]], device=target.device)
            return positionwise_columns(target, RepeatProposals(last, int(target.config.vocab_size)), request)

        return recorder


# --- What works then -------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setitem(DRAFTERS, "repeat-last", RepeatKind)  # DRAFTERS["repeat-last"] = RepeatKind
    tiny_pair().target.save_pretrained(tmp_path / "target")
    tiny_pair().tokenizer.save_pretrained(tmp_path / "target")
    return load_pair(str(tmp_path / "target"), drafter="repeat-last", dtype="float64")


@pytest.mark.parametrize("sampler", [Sampler(), Sampler("gumbel", 0.3, seed=4)], ids=lambda s: s.mode)
def test_it_is_recorded_profiled_and_replayed(pair: Pair, sampler: Sampler) -> None:
    prompts = tiny_prompts(4)
    trace = record(pair, prompts, RecordSettings(4, 40, sampler))
    assert trace.meta["drafter_kind"] == "repeat" and trace.meta["drafter_facts"] == {}
    assert 0 < trace.match_len.mean() < 4
    document = profile(pair, contexts=[2, 70], depth=4, limit_s=0, sampler=sampler)
    table = cost_table(trace, profile_from_json(document, "toy"))
    policy = make_policy("fixed_k", {"k": 3})
    replayed = replay(trace, policy, table, log=True)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    runs = [decoder.decode(prompt.tokens, 40, policy, sequence=index) for index, prompt in enumerate(prompts)]
    assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0
    # Another token ends the third round of the first text, and what follows it is drafted otherwise.
    first = runs[0]
    first.tokens[first.rounds[3].t - 1] += 1
    first.rounds[3:] = [dataclasses.replace(round_, drafted=0) for round_ in first.rounds[3:]]
    assert rounds_identical(replayed, runs) < same_text_rounds_identical(trace, replayed, runs) == 1.0
    first.rounds[1] = dataclasses.replace(first.rounds[1], drafted=0)  # where the text is still the same
    before = 2 + sum(len(run.rounds) for run in runs[1:])
    assert same_text_rounds_identical(trace, replayed, runs) == pytest.approx(1 - 1 / before)


def test_every_round_of_a_validation_is_foretold(pair: Pair, tmp_path: Path) -> None:
    kinds = tuple(CHAIN_POLICIES[name] for name in ("fixed_k", "max_confidence"))
    settings = ValidationSettings(RecordSettings(4, 24), kinds, trials=2, repeats=3)
    with quick_measurements():
        document = validate(pair, tiny_prompts(), settings, tmp_path / "out", lambda *step: None).as_dict()
    assert document["drafter_kind"] == "repeat"
    assert {row["rounds_identical_percent"] for row in document["rows"]} == {100.0}


def test_what_it_lacks_is_refused_in_one_line(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^drafter repeat-last drafts chains only; record it with --tree-nodes 0$"):
        record(pair, tiny_prompts(1), RecordSettings(4, 8, tree_nodes=8))
    with pytest.raises(InputError, match="^drafter repeat-last has no states that a predictor reads; leave"):
        load_pair(str(tmp_path / "target"), drafter="repeat-last", dtype="float64", predictor="lab")
