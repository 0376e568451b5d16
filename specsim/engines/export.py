"""Export settings to engines: draft lengths, schedules, and scripted acceptance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.engines.flags import (
    DRAFTER,
    FLAGS,
    OFF,
    PLACEHOLDER,
    as_arguments,
    draft_length_flags,
    generation_config,
    kind_of,
    llamacpp,
    sglang_tree,
    speculative_config,
    tensorrt_llm,
    vllm_drafter,
)
from specsim.engines.import_records import SourceLike, as_counts
from specsim.io.errors import InputError
from specsim.io.names import known_name
from specsim.lookup.ngram import RULES
from specsim.serving.draft_length import ScheduledK, as_schedule, schedule_ranges

if TYPE_CHECKING:
    from specsim.policy.base import Policy

PER_BATCH = ("vllm", "sglang", "tensorrt-llm")
STOPS = ("llamacpp", "transformers")
LOOKUP = ("vllm", "transformers")
GENERATION_CONFIG = "generation_config.json"
LARGEST_BATCH = 512  # of a schedule for vLLM


class Setting(NamedTuple):
    """Flags of an engine, and the text and path of the file that they name, if any."""

    flags: str
    file: str | None = None
    path: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return self._asdict()


def export_flags(
    engine: str,
    k: int | None = None,
    *,
    schedule: Mapping[int, int] | str | None = None,
    policy: Policy | str | None = None,
    largest_batch: int = LARGEST_BATCH,
    p_min: float | None = None,
    min_ngram: int | None = None,
    max_ngram: int | None = None,
    acceptance: SourceLike | None = None,
    drafter: str | None = None,
    model: str | None = None,
    path: str | None = None,
) -> Setting:
    """Write the flags with which to start an engine, and its configuration file if it needs any.

    Parameters
    ----------
    engine : {"vllm", "sglang", "llamacpp", "tensorrt-llm", "transformers"}
    k : int, optional
        Draft tokens per round; 0 turns speculation off.
    schedule : mapping of int to int, or str, optional
        In place of `k`, K by batch size, such as {1: 5, 4: 3, 16: 0} or "1:5,4:3,16:0": 3 from batch 4 on.
    policy : Policy or str, optional
        In place of `k`: `fixed_k`, `llama_cpp` (llama.cpp) or `eagle2` (SGLang), such as a leaderboard's best.
    largest_batch : int
        Largest batch of a schedule for vLLM.
    p_min : float, optional
        Drafts end at the first token with a lower probability.
    min_ngram, max_ngram : int, optional
        N-gram lengths of prompt lookup, in tokens.
    acceptance : path, mapping, Counters, Rounds, Trace or ImportedRecords, optional
        Make the engine accept as often as this source, without a trained drafter.
    drafter : str, optional
        Kind of drafter, such as "eagle3" or "mtp", with `k` or `schedule`; default: EAGLE in vLLM.
    model : str, optional
        The drafter's folder or hub id, in place of "<drafter>" in the flags of vLLM, SGLang and TensorRT-LLM.
    path : str, optional
        Name of the file in the flags.

    Returns
    -------
    Setting
        `flags`, and if the engine needs a file, its text `file` and name `path`.

    Raises
    ------
    InputError
        For an unknown engine, and for settings that it does not have.

    Examples
    --------
    >>> import specsim
    >>> specsim.export_flags("sglang", 3).flags
    '--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4'
    >>> tree = specsim.make_policy("eagle2", nodes=7, depth=5, top_k=4)
    >>> specsim.export_flags("sglang", policy=tree).flags
    '--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8'
    >>> print(specsim.export_flags("vllm", 2, drafter="medusa", model="my/heads").flags)
    --speculative-config '{"method": "medusa", "model": "my/heads", "num_speculative_tokens": 2}'
    """
    engine = known_name("engine", engine, [*FLAGS])
    if model is not None and engine not in PER_BATCH:
        raise InputError(f"{engine} takes no drafter's model in these flags; give it as the engine's own option")
    if model is not None and engine == "tensorrt-llm" and drafter is None:
        raise InputError("the configuration of tensorrt-llm names the drafter's kind beside its model; add --drafter")
    if drafter is not None and (policy is not None or acceptance is not None or min_ngram or max_ngram):
        raise InputError("a drafter belongs to --k or --schedule alone; leave out --policy, --acceptance and n-grams")
    if sum(value is not None for value in (k, schedule, policy)) != 1:
        raise InputError("give either --k, --schedule or --policy")
    ngram = min_ngram if max_ngram is None else max_ngram
    special = {"--p-min": p_min, "--max-ngram": ngram, "--acceptance": acceptance}
    chosen = [name for name, value in special.items() if value is not None]
    if len(chosen) > 1:
        raise InputError(f"{' and '.join(chosen)} exclude each other; give one at a time")
    if chosen and not k:
        raise InputError(f"{chosen[0]} needs drafts of a fixed length; give --k of 1 or more")
    named = {} if path is None else {"path": path}
    if schedule is not None:
        setting = schedule_setting(engine, as_schedule(schedule), largest_batch, drafter=drafter, **named)
        return _of_model(engine, setting, model)
    if policy is not None:
        from specsim.policy.registry import make_policy

        return _of_model(engine, policy_setting(engine, make_policy(policy), **named), model)
    assert k is not None
    if acceptance is not None:
        return _of_model(engine, scripted(engine, acceptance_by_depth(as_counts(acceptance), k)), model)
    if ngram is not None:
        return lookup(engine, k, min_ngram=min_ngram, max_ngram=max_ngram, **named)
    return _of_model(engine, draft_length(engine, k, p_min=p_min or 0.0, drafter=drafter, **named), model)


def _of_model(engine: str, setting: Setting, model: str | None) -> Setting:
    """The setting with the drafter's model in its flags; as it is where the method takes none, such as MTP."""
    if model is None or setting.flags == OFF:
        return setting
    if engine == "sglang":
        return setting._replace(flags=f"--speculative-draft-model-path {model} {setting.flags}")
    if engine == "tensorrt-llm":
        return setting._replace(flags=setting.flags.replace(PLACEHOLDER, model))
    return setting._replace(flags=setting.flags.replace(json.dumps(DRAFTER["model"]), json.dumps(model)))


