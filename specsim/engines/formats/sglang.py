"""SGLang: `meta_info` of responses, with a histogram that gives counters, and the averages of its log.

Proposed drafts are nodes of the draft tree, which equals the draft's depth only if `--speculative-eagle-topk` is 1; the
histogram's length shows whether it is. Names and definitions changed in pull request 13212.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED
from specsim.engines import rates
from specsim.engines.formats.reading import count, json_records, left_out, log_lines
from specsim.engines.formats.records import UNSET, ImportedRecords, Setup, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked

ENGINE = "sglang"
INVALID = "give SGLang's responses with meta_info, or with return_spec_tokens_details, as JSON or JSON Lines"
INSTEAD = "import the meta_info of its responses (sglang-responses), whose histogram counts by position"


class Meta(TypedDict):
    """meta_info, by the names of today and of before."""

    spec_verify_ct: int
    completion_tokens: NotRequired[int]
    spec_num_correct_drafts: NotRequired[int]
    spec_num_proposed_drafts: NotRequired[int]
    spec_correct_drafts_histogram: NotRequired[list[int]]
    spec_accept_token_num: NotRequired[int]
    spec_draft_token_num: NotRequired[int]
    spec_accept_histogram: NotRequired[list[int]]


class Verified(NamedTuple):
    """Verification passes of a request, its drafted and accepted tokens without root and bonus, and their histogram."""

    passes: int
    drafted: int
    accepted: int
    histogram: list[int]
    output_tokens: int | None


def read_responses(paths: Sequence[Path]) -> ImportedRecords:
    """Read meta_info, alone, in responses of the native interface, or the OpenAI interface's part of it (sglext)."""
    skipped = Skipped()
    requests = []
    for name, record in json_records(paths, skipped, invalid=INVALID):
        for meta in _metas(record):
            if isinstance(meta, dict) and meta.get("spec_verify_ct"):
                requests.append(_verified(checked(meta, name, Meta, invalid=INVALID), name))
            else:
                skipped["responses without speculation"] += 1
    if not requests:
        raise InputError(f"{paths[0]} holds no meta_info with spec_verify_ct; {INVALID}")
    outputs = tuple(request.output_tokens for request in requests if request.output_tokens is not None)
    passes, drafted, accepted = (sum(column) for column in zip(*(request[:3] for request in requests), strict=True))
    imported = ImportedRecords(
        None,
        ENGINE,
        requests=len(requests),
        output_tokens=outputs if len(outputs) == len(requests) else None,
        sums=(passes, drafted, accepted),
        skipped=skipped,
        instead="import responses of a version whose meta_info has spec_correct_drafts_histogram",
    )
    if any(not request.histogram for request in requests):
        return imported
    depth = max(len(request.histogram) for request in requests) - 1
    if drafted > passes * depth:
        return replace(
            imported,
            notes=(f"{drafted:,} drafts in {passes:,} passes of at most {depth} steps: these are nodes of trees",),
            instead=CHAIN,
            trees=True,
        )
    times = np.zeros(depth + 1, dtype=np.int64)
    for request in requests:
        times[: len(request.histogram)] += request.histogram
    fixed = "run SGLang with a fixed number of steps, not adaptively"
    counters, notes = rates.counters_of_histogram(times, drafted, fixed)
    return replace(imported, source=counters, notes=tuple(notes), instead="")


def _metas(record: Mapping[str, Any]) -> Iterator[Any]:
    if "spec_verify_ct" in record:
        yield record
    elif "meta_info" in record:
        yield record["meta_info"]
    elif isinstance(extension := record.get("sglext"), dict) and "spec_tokens_details" in extension:
        details, usage = extension["spec_tokens_details"], record.get("usage")
        if isinstance(details, dict) and isinstance(usage, dict) and "completion_tokens" in usage:
            details = {**details, "completion_tokens": usage["completion_tokens"]}
        yield details
    elif isinstance(choices := record.get("choices"), list):
        for choice in choices:
            yield choice.get("meta_info") if isinstance(choice, dict) else None
    else:
        yield None


def _verified(meta: Meta, name: str) -> Verified:
    passes = count(meta["spec_verify_ct"], f"{name}: spec_verify_ct")
    histogram = meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram")) or []
    if len(histogram) > MOST_DRAFTED or any(times < 0 for times in histogram):
        raise InputError(f"{name}: its histogram has impossible counts; export again")
    by_histogram = sum(length * times for length, times in enumerate(histogram))
    if histogram and sum(histogram) != passes:
        raise InputError(f"{name}: its histogram counts {sum(histogram)} of {passes} passes; export again")
    if "spec_num_correct_drafts" in meta and "spec_num_proposed_drafts" in meta:
        accepted, drafted = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
    elif "spec_accept_token_num" in meta and "spec_draft_token_num" in meta:
        accepted, drafted = meta["spec_accept_token_num"], meta["spec_draft_token_num"]
        if histogram and accepted == by_histogram + passes:  # bonus and root were counted
            accepted, drafted = accepted - passes, drafted - passes
    else:
        raise InputError(f"{name} lacks counts of drafts; {INVALID}")
    accepted = count(accepted, f"{name}: accepted", count(drafted, f"{name}: drafted"))
    if histogram and accepted != by_histogram:
        raise InputError(f"{name}: {accepted} drafts accepted, but {by_histogram} by its histogram; export again")
    output = meta.get("completion_tokens")
    tokens = None if output is None else count(output, f"{name}: completion_tokens")
    return Verified(passes, drafted, accepted, histogram, tokens)


