"""Dense traces: for every position of the target's output, what the drafter would propose.

Row t of a sequence answers: after prompt and y[:t], the drafter proposes these D tokens, the
first match_len[t] of which equal y[t:]. Any chain policy up to depth D can be replayed on it
exactly; with the rank of the true token at every depth any static tree too, and with a record
of trees (`specsim.trace.tree_record`) any tree policy whose nodes were recorded. `specsim.trace.files`
reads and writes traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Array, FloatArray, IntArray
from specsim.io.errors import InputError
from specsim.trace.tree_record import TreeRecord

if TYPE_CHECKING:
    import pandas as pd

NO_TOKEN = -1  # draft_token where the drafter proposes nothing
MAX_DEPTH = 255  # match_len and draft_limit are uint8


STEP_LISTS = {  # column -> dtype of its lists over depth 1..D
    "draft_token": np.int32,
    "prob": np.float32,
    "confidence": np.float32,
    "entropy_nats": np.float32,
}
OPTIONAL_LISTS = {
    "true_rank": np.int16,  # rank of y[t+i-1] among the drafter's candidates after y[:t+i-1]; -1 beyond the output
    "text_prob": np.float32,  # drafter's probability of y[t+i-1] after y[:t+i-1]; 0 beyond the output
    "text_accept": np.float32,  # min(1, text_prob / target's probability of the same); 0 beyond the output
    "score": np.float32,  # acceptance predictor's output
    "top10_confidence": np.float32,  # largest of the ten largest draft probabilities, scaled to sum to 1
}


@dataclass(frozen=True, repr=False, eq=False)  # arrays have no single truth value: a trace equals itself alone
class Trace:
    """A dense trace in memory. N positions in S sequences, recorded to depth D.

    Attributes
    ----------
    meta : dict, contents of `meta.json`: target, drafter and its kind, decoding, limits, where and when recorded
    sequence_id, prompt_tokens, budget_tokens : int arrays [S]. The budget is the
        most output tokens that the run would have emitted.
    domain : str array [S]
    source : str array [S], the text that a prompt was cut from, such as a file; "" where it is its own, or None where
        not recorded. Prompts of the same text are similar, so they are all tuned on or all held out
    prompt : int32 array, the prompts' tokens, concatenated, or None where not recorded
    offsets : int64 [S + 1], rows of sequence s are offsets[s]:offsets[s+1]
    token, match_len : int32, uint8 [N]
    draft_token, prob, confidence, entropy_nats : [N, D]. Beyond what a drafter proposes, which
        may be nothing at all, draft_token is NO_TOKEN, and the others mean nothing
    true_rank, text_prob, text_accept, score, top10_confidence : [N, D] or None where not recorded
    tree : the drafter's expansion at every position, or None

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=4, output_tokens=30, depth=8)
    >>> trace.depth, trace.sequences, trace.select([0, 2]).sequences
    (8, 4, 2)
    """

    meta: dict[str, Any]
    sequence_id: IntArray
    domain: npt.NDArray[np.str_]
    prompt_tokens: IntArray
    budget_tokens: IntArray
    offsets: IntArray
    token: IntArray
    match_len: IntArray
    draft_token: IntArray
    prob: FloatArray
    confidence: FloatArray
    entropy_nats: FloatArray
    true_rank: IntArray | None = None
    text_prob: FloatArray | None = None
    text_accept: FloatArray | None = None
    score: FloatArray | None = None
    top10_confidence: FloatArray | None = None
    tree: TreeRecord | None = None
    source: npt.NDArray[np.str_] | None = None
    prompt: IntArray | None = None

    def __repr__(self) -> str:
        """One line: sizes, both models, and how the output was sampled."""
        decoding, sampling = self.meta.get("decoding"), self.mode
        if temperature := decoding.get("temperature") if isinstance(decoding, dict) else None:
            sampling += f" at temperature {temperature:g}"
        sizes = f"{self.sequences:,} sequences, {len(self.token):,} tokens, depth {self.depth}"
        models = f"target {self.meta.get('target')}, drafter {self.meta.get('drafter')}"
        return f"{type(self).__name__}: {sizes}, {models}, {sampling}"

    @property
    def depth(self) -> int:
        """D, the longest draft recorded, in tokens."""
        return int(self.draft_token.shape[1])

    @property
    def output_tokens(self) -> IntArray:
        """Output tokens per sequence [S]."""
        return np.diff(self.offsets)

    @property
    def position(self) -> IntArray:
        """t of every row [N], from 0 in each sequence."""
        return np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], self.output_tokens)

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row per position: sequence, t, the target's token, and the longest accepted prefix in tokens."""
        import pandas as pd  # slow to import, and a replay does not need it

        ids = np.repeat(self.sequence_id, self.output_tokens)
        columns = {"sequence_id": ids, "t": self.position, "token": self.token, "match_len": self.match_len}
        return pd.DataFrame(columns | {"draft_limit": self.draft_limit})

    @property
    def sequences(self) -> int:
        return len(self.sequence_id)

    @property
    def prompts(self) -> list[IntArray] | None:
        """The tokens of every sequence's prompt, where they were recorded."""
        return None if self.prompt is None else np.split(self.prompt, np.cumsum(self.prompt_tokens)[:-1])

    @cached_property
    def draft_limit(self) -> IntArray:
        """Longest useful draft per position [N], uint8.

        A drafter stops at the end-of-text token it proposes, or where it has nothing to propose, and
        never proposes more than the remaining budget less the token that the target adds.
        """
        remaining = np.repeat(self.budget_tokens, self.output_tokens) - self.position - 1
        limit = np.minimum(remaining, self.depth)
        ends = np.isin(self.draft_token, self.eos_token_ids)
        first_end = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, self.depth)
        proposed = (self.draft_token != NO_TOKEN).sum(axis=1)  # the first ones
        return np.minimum(np.minimum(limit, first_end), proposed).astype(np.uint8)

    @property
    def informed(self) -> bool:
        """Whether the drafter reported its confidence; without a report the confidence columns hold constants."""
        return bool(self.meta.get("informed", self.meta.get("synthetic", {}).get("informed", True)))

    @property
    def mode(self) -> str:
        """Decoding mode: greedy, greedy-draft, gumbel or rejection; "unknown" if not recorded."""
        decoding = self.meta.get("decoding", "unknown")
        return decoding if isinstance(decoding, str) else str(decoding.get("mode", "unknown"))

    @property
    def drafter_kind(self) -> str | None:
        """Kind of the drafter; None if it was not recorded."""
        kind: str | None = self.meta.get("drafter_kind")
        return kind

    @property
    def sampled_by_rejection(self) -> bool:
        """Whether drafts were sampled and verified by rejection sampling.

        Drafts, match_len and output are then drawn together as in a real run (`realrun.proposals.chain`), so a replay
        of the recorded outcome follows a real run's distribution. A real run draws another text.
        """
        return self.mode == "rejection" and self.meta.get("accepted_by") != "greedy-draft"

    @property
    def eos_token_ids(self) -> list[int]:
        ids = self.meta["eos_token_id"]
        return [ids] if isinstance(ids, int) else list(ids or [])

    def select(self, sequences: npt.ArrayLike) -> Trace:
        """The trace of these sequences only, by index, in the order given."""
        index = np.asarray(sequences, dtype=np.int64)
        lengths = self.output_tokens[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        values: dict[str, Any] = {"meta": self.meta, "offsets": offsets}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("sequence_id", "domain", "prompt_tokens", "budget_tokens", "source"):
                values[field.name] = None if value is None else value[index]
            elif field.name == "prompt":
                prompts = self.prompts
                chosen = [] if prompts is None else [prompts[sequence] for sequence in index]
                values["prompt"] = None if value is None else np.concatenate([value[:0], *chosen])
            elif field.name == "tree":
                values["tree"] = None if value is None else value.select(rows)
            elif field.name not in values:
                values[field.name] = None if value is None else value[rows]
        return Trace(**values)

    def shortened(self, max_output_tokens: int) -> Trace:
        """The trace of the same run with a limit on the output tokens of every sequence.

        A loss-free run emits the same tokens under any limit, so that its first rows are those of the shorter run.
        """
        if max_output_tokens < 1:
            raise InputError(f"max_output_tokens={max_output_tokens}; give at least 1")
        lengths = np.minimum(self.output_tokens, max_output_tokens)
        kept = self.position < max_output_tokens
        remaining = np.repeat(lengths, lengths) - self.position[kept]
        part = self.with_columns(
            ("token", "match_len", *STEP_LISTS, *OPTIONAL_LISTS),
            lambda column: column[kept],
            budget_tokens=np.minimum(self.budget_tokens, max_output_tokens),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tree=None if self.tree is None else self.tree.select(np.flatnonzero(kept)),
        )
        match_len, rank = np.minimum(part.match_len, remaining).astype(self.match_len.dtype), part.true_rank
        if rank is not None:
            rank = np.where(np.arange(self.depth) >= remaining[:, None], -1, rank).astype(rank.dtype)
        return dataclasses.replace(part, match_len=match_len, true_rank=rank)

    def shallower(self, depth: int) -> Trace:
        """Cut the trace to a smaller depth; InputError if it was recorded to less than this depth."""
        if not 1 <= depth <= self.depth:
            raise InputError(
                f"drafts of up to {depth} tokens; the trace is recorded to depth {self.depth}, choose 1 to that"
            )
        if depth == self.depth:
            return self
        return self.with_columns(
            (*STEP_LISTS, *OPTIONAL_LISTS),
            lambda column: np.ascontiguousarray(column[:, :depth]),
            meta={**self.meta, "depth": depth},
            match_len=np.minimum(self.match_len, depth),
        )

    def with_columns(self, names: Iterable[str], change: Callable[[Array], Array], **others: Any) -> Trace:
        """Change these columns, where they are recorded, and replace other fields."""
        columns = {name: getattr(self, name) for name in names}
        for name, column in columns.items():
            columns[name] = None if column is None else change(column)
        return dataclasses.replace(self, **columns, **others)
