"""mlx-lm: the pair as Hugging Face has models; rounds by what it says of every token, and by the target's passes."""

from __future__ import annotations

from pathlib import Path

from realrun.drafters.independent import IndependentKind
from realrun.engines.engine import Engine, EngineRun, Job, Setting, run_apart, save_models
from realrun.pairs.pair import Pair
from specsim.io.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK

PROCESS = "run_mlx.py"


class MlxEngine(Engine):
    """With a draft model; it has no prompt lookup."""

    name = "mlx"
    package = "mlx-lm"

    def convert(self, pair: Pair, folder: Path) -> None:
        if not isinstance(pair.drafter, IndependentKind):
            raise InputError(
                f"mlx-lm is run with draft models, and {pair.draft_name} is of kind {pair.drafter.name}; give "
                "--draft-model"
            )
        save_models(pair, folder)

    def policy(self, setting: Setting) -> ChainPolicy:
        return FixedK(setting.k)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        result = run_apart(PROCESS, {**job.as_dict(), "k": setting.k}, job.folder, python=self.python)
        rounds = [[(drafted, accepted) for drafted, accepted in rounds] for rounds in result["rounds"]]
        return EngineRun(result["outputs"], rounds)
