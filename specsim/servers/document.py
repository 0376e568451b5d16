"""The document of `specsim bench`: servers, and the requests of every arm.

Types carry their ranges. What a server answers and what a file holds are converted to them, so that both are checked
here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from msgspec import Meta

from specsim.acceptance.sources import MOST_COUNT, read_counters
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.json import from_keys, read_json
from specsim.replaying.intervals import Estimate, log_ratio_error, ratio_of_ratios
from specsim.trace.trace import MAX_DEPTH

KIND: Final = "specsim-bench"
VERSION: Final = 1
SPECULATIVE: Final = "speculative"
BASELINE: Final = "baseline"
REPEAT: Final = "baseline, repeated"
INVALID = "give what `specsim bench --out` wrote"
MOST_BYTES = 2**28  # of a file
MOST_CLIENTS = 10**6
BURST_S, BURST_SHARE = 5e-4, 0.2  # see `arrived_at_once`
MOST_BUFFERED = 0.1  # share of a response's pieces that may arrive together with the first
OTHERS = "more tokens than were sent here: others used the server"

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
DraftLength: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]
Clients: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_CLIENTS)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Duration: TypeAlias = Annotated[float, Meta(ge=1e-9, le=1e9)]
Text: TypeAlias = Annotated[str, Meta(max_length=2**12)]
ArmName: TypeAlias = Literal["speculative", "baseline", "baseline, repeated"]


def exceeding(rounds: int, accepted: int, tokens: int, requests: int, k: int) -> int:
    """Return by how many tokens counts exceed the output of these requests; 0 if they can be of them.

    A round puts out its accepted tokens and one more, but the last round of a request may go K tokens beyond its end.
    """
    return rounds + accepted - tokens if rounds + accepted > tokens + requests * (k + 1) else 0


@dataclass(frozen=True)
class ServerFacts:
    """A server, and what it tells of its settings.

    draft_tokens : K; None if it tells none, or does not speculate
    method : kind of drafter, in the engine's words; "" if unknown
    """

    url: Text
    engine: Literal["vllm", "sglang", "llamacpp"]
    version: Text
    model: Annotated[str, Meta(min_length=1, max_length=2**12)]
    draft_tokens: DraftLength | None = None
    method: Text = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """Sampling fields of every request."""

    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Request:
    """A request's times and counts.

    prompt : digest of the prompt
    output_tokens : by the server's usage counts
    deltas : pieces of text that were streamed
    decode_s : from the first piece to the last
    finish : "stop", "length", or "" if unknown
    rounds, drafted, accepted : by the response; None where it does not tell
    at_once : pieces that arrived together, the first of them included; see `arrived_at_once`
    """

    prompt: Text
    output_tokens: Positive
    deltas: Count
    ttft_s: Seconds
    decode_s: Seconds
    finish: Text = ""
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    rounds: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    at_once: Count = 1

    def __post_init__(self) -> None:
        accepted = self.accepted or 0
        if self.drafted is not None and accepted > self.drafted:
            raise InputError(f"{accepted:,} of {self.drafted:,} drafted tokens were accepted")
        if exceeding(self.rounds or 0, accepted, self.output_tokens, 1, MAX_DEPTH):
            raise InputError(
                f"{self.rounds or 0:,} rounds and {accepted:,} accepted tokens are more than the request's "
                f"{self.output_tokens:,} output tokens"
            )


@dataclass(frozen=True)
class Arm:
    """Requests to a server at one concurrency.

    drafted, accepted : counters by position [D]; None where nothing counts them
    clients_s : seconds in which requests were running
    other_tokens : tokens that the server counts beside those of these requests, which others asked for
    """

    name: ArmName
    concurrency: Clients
    clients_s: Duration
    requests: Annotated[list[Request], Meta(min_length=1)]
    drafted: list[Count] | None = None
    accepted: list[Count] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    other_tokens: Count = 0

    def __post_init__(self) -> None:
        if all(request.output_tokens == 1 for request in self.requests):
            raise InputError("answers of a single token have no time per token")
        if self.drafted is None and self.accepted is None:
            return
        drafted, accepted = self.drafted or [], self.accepted or []
        read_counters({"drafted": drafted, "accepted": accepted})
        if len(drafted) > MAX_DEPTH:
            raise InputError(f"drafts of {len(drafted):,} tokens are longer than {MAX_DEPTH}")
        tokens = sum(request.output_tokens for request in self.requests)
        if exceeding(drafted[0], sum(accepted), tokens, len(self.requests), len(drafted)):
            raise InputError(
                f"{drafted[0]:,} rounds with {sum(accepted):,} accepted tokens put out {OTHERS} ({tokens:,} tokens)"
            )

    @cached_property
    def columns(self) -> Floats:
        """Seconds of decoding and tokens behind the first, of every request [2, R]."""
        return np.array([[r.decode_s, r.output_tokens - 1] for r in self.requests], dtype=np.float64).T

    @property
    def token_s(self) -> float:
        """Seconds per output token behind the first."""
        return float(self.columns[0].sum() / self.columns[1].sum())

    @property
    def token_error(self) -> float:
        """Relative standard error of `token_s` over requests."""
        seconds, tokens = self.columns
        ones = np.ones(len(tokens))
        return log_ratio_error(seconds, tokens, ones, ones) if len(tokens) > 1 else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests per second."""
        return sum(request.output_tokens for request in self.requests) / self.clients_s

    @property
    def ttft_s(self) -> float:
        """Median time to the first token."""
        return float(np.median([request.ttft_s for request in self.requests]))

    @property
    def tokens_per_delta(self) -> float:
        """Output tokens per streamed piece of text."""
        return sum(r.output_tokens for r in self.requests) / max(sum(r.deltas for r in self.requests), 1)

    @property
    def share_at_once(self) -> float:
        """Share of a response's pieces that arrived together with its first piece; 1 if no piece came later.

        It is the median over requests: a client that has to wait for its CPU gets pieces together now and then.
        """
        if not self.columns[0].sum() > 0:
            return 1.0
        return float(np.median([max(r.at_once - 1, 0) / max(r.deltas, 1) for r in self.requests]))

    @property
    def buffered(self) -> bool:
        """Whether something between server and client held pieces back, so that their times say nothing."""
        return self.share_at_once > MOST_BUFFERED

    def _sum(self, name: str) -> int:
        return sum(getattr(request, name) or 0 for request in self.requests)

    @property
    def steps(self) -> float:
        """Decoding steps: rounds with a draft, and those that the counts show to have had none."""
        rounds = self.drafted[0] if self.drafted else self._sum("rounds")
        accepted = sum(self.accepted) if self.accepted else self._sum("accepted")
        return max(float(rounds), float(self.columns[1].sum()) - accepted, 1.0)

    @property
    def tokens_per_round(self) -> float:
        """Mean acceptance length: output tokens per decoding step."""
        return float(self.columns[1].sum()) / self.steps

    @property
    def drafted_per_round(self) -> float:
        """Drafted tokens per decoding step."""
        return (sum(self.drafted) if self.drafted else self._sum("drafted")) / self.steps


