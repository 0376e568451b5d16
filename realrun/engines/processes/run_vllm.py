"""vLLM in a process of its own, by an interpreter that has it.

All prompts are asked at once, of which the server runs as many together as a batch holds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams

LEAST_TOKENS = 2048  # of a step, so that whole prompts fit in


def plain(job: dict[str, Any], prompt: int) -> dict[str, Any]:
    """Ask for the likeliest tokens, or for samples of all tokens at the job's temperature."""
    seed = job["seed"] + prompt if job["temperature"] else None
    return {"temperature": job["temperature"], "seed": seed}


def run(job: dict[str, Any]) -> dict[str, Any]:
    recorder: Any = None
    if folder := job.get("recording"):
        from vllm_recorder import install  # type: ignore[import-not-found]  # beside this file, which runs as a script

        recorder = install(Path(folder), vllm.__version__)
    server = LLM(
        model=f"{job['folder']}/target",
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=job["batch"],
        max_num_batched_tokens=job.get("step_tokens") or max(LEAST_TOKENS, job["batch"] * job["context"]),
        enforce_eager=True,
        async_scheduling=False,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed" if job["speculation"] else "none",
        speculative_config=job["speculation"],
    )
    sampling = [
        SamplingParams(
            **how,
            max_tokens=job["max_new_tokens"],
            stop_token_ids=job["eos_token_ids"] or None,
            ignore_eos=not job["eos_token_ids"],
        )
        for how in job.get("sampling") or [plain(job, number) for number in range(len(job["prompts"]))]
    ]
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    start = time.monotonic()
    answers = [answer.outputs[0] for answer in server.generate(prompts, sampling, use_tqdm=False)]
    whole_s = time.monotonic() - start
    metrics = [answer.spec_decode_metrics for answer in answers]
    counters = {
        metric.name: metric.values if hasattr(metric, "values") else metric.value
        for metric in server.get_metrics()
        if "spec_decode" in metric.name
    }
    result = {
        "outputs": [[*answer.token_ids] for answer in answers],
        "metrics": [None if metric is None else metric.to_dict() for metric in metrics],
        "counters": counters,
        "whole_s": whole_s,
    }
    if recorder is not None:
        result["draft_s"] = recorder.draft_s
    return result
