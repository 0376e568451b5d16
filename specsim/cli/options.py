"""Groups of options that the `specsim` commands share."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from specsim.cli.console import MAX_SEED, parse_settings
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.cost.model import CostModel
    from specsim.engines.formats.records import Setup
    from specsim.engines.import_records import Reading
    from specsim.io.workers import Workers
    from specsim.trace.trace import Trace

T = TypeVar("T")

TUNED = ["fixed_k", "max_confidence", "adaedl"]  # policies that commands tune by default

SET_HELP = "Policy setting, NAME=VALUE; repeat for more."
POLICY_FILE_HELP = "Add your own policies: FILE.py, or FILE.py:NAME for one of several; repeat for more."
OVERWRITE_FILE_HELP = "Replace an existing file."
TRIALS_HELP = "Configurations to try per policy."
LEARNING_SHARE_HELP = "Share of the sequences that a policy which learns from data learns from."
JOBS_HELP = "Number of threads (default: one per core). Does not change the result."
WEIGHTS_HELP = (
    "Weight format of the layers: int4, int8, float8, mxfp4, nvfp4, q4_k_m, ..., or of parts: experts=mxfp4 (default: "
    "as the target is stored)."
)
CACHE_HELP = "Format of the KV cache: float8, q8_0, q4_0, ... (default: that of activations)."
DRAFT_COST_HELP = "The drafter's cost grid; FILE:MODEL picks one from a result of `realrun gpu`."
COUNTS_CONTEXT = 1000  # cached tokens that are assumed for counts
TRACE_HELP = "Trace folder, made by `realrun record`, or a name of `specsim example --list`."


@dataclass(frozen=True, kw_only=True)
class SeedSettings(Settings):
    """Seed of a command that draws random numbers."""

    panel = "Sampling and search"
    seed: int = setting(0, "Seed of all randomness.", low=0, high=MAX_SEED)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Settings):
    """Processes that share the work."""

    backend: Literal["loky", "dask"] = setting("loky", "Processes of this machine, or a Dask cluster.")
    jobs: int | None = setting(
        None, "Number of processes (default: one per core, or the whole cluster). Does not change the result.", low=1
    )
    scheduler: str | None = setting(None, "Address of a cluster (default: a local one).", metavar="ADDRESS")

    @property
    def ready(self) -> Workers:
        """The workers that the options name."""
        from specsim.io.workers import Workers

        return Workers(self.backend, self.jobs, self.scheduler)


@dataclass(frozen=True, kw_only=True)
class AcceptSettings(Settings):
    """The rule by which drafts are accepted."""

    panel = "Acceptance at a temperature"
    accept: str | None = setting(
        None,
        "Accept drafts as this engine does, such as vllm, or by the rule greedy-draft, sampled-draft, equal-samples or "
        "typical:EPSILON:DELTA (lossy); see `specsim explain accept` (default: as recorded).",
        metavar="ENGINE",
    )

    def read(self, trace: Path) -> Trace:
        """Read a trace, under the rule if one is named; InputError if the trace cannot be had under it."""
        from specsim.trace.files import read_trace

        if self.accept is None:
            return read_trace(trace)
        from specsim.engines.acceptance_rules import find_rule
        from specsim.trace.accepted import accepted_by
        from specsim.trace.typical import typical_thresholds, typically_accepted

        thresholds = typical_thresholds(self.accept)
        if thresholds is not None:
            return typically_accepted(read_trace(trace), *thresholds)
        rule = find_rule(self.accept)  # refused before the trace is read
        return accepted_by(read_trace(trace), rule)


@dataclass(frozen=True, kw_only=True)
class TraceSettings(AcceptSettings):
    """The recorded trace that a command reads."""

    trace: Path = argument(TRACE_HELP)


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """Batch size that costs are read at."""

    panel = "Costs"
    batch: int | None = setting(None, "Batch size, for batch-aware costs (default: 1).", low=1)


@dataclass(frozen=True, kw_only=True)
class GpuSettings(Settings):
    """Costs by a GPU's data sheet, in place of a cost file."""

    panel = "Costs on a GPU"
    gpu: str | None = setting(
        None,
        "GPU whose data sheet gives the costs, such as h100, also as nvidia-smi prints it. Needs --target and "
        "--drafter.",
    )
    target: str | None = setting(
        None, "Target on that GPU: a model such as llama-3.1-8b or Qwen/Qwen3-32B-FP8, or its config.json."
    )
    drafter: str | None = setting(
        None,
        "Drafter on that GPU: a draft model, as --target; the drafter's config.json; or eagle, eagle3, mtp, edd, vdm, "
        "space, prompt-lookup, block:LAYERS, eesd:LAYERS, self-sd:LAYERS, medusa:HEADS, or an engine's name for it.",
    )
    engine: str | None = setting(
        None,
        "Add this engine's overhead to the costs on that GPU: vllm, sglang, tensorrt-llm or llamacpp.",
    )
    weights: str | None = setting(None, WEIGHTS_HELP, metavar="FORMAT")
    dtype: str | None = setting(
        None,
        "Data type of activations, KV cache and other matrices on that GPU (default: bfloat16, or float16 or float32 "
        "where it has no bfloat16).",
    )
    cache: str | None = setting(None, CACHE_HELP, metavar="FORMAT")
    tp: int | None = setting(None, "GPUs that share every layer (tensor parallelism; default: 1).", low=1)
    engine_alone: ClassVar[bool] = False  # whether --engine has a meaning without --gpu
    names_later: ClassVar[bool] = False  # whether a file may give the target and the drafter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpu is None or not self.names_later:
            self.check_names()
        about = self.weights, self.cache, (self.tp or 1) != 1, self.dtype, not self.engine_alone and self.engine
        if self.gpu is None and any(about):
            raise InputError(
                "--engine, --weights, --dtype, --cache and --tp describe costs on a GPU; give --gpu, --target and "
                "--drafter"
            )

    def check_names(self) -> None:
        """InputError unless all of GPU, target and drafter are named, or none."""
        missing = [flag for flag in ("gpu", "target", "drafter") if not getattr(self, flag)]
        if 0 < len(missing) < 3:
            flags = " and ".join(f"--{flag}" for flag in missing)
            raise InputError(f"--gpu, --target and --drafter go together; add {flags}")

    def named_by(self, setup: Setup) -> tuple[Self, list[str]]:
        """These settings with the models, GPUs and formats that a file tells, and notes on unknown formats.

        InputError if one of three names is still missing.
        """
        from specsim.cost.roofline.formats import ENGINE_FORMATS, stored_weights

        if self.gpu is None:
            self.check_names()
            return self, []
        named = replace(self, target=self.target or setup.model or None, drafter=self.drafter or setup.kind or None)
        named.check_names()
        known: dict[str, Any] = {}
        notes = []
        stored = bool(setup.weights) and stored_weights(str(named.target)) is not None
        for name, word in (("weights", setup.weights), ("cache", setup.cache)):
            if not word or getattr(self, name) is not None or (stored and name == "weights"):
                continue
            if word in ENGINE_FORMATS:
                known[name] = ENGINE_FORMATS[word]
            else:
                notes.append(f"the file says {name} {word}, of bytes unknown, which costs leave out; add --{name}")
        return replace(named, tp=self.tp or setup.tp or 1, **known), notes

    @property
    def gpu_text(self) -> str:
        """The models and the machine that the options name."""
        tp = self.tp or 1
        devices = f"{tp} x {self.gpu}" if tp > 1 else self.gpu
        formats = f", weights {self.weights}" if self.weights else ""
        formats += f", {self.dtype}" if self.dtype else ""
        formats += f", {self.cache} cache" if self.cache else ""
        engine = f", {self.engine}" if self.engine else ""
        return f"{self.target} with {self.drafter} on {devices}{formats}{engine}"

    @property
    def roofline_document(self) -> dict[str, Any] | None:
        """The document of the costs on the GPU that the options name."""
        from specsim.cost.calibrate import data_sheet_document

        if self.gpu is None or self.target is None or self.drafter is None:
            return None
        names = self.gpu, self.target, self.drafter
        return data_sheet_document(*names, self.weights, self.tp or 1, self.engine, self.dtype, self.cache)

    def costs(self, cost: T | None) -> T | dict[str, Any]:
        """Return the cost file, or the costs on the GPU; InputError for none or both."""
        roofline = self.roofline_document
        if (cost is None) == (roofline is None):
            raise InputError("give costs once: a cost file (--cost), or --gpu, --target and --drafter")
        return roofline if cost is None else cost  # type: ignore[return-value]  # one of the two is there

    def cost_facts(self, cost: Path | None, model: CostModel) -> dict[str, Any]:
        """Name the costs of a document's speedups, and how far off such speedups were; see `CostModel.error_band`."""
        return {"cost": cost.name if cost else self.gpu_text, "cost_band": model.error_band}


