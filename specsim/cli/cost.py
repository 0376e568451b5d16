"""`specsim cost`: costs in files, under names that ship, and on hardware that is not at hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specsim.cli.command import Answer, command
from specsim.cli.console import claim_file, print_notes, print_table, progress_bar
from specsim.cli.options import (
    CACHE_HELP,
    OVERWRITE_FILE_HELP,
    TUNED,
    WEIGHTS_HELP,
    GpuSettings,
    RequestSettings,
    SplitSettings,
)
from specsim.io.errors import InputError
from specsim.io.settings import argument, setting

if TYPE_CHECKING:
    from specsim.compare.hardware import Comparison
    from specsim.cost.model import CostModel
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.engines.pass_times import PassTimes
    from specsim.trace.trace import Trace


def list_costs() -> Answer:
    """List the costs that ship with specsim.

    All commands that take costs accept these names. A cost file of the form roofline prices other models, drafters and
    GPUs by their shapes and data sheets.

    Example: specsim replay TRACE --policy fixed_k --set k=3 --cost vllm-llama3.1-8b-eagle-h100
    """
    from specsim.cost.files import read_cost_file, shipped_costs

    costs = {name: read_cost_file(path) for name, path in shipped_costs().items()}
    rows = [[name, cost["form"], cost["date"], cost["source"]] for name, cost in costs.items()]
    return Answer(costs, partial(print_table, f"{len(rows)} shipped costs", ["name", "form", "date", "source"], rows))


@dataclass(frozen=True, kw_only=True)
class ShowOptions(GpuSettings, RequestSettings):
    """Which costs are shown, and where."""

    file: str | None = argument(
        "Cost file, or a name of `specsim cost list`. Leave it out with --gpu, --target and --drafter.", default=None
    )
    tokens: tuple[int, ...] | None = setting(
        None, "Tokens of a target pass (default: 1,2,4,8; for a profile, those that it covers)."
    )
    contexts: tuple[int, ...] | None = setting(
        None, "Cached tokens (default: 128,1024; for a profile, its smallest and largest)."
    )
    batch: int | None = setting(None, "Batch size, or with --isl concurrent requests; for batch-aware costs.", low=1)


def show(options: ShowOptions) -> Answer:
    """Show the times of draft and target steps.

    s_d / s_t is the time of a draft step over that of a baseline decode step. Passes over n tokens are shown in
    baseline decode steps, too: a round can pay if it accepts more tokens. Where drafting takes a fixed time per round,
    the column "proposal" shows it. With --isl and --osl, the time per output token (TPOT) of a server that keeps
    --batch such requests running is shown, too, without speculation.

    Example: specsim cost show edd-llama2-chat-7b-a6000

    Example: specsim cost show --gpu h100 --target llama-3.1-8b --drafter eagle --engine vllm --batch 64 --isl 1024
    --osl 512
    """
    from specsim.cost.files import read_cost

    model = read_cost(options.costs(options.file), batch=options.batch)
    contexts, sizes = _shown_range(model)
    contexts, sizes = options.contexts or contexts, options.tokens or sizes
    rows = []
    for context in contexts:
        baseline_s, proposal_s = float(model.autoregressive_step(context)), float(model.proposal_seconds(context))
        draft_s = float(model.draft(1, context)) - proposal_s
        verify_s = {size: float(model.verify(size, context)) for size in sizes}
        ratio = draft_s / baseline_s
        rows.append(CostsAt(context, baseline_s, proposal_s, draft_s, ratio, verify_s, model.round_overhead()))
    shown = ShownCosts(
        cost=options.file or options.gpu_text,
        batch=getattr(model, "batch", 1),
        rows=rows,
        notes=model.notes(max(sizes) - 1, (min(contexts), max(contexts))),
        tpot_s=_served(model, options),
        tpot_error=_tpot_error(model),
    )
    return Answer(asdict(shown), partial(_print_costs, shown))


@dataclass(frozen=True)
class CostsAt:
    """Seconds at so many cached tokens. step_ratio : s_d / s_t; verify_s : by the tokens of a target pass"""

    context: int
    autoregressive_s: float
    proposal_s: float
    draft_step_s: float
    step_ratio: float
    verify_s: dict[int, float]
    round_overhead_s: float


@dataclass(frozen=True)
class ShownCosts:
    """What `specsim cost show` prints."""

    cost: str
    batch: int
    rows: list[CostsAt]
    notes: list[str]
    tpot_s: float | None
    tpot_error: str


def _served(model: CostModel, options: ShowOptions) -> float | None:
    """Seconds per output token of the server that the options name."""
    from specsim.cost.roofline.serving import prompts_s

    if options.isl is None or options.osl is None:
        return None
    return model.round_seconds(0, options.isl + options.osl / 2) + prompts_s(model, options.isl, options.osl)


def _tpot_error(model: CostModel) -> str:
    """How far published times per output token of this class were off, for costs of an engine on a GPU."""
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.cost.roofline.published import error_note

    if not isinstance(model, RooflineCost) or not model.engine or model.covered is not None:
        return ""
    return error_note("TPOT", model.kind(drafts=False))


def _shown_range(model: CostModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contexts and pass sizes to show by default."""
    from specsim.cost.batch_profile import BatchProfileCost
    from specsim.cost.profile import ProfileCost

    sizes = (1, 2, 4, 8)
    if not isinstance(model, ProfileCost | BatchProfileCost):
        return (128, 1024), sizes
    most = len(model.verify_s) if isinstance(model, ProfileCost) else int(model.tokens[-1])
    return (int(model.contexts[0]), int(model.contexts[-1])), tuple(size for size in sizes if size <= most)


