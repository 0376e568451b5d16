"""Settings as engines take them: draft lengths, schedules, tables to schedule by, and acceptance by script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy as np

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.cost.files import CostLike, as_cost
from specsim.cost.model import CostModel
from specsim.engines import sps_table
from specsim.engines.confidence_temperatures import confidence_temperatures
from specsim.engines.flags import as_arguments, draft_length_flags, generation_config, llamacpp, speculative_config
from specsim.engines.formats.imported import SourceLike, as_counts
from specsim.errors import InputError
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import ScheduledK, as_schedule
from specsim.serving.speedup_map import schedule_ranges
from specsim.trace.files import TraceLike, read_plain_trace
from specsim.trace.ngram import RULES
from specsim.trace.trace import Trace

LLAMACPP_2025 = "llamacpp-2025"  # before its options were renamed, which today's refuses
PER_BATCH = ("vllm", "sglang", "tensorrt-llm")
STOPS = ("llamacpp", LLAMACPP_2025, "transformers")
LOOKUP = ("vllm", "transformers")
SCRIPTED = ("vllm", "sglang", "llamacpp", "tensorrt-llm")
DSPARK = ("sglang", "tensorrt-llm")


class Setting(NamedTuple):
    """What to type, and what is to be in a file of that path beside, if anything; what has to be said of it."""

    flags: str
    file: str | None = None
    path: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return self._asdict()


def export_flags(
    engine: str,
    k: int | None = None,
    *,
    schedule: Mapping[int, int] | str | None = None,
    largest_batch: int = 512,
    p_min: float | None = None,
    min_ngram: int | None = None,
    max_ngram: int | None = None,
    acceptance: SourceLike | None = None,
    cost: CostLike | None = None,
    context: int = 1000,
    form: Literal["additive", "tokens"] = "additive",
    confidence: TraceLike | None = None,
    path: str | None = None,
) -> Setting:
    """Write what an engine is to be started with: flags, and a file where it wants one.

    Parameters
    ----------
    engine : {"vllm", "sglang", "llamacpp", "llamacpp-2025", "tensorrt-llm", "transformers"}
        The last but two takes llama.cpp's options of before their renaming.
    k : int, optional
        Draft tokens of every round; 0 turns speculation off.
    schedule : mapping of int to int, or str, optional
        In place of `k`, K from each batch on, such as {1: 5, 4: 3, 16: 0} or "1:5,4:3,16:0".
    largest_batch : int
        Where a schedule ends, for vLLM, and a table of steps.
    p_min : float, optional
        Drafts end where the draft model is less sure.
    min_ngram, max_ngram : int, optional
        Prompt lookup by n-grams of so many tokens.
    acceptance : path, mapping, Counters, Rounds, Trace or Imported, optional
        Make the engine accept as often as this source does, without a trained drafter.
    cost : CostModel, str, Path or mapping, optional
        What steps cost, as the table by which a DSpark drafter's verification is scheduled.
    context : int
        Tokens in every cache at which that table is made.
    form : {"additive", "tokens"}
        Of that table: by sequences and verified tokens, or by verified tokens alone.
    confidence : Trace, str or Path, optional
        As temperatures of a DSpark drafter's confidence.
    path : str, optional
        What flags call the file.

    Returns
    -------
    Setting
        `flags`, and where the engine wants a file its text `file` and name `path`; `notes` say what to know.

    Raises
    ------
    InputError
        For an unknown engine, and what it cannot be told.

    Examples
    --------
    >>> import specsim
    >>> specsim.export_flags("sglang", 3).flags
    '--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4'
    """
    if (k is None) == (schedule is None):
        raise InputError("give either --k or --schedule")
    ngram = min_ngram if max_ngram is None else max_ngram
    special = {
        "--p-min": p_min, "--max-ngram": ngram, "--acceptance": acceptance, "--cost": cost, "--confidence": confidence,
    }  # fmt: skip
    given = [name for name, value in special.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are settings of their own; give one at a time")
    if given and not k:
        raise InputError(f"{given[0]} is of drafts of one length; give --k of 1 or more")
    named = {} if path is None else {"path": path}
    if schedule is not None:
        return schedule_setting(engine, as_schedule(schedule), largest_batch, **named)
    assert k is not None
    if acceptance is not None:
        return scripted(engine, acceptance_by_depth(as_counts(acceptance), k))
    if cost is not None:
        return step_times(engine, as_cost(cost), k, largest_batch=largest_batch, context=context, form=form, **named)
    if confidence is not None:
        recorded = str(confidence) if isinstance(confidence, str | PathLike) else repr(confidence)
        return confidence_setting(engine, read_plain_trace(confidence), recorded, k, **named)
    if ngram is not None:
        return lookup(engine, k, min_ngram=min_ngram, max_ngram=max_ngram, **named)
    return draft_length(engine, k, p_min=p_min or 0.0, **named)


def draft_length(engine: str, k: int, *, p_min: float = 0.0, path: str = "generation_config.json") -> Setting:
    """Drafts of K tokens, which end earlier at one that the draft model gives less than p_min."""
    if p_min and engine not in STOPS:
        raise InputError(f"{engine} has no rule for --p-min; choose one of {', '.join(STOPS)}")
    if engine == LLAMACPP_2025 and k:
        return Setting(f"--draft-max {k} --draft-p-min {p_min:g}")
    flags = draft_length_flags("llamacpp" if engine == LLAMACPP_2025 else engine, k)
    if engine == "llamacpp" and k and p_min:
        return Setting(llamacpp(f"--spec-draft-n-max {k} --spec-draft-p-min {p_min:g}"))
    if engine == "transformers" and k:
        fields = generation_config(k, p_min)
        return Setting(f"{as_arguments(fields)}, of the draft model's generation_config", json.dumps(fields), path)
    return Setting(flags)


def lookup(
    engine: str, k: int, *, min_ngram: int | None, max_ngram: int | None, path: str = "generation_config.json"
) -> Setting:
    """Prompt lookup of K tokens, by the engine's rule but for the n-grams that are given."""
    if engine not in LOOKUP:
        raise InputError(f"how {engine} looks up n-grams is not known; choose one of {', '.join(LOOKUP)}")
    usual = RULES[engine]
    rule = dataclasses.replace(
        usual,
        min_ngram=usual.min_ngram if min_ngram is None else min_ngram,
        max_ngram=usual.max_ngram if max_ngram is None else max_ngram,
    )
    if engine == "vllm":
        config = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_min": rule.min_ngram,
            "prompt_lookup_max": rule.max_ngram,
        }
        return Setting(speculative_config(config))
    if rule.min_ngram != 1:
        raise InputError(f"{engine} looks up n-grams of 1 token, too; leave --min-ngram out")
    fields = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": rule.max_ngram}
    return Setting(f"{as_arguments(fields)}, of the target's generation_config", json.dumps(fields), path)


