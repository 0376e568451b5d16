"""vLLM in a process of its own, by an interpreter that has it: `python run_vllm.py JOB RESULT`, both JSON.

All prompts are asked at once, of which the server runs as many together as a batch holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

LEAST_TOKENS = 2048  # of a step, so that whole prompts fit in


def main(given: str, made: str) -> None:
    job = json.loads(Path(given).read_text())
    server = LLM(
        model=f"{job['folder']}/target",
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=job["batch"],
        max_num_batched_tokens=max(LEAST_TOKENS, job["batch"] * job["context"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config=job["speculation"],
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["eos_token_ids"] or None
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    answers = [answer.outputs[0] for answer in server.generate(prompts, greedy, use_tqdm=False)]
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
    }
    Path(made).write_text(json.dumps(result))


if __name__ == "__main__":  # vLLM may start processes that import this file
    main(*sys.argv[1:])
