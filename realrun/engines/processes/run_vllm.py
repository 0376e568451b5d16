"""vLLM in a process of its own, of an environment of its own: `python run_vllm.py JOB RESULT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def speculation(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's --speculative-config."""
    found: dict[str, Any] = {"num_speculative_tokens": job["k"]}
    if job["lookup"]:
        shortest, longest = job["ngram"]
        return {**found, "method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    return {**found, "method": "draft_model", "model": f"{job['folder']}/draft"}


def main(given: str, made: str) -> None:
    job = json.loads(Path(given).read_text())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=f"{job['folder']}/target",
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config=speculation(job),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    outputs, metrics = [], []
    for prompt in job["prompts"]:
        (answer,) = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        told = answer.outputs[0].spec_decode_metrics
        outputs.append([*answer.outputs[0].token_ids])
        metrics.append(None if told is None else told.to_dict())
    counters = {
        one.name: getattr(one, "values", None) or getattr(one, "value", None)
        for one in engine.get_metrics()
        if "spec_decode" in one.name
    }
    Path(made).write_text(json.dumps({"outputs": outputs, "metrics": metrics, "counters": counters}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:])
