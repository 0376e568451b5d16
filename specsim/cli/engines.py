"""`specsim advise`, `explain`, `import`, `export`: from an engine's counts of drafts to its flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import check_new, parse_settings, print_notes, print_table
from specsim.cli.options import (
    COUNTS_CONTEXT,
    OVERWRITE_FILE_HELP,
    SET_HELP,
    CostSettings,
    CountsSettings,
    RequestSettings,
)
from specsim.engines.formats.reading import LEFT_OUT
from specsim.engines.formats.registry import UNTESTED, listed
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.cost.model import CostModel
    from specsim.engines.advise import Advice
    from specsim.engines.formats.records import ImportedRecords
    from specsim.engines.import_records import Reading
    from specsim.engines.self_sizing import SelfSizing


FAR_SLOWER = 10.0  # times; a server that waits for requests is slower than predicted, too, but not by as much


@dataclass(frozen=True, kw_only=True)
class AdviseCosts(CostSettings):
    """Costs, and the engine whose flags are printed."""

    engine: str | None = setting(
        None,
        "Engine whose flags to print: vllm, sglang, llamacpp, tensorrt-llm or transformers. Its overhead is part of "
        "costs on a GPU.",
    )
    engine_alone = True
    names_later = True

    def of_reading(self, reading: Reading) -> tuple[AdviseCosts, list[str]]:
        """Complete these costs with the models, formats, engine and load that a file tells; return notes, too."""
        setup = reading.setup
        if self.gpu is None and self.cost is None:
            missing = [flag for flag, name in (("--target", setup.model), ("--drafter", setup.kind)) if not name]
            raise InputError(
                f"{reading}; which GPU is it? Add --gpu, such as --gpu h100"
                f"{''.join(f' {flag} ...' for flag in missing)}, or measured costs with --cost; `specsim cost list` "
                "names those that ship"
            )
        costs, notes = self.named_by(setup)
        if self.engine is None and (engine := reading.engine):
            costs = costs.if_read(engine=engine)[0]
        if self.batch is not None or not setup.running:
            return costs, notes
        batch = max(1, round(setup.running))
        loaded, error = costs.if_read(batch=batch)
        if not error:
            return loaded, notes
        notes.append(f"the file tells of {batch} requests at once, but this is for {costs.batch or 1}: {error}")
        return costs, notes

    def if_read(self, **changes: Any) -> tuple[AdviseCosts, str]:
        """Return these costs with changes and "", or, if there are no such costs, unchanged and the error."""
        changed = replace(self, **changes)
        try:
            changed.read()
        except InputError as error:
            return self, str(error)
        return changed, ""


def advise(options: CountsSettings, costs: AdviseCosts, requests: RequestSettings) -> Answer:
    """Recommend a draft length K from counters.

    For every K up to the longest draft counted: tokens per step, the speedup over decoding without speculation with
    a 95 % interval of counts and costs, and how likely it is the best, or within 1 % of the best. Where they do not
    decide, the output says what to measure. The last lines are the answer and the server's command. Lines before them
    name signs of a fault, each with what to check, and say whether vLLM's adaptive verification, or a K by batch size,
    is faster. With --isl and --osl, the speedup is that of the time per output token
    on a server with --batch such requests, whose prompts are read in the same steps.

    Example: specsim advise counters.json --cost vllm-llama3.1-8b-eagle-h100 --engine vllm

    Example: specsim advise vllm.log --gpu h100 --target llama-3.1-8b --drafter eagle3 --engine vllm
    """
    from specsim.cost.files import as_cost
    from specsim.cost.linear import LinearCost
    from specsim.engines.advise import advise as find_advice
    from specsim.engines.advise import drafter_kind
    from specsim.engines.flags import NAMES, draft_length_flags, kind_of
    from specsim.engines.import_records import BY_AVERAGE
    from specsim.report.advice import KIND, VERSION

    reading = options.read()
    costs, load = costs.of_reading(reading)
    context = options.context or reading.setup.context or COUNTS_CONTEXT
    engine = costs.engine and costs.engine.partition("@")[0]
    try:
        cost = as_cost(costs.read())
    except InputError as error:
        beside = [note for note in reading.notes if note.startswith(LEFT_OUT)]
        raise InputError("; ".join((str(error), *beside))) from None
    kind = drafter_kind(cost)
    if isinstance(cost, LinearCost) and engine in NAMES and kind and kind_of(kind) not in NAMES[engine]:
        kind = None  # costs of another engine, whose drafter this one lacks
    if engine is not None:
        draft_length_flags(engine, 1, kind)  # rejects what has no flags before any work
    advice = find_advice(
        reading.source,
        cost,
        context=context,
        seed=options.seed,
        isl=requests.isl,
        osl=requests.osl,
    )
    flags = None if engine is None or advice.k is None else advice.flags(engine, kind)
    commands, without = _server_commands(advice, costs, cost, kind, reading)
    load += [*without, *_slow_server(advice, cost, reading, context)]
    by_position = BY_AVERAGE not in reading.notes
    sizing, line = _self_sizing(advice, cost, costs, context) if by_position else (None, None)

    def show() -> None:
        print(reading)
        _print_lengths(advice)
        print_notes((*reading.notes, *load, *advice.notes, *map(str, advice.signatures)))
        if line is not None:
            print(line)
        print(advice)
        if len(commands) > 1:
            print(f"the two servers to measure, K = 0 and K = {advice.candidate}:")
        for command in commands:
            print(command)

    about = {
        "kind": KIND,
        "version": VERSION,
        "asked": {**_asked_as_dict(options, costs, requests), "context": context},
    }
    printed = {"flags": flags, "commands": commands, "read_as": reading.as_dict()}
    printed |= {"self_sizing": sizing and sizing._asdict()}
    return Answer({**about, **advice.as_dict(), **printed}, show)


def _slow_server(advice: Advice, cost: CostModel, reading: Reading, context: int) -> list[str]:
    """Note a throughput that is far below the predicted one at the file's load."""
    from specsim.cost.files import with_batch

    setup = reading.setup
    k = setup.draft_tokens or 0
    if setup.tokens_per_s is None or setup.running is None or not 0 < k < len(advice.lengths):
        return []
    batch = max(1, round(setup.running))
    try:
        step_s = float(with_batch(cost, batch).round_seconds(k, context))
    except InputError:  # of costs for other batches
        return []
    predicted = batch * advice.lengths[k].tokens_per_round / step_s
    if setup.tokens_per_s * FAR_SLOWER > predicted:
        return []
    return [
        f"the server is far slower than these costs: {setup.tokens_per_s:,.3g} tok/s, predicted {predicted:,.3g} at "
        f"K = {k}; check --context ({context:,}), weights or caches in the CPU's memory, and other load on the GPU"
    ]


