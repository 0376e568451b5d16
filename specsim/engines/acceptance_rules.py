"""With which probability inference engines keep a drafted token at a temperature, and how that is known.

Recordings are replayed under the rules of `specsim.trace.accepted`. A tree of greedy drafts keeps a level with the sum
of the siblings' p. What is drafted by lookup has no q, and every engine below that is lossless keeps it with p(x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from specsim.io.errors import InputError
from specsim.io.names import find_name
from specsim.trace.accepted import Rule


@dataclass(frozen=True)
class AcceptanceRule:
    """How an engine drafts, and what it accepts, at a temperature.

    name : what `find_rule` takes: the engine's name alone for its default
    version : the release that it was seen in
    setting : by which the engine is told to; "" for its default
    rule : under which a recording is replayed; None if no rule of a replay is the engine's
    reason : why there is none; "" where there is one
    source : how it was determined

    >>> from specsim.engines.acceptance_rules import RULES
    >>> RULES["vllm-probabilistic"].rule
    'sampled-draft'
    """

    name: str
    version: str
    setting: str
    rule: Rule | None
    reason: str
    source: str


RULES = {
    row.name: row
    for row in (
        AcceptanceRule(
            name="vllm",
            version="0.32.0, 0.33.0",
            setting="",
            rule="greedy-draft",
            reason="",
            source="read: draft_sample_method in config/speculative.py, argmax in v1/spec_decode/llm_base_proposer.py "
            "and v1/worker/gpu/spec_decode/speculator.py, no draft probabilities in v1/sample/rejection_sampler.py; "
            "run: the samplers of both model runners in Triton's interpreter",
        ),
        AcceptanceRule(
            name="vllm-probabilistic",
            version="0.32.0, 0.33.0",
            setting='draft_sample_method="probabilistic"',
            rule="sampled-draft",
            reason="",
            source="read and run as for vllm",
        ),
        AcceptanceRule(
            name="vllm-block",
            version="0.32.0, 0.33.0",
            setting='rejection_sample_method="block", draft_sample_method="probabilistic"',
            rule=None,
            reason="a draft is judged as a whole (Sun et al. 2024), so that whether a token is kept depends on those "
            "drafted behind it; with greedy drafts it accepts as vllm does",
            source="read: v1/worker/gpu/spec_decode/rejection_sampler_utils.py; run in Triton's interpreter: z of "
            "acceptance 4.5 against sampled-draft, of greedy drafts below 2 against greedy-draft",
        ),
        AcceptanceRule(
            name="vllm-fly",
            version="0.33.0",
            setting='rejection_sample_method="fly"',
            rule=None,
            reason="it is not lossless: where the target's entropy is high, a rejected token is kept if the tokens "
            "drafted behind it would be",
            source="read: v1/spec_decode/fly.py, config/speculative.py",
        ),
        AcceptanceRule(
            name="vllm-synthetic",
            version="0.32.0, 0.33.0",
            setting='rejection_sample_method="synthetic"',
            rule=None,
            reason="tokens are accepted at given rates, whatever the target's probabilities are",
            source="read: v1/sample/rejection_sampler.py",
        ),
        AcceptanceRule(
            name="sglang",
            version="0.5.23",
            setting="",
            rule="greedy-draft",
            reason="",
            source="read: eagle_sample in srt/speculative/eagle_utils.py, top-k drafts in eagle_worker_v2.py, "
            "sgl-kernel/csrc/speculative/speculative_sampling.cuh (a uniform for each level is compared with the "
            "running sum of the siblings' p)",
        ),
        AcceptanceRule(
            name="sglang-rejection",
            version="0.5.23",
            setting="--speculative-use-rejection-sampling (on ROCm the default of EAGLE chains)",
            rule="sampled-draft",
            reason="",
            source="read: sample_draft_proposal in srt/speculative/spec_utils.py, eagle_sample in eagle_utils.py, "
            "srt/arg_groups/speculative_hook.py; q has the temperature, top-k and top-p cut p alone",
        ),
        AcceptanceRule(
            name="sglang-block",
            version="0.5.23",
            setting="--speculative-use-block-verification",
            rule=None,
            reason="a draft is judged as a whole, so that whether a token is kept depends on those drafted behind it",
            source="read: srt/arg_groups/fields/spec.py, eagle_sample in srt/speculative/eagle_utils.py",
        ),
        AcceptanceRule(
            name="sglang-threshold",
            version="0.5.23",
            setting="--speculative-accept-threshold-single or --speculative-accept-threshold-acc below 1",
            rule=None,
            reason="it is not lossless: tokens above a threshold are kept, or all with min(1, p / threshold)",
            source="read: sgl-kernel/csrc/speculative/speculative_sampling.cuh",
        ),
        AcceptanceRule(
            name="sglang-cpu",
            version="0.5.23",
            setting="on a CPU or Intel GPU, with EAGLE",
            rule=None,
            reason="it is not lossless: drafts are compared with the target's likeliest tokens at every temperature",
            source="read: _verify_uses_greedy in srt/speculative/eagle_utils.py",
        ),
        AcceptanceRule(
            name="tensorrt-llm",
            version="main since pull request 15775 (July 2026)",
            setting="",
            rule="greedy-draft",
            reason="",
            source="read: sample_draft_tokens and _sample_and_accept_draft_tokens_base in "
            "_torch/speculative/interface.py: argmax, compared with the target's samples",
        ),
        AcceptanceRule(
            name="tensorrt-llm-rejection",
            version="main since pull request 15775 (July 2026)",
            setting="use_rejection_sampling: true",
            rule="sampled-draft",
            reason="",
            source="read: _sample_and_accept_draft_tokens_rejection in _torch/speculative/interface.py, which calls "
            "flashinfer's chain_speculative_sampling",
        ),
        AcceptanceRule(
            name="tensorrt-llm-before-15775",
            version="main from pull request 14745 (June 2026) to 15775",
            setting="",
            rule="equal-samples",
            reason="",
            source="read: _draft_sampler_advanced in _torch/speculative/interface.py drafts samples at the target's "
            "temperature, which are compared with the target's samples; the reviews of both pull requests",
        ),
        AcceptanceRule(
            name="tensorrt-llm-before-14745",
            version="main before pull request 14745 (June 2026)",
            setting="without allow_advanced_sampling",
            rule=None,
            reason="where drafter and target run as one model, the output is greedy at every temperature",
            source="read: _sample_tokens_for_batch in _torch/speculative/interface.py",
        ),
        AcceptanceRule(
            name="tensorrt-llm-relaxed",
            version="1.3.0rc29",
            setting="use_relaxed_acceptance_for_thinking: true",
            rule=None,
            reason="it is not lossless: while a model thinks, any of the target's likeliest tokens is kept",
            source="read: documentation of MTPDecodingConfig (relaxed_topk, relaxed_delta)",
        ),
        AcceptanceRule(
            name="llamacpp",
            version="xllamacpp 2026.10.11549",
            setting="",
            rule="greedy-draft",
            reason="",
            source="read: common_sampler_sample_and_accept_n in common/sampling.cpp; run on a CPU: acceptance as a "
            "replay's, see docs/recorded/lossless",
        ),
        AcceptanceRule(
            name="llamacpp-probabilistic",
            version="xllamacpp 2026.10.11549",
            setting="--spec-draft-sampling probabilistic",
            rule=None,
            reason="drafts are samples of the drafter's ten likeliest tokens alone, kept with min(1, p / q) of q among "
            "the ten; a replay draws from all of q, and accepts more",
            source="run on a CPU at T = 1: z of acceptance -7.2 with all of q, -1.2 with ten tokens of it; lossless",
        ),
        AcceptanceRule(
            name="transformers",
            version="5.23.0",
            setting="",
            rule="sampled-draft",
            reason="",
            source="read: _speculative_sampling in generation/utils.py; run on a CPU: acceptance as a replay's, see "
            "docs/recorded/lossless",
        ),
        AcceptanceRule(
            name="transformers-ensemble",
            version="5.23.0",
            setting="assistant_ensemble_weight",
            rule=None,
            reason="it is not lossless: tokens are judged by a mixture of p and q",
            source="read: _speculative_sampling in generation/utils.py",
        ),
        AcceptanceRule(
            name="mlx",
            version="mlx-lm 0.32.2",
            setting="",
            rule="equal-samples",
            reason="",
            source="read: speculative_generate_step in mlx_lm/generate.py, one sampler for both models; run on a CPU",
        ),
        AcceptanceRule(
            name="openvino",
            version="2026.4.1",
            setting="",
            rule=None,
            reason="it is not lossless: a drafted token is kept with the draft model's probability of it over the "
            "target's probability of another token",
            source="read: Sampler::validate_candidate in src/cpp/src/sampling/sampler.cpp (August 2026); run on a CPU",
        ),
        AcceptanceRule(
            name="onnxruntime-genai",
            version="0.18.0",
            setting="",
            rule="sampled-draft",
            reason="",
            source="read (0.16.0-dev of August 2026): ComputeAcceptProb and SampleCorrectionToken in "
            "src/speculative_sampling.h, as called in speculative_decoding_strategy.cpp and mtp_generator.cpp; run on "
            "a CPU: acceptance as a replay's, see docs/recorded/lossless",
        ),
    )
}


def find_rule(name: str) -> Rule:
    """Find the rule that an engine accepts by.

    name : a rule's; or an engine's in `RULES`, alone for its default

    Raises InputError for another name, and with the reason for an engine whose rule cannot be replayed.

    >>> from specsim.engines.acceptance_rules import find_rule
    >>> find_rule("sglang"), find_rule("equal-samples")
    ('greedy-draft', 'equal-samples')
    """
    rules: tuple[Rule, ...] = get_args(Rule)
    known = {rule: rule for rule in rules} | {row.name: row.rule for row in RULES.values() if row.rule}
    name = find_name("engine", name, {**known, **RULES}) or name
    if name in known:
        return known[name]
    choices = f"choose one of {', '.join(rules)}, or an engine such as vllm"
    if name in RULES:
        raise InputError(f"acceptance of {name!r} cannot be replayed: {RULES[name].reason}; {choices}")
    raise InputError(f"unknown rule of acceptance {name!r}; {choices}")
