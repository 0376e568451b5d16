"""Scheduler rules of vLLM, SGLang and llama.cpp: which requests a step serves first, what its token budget limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specsim.cost.batches import Pad
from specsim.io.names import known_name

ServerName = Literal["vllm", "sglang", "llamacpp"]


@dataclass(frozen=True)
class ServerRules:
    """How an engine fills its steps.

    name : of the engine
    mixes : whether a step can prefill some requests and decode others; otherwise a step only prefills as long as a
        waiting request can be admitted
    cuts : whether the token budget of a step also limits decoding: a draft is verified only as far as the budget
        allows, and later requests wait. Otherwise it limits prefills alone
    drafts_ahead : whether a round's draft is made at the end of the previous step, so that a schedule of K by batch
        looks the requests of that step up, including those that it prefilled
    step_tokens : default token budget of a step
    keeps : tokens of the budget that the engine reserves for each request, by kind of drafter
    pad : default padding of a pass
    source : file and function of the engine that these rules follow

    Examples
    --------
    >>> from specsim.serving.presets import find_server
    >>> find_server("sglang").mixes
    False
    """

    name: str
    mixes: bool
    cuts: bool
    drafts_ahead: bool
    step_tokens: int
    pad: Pad
    source: str
    keeps: Mapping[str, int] = field(default_factory=dict)


SERVERS = {
    rules.name: rules
    for rules in (
        ServerRules(
            "vllm",
            mixes=True,
            cuts=True,
            drafts_ahead=True,
            step_tokens=8192,
            pad="graphs",
            keeps={"model": 1},
            source="vLLM 0.32, vllm/v1/core/sched/scheduler.py, schedule(); max_num_batched_tokens of its API server "
            "on an H100; steps of runs on a CPU are equal",
        ),
        ServerRules(
            "sglang",
            mixes=False,
            cuts=False,
            drafts_ahead=False,
            step_tokens=8192,
            pad="sequences",
            source="SGLang 0.5, managers/scheduler.py, get_next_batch_to_run(); chunked_prefill_size of an 80 GB GPU",
        ),
        ServerRules(
            "llamacpp",
            mixes=True,
            cuts=False,
            drafts_ahead=False,
            step_tokens=2048,
            pad="none",
            source="llama.cpp 2026.10, tools/server/server-context.cpp, update_slots(); n_batch",
        ),
    )
}


def find_server(name: str) -> ServerRules:
    """The rules of an engine; InputError for an unknown engine."""
    return SERVERS[known_name("engine", name, [*SERVERS])]