def _asked_as_dict(options: CountsSettings, costs: AdviseCosts, requests: RequestSettings) -> dict[str, Any]:
    """What was asked, as the document states it."""
    of_costs = ("gpu", "target", "drafter", "weights", "dtype", "cache", "tp", "engine", "batch")
    of_gpu = {name: getattr(costs, name) for name in of_costs}
    asked = {
        "source": options.source,
        "accept_length": options.accept_length,
        "k": options.k,
        "cost": costs.cost and str(costs.cost),
        **of_gpu,
    }
    return {**asked, "policy": options.policy, **vars(requests)}


def _server_commands(
    advice: Advice, costs: AdviseCosts, cost: CostModel, kind: str | None, reading: Reading
) -> tuple[list[str], list[str]]:
    """The server's command with the user's own ids, and what it does not set, in words.

    Where nothing is decided, the commands of the two servers to measure.
    """
    from specsim.cost.roofline.architecture import find_model
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.engines.flags import PLACEHOLDER, kind_of, server_command, without_option

    engine, setup = (costs.engine or reading.engine or "").partition("@")[0], reading.setup
    if not engine or advice.upper_bound or any(sign.in_time for sign in advice.signatures):
        return [], []
    kind, target = kind or setup.kind or None, costs.target or setup.model
    shapes = [model and model.shape for model in map(find_model, (target, setup.model))]
    same = target == setup.model or (bool(shapes[0]) and shapes[0] == shapes[1])
    if same and not _served(target):
        target = setup.model
    # The log's drafter belongs to the log's target, and is of the log's kind.
    own = same and kind_of(kind or "") == kind_of(setup.kind) and costs.drafter in (None, setup.kind)
    drafter = setup.drafter if own else costs.drafter or ""
    # Of a name of a shape, such as llama-3.1-8b, there is nothing to load.
    shape = f"<{drafter}>" if drafter and kind == "model" else PLACEHOLDER
    options: dict[str, Any] = {}
    if isinstance(cost, RooflineCost):
        passes, weights = cost.target, cost.target.weights
        if weights == passes.dtype or (costs.gpu and (costs.weights is None or weights == _stored(target))):
            weights = None
        cache = passes.cache if passes.cache != passes.dtype else None
        options = {"tensor_parallel": passes.tensor_parallel, "weights": weights, "cache": cache, "dtype": passes.dtype}
    target = _served(target) or f"<{target or 'target'}>"
    lengths = (0, advice.candidate) if advice.k is None else (advice.k,)
    commands = [
        server_command(engine, k, target=target, drafter=kind, model=_served(drafter) or shape, **options)
        for k in lengths
    ]
    return commands, without_option(engine, target, options.get("weights"), options.get("cache")) if options else []


