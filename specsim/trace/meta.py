"""`meta.json` of a trace folder: what was recorded, and checksums of everything in the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import checked, read_json
from specsim.trace.trace import MAX_DEPTH
from specsim.trace.tree_record import MAX_NODES

SCHEMA_VERSION = 3
META = "meta.json"
SEQUENCES = "sequences.parquet"
STEPS = "steps.parquet"
TREES = "trees.parquet"
JOINED_FILE = "joined.json"  # beside a folder for each trace: 1, 2 and so on
AGAIN = "restore or record it again"


class Decoding(TypedDict):
    """How the output was decoded; other keys are the sampler's."""

    mode: str
    temperature: NotRequired[float]
    top_p: NotRequired[float]
    top_k: NotRequired[int]
    seed: NotRequired[int]


class Trees(TypedDict):
    """Most nodes recorded per position, and most children per node."""

    nodes: int
    width: int


class Prompts(TypedDict):
    """Where the prompts come from."""

    source: str
    count: int
    digest: str


class Seconds(TypedDict):
    """Seconds that recording took."""

    generate: float
    dense: float


class Provenance(TypedDict):
    """Where and when the trace was recorded."""

    device: str
    date: str


class EngineFacts(TypedDict):
    """The inference engine that recorded the trace, and how it ran.

    max_num_batched_tokens, max_num_seqs : tokens and sequences of a step, at most; longer prompts are read in chunks
    first_position_drafted : whether it drafts ahead of an output's first token. If not, the first row of every sequence
        has no draft: NO_TOKEN and match length 0
    """

    name: str
    version: str
    runner: str
    max_num_batched_tokens: int
    max_num_seqs: int
    first_position_drafted: bool


class Synthetic(TypedDict):
    """The acceptance model of a synthetic trace."""

    model: str
    informed: NotRequired[bool]


class Vocabulary(TypedDict):
    """Tokens that the target can emit."""

    tokens: int


class Meta(TypedDict):
    """Schema of meta.json; unknown keys are allowed.

    recurrent_layers : which of "target" and "drafter" have recurrent layers, which can neither draft nor verify trees
    second_pass : whether a round that rejects tokens ends with a second target pass, over the pending and the accepted
        tokens, which restores the recurrent states
    """

    schema_version: Literal[3]
    target: str
    drafter: str
    decoding: str | Decoding
    depth: int
    eos_token_id: int | list[int] | None
    dtype: str
    device: str
    checksums: dict[str, str]
    drafter_kind: NotRequired[str]
    drafter_facts: NotRequired[dict[str, Any]]
    weights: NotRequired[str | None]
    predictor: NotRequired[str | None]
    tree: NotRequired[Trees | None]
    prompts: NotRequired[str | Prompts | None]
    max_new_tokens: NotRequired[int]
    kernels: NotRequired[str]
    distinct_trigram_share: NotRequired[float]
    first_token_accepted_share: NotRequired[float]
    record_seconds: NotRequired[Seconds]
    provenance: NotRequired[Provenance]
    engine: NotRequired[EngineFacts]
    synthetic: NotRequired[Synthetic]
    informed: NotRequired[bool]
    text: NotRequired[bool]
    vocabulary: NotRequired[Vocabulary | None]
    recurrent_layers: NotRequired[list[str]]
    second_pass: NotRequired[bool]


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and check the meta.json of a trace folder; raise InputError if it is invalid."""
    path = folder / META
    if not path.is_file():
        wrong = f"is not a trace: {META} is missing" if folder.exists() else "does not exist"
        raise InputError(
            f"{folder} {wrong}; give a folder made by `realrun record`, or a name of `specsim example --list`"
        )
    meta = read_json(path, str(path), dict[str, Any], missing=AGAIN, invalid=AGAIN)
    version = meta.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; record it again")
    checked(meta, str(path), Meta, invalid=AGAIN)
    if not 1 <= meta["depth"] <= MAX_DEPTH:
        raise InputError(f"{path}: depth {meta['depth']} is not from 1 to {MAX_DEPTH}; record it again")
    checksums = set(meta["checksums"])
    if not {SEQUENCES, STEPS} <= checksums <= {META, SEQUENCES, STEPS, TREES}:
        raise InputError(f"{path}: checksums must list {SEQUENCES} and {STEPS}; {AGAIN}")
    if TREES in checksums and not (meta.get("tree") and all(1 <= n <= MAX_NODES for n in tree_limits(meta))):
        raise InputError(f"{path}: tree does not give nodes and width from 1 to {MAX_NODES}; record it again")
    if meta["checksums"].get(META) != meta_digest(meta):
        raise InputError(f"{path} is altered (its own checksum differs); {AGAIN}")
    return dict(meta)


def tree_limits(meta: dict[str, Any]) -> tuple[int, int]:
    """Return the nodes and the width of the recorded trees."""
    return meta["tree"]["nodes"], meta["tree"]["width"]


def meta_digest(meta: dict[str, Any]) -> str:
    """Compute the checksum of meta.json without its own checksum."""
    others = {name: value for name, value in meta["checksums"].items() if name != META}
    return digest(json.dumps({**meta, "checksums": others}, sort_keys=True), length=64)
