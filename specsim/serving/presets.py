"""What a serving engine does within a step, in which engines differ: who goes first, and what a token budget binds."""

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
    mixes : whether prompts are read in steps in which other requests decode; otherwise a step reads prompts alone
        whenever a request waits that can be admitted
    cuts : whether the token budget of a step binds requests that decode, too: drafts are verified as far as it goes,
        and requests behind it wait. Otherwise it binds prompts alone
    drafts_ahead : whether a round's draft is made at the end of the step before, so that a schedule of K by batch goes
        by the requests of that step, prompts included
    step_tokens : the budget by default
    keeps : tokens of the budget that it keeps free for each request, by kind of drafter
    pad : what a pass is padded to by default
    source : of these rules

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