def _self_sizing(
    advice: Advice, cost: CostModel, costs: AdviseCosts, context: int
) -> tuple[SelfSizing | None, str | None]:
    """Advise on adaptive verification or a K by batch size: vLLM's gain, and the line to print."""
    import numpy as np

    from specsim.engines.advise import drafter_kind
    from specsim.engines.self_sizing import adaptive_verification, schedule_line

    kind = drafter_kind(cost)
    engine, _, month = (costs.engine or "").partition("@")
    if advice.k is None or kind is None or engine not in ("vllm", "sglang", "tensorrt-llm"):
        return None, None
    if engine != "vllm":
        return None, schedule_line(engine, advice.by_load, kind)
    if month:  # an older release, without adaptive verification
        return None, None
    survival = np.diff([length.tokens_per_round for length in advice.lengths]).tolist()
    sizing = adaptive_verification(survival, cost, costs.batch or 1, context, kind)
    return sizing, None if sizing is None else sizing.text(kind)


def _stored(target: str) -> str | dict[str, str] | None:
    """Format in which a checkpoint stores its weights, as far as its name or its config.json tells."""
    from specsim.cost.roofline.formats import stored_weights

    try:
        stored = stored_weights(target)
    except InputError:  # it tells none, or one that is not known
        return None
    return stored and stored.weights


def _served(name: str) -> str | None:
    """Hub id or path that an engine can load; the folder of a config.json. None for a name such as llama-3.1-8b."""
    path = Path(name)
    if path.suffix == ".json":
        return str(path.parent) if path.name == "config.json" and path.parent.name else None
    return name if name and ("/" in name or name.endswith(".gguf") or path.exists()) else None


def _print_lengths(advice: Advice) -> None:
    from specsim.engines.advise import NEAR_PERCENT

    rows = [
        [
            str(length.k),
            f"{length.tokens_per_round:.2f}",
            advice.shown(length),
            f"{100 * length.best:.0f} %",
            f"{100 * length.near:.0f} %",
        ]
        for length in advice.lengths
    ]
    speedup = "speedup [95 %]" if advice.error_known else "speedup, error unknown"
    columns = ["K", "tokens per step", speedup, "best", f"within {NEAR_PERCENT:g} %"]
    if advice.upper_bound:
        rows = [
            [row[0], row[1], f"{float(length.speedup):.2f}"] for row, length in zip(rows, advice.lengths, strict=True)
        ]
        print_table("if every step drafted", ["K", "tokens per step, at most", "speedup, at most"], rows)
        return
    title = f"speedup by draft length; how likely a K is the best, or within {NEAR_PERCENT:g} % of the best"
    print_table(title, columns, rows)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Settings):
    """The number to explain, and the engine."""

    quantity: str = argument("acceptance-length, acceptance-rate, position-rate, tpot, rounds, or accept.")
    engine: str | None = setting(None, "Only this engine, beside specsim's own definition (default: all).")


def explain(options: ExplainOptions) -> Answer:
    """Explain an engine's acceptance numbers.

    Shows what an engine means by its acceptance length or rate, or by its time per output token (TPOT), how it runs and
    counts rounds, or which drafts it accepts at a temperature.

    Example: specsim explain acceptance-rate --engine sglang
    """
    from specsim.engines.definitions import find_definitions

    if options.quantity == "rounds":
        return _explain_rounds(options.engine)
    if options.quantity == "accept":
        return _explain_accept(options.engine)
    definitions = find_definitions(options.quantity, options.engine)
    if options.engine is not None and definitions[0].engine != "specsim":
        definitions = [*find_definitions(options.quantity, "specsim"), *definitions]
    rows = [[each.engine, each.printed, each.formula, each.note] for each in definitions]
    lines = [dict(zip(("engine", "printed", "formula", "note"), row, strict=True)) for row in rows]
    show = partial(print_table, options.quantity, ["engine", "printed as", "is", "but"], rows, labels=4)
    return Answer({options.quantity: lines}, show)


