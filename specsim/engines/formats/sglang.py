"""SGLang: `meta_info` of responses, with a histogram from which counters follow, and the averages of its log.

What is proposed counts the nodes of the draft tree; it is the depth of the draft only where `--speculative-eagle-topk`
is 1, which the histogram's length shows. Names and definitions changed in pull request 13212.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED
from specsim.engines import rates
from specsim.engines.formats.imported import Imported, count, definition_of, json_records, log_lines
from specsim.errors import InputError
from specsim.json_files import checked

ENGINE = "sglang"
INVALID = "give SGLang's responses with meta_info, or with return_spec_tokens_details, as JSON or JSON Lines"
INSTEAD = "import the meta_info of its responses (sglang-responses), whose histogram counts by position"


class Meta(TypedDict):
    """Of meta_info, by the names of today and of before."""

    spec_verify_ct: int
    completion_tokens: NotRequired[int]
    spec_num_correct_drafts: NotRequired[int]
    spec_num_proposed_drafts: NotRequired[int]
    spec_correct_drafts_histogram: NotRequired[list[int]]
    spec_accept_token_num: NotRequired[int]
    spec_draft_token_num: NotRequired[int]
    spec_accept_histogram: NotRequired[list[int]]


class Verified(NamedTuple):
    """Passes of a request, what they drafted and accepted, and how many accepted so many; without root and bonus."""

    passes: int
    drafted: int
    accepted: int
    histogram: list[int]
    output_tokens: int | None


def read_responses(paths: Sequence[Path]) -> Imported:
    """meta_info, alone or in responses of the native interface, or what the OpenAI interface has of it (sglext)."""
    found, skipped = json_records(paths, invalid=INVALID)
    requests, without = [], 0
    for number, record in enumerate(found):
        for meta in _metas(record):
            if not isinstance(meta, dict) or not meta.get("spec_verify_ct"):
                without += 1
                continue
            name = f"record {number + 1}"
            requests.append(_verified(checked(meta, name, Meta, invalid=INVALID), name))
    if without:
        skipped["responses without speculation"] = without
    if not requests:
        raise InputError(f"{paths[0]} holds no meta_info with spec_verify_ct; {INVALID}")
    outputs = tuple(one.output_tokens for one in requests if one.output_tokens is not None)
    sums = [sum(column) for column in zip(*(one[:3] for one in requests), strict=True)]
    about = Imported(
        None, ENGINE, definition_of(ENGINE), "", len(requests), outputs if len(outputs) == len(requests) else None,
        (sums[0], sums[1], sums[2]),
        skipped=skipped, instead="import responses of a version whose meta_info has spec_correct_drafts_histogram",
    )  # fmt: skip
    if any(not one.histogram for one in requests):
        return about
    return _with_counters(about, requests)


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
        for one in choices:
            yield one.get("meta_info") if isinstance(one, dict) else None
    else:
        yield None


def _verified(meta: Meta, name: str) -> Verified:
    passes = count(meta["spec_verify_ct"], f"{name}: spec_verify_ct")
    histogram = meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram")) or []
    if len(histogram) > MOST_DRAFTED or any(times < 0 for times in histogram):
        raise InputError(f"{name}: its histogram cannot be; export again")
    passed = sum(i * times for i, times in enumerate(histogram))
    if histogram and sum(histogram) != passes:
        raise InputError(f"{name}: its histogram counts {sum(histogram)} of {passes} passes; export again")
    if "spec_num_correct_drafts" in meta and "spec_num_proposed_drafts" in meta:
        accepted, drafted = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
    elif "spec_accept_token_num" in meta and "spec_draft_token_num" in meta:
        accepted, drafted = meta["spec_accept_token_num"], meta["spec_draft_token_num"]
        if histogram and accepted == passed + passes:  # bonus and root were counted
            accepted, drafted = accepted - passes, drafted - passes
    else:
        raise InputError(f"{name} lacks counts of drafts; {INVALID}")
    accepted = count(accepted, f"{name}: accepted", count(drafted, f"{name}: drafted"))
    if histogram and accepted != passed:
        raise InputError(f"{name}: {accepted} drafts accepted, but {passed} by its histogram; export again")
    output = meta.get("completion_tokens")
    tokens = None if output is None else count(output, f"{name}: completion_tokens")
    return Verified(passes, drafted, accepted, histogram, tokens)


def _with_counters(about: Imported, requests: Sequence[Verified]) -> Imported:
    passes, drafted, _ = about.sums
    assert passes is not None and drafted is not None
    depth = max(len(one.histogram) for one in requests) - 1
    if drafted > passes * depth:
        raise InputError(
            f"{drafted:,} drafts proposed in {passes:,} passes of at most {depth} steps: these are nodes of trees, not "
            "depths; run SGLang with --speculative-eagle-topk 1"
        )
    times = np.zeros(depth + 1, dtype=np.int64)
    for one in requests:
        times[: len(one.histogram)] += one.histogram
    passed = times[::-1].cumsum()[::-1][1:].tolist()
    found, notes = rates.counters(passes, drafted, passed, "run SGLang with a fixed number of steps, not adaptively")
    return replace(about, source=found, notes=tuple(notes), instead="")


DECODE = re.compile(r"Decode batch[.,]")
RUNNING = re.compile(r"#running-req: (\d+)")
LENGTH = re.compile(r"accept len: (\d+\.\d+),")
RATE = re.compile(r"accept rate: (\d+\.\d+),")


def read_log(paths: Sequence[Path]) -> Imported:
    """SGLang's log: averages of its intervals, weighted by running requests, as counts are not printed.

    Older versions, such as those of May 2025, print no accept rate.
    """
    lengths: list[rates.Printed] = []
    shares: list[rates.Printed | None] = []
    weights = []
    cut = 0
    skipped: Counter[str] = Counter()
    for line in log_lines(paths, skipped):
        decode = RUNNING.search(line) if DECODE.search(line) else None
        if decode is None:
            continue
        length, rate = LENGTH.search(line), RATE.search(line)
        if length is None or not line.endswith("\n"):
            cut += "accept " in line
            continue
        if not (running := count(decode[1], "#running-req")):
            continue
        weights.append(running)
        lengths.append(rates.Printed.of(length[1]))
        shares.append(rates.Printed.of(rate[1]) if rate else None)
    if not lengths:
        raise InputError(f"{paths[0]} holds no line 'Decode batch' with accept len; give a speculative run's log")
    averages = {"accept len": float(np.average([one.value for one in lengths], weights=weights))}
    notes = [f"averages of {len(lengths):,} lines, each weighted by its running requests, as no counts are printed"]
    known = [share for share in shares if share is not None]
    if len(known) == len(lengths):
        averages["accept rate"] = float(np.average([one.value for one in known], weights=weights))
        notes += _guess(lengths, known)
    else:
        notes.append(f"{len(lengths) - len(known):,} lines have no accept rate, as of older versions")
    if cut:
        skipped["lines that were cut off"] = cut
    return Imported(
        None, ENGINE, definition_of(ENGINE), averages=averages, notes=tuple(notes), skipped=skipped, instead=INSTEAD
    )


def _guess(lengths: Sequence[rates.Printed], shares: Sequence[rates.Printed]) -> list[str]:
    """Which definition of the rate, and how many draft tokens, explain every line."""
    pairs = list(zip(lengths, shares, strict=True))

    def explains(tokens: int, bonus: int) -> bool:
        off = [abs((one.value - bonus) / tokens - rate.value) for one, rate in pairs]
        return all(d <= one.half / tokens + rate.half + 1e-9 for d, (one, rate) in zip(off, pairs, strict=True))

    fits = [(tokens, bonus) for bonus in (1, 0) for tokens in range(1, 65) if explains(tokens, bonus)]
    if len(fits) != 1:
        return ["which definition of accept rate these are does not follow from the lines"]
    tokens, bonus = fits[0]
    if bonus:
        return [f"accept rate = (accept len - 1) / {tokens}: {tokens} draft tokens beside the root"]
    return [
        f"accept rate = accept len / {tokens}, with bonus and root, as before pull request 13212: today's would be "
        f"(accept len - 1) / {tokens - 1}"
    ]