def _print_costs(shown: ShownCosts) -> None:
    rows = shown.rows
    proposes = any(row.proposal_s for row in rows)
    cells = [
        [
            f"{row.context}",
            f"{1e3 * row.autoregressive_s:.3f}",
            f"{1e3 * row.draft_step_s:.3f}",
            f"{row.step_ratio:.3f}",
            *([f"{1e3 * row.proposal_s:.3f}"] if proposes else []),
            f"{1e3 * row.round_overhead_s:.3f}",
            *(f"{1e3 * value:.3f} ({value / row.autoregressive_s:.2f})" for value in row.verify_s.values()),
        ]
        for row in rows
    ]
    passes = [f"pass of {size}" for size in rows[0].verify_s]
    proposal = ["proposal"] if proposes else []
    columns = ["context", "decode step, ms", "draft step", "s_d / s_t", *proposal, "overhead", *passes]
    title = f"{shown.cost}: milliseconds (passes also in baseline decode steps)"
    print_table("; ".join([title, *shown.notes]), columns, cells)
    if shown.tpot_s is not None:
        error = f" ({shown.tpot_error})" if shown.tpot_error else ""
        print(f"TPOT with {shown.batch} concurrent requests, without speculation: {1e3 * shown.tpot_s:.2f} ms{error}")


RESULT, PAGE = "comparison.json", "report.html"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SplitSettings):
    """Which pair is compared on which GPUs."""

    trace: Path = setting(..., "Trace folder, made by `realrun record` or `specsim example`.")
    target: str = setting(..., "Target: a public shape such as llama-3.1-8b, or a config.json.")
    drafter: str = setting(
        ...,
        "Drafter: a draft model, as --target; or eagle, eagle3, mtp, edd, vdm, space, prompt-lookup, block:LAYERS, "
        "eesd:LAYERS, self-sd:LAYERS, medusa:HEADS.",
    )
    gpus: str = setting("a100,h100,h200,l40s", "GPUs to compare, by name.")
    batch: tuple[int, ...] = setting((1,), "Batch sizes; a list such as 1,8.")
    weights: str | None = setting(None, WEIGHTS_HELP, metavar="FORMAT")
    cache: str | None = setting(None, CACHE_HELP, metavar="FORMAT")
    engine: str | None = setting(None, "Inference engine whose overhead counts: vllm, sglang, tensorrt-llm, ...")
    tp: int = setting(1, "GPUs that share every layer (tensor parallelism).", low=1)
    policy: list[str] = setting(TUNED, "Policy to tune, by name or FILE.py; repeat for more. The best counts.")
    out: Path | None = setting(None, f"Folder for {RESULT} and {PAGE} with figures.")