def schedule_setting(engine: str, rule: ScheduledK, largest_batch: int, *, path: str = "adaptive.json") -> Setting:
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
        return Setting(f"{speculative_config(config)}, beside method and model")
    if engine == "sglang":
        steps = {str(batch): {"candidate_steps": [k]} for batch, k in lengths.items()}
        flags = f"{draft_length_flags(engine, rule.max_draft_tokens)} --speculative-adaptive"
        return Setting(f"{flags} --speculative-adaptive-config {path}", json.dumps(steps), path)
    if lengths[1] != rule.max_draft_tokens:
        raise InputError(
            f"{engine} wants its longest draft at batch 1, where this schedule has {lengths[1]} of "
            f"{rule.max_draft_tokens}; give a schedule that does not grow"
        )
    inner = ", ".join(f"{batch}: {k}" for batch, k in lengths.items())
    text = f"speculative_config: {{max_draft_len: {rule.max_draft_tokens}, draft_len_schedule: {{{inner}}}}}"
    return Setting(f"{text}, beside decoding_type and model")


def step_times(
    engine: str, cost: CostModel, k: int, *, largest_batch: int, context: int, form: str, path: str = "sps.json"
) -> Setting:
    """What steps of a DSpark drafter's K tokens take, by sequences and verified tokens, or by verified tokens alone."""
    _check_dspark(engine)
    priced = batch_cost(cost)
    notes = (
        f"of steps that draft {k} tokens for each sequence, at {context:,} tokens in every cache",
        *cost.notes(k, (context, context)),
    )
    if form == "tokens":
        if engine != "sglang":
            raise InputError(f"{engine} takes no table by tokens alone; leave --form out")
        table = sps_table.sglang_by_tokens(priced, k, largest_batch, context)
    else:
        fitted, error = sps_table.additive_steps(priced, k, largest_batch, context)
        notes = (*notes, f"the sum is off by at most {max(100 * error, 1e-3):.2g} % of what a step costs")
        as_engine = sps_table.sglang_additive if engine == "sglang" else sps_table.tensorrt_llm_additive
        table = as_engine(fitted)
    flag, key = "--speculative-dspark-sps-table-path", "confidence_sps_table_path"
    return Setting(_dspark(engine, k, flag, key, path), json.dumps(table), path, notes)


