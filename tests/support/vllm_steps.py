"""Write the steps of vLLM on a CPU under two loads and three budgets: `python -m tests.support.vllm_steps VLLM_PYTHON`.

The lab's pair decodes greedily with K = 3 and 8 slots; users send the next prompt as soon as they are answered. The
file has the requests, new tokens and earlier computed tokens of every step, from the output of vLLM's scheduler.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "specsim" / "serving" / "vllm_steps.json"
SLOTS, K, TOKENS, DEPTH = 8, 3, 48, 3
LOADS = [(users, budget) for users in (3, 8) for budget in (12, 24, 64)]
REQUESTS = 16


def record(folder: Path) -> dict[str, Any]:
    """Save the lab's models and record what would be accepted at every position of every prompt's text."""
    from dataclasses import replace

    from realrun.engines.engine import save_models
    from realrun.measure.record import RecordSettings, record
    from realrun.pairs.pair import load_pair
    from realrun.pairs.prompts import lab_prompts

    pair = load_pair("lab", dtype="float32", threads=1)
    prompts = [replace(p, tokens=p.tokens[: 64 - 5 * i]) for i, p in enumerate(lab_prompts(pair.tokenizer, 10))]
    settings = RecordSettings(max_draft_tokens=DEPTH, max_new_tokens=TOKENS + DEPTH + 1)
    trace = record(pair, prompts, settings)
    save_models(pair, folder)
    texts = [trace.match_len[slice(*trace.offsets[i : i + 2])] for i in range(trace.sequences)]
    return {"prompts": [p.tokens for p in prompts], "match_len": ["".join(map(str, text)) for text in texts]}


def serve(given: str) -> None:
    """Run vLLM; this part runs in vLLM's own interpreter."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]

    job = json.loads(Path(given).read_text())
    steps: list[list[int]] = []
    inner = Scheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = inner(self, *args, **kwargs)
        new = made.num_scheduled_tokens
        if new:
            # what was computed before: the scheduler has already counted this step
            before = sum(self.requests[name].num_computed_tokens - count for name, count in new.items())
            steps.append([len(new), sum(new.values()), before])
        return made

    Scheduler.schedule = schedule
    llm = LLM(
        model=f"{job['folder']}/target", dtype="float32", max_model_len=256, max_num_seqs=SLOTS,
        max_num_batched_tokens=job["budget"], enforce_eager=True, async_scheduling=False,
        enable_prefix_caching=False,
        speculative_config={"method": "draft_model", "model": f"{job['folder']}/draft", "num_speculative_tokens": K},
    )  # fmt: skip
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    asked = 0

    def ask() -> None:
        nonlocal asked
        if asked < REQUESTS:
            tokens = job["prompts"][asked % len(job["prompts"])]
            engine.add_request(str(asked), {"prompt_token_ids": tokens}, sampling)
            asked += 1

    for _ in range(job["users"]):
        ask()
    while engine.has_unfinished_requests():
        for answer in engine.step():
            if answer.finished:
                ask()
    Path(given + ".out").write_text(json.dumps(steps))


def main() -> None:
    if sys.argv[1] == "serve":
        return serve(sys.argv[2])
    import os

    from realrun.engines.vllm import ENVIRONMENT

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = record(folder)
        runs = {}
        for users, budget in LOADS:
            job = folder / f"{users}-{budget}.json"
            job.write_text(json.dumps({**recorded, "folder": name, "users": users, "budget": budget}))
            subprocess.run(
                [sys.argv[1], __file__, "serve", str(job)],
                check=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": ""},
            )
            runs[f"{users} users, {budget} tokens"] = json.loads(Path(f"{job}.out").read_text())
    prompt_tokens = [len(tokens) for tokens in recorded["prompts"]]
    FILE.write_text(
        json.dumps({"prompt_tokens": prompt_tokens, "match_len": recorded["match_len"], "runs": runs}) + "\n"
    )


if __name__ == "__main__":
    main()