def compare(options: CompareOptions) -> Answer:
    """Compare predicted speedups on GPUs.

    Acceptance comes from the trace; times come from an uncalibrated roofline: shapes of both models against each GPU's
    datasheet. On each GPU every policy is tuned on one part of the sequences; the best is predicted on the held-out
    part, with its 95 % interval. s_d and s_t are the times of a draft step and of a baseline decode step. "Most
    sensitive to" is the roofline constant that changes the speedup most when it is 20 % smaller or larger; --out has
    all of them as tornado charts, and s_d / s_t over the context.

    Example: specsim cost compare --trace TRACE --target llama-3.1-8b --drafter eagle --weights int4
    """
    from specsim.compare.hardware import compare_devices
    from specsim.cost.roofline.formats import weights_text
    from specsim.io.files import working_in, write_json, write_text
    from specsim.learn.settings import SearchSettings
    from specsim.policy.registry import find_policies
    from specsim.trace.files import read_plain_trace

    kinds, out = find_policies(options.policy), options.out
    search, share = SearchSettings(trials=options.trials, seed=options.seed), options.tuning_share
    trace = read_plain_trace(options.trace)
    costs, skipped = _gpu_costs(options, trace)
    with nullcontext() if out is None else working_in(out, None):
        with progress_bar() as bar:
            comparison = compare_devices(trace, costs, kinds, search, tuning_share=share, progress=partial(bar, "GPUs"))
        names, weights = ("target", "drafter", "cache", "engine", "tp", "trials", "seed"), costs[0].target.weights
        described = {"trace": options.trace.name, **{name: getattr(options, name) for name in names}}
        described["weights"] = weights_text(weights or "bfloat16")
        document = {**comparison.as_dict(), "options": described, "skipped": skipped}
        if out is not None:
            from specsim.report.hardware import render_comparison

            write_json(document, out / RESULT)
            write_text(out / PAGE, render_comparison(document))

    def show() -> None:
        _print_comparison(comparison, options, weights_text(weights or "bfloat16"))
        for gpu in skipped:
            print(f"left out, {gpu['gpu']}: {gpu['reason']}")
        if out is not None:
            print(f"full report: {out / PAGE}")

    return Answer(document, show)


def _gpu_costs(options: CompareOptions, trace: Trace) -> tuple[list[RooflineCost], list[dict[str, str]]]:
    """Costs of every GPU at every batch size; GPUs that cannot run the pair over the trace's contexts, and why."""
    from specsim.cost.batches import BatchTokens
    from specsim.cost.calibrate import data_sheet_document
    from specsim.cost.files import read_cost
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.cost.roofline.hardware import find_hardware
    from specsim.cost.table import context_range

    costs, skipped = [], []
    pair = options.target, options.drafter, options.weights, options.tp, options.engine
    for gpu in (name.strip() for name in options.gpus.split(",")):
        find_hardware(gpu)
        for size in options.batch:
            try:
                cost = read_cost(data_sheet_document(gpu, *pair, cache=options.cache), batch=size)
                assert isinstance(cost, RooflineCost)
                cost.check_memory(BatchTokens.alike(size, 1, context_range(trace)[1]))
                costs.append(cost)
            except InputError as error:
                skipped.append({"gpu": gpu, "reason": str(error)})
    if not costs:
        raise InputError(skipped[0]["reason"])
    return costs, [reason for number, reason in enumerate(skipped) if reason not in skipped[:number]]