def confidence_setting(engine: str, trace: Trace, dataset: str, k: int, *, path: str = "sts.json") -> Setting:
    """Temperatures of a DSpark drafter's confidence at each of K places."""
    _check_dspark(engine)
    found = confidence_temperatures(trace, k)
    pairs = zip(found.ece_before, found.ece_after, strict=True)
    told = ", ".join(f"{100 * before:.1f} to {100 * after:.1f} %" for before, after in pairs)
    notes = (
        f"the error of what confidence foretells goes, by token of the draft, from {told}, on sequences not fitted to",
        "they are of the confidence that the trace holds, and serve a drafter whose confidence that is",
    )
    flag, key = "--speculative-dspark-confidence-sts-path", "confidence_sts_path"
    return Setting(_dspark(engine, k, flag, key, path), json.dumps(found.as_dict(dataset)), path, notes)


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
        return Setting(f"{speculative_config(config)}, beside method and model")
    if engine == "llamacpp":
        rates = ",".join(f"{share:.6f}" for share in shares)
        return Setting(llamacpp(f"--spec-draft-n-max {k} --spec-synth-rates {rates}"))
    if engine == "sglang":
        length = 1 + sum(shares)
        simulated = f"SGLANG_SIMULATE_ACC_LEN={length:.4f} SGLANG_SIMULATE_ACC_METHOD=match-expected"
        return Setting(
            f"{simulated} SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token in the environment, with "
            f"{draft_length_flags(engine, k)}"
        )
    if engine == "tensorrt-llm":
        forced = f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={sum(shares):.4f}"
        return Setting(f"{forced} in the environment, with {draft_length_flags(engine, k)}")
    raise InputError(f"{engine} is not known to accept by script; choose one of {', '.join(SCRIPTED)}")


def _check_dspark(engine: str) -> None:
    if engine not in DSPARK:
        raise InputError(f"{engine} reads no such file of a drafter with confidence; choose one of {', '.join(DSPARK)}")


def _dspark(engine: str, k: int, flag: str, key: str, path: str) -> str:
    """What names a file of DSpark's to an engine."""
    if engine == "sglang":
        return f"{flag} {path}, beside --speculative-algorithm DSPARK with drafts of {k} tokens"
    inner = f"decoding_type: DSpark, max_draft_len: {k}, enable_confidence_scheduling: true, {key}: {path}"
    return f"speculative_config: {{{inner}}}, beside model"
