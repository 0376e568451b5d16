"""transformers: `generate` with the draft model as its assistant, or with prompt lookup."""

from __future__ import annotations

from pathlib import Path

from realrun.engines.engine import Engine, EngineRun, Job, Setting, run_apart, save_models
from realrun.pairs.pair import Pair
from specsim.lookup.ngram import RULES
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK

PROCESS = "run_transformers.py"


class HuggingFaceEngine(Engine):
    """With a constant draft length and no confidence threshold, which the library would move by a curve it fits."""

    name = "transformers"
    package = "transformers"
    lookup_rule = RULES["transformers"]

    def convert(self, pair: Pair, folder: Path) -> None:
        save_models(pair, folder)

    def policy(self, setting: Setting) -> ChainPolicy:
        return FixedK(setting.k)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        result = run_apart(PROCESS, {**job.as_dict(), "k": setting.k}, job.folder)
        rounds = [[(drafted, accepted) for drafted, accepted in rounds] for rounds in result["rounds"]]
        return EngineRun(result["outputs"], rounds)
