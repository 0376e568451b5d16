"""llama.cpp, through the package xllamacpp: the pair as GGUF files, a round for every line of its trace log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.engines.engine import DenseRun, Engine, EngineRun, Job, Setting, Sums, Turn, models_of
from realrun.engines.gguf_file import ids_of, write_gguf
from realrun.engines.processes.vllm_recorder import STATISTICS, row_type
from realrun.pairs.pair import Pair
from specsim.engines.formats import prometheus
from specsim.engines.formats.llamacpp import DRAFTING, Log
from specsim.engines.formats.reading import log_lines
from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.p_min import LlamaCpp

TRACE = {"LLAMA_TRACE": "1"}  # a line in the log for every round
THREADS = 1


class LlamaCppEngine(Engine):
    """Drafts with a draft model; its own lookups follow rules that specsim does not know."""

    name = "llamacpp"
    modules = ("xllamacpp", "gguf")
    package = "xllamacpp"
    takes_p_min = True

    def convert(self, pair: Pair, folder: Path) -> None:
        if not isinstance(pair.drafter, IndependentKind):
            raise InputError(
                f"llama.cpp is run with draft models, and {pair.draft_name} is of kind {pair.drafter.name}; give "
                "--draft-model"
            )
        for name, model in models_of(pair):
            write_gguf(model, pair.eos_token_ids, folder / f"{name}.gguf")

    def check_dense(self, sampler: Sampler) -> None:
        if sampler.mode != "greedy":
            raise InputError("llama.cpp is recorded greedily; give --mode greedy")

    def run_dense(self, job: Job, setting: Setting, sampler: Sampler, step_tokens: int | None = None) -> DenseRun:
        """Decode with the target, and continue the text behind each of its tokens with the draft model alone.

        That is what llama.cpp's rounds draft with it, as far as their drafts go; its threshold p_min is not applied.
        """
        assert setting.batch == 1 and step_tokens is None
        result = self.process({**job_document(job, [setting], []), "depth": setting.k}, job.folder)
        facts = {
            "name": self.name,
            "version": self.version(),
            "runner": "target and draft model in servers of their own",
            "max_num_batched_tokens": result["step_tokens"],
            "max_num_seqs": 1,
            "first_position_drafted": False,
        }
        rows = rows_of(result["outputs"], result["drafts"], setting.k)
        return DenseRun(result["outputs"], rows, facts, result["generate_s"], result["draft_s"])

    def policy(self, setting: Setting) -> ChainPolicy:
        return LlamaCpp(setting.p_min, setting.k)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        turns = [(0, prompt) for prompt in range(len(job.prompts))]
        result = self.process(job_document(job, [setting], turns), job.folder, TRACE)
        log = Log()
        for line in log_lines([job.folder / "log.txt"], Counter()):
            log.take(line)
        requests = [task.request() for task in log.tasks]
        if len(requests) != len(job.prompts):
            raise InputError(f"{setting}: the log has {len(requests)} requests of {len(job.prompts)}; run it again")
        scraped = job.folder / "metrics.txt"
        scraped.write_text(result["metrics"][0])
        return EngineRun(
            outputs=[ids_of(turn["text"]) for turn in result["turns"]],
            rounds=[list(zip(request.drafted, request.accepted, strict=True)) for request in requests],
            sums=_sums(prometheus.scrape(scraped).counts),
        )

    def run_timed(
        self, job: Job, arms: Sequence[Setting], turns: Sequence[tuple[int, int]], done: Callable[[int], None]
    ) -> list[Turn]:
        result = self.process(job_document(job, arms, turns), job.folder, done=done)["turns"]
        lines = (job.folder / "log.txt").read_text(errors="replace").splitlines()
        drafts_s = draft_seconds(lines, [(arm, bool(arms[arm].k)) for arm, _ in turns])
        return [
            Turn(turn["timings"]["predicted_n"], turn["timings"]["predicted_ms"] / 1000, draft_s)
            for turn, draft_s in zip(result, drafts_s, strict=True)
        ]


def rows_of(outputs: Sequence[Sequence[int]], drafts: Sequence[Any], depth: int) -> Array:
    """Make rows as a recorder inside an engine writes them, of drafts by prompt and position."""
    rows = np.zeros(sum(map(len, drafts)), row_type(depth))
    places = [(prompt, length) for prompt, own in enumerate(drafts) for length in range(1, len(own) + 1)]
    for row, (prompt, length) in zip(rows, places, strict=True):
        row["request"], row["position"], row["token"] = prompt, length, outputs[prompt][length - 1]
        for name, values in zip(("draft", *STATISTICS), zip(*drafts[prompt][length - 1], strict=True), strict=True):
            row[name] = values
    return rows


def draft_seconds(lines: Sequence[str], turns: Sequence[tuple[int, bool]]) -> list[float]:
    """Seconds that the drafts of every turn took, by the statistics that a server prints after each.

    turns : the server's number, and whether it drafts at all; if so, it counts since its start
    """
    printed = [float(match[1]) / 1000 for line in lines if "statistics " in line and (match := DRAFTING.search(line))]
    if len(printed) != sum(drafts for _, drafts in turns):
        raise InputError(
            f"the log has statistics of {len(printed)} requests of {sum(drafts for _, drafts in turns)}; this version "
            "of llama.cpp may print them in another way"
        )
    so_far: dict[int, float] = {}
    found_s, each = [], iter(printed)
    for server, drafts in turns:
        total = next(each) if drafts else 0.0
        found_s.append(total - so_far.get(server, 0.0))
        so_far[server] = total
    return found_s


def job_document(job: Job, arms: Sequence[Setting], turns: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Describe the job of the engine's process: servers of these settings, and (arm, prompt) of every turn."""
    longest = max(map(len, job.prompts))
    context = longest + job.max_new_tokens + max(arm.k for arm in arms) + 1
    return {
        **job.as_dict(),
        "arms": [{"k": arm.k, "p_min": arm.p_min} for arm in arms],
        "turns": list(turns),
        "context": context,
        "threads": THREADS,
    }


def _sums(counts: prometheus.Counts) -> Sums:
    names = prometheus.DRAFTS, prometheus.DRAFTED, prometheus.ACCEPTED
    rounds, drafted, accepted = (counts.get((name, None), 0) for name in names)
    return Sums(rounds, drafted, accepted, prometheus.by_position(counts, prometheus.BY_POSITION))