@dataclass(frozen=True, kw_only=True)
class RequestSettings(Settings):
    """Lengths of the requests that a server keeps running."""

    panel = "Requests of a server"
    isl: int | None = setting(None, "Input length of a served request, in tokens; with --osl.", low=1)
    osl: int | None = setting(None, "Output length of a served request, in tokens; with --isl.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.isl is None) != (self.osl is None):
            raise InputError("--isl and --osl go together; give both lengths of a request")


@dataclass(frozen=True, kw_only=True)
class CostSettings(BatchSettings, GpuSettings):
    """Costs of draft steps and verification steps."""

    panel = "Costs"
    cost: Path | None = setting(
        None,
        'Cost file: a profile, {"s_d": seconds, "s_t": seconds}, a name of `specsim cost list` or '
        "`specsim example --list`, or the target's cost grid (with --draft-cost).",
    )
    draft_cost: Path | None = setting(None, DRAFT_COST_HELP)

    def read(self) -> CostModel:
        """Read the cost model that the options name."""
        return read_costs(self.costs(self.cost), self.draft_cost, self.batch)


@dataclass(frozen=True, kw_only=True)
class BatchCostSettings(AcceptSettings, GpuSettings):
    """A trace or counts, and batch-aware costs."""

    panel = "Costs"
    trace: Path = argument(f"{TRACE_HELP} Or counts that `specsim advise` takes, such as a server's log.")
    cost: Path | None = setting(
        None,
        "Batch-aware cost model: a linear or roofline cost file, a batch profile, or a name of `specsim cost list`.",
        metavar="COST",
    )

    names_later = True

    def completed(self) -> Self:
        """These settings with the models and the engine that counts tell of, as `specsim advise` takes them."""
        from specsim.cost.files import as_cost
        from specsim.engines.import_records import read_counts

        if self.gpu is None or not self.holds_counts:
            self.check_names()
            return self
        reading = read_counts(self.trace)
        named, unknown = self.named_by(reading.setup)
        if unknown:
            raise InputError(f"{self.trace}: {unknown[0]}")
        if named.engine is None and reading.engine:
            with suppress(InputError):  # an engine whose overhead is not known
                as_cost(replace(named, engine=reading.engine).roofline_document)
                return replace(named, engine=reading.engine)
        return named

    @property
    def holds_counts(self) -> bool:
        """Whether the file holds counts, from which a trace is generated."""
        return self.trace.is_file() and self.trace.suffix != ".zip"

    @property
    def served(self) -> Trace | Path:
        """The trace, or its folder if it is taken as recorded, so that other processes can read it themselves."""
        if self.accept is not None:
            return self.read(self.trace)
        if not self.holds_counts:
            return self.trace
        from specsim.acceptance.generate import generate_alike
        from specsim.engines.import_records import as_counts

        return generate_alike(as_counts(self.trace), prompt_tokens=COUNTS_CONTEXT)

    @property
    def counts_notes(self) -> list[str]:
        """How a trace was made of counts, in words."""
        made = (
            f"generated sequences that accept as {self.trace} does at every position, behind {COUNTS_CONTEXT:,} tokens"
        )
        return [made] if self.holds_counts else []


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Settings):
    """A policy and its settings."""

    panel = "Policy"
    policy: str = setting(..., "Policy: a name of `specsim policies`, or your own FILE.py.")
    set_: list[str] = setting([], SET_HELP, metavar="NAME=VALUE")

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the policy by name, as text."""
        return parse_settings(self.set_)


@dataclass(frozen=True, kw_only=True)
class SplitSettings(SeedSettings):
    """How many configurations are tried, and on which sequences."""

    panel = "Sampling and search"
    trials: int = setting(100, TRIALS_HELP, low=1)
    tuning_share: float = setting(0.5, "Share of the sequences to tune on; the others are held out.")


@dataclass(frozen=True, kw_only=True)
class RoundsSettings(Settings):
    """Which counts of accepted tokens are read."""

    panel = "Counters"
    policy: str | None = setting(None, "Use only rounds recorded under this policy.")
    accept_length: float | None = setting(
        None, "In place of a file: the mean acceptance length, the target's own token included; with --k.", low=1
    )
    k: int | None = setting(None, "Draft length of --accept-length, or of a file that does not tell it.", low=1)

    def read_counts(self, source: str | None) -> Reading:
        """Read the counts of a file, or those of the acceptance length."""
        from specsim.engines.import_records import read_counts, read_length

        if (source is None) == (self.accept_length is None):
            raise InputError("give a file of an engine, or --accept-length 2.6 --k 3")
        if self.accept_length is not None:
            if self.k is None:
                raise InputError("--accept-length needs the draft length; add --k")
            return read_length(self.accept_length, self.k)
        return read_counts(str(source), policy=self.policy, k=self.k)


@dataclass(frozen=True, kw_only=True)
class CountsSettings(RoundsSettings, SeedSettings):
    """Counts of accepted tokens from an engine."""

    panel = "Counters"
    context: int | None = setting(
        None, "Cached tokens at which costs are taken. Default: a benchmark's own, else 1000.", low=1
    )
    source: str | None = argument(
        "What an engine or a benchmark wrote about drafts, told by its content: a log, a scrape of /metrics, a "
        "benchmark's text or JSON, responses, a table of a sweep; a server's address; or a trace, a rounds.parquet or "
        'counters by depth as .json, {"drafted": [...], "accepted": [...]}.',
        default=None,
    )

    def read(self) -> Reading:
        """Read the counts of a file or a running server, or those of the acceptance length."""
        if str(self.source).startswith(("http://", "https://")) and self.accept_length is None:
            from specsim.servers.client import read_server

            return read_server(str(self.source), k=self.k)
        return self.read_counts(self.source)


def read_costs(cost: Path | dict[str, Any], draft_cost: Path | None, batch: int | None) -> CostModel:
    """Read the cost model that --cost, --draft-cost and --batch name."""
    from specsim.cost.files import read_cost
    from specsim.cost.grid import read_grid_pair

    if draft_cost is not None:
        if isinstance(cost, dict):
            raise InputError("--draft-cost goes with the target's cost grid; give that with --cost")
        return read_grid_pair(cost, draft_cost, batch=batch or 1)
    return read_cost(cost, batch=batch)
