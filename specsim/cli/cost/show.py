"""`specsim cost list` and `specsim cost show`: costs in files and under names that ship."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.cli.options import GpuSettings, RequestSettings
from specsim.io.settings import argument, setting

if TYPE_CHECKING:
    from specsim.cost.model import CostModel


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
    rows: list[dict[str, Any]] = []
    for context in contexts:
        baseline_s, proposal_s = float(model.autoregressive_step(context)), float(model.proposal_seconds(context))
        draft_s = float(model.draft(1, context)) - proposal_s
        rows.append(
            {
                "context": context,
                "autoregressive_s": baseline_s,
                "proposal_s": proposal_s,
                "draft_step_s": draft_s,
                "step_ratio": draft_s / baseline_s,
                "verify_s": {size: float(model.verify(size, context)) for size in sizes},
                "round_overhead_s": model.round_overhead(),
            }
        )
    notes = model.notes(max(sizes) - 1, (min(contexts), max(contexts)))
    name = options.file or options.gpu_text
    document = {
        "cost": name,
        "batch": getattr(model, "batch", 1),
        "rows": rows,
        "notes": notes,
        "tpot_s": _served(model, options),
        "tpot_error": _tpot_error(model),
    }
    return Answer(document, partial(_print_costs, document))


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
    return error_note("TPOT", experts=model.target.model.experts is not None, batch=model.batch)


def _shown_range(model: CostModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contexts and pass sizes to show by default."""
    from specsim.cost.batch_profile import BatchProfileCost
    from specsim.cost.profile import ProfileCost

    sizes = (1, 2, 4, 8)
    if not isinstance(model, ProfileCost | BatchProfileCost):
        return (128, 1024), sizes
    most = len(model.verify_s) if isinstance(model, ProfileCost) else int(model.tokens[-1])
    return (int(model.contexts[0]), int(model.contexts[-1])), tuple(size for size in sizes if size <= most)


def _print_costs(document: dict[str, Any]) -> None:
    rows = document["rows"]
    proposes = any(row["proposal_s"] for row in rows)
    cells = [
        [
            f"{row['context']}",
            *(f"{1e3 * row[key]:.3f}" for key in ("autoregressive_s", "draft_step_s")),
            f"{row['step_ratio']:.3f}",
            *([f"{1e3 * row['proposal_s']:.3f}"] if proposes else []),
            f"{1e3 * row['round_overhead_s']:.3f}",
            *(f"{1e3 * value:.3f} ({value / row['autoregressive_s']:.2f})" for value in row["verify_s"].values()),
        ]
        for row in rows
    ]
    passes = [f"pass of {size}" for size in rows[0]["verify_s"]]
    proposal = ["proposal"] if proposes else []
    columns = ["context", "decode step, ms", "draft step", "s_d / s_t", *proposal, "overhead", *passes]
    title = f"{document['cost']}: milliseconds (passes also in baseline decode steps)"
    print_table("; ".join([title, *document["notes"]]), columns, cells)
    if document["tpot_s"] is not None:
        print(
            f"TPOT with {document['batch']} concurrent requests, without speculation: {1e3 * document['tpot_s']:.2f} ms"
            + (f" ({document['tpot_error']})" if document["tpot_error"] else "")
        )
