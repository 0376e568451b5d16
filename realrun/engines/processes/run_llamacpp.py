"""llama.cpp in a process of its own: `python run_llamacpp.py JOB RESULT`, both JSON.

A job has a server for each of its arms (k, p_min), and turns (arm, prompt), one after another; after the Nth "done N"
is printed. No torch here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp

INFO = 4  # level of a log that has a line for every round and request


def parameters(job: dict[str, Any], k: int, p_min: float) -> Any:
    """Set the parameters of a server with this draft length and threshold, in float32 throughout.

    By default caches are float16, and attention computes in float16 even over float32 caches. That changes
    probabilities by 1e-4, enough to flip numerically tied logits.
    """
    float32 = xllamacpp.ggml_type.GGML_TYPE_F32
    found = xllamacpp.CommonParams()
    found.model.path = f"{job['folder']}/target.gguf"
    found.n_ctx = job["context"]
    found.n_parallel, found.port, found.verbosity = 1, 0, INFO
    found.endpoint_metrics, found.cache_prompt, found.fit_params = True, False, False
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = job["threads"]
    found.cache_type_k = found.cache_type_v = float32
    found.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if k:
        found.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = found.speculative.draft
        draft.mparams.path = f"{job['folder']}/draft.gguf"
        draft.n_max, draft.n_min, draft.p_min = k, 0, p_min
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job["threads"]
        draft.cache_type_k = draft.cache_type_v = float32
    return found


def main(given: str, made: str) -> None:
    job = json.loads(Path(given).read_text())
    servers = [xllamacpp.Server(parameters(job, arm["k"], arm["p_min"])) for arm in job["arms"]]
    turns = []
    for arm, prompt in job["turns"]:
        asked = {
            "prompt": job["prompts"][prompt],
            "n_predict": job["max_new_tokens"],
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,  # or a prompt that was met before would take no time
        }
        answer = servers[arm].handle_completions(asked)
        turns.append({"text": answer["choices"][0]["text"], "timings": answer["timings"]})
        print("done", len(turns), flush=True)
    metrics = [server.handle_metrics() for server in servers]
    Path(made).write_text(json.dumps({"turns": turns, "metrics": metrics}))


if __name__ == "__main__":
    main(*sys.argv[1:])
