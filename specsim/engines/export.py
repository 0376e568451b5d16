"""Settings as engines take them: a draft length, one per batch size, or acceptance that the engine is made to have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.engines.flags import draft_length_flags
from specsim.errors import InputError
from specsim.serving.draft_length import ScheduledK
from specsim.serving.speedup_map import schedule_ranges

LLAMACPP_2025 = "llamacpp-2025"  # before its options were renamed, which today's refuses
PER_BATCH = ("vllm", "sglang", "tensorrt-llm")
SCRIPTED = ("vllm", "sglang", "llamacpp")
FILE = "adaptive.json"


class Setting(NamedTuple):
    """What to type, and what is to be in a file beside, if anything."""

    flags: str
    file: str | None = None


def draft_length(engine: str, k: int) -> Setting:
    """K tokens in every round."""
    if engine == LLAMACPP_2025:
        return Setting(f"--draft-max {k} --draft-p-min 0" if k else "leave speculation off")
    return Setting(draft_length_flags(engine, k))


def schedule(engine: str, rule: ScheduledK, largest_batch: int) -> Setting:
    """A K per batch size, in the engine's form; InputError where it has none."""
    lengths = {batch: rule.lengths[batch] for batch in sorted(rule.lengths)}
    if engine not in PER_BATCH:
        raise InputError(f"{engine} takes no draft length per batch; choose one of {', '.join(PER_BATCH)}, or give --k")
    if not rule.max_draft_tokens:
        return draft_length(engine, 0)
    if largest_batch < max(lengths):
        raise InputError(f"a schedule to batch {max(lengths)} exceeds {largest_batch}; give a larger --largest-batch")
    if engine == "vllm":
        ranges = schedule_ranges(lengths, largest_batch)
        config = {"num_speculative_tokens": rule.max_draft_tokens, "num_speculative_tokens_per_batch_size": ranges}
        return Setting(f"--speculative-config '{json.dumps(config)}', beside method and model")
    if engine == "sglang":
        steps = {str(batch): {"candidate_steps": [k]} for batch, k in lengths.items()}
        flags = f"{draft_length_flags(engine, rule.max_draft_tokens)} --speculative-adaptive"
        return Setting(f"{flags} --speculative-adaptive-config {FILE}", json.dumps(steps))
    if lengths[1] != rule.max_draft_tokens:
        raise InputError(
            f"{engine} wants its longest draft at batch 1, where this schedule has {lengths[1]} of "
            f"{rule.max_draft_tokens}; give a schedule that does not grow"
        )
    inner = ", ".join(f"{batch}: {k}" for batch, k in lengths.items())
    text = f"speculative_config: {{max_draft_len: {rule.max_draft_tokens}, draft_len_schedule: {{{inner}}}}}"
    return Setting(f"{text}, beside decoding_type and model")


def acceptance_by_depth(source: Source, k: int) -> list[float]:
    """Share of rounds that accept an i-th token, for i = 1..K, were all to draft K; InputError where it is not told."""
    accepted, verified = verified_by_depth(source)
    told = int((verified > 0).sum()) if (verified > 0).all() else int(np.argmin(verified > 0))
    if told < k:
        raise InputError(f"acceptance is told of {told} draft tokens, not of {k}; give --k {told} or other counts")
    return [float(share) for share in np.cumprod(accepted[:k] / verified[:k])]


def scripted(engine: str, shares: Sequence[float]) -> Setting:
    """What makes an engine accept drafts this often, without a trained drafter, so that its seconds can be measured."""
    k = len(shares)
    rounded = [round(share, 6) for share in shares]
    if engine == "vllm":
        config = {
            "num_speculative_tokens": k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rounded,
        }
        return Setting(f"--speculative-config '{json.dumps(config)}', beside method and model")
    if engine == "llamacpp":
        return Setting(f"--spec-draft-n-max {k} --spec-synth-rates {','.join(f'{share:.6f}' for share in shares)}")
    if engine == "sglang":
        length = 1 + sum(shares)
        simulated = f"SGLANG_SIMULATE_ACC_LEN={length:.4f} SGLANG_SIMULATE_ACC_METHOD=match-expected"
        return Setting(
            f"{simulated} SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token in the environment, with "
            f"{draft_length_flags(engine, k)}"
        )
    raise InputError(f"{engine} is not known to accept by script; choose one of {', '.join(SCRIPTED)}")