def _explain_rounds(engine: str | None) -> Answer:
    from specsim.engines.conventions import CONVENTIONS, find_conventions

    conventions = [*CONVENTIONS.values()] if engine is None else [find_conventions(engine)]
    rows = [
        [
            f"{each.engine} {each.version}",
            f"the {each.first_token}",
            each.last_draft
            + (f"; lookup: {each.lookup_last_draft}" if each.lookup_last_draft else "")
            + ("; lookup pads to K" if each.pads_lookup else ""),
            *("yes" if fact else "no" for fact in (each.counts_past_end, each.counts_empty, each.drafts_ahead)),
            f"{'goes on' if each.drafts_past_end else 'ends'}; accepted: {each.accepts_end}",
            *([each.source] if engine else []),
        ]
        for each in conventions
    ]
    columns = ["engine", "first token from", "longest last draft", "counts tokens past the end"]
    columns += ["counts rounds without a draft", "drafts in the previous step", "a draft after an end of text"]
    columns += ["source"] if engine else []
    show = partial(print_table, "How engines run and count rounds", columns, rows, labels=len(columns))
    return Answer({"rounds": [asdict(each) for each in conventions]}, show)


def _explain_accept(engine: str | None) -> Answer:
    from specsim.engines.acceptance_rules import RULES, find_rule
    from specsim.io.names import find_name

    named = {row.name: row.name.partition("-")[0] for row in RULES.values()}
    if engine is not None:
        engine = find_name("engine", engine, [*RULES, *named.values()]) or find_rule(engine)  # which names the choices
    shown = [row for row in RULES.values() if engine in (None, row.name, named[row.name])]
    rows = [
        [row.name, row.version, row.setting or "default", row.rule or f"none: {row.reason}", row.source]
        for row in shown
    ]
    columns = ["engine", "version", "setting", "accepts by", "source"]
    show = partial(print_table, "Which drafts engines accept at a temperature", columns, rows, labels=5)
    return Answer({"accept": [asdict(row) for row in shown]}, show)


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Settings):
    """Which files are read, and what is written."""

    kind: str = argument("What the files are, of the kinds above; left out, the first file tells it.")
    files: list[Path] = argument("Files of this kind, in order.", default=[])
    out: Path | None = setting(
        None,
        "Where to write what the table says the files hold: a trace folder, rounds as .parquet, counters as .json; "
        "rounds also as AIPerf's records, .jsonl. Default: print the table only.",
    )
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def import_(options: ImportOptions) -> Answer:
    from specsim.engines.formats.registry import FORMATS, read_any
    from specsim.engines.import_records import import_records

    kind, files, out = options.kind, options.files, options.out
    if out is not None:
        check_new(out, overwrite=options.overwrite)
    if kind not in FORMATS and (not files or Path(kind).exists()):
        files = [Path(kind), *files]
        kind, imported = read_any(files)
    else:
        imported = import_records(kind, files)
    if out is not None:
        imported.write(out, overwrite=options.overwrite)
    document = {"kind": kind, "holds": imported.holds, "out": None if out is None else str(out), **imported.as_dict()}

    def show() -> None:
        title = f"{', '.join(map(str, files))}, read as {kind}: {imported}"
        print_table(title, ["", "value"], list(_sizes(document)))
        rows = [
            [line["quantity"], line["engine"], line["printed"], _text(line["value"]), line["formula"]]
            for line in document["printed"]
        ]
        if rows:
            print_table("acceptance", ["quantity", "by", "printed as", "value", "is"], rows, labels=3)
        print_notes(imported.notes)
        for line in _next_commands(imported, kind, out):
            print(line)

    return Answer(document, show)


def _next_commands(imported: ImportedRecords, kind: str, out: Path | None) -> list[str]:
    """What a user may run next."""
    if imported.source is None:
        return [f"next: these files hold no acceptance by position; {imported.instead}"]
    if out is None:
        return [f"next: specsim import {kind} ... --out {_SUGGESTED[imported.holds]}"]
    if out.suffix == ".jsonl":
        return [f"next: specsim import aiperf {out} --out rounds.parquet"]
    if imported.holds == "dense trace":
        return [f"next: specsim leaderboard {out} --cost COST"]
    return [
        f"next: specsim acceptance fit {out} --model per_position --out model.json, or",
        f"      specsim advise {out} --cost COST",
    ]


