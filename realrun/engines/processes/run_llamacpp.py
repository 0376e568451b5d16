"""llama.cpp in a process of its own.

A job has a server for each of its arms (k, p_min), and turns (arm, prompt), one after another; after the Nth "done N"
is printed. A job with a "depth" is to record: the target decodes every prompt, and behind each of its tokens a server
of the draft model alone continues the text by that many tokens. No torch here.
"""

from __future__ import annotations

import math
import time
from typing import Any

import xllamacpp

ALL = 2**24  # more tokens than a vocabulary has
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


def completion(server: Any, prompt: list[int], tokens: int, likeliest: int, *, reuse: bool) -> list[Any]:
    """Decode greedily; for every token its id, and those of its log-probability and of the `likeliest` tokens'."""
    asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "top_k": 1, "cache_prompt": reuse}
    choice = server.handle_completions({**asked, "n_probs": likeliest})["choices"][0]
    return [(token["id"], token["top_logprobs"]) for token in choice["logprobs"]["content"]]


def statistics(likeliest: list[dict[str, float]]) -> list[float]:
    """Compute the largest probability, the entropy in nats, and that probability's share of the ten largest."""
    logs = [token["logprob"] for token in likeliest if token["logprob"] is not None]
    probs = [math.exp(log) for log in logs]
    entropy_nats = -sum(prob * log for prob, log in zip(probs, logs, strict=True) if prob)
    return [probs[0], entropy_nats, probs[0] / sum(probs[:10])]


def record(job: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs, what is drafted behind each of their tokens but the last, and the seconds of both."""
    target, alone = (parameters(job, 0, 0.0) for _ in range(2))
    alone.model.path = f"{job['folder']}/draft.gguf"
    server, begin = xllamacpp.Server(target), time.monotonic()
    outputs = [
        [token for token, _ in completion(server, prompt, job["max_new_tokens"], 1, reuse=False)]
        for prompt in job["prompts"]
    ]
    decoded, server = time.monotonic(), xllamacpp.Server(alone)
    drafts: list[list[Any]] = []
    for done, (prompt, output) in enumerate(zip(job["prompts"], outputs, strict=True), start=1):
        drafts.append([])
        for length in range(1, max(len(output), 2)):
            text: list[int] = prompt + output[:length]
            draft: list[Any] = []
            while len(draft) < job["depth"]:  # a server ends with an end of text, behind which llama.cpp drafts on
                more = completion(server, text, job["depth"] - len(draft), ALL, reuse=True)
                text = text + [token for token, _ in more]
                draft += [(token, *statistics(likeliest)) for token, likeliest in more]
            drafts[-1].append(draft)
        print("done", done, flush=True)
    seconds = {"generate_s": decoded - begin, "draft_s": time.monotonic() - decoded}
    return {"outputs": outputs, "drafts": drafts, "step_tokens": alone.n_batch, **seconds}


def sampling(job: dict[str, Any], prompt: int) -> dict[str, Any]:
    """Ask for the likeliest tokens, or for samples of all tokens at the job's temperature."""
    if not job["temperature"]:
        return {"temperature": 0.0, "top_k": 1}
    return {"temperature": job["temperature"], "samplers": ["temperature"], "seed": job["seed"] + prompt}


def run(job: dict[str, Any]) -> dict[str, Any]:
    if "depth" in job:
        return record(job)
    servers = [xllamacpp.Server(parameters(job, arm["k"], arm["p_min"])) for arm in job["arms"]]
    turns = []
    for arm, prompt in job["turns"]:
        asked = {
            "prompt": job["prompts"][prompt],
            "n_predict": job["max_new_tokens"],
            **sampling(job, prompt),
            "cache_prompt": False,  # or a prompt that was met before would take no time
        }
        answer = servers[arm].handle_completions(asked)
        turns.append({"text": answer["choices"][0]["text"], "timings": answer["timings"]})
        print("done", len(turns), flush=True)
    return {"turns": turns, "metrics": [server.handle_metrics() for server in servers]}