def _print_comparison(comparison: Comparison, options: CompareOptions, weights: str) -> None:
    from specsim.report.hardware import COLUMNS
    from specsim.report.table import as_text

    title = (
        f"{options.target} with {options.drafter}, weights {weights}: tuned on {comparison.tuning} sequences, "
        f"predicted on {comparison.holdout} held-out ones"
    )
    notes = dict.fromkeys(note for device in comparison.devices for note in device.prediction.cost_notes)
    print_table("; ".join([title, *notes]), *as_text(COLUMNS, [device.as_dict() for device in comparison.devices]))


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(GpuSettings):
    """Which costs are calibrated on what."""

    cost: str | None = argument(
        "Profile or roofline to calibrate: a cost file, or a name of `specsim cost list`. Leave it out with --gpu, "
        "--target and --drafter.",
        default=None,
    )
    measurement: str | None = argument(
        "What was measured: a probe for a profile, a profile for a roofline. Leave it out with --measured.",
        default=None,
    )
    measured: list[str] = setting(
        [],
        'Measured time per output token, as "batch=1 context=500 tpot_ms=7.07"; with speculation add k and acceptance, '
        'the output tokens of a round: "batch=1 context=500 k=3 acceptance=2.29 tpot_ms=4.29". Or a file: pass times '
        'such as {"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2}, the output of llama-batched-bench or '
        "llama-bench, llama-server's log, a table of a sweep. Repeat for more.",
        metavar="POINT|FILE",
    )
    out: Path = setting(doc="Costs to write, JSON.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.measured) == (self.measurement is not None):
            raise InputError("give what was measured: a profile or probe, or points by --measured")
        if self.measurement is not None and self.gpu is not None:
            raise InputError("costs are given twice, as a file and by --gpu; leave one out")

    @property
    def files(self) -> list[str]:
        """The files of --measured; InputError beside points."""
        files = [text for text in self.measured if "=" not in text or Path(text).is_file()]
        if files and len(files) < len(self.measured):
            raise InputError("--measured has files and points; give either")
        return files


def calibrate(options: CalibrateOptions) -> Answer:
    """Calibrate costs on a measurement.

    A profile is rescaled to the state of the machine that a probe of `realrun probe` found. A roofline is fitted to a
    profile, or to times per output token that an engine took: a time without speculation gives how much longer passes
    take than the roofline says, two of other batches or contexts also what a step takes beside them; a time with
    speculation gives what a round takes besides, two of other K also a draft step.

    Pass times that people have are costs of their own: files of --measured. What they do not tell, a decode step or a
    draft step, comes from the data sheet with --gpu, --target and --drafter. Measurements that contradict each other
    are named.

    Example: specsim cost calibrate --measured batched-bench.txt --measured server.log --out mine.json

    Example: specsim cost calibrate --gpu h100 --target llama-3.1-8b --drafter eagle --measured "batch=1 context=500
    tpot_ms=7.07" --measured "batch=1 context=500 k=3 acceptance=2.29 tpot_ms=4.29" --out vllm.json
    """
    from specsim.cost.calibrate import calibrated_document, document_on_points
    from specsim.cost.roofline.point_calibration import read_point
    from specsim.io.files import write_json

    claim_file(options.out, overwrite=options.overwrite)
    points = []
    if files := options.files:
        from specsim.engines.pass_times import read_pass_times

        times = read_pass_times(files)
        priced = options.cost is not None or options.roofline_document is not None
        if not (times.points and priced):
            return _of_pass_times(times, options, options.costs(options.cost) if priced else None)
        points = times.points
    if options.measured:
        points = points or [read_point(text) for text in options.measured]
        document, fitted = document_on_points(options.costs(options.cost), points)
        write_json(document, options.out)
        rows = [
            [str(point), f"{error:+.1f}", "-" if held is None else f"{held:+.1f}"]
            for point, error, held in zip(points, fitted.errors_percent, fitted.held_out_percent, strict=True)
        ]

        def show() -> None:
            print_table(
                f"{fitted.cost.subject}, calibrated on {len(points)} points: passes take {fitted.factor:.2f} times the "
                "data sheet's",
                ["measured", "error %", "error % if left out"],
                rows,
            )
            print_notes(fitted.contradictions)
            print(f"costs: {options.out}")

        return Answer(document, show)
    assert options.cost is not None and options.measurement is not None  # positional: no measurement without costs
    document = calibrated_document(options.cost, options.measurement)
    write_json(document, options.out)
    probed = document.get("probed")
    line = f"{options.cost}, calibrated on {options.measurement}: {options.out}"
    if probed:
        passes = ", ".join(f"{factor:.3f}" for factor in probed["passes"])
        line += f"; passes of 1 to {len(probed['passes'])} tokens x {passes}, draft steps x {probed['drafting']:.3f}"
    return Answer(document, lambda: print(line))


def _of_pass_times(times: PassTimes, options: CalibrateOptions, base: Any) -> Answer:
    """Write measured pass times down as costs; a roofline gives what they do not tell."""
    from specsim.cost.files import as_cost
    from specsim.cost.pass_times import pass_times_from_json
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.engines.pass_times import pass_times_document
    from specsim.io.files import write_json

    roofline = None if base is None else as_cost(base)
    if roofline is not None and not isinstance(roofline, RooflineCost):
        raise InputError(f"{options.cost} has no form roofline; pass times are costs of their own, or need a GPU's")
    document = pass_times_document(times, ", ".join(options.measured), roofline)
    model = pass_times_from_json(document, str(options.out))
    write_json(document, options.out)
    step_ms = document["pass_ms"]["1"]
    rows = [[size, f"{ms:.3f}", f"{ms / step_ms:.2f}"] for size, ms in document["pass_ms"].items()]

    def show() -> None:
        print_table(document["source"], ["tokens of a pass", "ms", "decode steps"], rows)
        print(f"drafting a token: {document['draft_ms']:.3f} ms")
        print_notes((*times.notes, *times.contradictions, *model.contradictions))
        print(f"costs: {options.out}")

    return Answer(document, show)


cost = typer.Typer(help="Show, calibrate and compare costs.", no_args_is_help=True)
command(cost, "list")(list_costs)
for _command in (show, compare, calibrate):
    command(cost)(_command)
