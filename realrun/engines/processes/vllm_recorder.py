"""Record inside vLLM what its drafter proposes after every output token.

`install` replaces methods of the model runner before a server is made. The scheduler gets no drafts, so that the target
decodes one token a step, and the text is the one without speculation. Every step still drafts after each sequence's
newest token, from the states that a normal run has there: a drafter computes the keys and values of accepted tokens
anew from the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NO_TOKEN = -1  # where nothing is drafted
STATISTICS = ("prob", "entropy_nats", "top10_confidence")
PART_ROWS = 4096  # rows that are written at once

Rows = npt.NDArray[Any]  # of `row_type`


def row_type(depth: int) -> np.dtype[Any]:
    """Make the type of a row: a request, the token that it just got, and the draft of `depth` tokens behind it."""
    lists = [(name, np.float32, (depth,)) for name in STATISTICS]
    return np.dtype([("request", np.int32), ("token", np.int32), ("draft", np.int32, (depth,)), *lists])


def draft_statistics(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute `STATISTICS` [n, 3] of the likeliest tokens [n] from their logits [n, V], in float32."""
    probs = logits.float().softmax(dim=-1)
    own = probs.gather(-1, tokens[:, None])[:, 0]
    best = probs.topk(min(10, probs.shape[-1]), dim=-1).values.sum(dim=-1)
    return torch.stack([own, torch.special.entr(probs).sum(dim=-1), own / best], dim=-1)


class Recorder:
    """Rows in the order of the steps, in a file of npy arrays one behind the other.

    draft_s : seconds that drafting and recording took
    """

    def __init__(self, file: Path, depth: int):
        self.draft_s = 0.0
        self._depth, self._type, self._unwritten = depth, row_type(depth), 0
        self._part: list[Rows] = []
        self._file = file.open("wb")

    def take(
        self,
        requests: Sequence[int],
        tokens: Sequence[int],
        drafts: Sequence[Sequence[int]],
        statistics: npt.NDArray[np.float32] | None,
    ) -> None:
        """Add a row for each request of a step. statistics : [n, D, 3], None where the drafter has no probabilities"""
        if not requests:
            return
        rows = np.zeros(len(requests), self._type)
        rows["request"], rows["token"] = requests, tokens
        rows["draft"] = [[*draft, *[NO_TOKEN] * (self._depth - len(draft))] for draft in drafts]
        if statistics is not None:
            for column, name in enumerate(STATISTICS):
                rows[name] = statistics[:, :, column]
        self._part.append(rows)
        self._unwritten += len(rows)
        if self._unwritten >= PART_ROWS:
            self._write()

    def close(self) -> None:
        """Write the rows that are left."""
        if self._part:
            self._write()
        self._file.close()

    def _write(self) -> None:
        np.save(self._file, np.concatenate(self._part))
        self._part, self._unwritten = [], 0


def read_rows(file: Path) -> Rows:
    """Read the rows of a recorder's file; ValueError if the file is empty or cut off."""
    parts = []
    with file.open("rb") as handle:
        while handle.peek(1):
            parts.append(np.load(handle))
    if not parts:
        raise ValueError(f"{file} is empty")
    return np.concatenate(parts)


def record_v1(recorder: Recorder) -> None:
    """Record the V1 model runner of vLLM 0.32."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose = GPUModelRunner.propose_draft_token_ids
    steps: list[torch.Tensor] = []  # statistics [B, 3] of each depth of the drafts that are being made

    def greedy_sample(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.use_local_argmax_reduction or self.use_heterogeneous_vocab:
            raise RuntimeError("this drafter has no logits of the target's vocabulary to record")
        logits = self.model.compute_logits(hidden_states)
        tokens = logits.argmax(dim=-1)
        steps.append(draft_statistics(logits, tokens))
        return tokens

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled: Any, *rest: Any, **named: Any) -> Any:
        if self.use_async_scheduling:
            raise RuntimeError("with async scheduling vLLM verifies drafts all the same; set async_scheduling=False")
        start = time.monotonic()
        steps.clear()
        drafts = propose(self, scheduler_output, sampled, *rest, **named)
        requests = [int(name.partition("-")[0]) for name in self.input_batch.req_ids]
        # Where only a part of a prompt was read, the sampled token is dropped.
        kept = np.flatnonzero(~self.discard_request_mask.np[: len(requests)]).tolist()
        tokens, drafted = (value.tolist() if torch.is_tensor(value) else value for value in (sampled, drafts))
        if any(len(tokens[row]) != 1 for row in kept):
            raise RuntimeError("vLLM verified a draft while its drafts were recorded")
        # A drafter that drafts all tokens in parallel calls `greedy_sample` once, with the rows of a request together.
        statistics = torch.stack(steps, dim=1).view(len(requests), -1, len(STATISTICS)).cpu().numpy() if steps else None
        recorder.take(
            [requests[row] for row in kept],
            [tokens[row][0] for row in kept],
            [drafted[row] for row in kept],
            None if statistics is None else statistics[kept],
        )
        recorder.draft_s += time.monotonic() - start
        return drafts

    SpecDecodeBaseProposer._greedy_sample = greedy_sample
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    GPUModelRunner.take_draft_token_ids = lambda self: None


ADAPTERS: dict[str, Callable[[Recorder], None]] = {"0.32": record_v1}  # by minor version


def adapter_of(version: str) -> Callable[[Recorder], None]:
    """Find what records this version of vLLM; ValueError if nothing does."""
    minor = ".".join(version.split(".")[:2])
    if minor not in ADAPTERS:
        known = ", ".join(f"{name}.*" for name in ADAPTERS)
        raise ValueError(f"drafts of vLLM {version} cannot be recorded; install a version of {known}")
    return ADAPTERS[minor]


def install(file: Path, depth: int, version: str) -> Recorder:
    """Record the servers that this process makes from now on.

    file : to write; depth : number of tokens that are drafted
    """
    record, recorder = adapter_of(version), Recorder(file, depth)
    record(recorder)
    return recorder