def _require(engine: str, engines: tuple[str, ...], problem: str) -> None:
    """Raise InputError unless the engine is among these."""
    if engine not in engines:
        raise InputError(f"{engine} {problem}; choose one of {', '.join(engines)}")


def draft_length(
    engine: str, k: int, *, p_min: float = 0.0, drafter: str | None = None, path: str = GENERATION_CONFIG
) -> Setting:
    """Drafts of K tokens, which end earlier at a token to which the draft model gives less than p_min.

    drafter : its kind, as `draft_length_flags` takes it
    """
    if p_min:
        _require(engine, STOPS, "has no rule for --p-min")
    flags, kind = draft_length_flags(engine, k, drafter), drafter and kind_of(drafter)
    if engine == "llamacpp" and k and p_min:
        return Setting(llamacpp(f"--spec-draft-n-max {k} --spec-draft-p-min {p_min:g}", kind))
    if engine == "transformers" and k:
        if kind == "prompt-lookup":
            return lookup(engine, k, min_ngram=None, max_ngram=None, path=path)
        fields = generation_config(k, p_min)
        # transformers moves a threshold above 0 while it decodes, where it can import scikit-learn.
        moves = ", without scikit-learn installed, which would adjust the threshold" if p_min else ""
        flags = f"{as_arguments(fields)} in the draft model's generation_config{moves}"
        return Setting(flags, json.dumps(fields), path)
    return Setting(flags)


def policy_setting(engine: str, policy: Policy, *, path: str = GENERATION_CONFIG) -> Setting:
    """The settings under which an engine drafts as a policy does."""
    from specsim.policy.chain.fixed_k import FixedK  # numba is slow to import
    from specsim.policy.chain.p_min import LlamaCpp
    from specsim.policy.tree.eagle2 import Eagle2

    if isinstance(policy, FixedK):
        return draft_length(engine, policy.k, path=path)
    if isinstance(policy, LlamaCpp):
        _require(engine, ("llamacpp",), "does not stop drafts as llama_cpp does")
        return draft_length(engine, policy.max_draft_tokens, p_min=policy.p_min, path=path)
    if not isinstance(policy, Eagle2):
        raise InputError(f"no engine has flags for policy {policy.name}; give fixed_k, llama_cpp or eagle2")
    _require(engine, ("sglang",), "has no flags for trees")
    if policy.top_k == 1 and policy.nodes < policy.depth:
        raise InputError(
            f"sglang verifies all {policy.depth} tokens of a chain, not {policy.nodes}; give depth={policy.nodes}"
        )
    return Setting(sglang_tree(policy.depth, policy.top_k, min(policy.nodes, policy.max_drafted)))


