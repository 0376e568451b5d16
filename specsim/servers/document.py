"""The document of `specsim bench`: servers, and the requests of every arm."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.replaying.intervals import Estimate, log_ratio_error, ratio_of_ratios

KIND, VERSION = "specsim-bench", 1
SPECULATIVE, BASELINE, REPEAT = "speculative", "baseline", "baseline, repeated"
INVALID = "give what `specsim bench --out` wrote"


@dataclass(frozen=True)
class ServerFacts:
    """A server, and what it tells of its settings.

    draft_tokens : K; None if it tells none, or does not speculate
    method : kind of drafter, in the engine's words; "" if unknown
    """

    url: str
    engine: str
    version: str
    model: str
    draft_tokens: int | None = None
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A request's times and counts.

    prompt : digest of the prompt
    output_tokens : by the server's usage counts
    deltas : pieces of text that were streamed
    decode_s : from the first piece to the last
    finish : "stop", "length", or "" if unknown
    rounds, drafted, accepted : by the response; None where it does not tell
    """

    prompt: str
    output_tokens: int
    deltas: int
    ttft_s: float
    decode_s: float
    finish: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Arm:
    """Requests to a server at one concurrency.

    drafted, accepted : counters by position [D]; None where nothing counts them
    clients_s : seconds in which requests were running
    """

    name: str
    concurrency: int
    clients_s: float
    requests: list[Request]
    drafted: list[int] | None = None
    accepted: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

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

    def _sum(self, name: str) -> int:
        return sum(getattr(request, name) or 0 for request in self.requests)

    @property
    def steps(self) -> float:
        """Decoding steps: rounds with a draft, and those that the counts show to have had none."""
        rounds = self.drafted[0] if self.drafted else self._sum("rounds")
        accepted = sum(self.accepted) if self.accepted else self._sum("accepted")
        return max(float(rounds), float(self.columns[1].sum()) - accepted)

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
    """The results of `specsim bench`; `as_dict` is its JSON document."""

    speculative: ServerFacts
    baseline: ServerFacts | None
    arms: list[Arm]
    prompts: str
    date: str
    notes: list[str] = field(default_factory=list)
    kind: str = KIND
    version: int = VERSION

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
    """How many times faster an arm decodes than another, with a 95 % interval in pairs over prompts that both have."""
    if slow is None or fast is None:
        return None
    of_prompt = {request.prompt: request for request in fast.requests}
    pairs = [(a, of_prompt[a.prompt]) for a in slow.requests if a.prompt in of_prompt]
    rows = [(a.decode_s, a.output_tokens - 1, b.decode_s, b.output_tokens - 1) for a, b in pairs]
    return ratio_of_ratios(*np.array(rows, dtype=np.float64).T) if rows else None


def read_bench(path: str | PathLike[str]) -> Bench:
    """Read a document of `specsim bench`; InputError if it is none."""
    import msgspec

    document = read_json(Path(path), str(path), missing=INVALID, invalid=INVALID)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"{path} is not a benchmark of specsim; {INVALID}")
    try:
        return msgspec.convert(document, Bench)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not a benchmark of specsim ({error}); {INVALID}") from None