DECODE = re.compile(r"Decode batch[.,]")
RUNNING = re.compile(r"#running-req: (\d+)")
SPEED = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
ARGUMENTS = re.compile(
    r"\b(model_path|tp_size|quantization|kv_cache_dtype|speculative_(?:draft_model_path|algorithm|num_steps|eagle_topk|num_draft_tokens))="
    r"(?:'([^']{1,200})'|(\d{1,9})\b)"
)
BESIDE = re.compile(r"\b(dp_size|pp_size|ep_size)=(\d{1,5})\b")  # of the same
CHAIN = "run SGLang with --speculative-eagle-topk 1"


def setup_of(arguments: Mapping[str, str | int | None]) -> tuple[Setup, bool]:
    """The server of SGLang's arguments, and whether it drafts trees."""
    steps, top_k, nodes = (
        int(arguments.get(f"speculative_{name}") or 0) for name in ("num_steps", "eagle_topk", "num_draft_tokens")
    )
    names = "model_path", "speculative_draft_model_path", "speculative_algorithm", "quantization", "kv_cache_dtype"
    words = (str(arguments.get(name) or "") for name in names)
    model, drafter, method, weights, cache = ("" if word in UNSET else word for word in words)
    if method == "EAGLE" and (drafter in ("", model) or drafter.lower().endswith("nextn")):
        method = "NEXTN"  # which SGLang renames to EAGLE: without a draft model it loads the target's MTP layers
    tp = int(arguments.get("tp_size") or 0) or None
    trees = top_k > 1 if top_k else nodes > steps + 1 > 1  # the root is one of the draft tokens
    return Setup(model, drafter, method, steps or None, tp=tp, weights=weights, cache=cache), trees


LENGTH = re.compile(r"accept len: (\d+\.\d+),")
RATE = re.compile(r"accept rate: (\d+\.\d+),")


def read_log(paths: Sequence[Path]) -> ImportedRecords:
    """Read SGLang's log: averages of its intervals, weighted by running requests because counts are not printed.

    Older versions, such as those of May 2025, print no accept rate.
    """
    lengths: list[rates.Printed] = []
    shares: list[rates.Printed] = []  # with an accept rate in every line, as many as lengths
    weights, speeds = [], []
    skipped = Skipped()
    arguments: dict[str, str | int | None] = {}
    parallel_attention = False
    beside: dict[str, str] = {}
    for line in log_lines(paths, skipped):
        parallel_attention |= "enable_dp_attention=True" in line
        if "ServerArgs(" in line or "server_args=" in line:
            arguments |= {name: text or number for name, text, number in ARGUMENTS.findall(line)}
            beside |= dict(BESIDE.findall(line))
        decode = RUNNING.search(line) if DECODE.search(line) else None
        if decode is None:
            continue
        length, rate = LENGTH.search(line), RATE.search(line)
        if length is None or not line.endswith("\n"):
            if "accept " in line:
                skipped["lines that were cut off"] += 1
        elif running := count(decode[1], "#running-req"):
            weights.append(running)
            lengths.append(rates.Printed.of(length[1]))
            shares += [rates.Printed.of(rate[1])] if rate else []
            speeds += [float(match[1])] if (match := SPEED.search(line)) else []
    if not lengths:
        raise InputError(f"{paths[0]} holds no line 'Decode batch' with accept len; give a speculative run's log")
    tokens: int | None = None
    averages = {"accept len": float(np.average([length.value for length in lengths], weights=weights))}
    notes = [f"averages of {len(lengths):,} lines, each weighted by its running requests, as no counts are printed"]
    if len(shares) == len(lengths):
        averages["accept rate"] = float(np.average([share.value for share in shares], weights=weights))
        definition, tokens = _definition_of_rate(lengths, shares)
        notes.append(definition)
    else:
        notes.append(f"{len(lengths) - len(shares):,} lines have no accept rate, as of older versions")
    if parallel_attention:
        notes.append("attention is data-parallel (enable_dp_attention), while costs split it over --tp")
    setup, trees = setup_of(arguments)
    if tokens and not setup.draft_tokens:
        notes.append(
            f"K = {tokens} is taken from the accept rate, which counts the nodes of a draft tree: give the log with "
            "its line of server_args to tell a tree from a chain"
        )
    notes += left_out([f"--{name.replace('_', '-')} {number}" for name, number in beside.items() if number != "1"])
    setup = replace(
        setup,
        draft_tokens=setup.draft_tokens or tokens,
        running=float(np.mean(weights)),
        tokens_per_s=float(np.mean(speeds)) if speeds else None,
    )
    return ImportedRecords(
        None,
        ENGINE,
        averages=averages,
        notes=tuple(notes),
        skipped=skipped,
        instead=CHAIN if trees else INSTEAD,
        setup=setup,
        trees=trees,
    )


def _definition_of_rate(lengths: Sequence[rates.Printed], shares: Sequence[rates.Printed]) -> tuple[str, int | None]:
    """Which definition of the rate explains every line, and the number of draft tokens if one does."""
    pairs = list(zip(lengths, shares, strict=True))

    def explains(tokens: int, bonus: int) -> bool:
        return all(
            abs((length.value - bonus) / tokens - rate.value) <= length.half / tokens + rate.half + 1e-9
            for length, rate in pairs
        )

    fits = [(tokens, bonus) for bonus in (1, 0) for tokens in range(1, 65) if explains(tokens, bonus)]
    if len(fits) != 1:
        return "the lines do not tell which definition of accept rate they have", None
    tokens, bonus = fits[0]
    if bonus:
        return f"accept rate = (accept len - 1) / {tokens}: {tokens} draft tokens beside the root", tokens
    return (
        f"accept rate = accept len / {tokens}, with bonus and root, as before pull request 13212: today's would be "
        f"(accept len - 1) / {tokens - 1}"
    ), tokens - 1