def lookup(
    engine: str, k: int, *, min_ngram: int | None, max_ngram: int | None, path: str = GENERATION_CONFIG
) -> Setting:
    """Prompt lookup of K tokens by the engine's rule, with these n-gram lengths."""
    _require(engine, LOOKUP, "has no known flags for prompt lookup")
    usual = RULES[engine]
    rule = dataclasses.replace(
        usual,
        min_ngram=usual.min_ngram if min_ngram is None else min_ngram,
        max_ngram=usual.max_ngram if max_ngram is None else max_ngram,
    )
    if engine == "vllm":
        lengths = {"prompt_lookup_min": rule.min_ngram, "prompt_lookup_max": rule.max_ngram}
        return Setting(speculative_config(method="ngram", num_speculative_tokens=k, **lengths))
    if rule.min_ngram != 1:
        raise InputError(f"{engine} also looks up n-grams of 1 token; leave --min-ngram out")
    fields = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": rule.max_ngram}
    return Setting(f"{as_arguments(fields)} in the target's generation_config", json.dumps(fields), path)


def schedule_setting(
    engine: str, rule: ScheduledK, largest_batch: int, *, path: str = "adaptive.json", drafter: str | None = None
) -> Setting:
    """K by batch size, in the engine's form. drafter : its kind, as `draft_length_flags` takes it"""
    _require(engine, PER_BATCH, "has no draft length by batch size, only --k")
    lengths = {batch: rule.lengths[batch] for batch in sorted(rule.lengths)}
    longest = rule.max_draft_tokens
    if drafter is not None:
        draft_length_flags(engine, longest, drafter)  # rejects a kind that the engine lacks
    if not longest:
        return draft_length(engine, 0)
    if largest_batch < max(lengths):
        raise InputError(f"a schedule to batch {max(lengths)} exceeds {largest_batch}; give a larger --largest-batch")
    if engine == "vllm":
        by_batch = {"num_speculative_tokens_per_batch_size": schedule_ranges(lengths, largest_batch)}
        method = vllm_drafter(drafter) if drafter else DRAFTER
        return Setting(speculative_config(**method, num_speculative_tokens=longest, **by_batch))
    if engine == "sglang":
        steps = {str(batch): {"candidate_steps": [k]} for batch, k in lengths.items()}
        flags = f"{draft_length_flags(engine, longest, drafter)} --speculative-adaptive"
        return Setting(f"{flags} --speculative-adaptive-config {path}", json.dumps(steps), path)
    if lengths[1] != longest:
        raise InputError(
            f"{engine} needs its longest draft at batch 1, where this schedule has {lengths[1]} of {longest}; give a "
            "schedule that does not grow"
        )
    # TensorRT-LLM: since pull request 10860 (March 2026) a key is the last batch size of a range; it drafts nothing
    # beyond the largest key.
    ranges = [(last, k) for _, last, k in schedule_ranges(lengths, largest_batch)]
    while not ranges[-1][1]:
        ranges.pop()
    inner = ", ".join(f"{last}: {k}" for last, k in ranges)
    kind = drafter and kind_of(drafter)
    return Setting(tensorrt_llm(f"max_draft_len: {longest}, draft_len_schedule: {{{inner}}}", kind))


def acceptance_by_depth(source: Source, k: int) -> list[float]:
    """Share of rounds that would accept the first i tokens, i = 1..K, if all drafted K; InputError if unknown."""
    accepted, verified = verified_by_depth(source)
    known = int((verified > 0).cumprod().sum())
    if known < k:
        raise InputError(f"acceptance is known for {known} draft tokens, not for {k}; give --k {known} or other counts")
    return [float(share) for share in np.cumprod(accepted[:k] / verified[:k])]


def scripted(engine: str, shares: Sequence[float]) -> Setting:
    """Export flags with which an engine accepts drafts at this rate without a trained drafter, to measure its speed."""
    k = len(shares)
    if engine == "vllm":
        rates = {"synthetic_acceptance_rates": [round(share, 6) for share in shares]}
        config = {"num_speculative_tokens": k, "rejection_sample_method": "synthetic", **rates}
        return Setting(speculative_config(**DRAFTER, **config))
    if engine == "llamacpp":
        listed = ",".join(f"{share:.6f}" for share in shares)
        return Setting(llamacpp(f"--spec-draft-n-max {k} --spec-synth-rates {listed}"))
    variables = {
        "sglang": f"SGLANG_SIMULATE_ACC_LEN={1 + sum(shares):.4f} SGLANG_SIMULATE_ACC_METHOD=match-expected "
        "SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token",
        "tensorrt-llm": f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={sum(shares):.4f}",
    }
    _require(engine, ("vllm", "llamacpp", *variables), "has no known flags for scripted acceptance")
    return Setting(f"{variables[engine]} in the environment, with {draft_length_flags(engine, k)}")
