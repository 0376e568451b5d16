"""vLLM on the CPU, in an environment of its own, as it wants other versions of torch and transformers than ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from realrun.engines.engine import Engine, EngineRun, Job, Setting, Sums, run_apart, save_models
from realrun.pairs.pair import Pair
from specsim.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.trace.ngram import NgramRule

PROCESS = "run_vllm.py"
PYTHON = "SPECSIM_VLLM_PYTHON"  # names the interpreter that has it
COUNTERS = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
VERSION = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class VllmEngine(Engine):
    """One sequence at a time, with a draft model or by its n-gram lookup."""

    name = "vllm"
    lookup_rule = NgramRule(2, 3, "first", "stop")

    def __init__(self) -> None:
        self.python = os.environ.get(PYTHON, sys.executable)

    def check_installed(self) -> None:
        try:
            self.version()
        except (OSError, subprocess.SubprocessError):
            raise InputError(
                f"vLLM is not installed for {self.python}; make an environment with `nox -s vllm` and name its "
                f"interpreter in {PYTHON}"
            ) from None

    def version(self) -> str:
        done = subprocess.run([self.python, "-c", VERSION], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def convert(self, pair: Pair, folder: Path) -> None:
        save_models(pair, folder)

    def policy(self, setting: Setting) -> ChainPolicy:
        return FixedK(setting.k)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        asked = {
            **job.as_dict(),
            "k": setting.k,
            "ngram": [self.lookup_rule.min_ngram, self.lookup_rule.max_ngram],
            "context": max(map(len, job.prompts)) + job.max_new_tokens + setting.k + 1,
        }
        made = run_apart(PROCESS, asked, job.folder, python=self.python)
        return EngineRun(made["outputs"], [_rounds(one) for one in made["metrics"]], _sums(made["counters"]))


def _rounds(metrics: dict[str, Any] | None) -> list[tuple[int, int]]:
    """Of a request; None is one that never drafted."""
    if metrics is None:
        return []
    return list(zip(metrics["per_step_drafted"], metrics["per_step_accepted"], strict=True))


def _sums(counters: dict[str, Any]) -> Sums:
    rounds, drafted, accepted = (int(counters[name]) for name in COUNTERS)
    return Sums(rounds, drafted, accepted, [int(one) for one in counters[BY_POSITION]])