import_.__doc__ = f"""Import an engine's logs or exported records.

\b
{listed()}

* {UNTESTED}: compare its numbers with the engine's own.

The table shows the engine's numbers beside specsim's; missing fields are reported, or the file is rejected. Of two
scrapes the difference is counted.

Example: specsim import llamacpp-log server.log --out rounds.parquet
"""


_SUGGESTED = {"dense trace": "trace", "rounds": "rounds.parquet", "counters": "counters.json"}


def _sizes(document: dict[str, Any]) -> Iterator[list[str]]:
    for name in ("requests", "rounds", "drafted", "accepted", "output_tokens"):
        yield [name.replace("_", " "), "not reported" if document[name] is None else f"{document[name]:,}"]
    if document["plain_steps"]:
        yield ["steps without a draft", f"{document['plain_steps']:,}"]
    setup = document["setup"]
    yield from ([name.replace("_", " "), f"{value}"] for name, value in setup.items() if value)
    for name, value in document["averages"].items():
        yield [name, f"{value:.4g}"]
    for reason, number in document["skipped"].items():
        yield [f"skipped: {reason}", f"{number:,}"]


def _text(value: Any) -> str:
    return ", ".join(f"{number:.3f}" for number in value) if isinstance(value, list) else f"{value:.3f}"


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Settings):
    """Settings of the engine's flags, as `export_flags` takes them."""

    engine: str = argument("vllm, sglang, llamacpp, tensorrt-llm or transformers.")
    k: int | None = setting(None, "Draft tokens per round; 0: no speculation.", low=0, high=255)
    schedule: str | None = setting(None, "K by batch size instead of --k, such as 1:5,4:3,16:0.", metavar="BATCH:K,...")
    drafter: str | None = setting(
        None, "Kind of drafter, with --k or --schedule: eagle, eagle3, mtp, medusa, model, ... (default: eagle)."
    )
    model: str | None = setting(None, "Folder or hub id of the drafter (vllm, sglang, tensorrt-llm).")
    policy: str | None = setting(None, "In place of --k: fixed_k, llama_cpp (llamacpp) or a tree of eagle2 (sglang).")
    set_: list[str] = setting([], SET_HELP, metavar="NAME=VALUE")
    largest_batch: int = setting(512, "Largest batch size of a schedule (vLLM).", low=1, high=4096)
    p_min: float | None = setting(
        None, "With --k: end drafts before a less probable token (llamacpp, transformers).", low=0, high=1
    )
    min_ngram: int | None = setting(None, "With --k: use prompt lookup, by n-grams of at least N tokens (vllm).", low=1)
    max_ngram: int | None = setting(
        None,
        "With --k: the longest n-grams to look up (vllm, transformers). Default: the engine's.",
        low=1,
    )
    acceptance: Path | None = setting(
        None,
        "With --k: make the engine accept as often as this source, without a trained drafter. A file written by "
        "`specsim import` (vllm, sglang, llamacpp, tensorrt-llm).",
    )


@dataclass(frozen=True, kw_only=True)
class ExportFile(Settings):
    """Where the engine's file is written."""

    out: Path | None = setting(None, "Where to write the engine's config file.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def export(options: EngineOptions, file: ExportFile) -> Answer:
    """Print engine flags, write its config file.

    Example: specsim export vllm --schedule 1:5,4:3,16:0 --drafter eagle3 --model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    """
    from specsim.engines.export import export_flags
    from specsim.engines.flags import CONFIG_KEY
    from specsim.io.files import write_text
    from specsim.policy.registry import make_policy

    if file.out is not None:
        check_new(file.out, overwrite=file.overwrite)
    given = dict(vars(options))
    settings = parse_settings(given.pop("set_"))
    if options.policy is not None:
        given["policy"] = make_policy(options.policy, settings)
    elif settings:
        raise InputError("--set belongs to --policy; give both")
    exported = export_flags(**given, path=None if file.out is None else str(file.out))
    flags, text = exported.flags, exported.file
    if file.out is not None:
        if text is None and flags.startswith(CONFIG_KEY) and flags.endswith("}"):  # trtllm-serve reads it from a file
            flags, text = f"--config {file.out}", flags
        if text is None:
            raise InputError(f"{options.engine} needs no file for {exported.flags}; leave --out out")
        write_text(file.out, text + "\n")

    def show() -> None:
        print(flags)
        if exported.file is not None and file.out is None:
            print(f"{exported.path}: {exported.file}")

    return Answer({"engine": options.engine, "flags": flags, "file": text}, show)