@dataclass(frozen=True)
class Bench:
    """The results of `specsim bench`; `as_dict` is its JSON document.

    stopped : why it ended before its time, such as a server that stopped answering; "" if it did not
    """

    speculative: ServerFacts
    baseline: ServerFacts | None
    arms: Annotated[list[Arm], Meta(min_length=1)]
    prompts: Text
    date: Text
    notes: list[str] = field(default_factory=list)
    kind: Literal["specsim-bench"] = KIND
    version: Literal[1] = VERSION
    stopped: Text = ""

    def __post_init__(self) -> None:
        has = {name: {arm.concurrency for arm in self.arms if arm.name == name} for name in (SPECULATIVE, BASELINE)}
        if len({(arm.name, arm.concurrency) for arm in self.arms}) < len(self.arms):
            raise InputError("two arms have the same name and concurrency")
        if not has[SPECULATIVE] or (self.baseline is not None and has[BASELINE] != has[SPECULATIVE]):
            raise InputError("servers were not measured at the same concurrencies")

    @property
    def concurrencies(self) -> list[int]:
        return sorted({arm.concurrency for arm in self.arms if arm.name == SPECULATIVE})

    def arm(self, name: str, concurrency: int) -> Arm | None:
        """The arm of this name and concurrency, if measured."""
        same = (arm for arm in self.arms if (arm.name, arm.concurrency) == (name, concurrency))
        return next(same, None)

    def speedup(self, concurrency: int) -> Estimate | None:
        """Speedup in seconds per output token, in pairs over prompts; None without a baseline."""
        return compared(self.arm(BASELINE, concurrency), self.arm(SPECULATIVE, concurrency))

    def null(self, concurrency: int) -> Estimate | None:
        """The A/A test: the baseline against its repeat."""
        return compared(self.arm(BASELINE, concurrency), self.arm(REPEAT, concurrency))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def compared(slow: Arm | None, fast: Arm | None) -> Estimate | None:
    """How many times faster an arm decodes than another, with a 95 % interval in pairs over prompts that both have.

    None if fewer than two prompts were answered by both, which have no interval, and for buffered streams.
    """
    if slow is None or fast is None or slow.buffered or fast.buffered:
        return None
    of_prompt = {request.prompt: request for request in fast.requests}
    pairs = [(a, of_prompt[a.prompt]) for a in slow.requests if a.prompt in of_prompt]
    rows = np.array(
        [(a.decode_s, a.output_tokens - 1, b.decode_s, b.output_tokens - 1) for a, b in pairs], dtype=np.float64
    )
    return ratio_of_ratios(*rows.T) if len(rows) > 1 and (rows.sum(axis=0) > 0).all() else None


def arrived_at_once(times_s: Sequence[float], start_s: float) -> int:
    """Count the pieces of a response that arrived together with the first.

    A piece belongs to the one before it if it follows within `BURST_S`, and within a small part of the time that a
    piece takes on average since the request: tokens of a server do not.
    """
    if not times_s:
        return 0
    gap_s = min(BURST_S, BURST_SHARE * (times_s[-1] - start_s) / len(times_s))
    later = (number for number in range(1, len(times_s)) if times_s[number] - times_s[number - 1] > gap_s)
    return next(later, len(times_s))


def read_bench(path: str | PathLike[str]) -> Bench:
    """Read a document of `specsim bench`; InputError if it is none, or holds what no server can have answered."""
    document = read_json(Path(path), str(path), missing=INVALID, invalid=INVALID, max_bytes=MOST_BYTES)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"{path} is not a benchmark of specsim; {INVALID}")
    return from_keys(document, Bench, str(path), INVALID)
