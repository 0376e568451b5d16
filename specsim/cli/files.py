"""`specsim example`, `info`, `policies`, `join`, `record-text`, `report`: traces, policies and result files."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_facts, print_table, progress_bar
from specsim.cli.options import OVERWRITE_FILE_HELP, POLICY_FILE_HELP, TraceSettings
from specsim.io.errors import InputError
from specsim.io.examples import SUFFIXES, Kind, example_files
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.lookup.ngram import NgramRule
    from specsim.lookup.suffix import SuffixRule
    from specsim.trace.trace import Trace


TRACE, COST = "example:lab-model", "example:lab-deep-model"  # the examples that are written


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(Settings):
    """Where the example is written."""

    out: Path = argument("Folder to write; it must not exist yet.", default=Path("example"))
    list_: bool = setting(False, "List the examples instead: size, content, source.", flag="--list")


def example(options: ExampleOptions) -> Answer:
    """Write example files, or list all examples.

    Writes a trace and a profile, which need no model. All commands that take a trace or costs accept the examples'
    names, too. The trace is of the lab's pair with a 40-layer target at temperature 0.8; the profile is of one CPU
    thread.

    Example: specsim leaderboard example:lab-eagle --cost example:llama-3.1-8b-eagle-h100
    """
    from specsim.io.errors import InputError
    from specsim.io.files import replacing_folder
    from specsim.trace.files import read_trace, write_trace

    if options.list_:
        return _list_examples()
    if options.out.exists():
        raise InputError(f"{options.out} exists; choose another name")
    with replacing_folder(options.out) as work:
        write_trace(read_trace(TRACE), work / "trace")
        (work / "profile.json").write_bytes(example_files("cost")[COST].read_bytes())
    trace, profile = options.out / "trace", options.out / "profile.json"
    show = partial(print, f"try: specsim leaderboard {trace} --cost {profile}")
    return Answer({"trace": str(trace), "profile": str(profile)}, show)


def _list_examples() -> Answer:
    """All examples: name, kind, size, content and source."""
    rows: list[dict[str, Any]] = []
    for kind in SUFFIXES:
        for name, path in example_files(kind).items():
            holds, source = _example_facts(kind, path)
            rows.append({"name": name, "kind": kind, "bytes": path.stat().st_size, "holds": holds, "source": source})
    cells = [[row["name"], row["kind"], f"{row['bytes'] / 1e3:.1f}", row["holds"], row["source"]] for row in rows]
    show = partial(print_table, "examples that ship", ["name", "kind", "kB", "holds", "source"], cells)
    return Answer({"examples": rows}, show)


def _example_facts(kind: Kind, path: Path) -> tuple[str, str]:
    """Describe a file's content and source, as recorded in the file."""
    if kind == "trace":
        from specsim.trace.files import read_trace

        trace = read_trace(path)
        return _trace_text(trace), _provenance_text("realrun record", trace.meta["provenance"])
    from specsim.cost.files import read_cost_document

    cost = read_cost_document(path)
    if "provenance" in cost:
        contexts = f"contexts of {cost['contexts'][0]} to {cost['contexts'][-1]} tokens"
        return f"{cost['target']} with {cost['drafter']}, {contexts}", _provenance_text(
            "realrun profile", cost["provenance"]
        )
    return f"{cost['target']} with {cost['drafter']} on {cost['hardware']}", f"{cost['source']}, {cost['date']}"


def _trace_text(trace: Trace) -> str:
    from specsim.report.page import decoding_text

    meta = trace.meta
    trees = "" if trace.tree is None else f", trees of {trace.tree.nodes} nodes"
    return (
        f"{meta['target']} with {meta['drafter']}, {decoding_text(meta['decoding'])}; {trace.sequences} sequences, "
        f"{len(trace.token):,} tokens, drafts of {trace.depth}{trees}"
    )


def _provenance_text(command: str, provenance: dict[str, Any]) -> str:
    return f"{command} on {provenance['device']}, {provenance['threads']} thread, {provenance['date'][:10]}"


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(Settings):
    """Which policies are listed beside the built-in ones."""

    policy_file: list[str] = setting([], POLICY_FILE_HELP, metavar="FILE.py")


def policies(options: PoliciesOptions) -> Answer:
    """List policies and their settings.

    Commands that take a policy accept these names, and your own FILE.py.
    """
    from specsim.policy.registry import NAMED, find_policies

    kinds = find_policies([*NAMED, *options.policy_file])
    document = {
        name: {
            "source": kind.source,
            "settings": {field.name: _setting_facts(field) for field in dataclasses.fields(kind)},
        }
        for name, kind in kinds.items()
    }

    def show() -> None:
        for name, kind in kinds.items():
            rows = [setting_texts(field) for field in dataclasses.fields(kind)]
            print_table(f"{name}: {kind.source}", ["setting", "default", "legal", "search", "meaning"], rows)

    return Answer(document, show)


def _setting_facts(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """A setting's default, ranges and help; what it bounds is for those who cut it to a trace."""
    return {"default": field.default, **{key: value for key, value in field.metadata.items() if key != "bounds"}}


def setting_texts(field: dataclasses.Field[Any]) -> list[str]:
    """A setting's line in `policies`: name, default, legal values, search range, meaning."""
    meta, default = field.metadata, field.default
    low, high = f"{meta['low']:g}", f"{meta['high']:g}"
    shown, legal = str(default), f"{low} to {high}"
    searched = (
        f"{meta['tune'][0]:g} to {meta['tune'][1]:g}{', log' if meta['log'] else ''}" if meta["tune"] else "fixed"
    )
    if isinstance(default, (bool, str)):
        choices = meta["choices"] or ("true", "false")
        shown, legal, searched = str(default).lower(), ", ".join(choices), "all" if meta["tune"] else "fixed"
    elif isinstance(default, tuple):
        shown = ",".join(f"{number:g}" for number in default) if len(default) <= 4 else f"{len(default)} numbers"
        legal, searched = f"numbers, {low} to {high}", "learned" if not meta["tune"] else searched
    return [field.name, shown, legal, searched, meta["doc"]]


def info(options: TraceSettings) -> Answer:
    """Show what a trace holds.

    Shows the pair, decoding, sizes, agreement and repetition.
    """
    import numpy as np

    from specsim.trace.accepted import rule_of

    trace = options.read(options.trace)
    rule = rule_of(trace)
    document = {
        **{key: value for key, value in trace.meta.items() if key not in ("checksums", "provenance")},
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "domains": {str(domain): int((trace.domain == domain).sum()) for domain in np.unique(trace.domain)},
        "mean_match_len": float(trace.match_len.mean()),
        **({"accepted_by": rule} if rule else {}),
    }
    return Answer(document, partial(print_facts, f"trace {options.trace}", document))


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Settings):
    """Which results are shown, and where."""

    files: list[Path] = argument("Results as JSON, or output folders of runs.", metavar="FILE...")
    out: Path = setting(Path("report.html"), "The page to write.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def report(options: ReportOptions) -> Answer:
    """Show results as one HTML page.

    Takes advice, validations, leaderboards, tunings, claims, batches and hardware comparisons. Each begins with its
    verdict. The page is one file that needs no network: click a column to sort a table, hover a figure to see values.

    Example: specsim advise vllm.log --gpu h100 --target llama-3.1-8b --drafter eagle3 --json > advice.json; specsim
    report advice.json

    Example: specsim tune TRACE --policy adaedl --cost COST --json > tuned.json; specsim report tuned.json validation/
    """
    from specsim.io.files import write_text
    from specsim.report.files import render_files

    files, out = options.files, options.out
    claim_file(out, overwrite=options.overwrite)
    write_text(out, render_files(files))
    show = partial(print, f"{out}: {len(files)} {'result' if len(files) == 1 else 'results'}")
    return Answer({"report": str(out), "results": [str(path) for path in files]}, show)


COST_FILE = "cost.json"


@dataclass(frozen=True, kw_only=True)
class JoinOptions(Settings):
    """Which traces are joined."""

    traces: list[Path] = argument("Two or three trace folders, in the order of the drafters.")
    out: Path = setting(..., "Trace folder to write.")
    cost: list[str] = setting(
        [],
        f"Cost file of a drafter; repeat: one per trace, in order. They are joined into OUT/{COST_FILE}.",
        metavar="FILE",
    )
    overwrite: bool = setting(False, "Replace an existing trace.", flag="--overwrite")


def join(options: JoinOptions) -> Answer:
    """Join traces of several drafters.

    On a joined trace, policies choose the drafter of every round. Outputs are the target's, whichever drafter was
    recorded with them, so that rounds of several drafters replay exactly on one output.
    Traces that differ in target, decoding, prompts, outputs or end-of-text tokens are rejected with the first
    difference. Chains only: recorded trees are left out. Put lookups first: switch_match drafts with the first drafter
    that is sure enough before it drafts, else with the last.

    Example: realrun record lookup/ --drafter prompt-lookup && realrun record eagle/ --drafter eagle
    && realrun profile lookup.json --for lookup/ --drafter prompt-lookup
    && realrun profile eagle.json --for eagle/ --drafter eagle
    && specsim join lookup/ eagle/ --cost lookup.json --cost eagle.json --out both/
    && specsim tune both/ --policy switch_match --cost both/cost.json
    """
    from specsim.cost.files import cost_path, read_cost, read_cost_document
    from specsim.cost.joined import joined_document
    from specsim.io.files import write_json
    from specsim.trace.files import check_free, read_trace, write_trace
    from specsim.trace.joined import join_traces

    traces, cost, out, overwrite = options.traces, options.cost, options.out, options.overwrite
    check_free(out, overwrite=overwrite)
    if len({*traces}) < len(traces):
        raise InputError("a trace is named twice; give each drafter's trace once")
    if cost and len(cost) != len(traces):
        raise InputError(f"{len(cost)} cost files for {len(traces)} traces; give a --cost for each, in their order")
    recorded = {str(path): read_trace(path) for path in traces}
    joined = join_traces(recorded)
    for path in cost:
        read_cost(path)  # rejects a bad cost file before writing
    write_trace(joined, out, overwrite=overwrite)
    if cost:
        write_json(joined_document([read_cost_document(cost_path(path)) for path in cost]), out / COST_FILE)
    trees = [name for name, trace in recorded.items() if trace.tree is not None]
    drafters: list[dict[str, Any]] = [
        {"trace": name, "drafter": part.meta["drafter"], "mean_match_len": float(part.match_len.mean())}
        for name, part in zip(recorded, joined.parts, strict=True)
    ]
    document = {
        "trace": str(out),
        "cost": str(out / COST_FILE) if cost else None,
        "depth": joined.depth,
        "sequences": joined.sequences,
        "output_tokens": int(joined.output_tokens.sum()),
        "drafters": drafters,
        "mean_longest_match": float(joined.columns.match_len.max(axis=0).mean()),
        "without_trees": trees,
    }
    return Answer(document, partial(_print_joined, document))


def _print_joined(document: dict[str, Any]) -> None:
    drafters = enumerate(document["drafters"], start=1)
    rows = [[str(n), str(part["drafter"]), f"{part['mean_match_len']:.3f}"] for n, part in drafters]
    rows.append(["", "the longest of them", f"{document['mean_longest_match']:.3f}"])
    size = f"{document['sequences']} sequences, {document['output_tokens']:,} output tokens, depth {document['depth']}"
    print_table(f"trace {document['trace']}: {size}", ["", "drafter", "mean longest accepted prefix"], rows)
    if document["without_trees"]:
        traces = ", ".join(document["without_trees"])
        print(f"recorded trees are left out, since switching policies draft chains: {traces}")


@dataclass(frozen=True, kw_only=True)
class RuleSettings(Settings):
    """Settings of prompt lookup, then those of suffix decoding; None: the rule's own."""

    min_ngram: int | None = setting(None, "Shortest n-gram to look up, in tokens.", low=1)
    max_ngram: int | None = setting(None, "Longest n-gram to look up, in tokens.", low=1)
    occurrence: Literal["first", "last"] | None = setting(None, "Which of several occurrences to copy from.")
    at_end: Literal["stop", "copy"] | None = setting(
        None, "At the end of the text, stop the draft or continue copying from the draft itself."
    )
    max_tree_depth: int | None = setting(
        None, "Suffix decoding: longest substring to count, in tokens (default: 24).", low=1, high=255
    )
    max_spec_factor: float | None = setting(
        None, "Suffix decoding: maximum draft tokens per matched token (default: 1).", low=0
    )
    max_spec_offset: float | None = setting(None, "Suffix decoding: draft tokens added to that (default: 0).")
    min_token_prob: float | None = setting(
        None, "Suffix decoding: minimum probability of a drafted token (default: 0.1).", low=0, high=1
    )
    max_cached_requests: int | None = setting(
        None, "Suffix decoding: requests to draft from, the current one included (default: 10000).", low=0
    )

    def rule(self, name: str) -> NgramRule | SuffixRule:
        """Make the rule of this name with the settings given; InputError for settings that it lacks."""
        from specsim.lookup.ngram import RULES
        from specsim.lookup.suffix import SuffixRule

        rule = SuffixRule() if name == "suffix" else RULES[name]
        changes = {key: value for key, value in vars(self).items() if value is not None}
        for unknown in changes.keys() - asdict(rule).keys():
            known = ", ".join(map(_flag, asdict(rule)))
            raise InputError(f"rule {name} has no setting {_flag(unknown)}; use {known}")
        return replace(rule, **changes)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Settings):
    """Which texts are read, and what is written."""

    texts: Path = argument('JSON Lines of token ids, {"prompt_tokens": [...], "output_tokens": [...]}.')
    out: Path = argument("Trace folder to write.")
    rule: Literal["specsim", "vllm", "transformers", "suffix"] = setting(
        "specsim", "Whose prompt lookup; or suffix decoding, as in Arctic Inference and vLLM."
    )
    max_draft_tokens: int | None = setting(
        None, "Maximum draft length (default: 8; for suffix decoding --max-tree-depth).", low=1, high=255
    )
    vocabulary: int | None = setting(None, "Vocabulary size (default: up to the largest token id found).", low=2)
    overwrite: bool = setting(False, "Replace an existing trace.", flag="--overwrite")


def record_text(options: TextOptions, settings: RuleSettings) -> Answer:
    """Record prompt lookup or suffix decoding.

    Needs prompts and outputs only, of any model or engine: what is looked up depends on the text alone, so any chain
    policy replays exactly on the trace, as `specsim replay --as vllm` would count it. vLLM's rule takes n-grams of 5
    tokens by default, as vLLM does. Suffix decoding also drafts from the outputs of earlier lines, as if requests came
    one by one, and chooses its draft by --max-draft-tokens: record again for another limit.

    Example: specsim record-text texts.jsonl lookup/ --rule vllm --min-ngram 2 --max-ngram 3
    """
    from specsim.lookup.from_text import lookup_trace, read_token_texts, suffix_trace
    from specsim.lookup.suffix import SuffixRule
    from specsim.trace.files import check_free, write_trace

    check_free(options.out, overwrite=options.overwrite)
    rule, texts = settings.rule(options.rule), read_token_texts(options.texts)
    about: dict[str, Any] = {"vocabulary": options.vocabulary, "source": str(options.texts)}
    if isinstance(rule, SuffixRule):
        depth = options.max_draft_tokens or rule.max_tree_depth
        with progress_bar() as report:
            trace = suffix_trace(texts, rule, depth, **about, progress=partial(report, "texts"))
    else:
        trace = lookup_trace(texts, rule, options.max_draft_tokens or 8, **about)
    write_trace(trace, options.out, overwrite=options.overwrite)
    document: dict[str, Any] = {
        "trace": str(options.out),
        "rule": asdict(rule),
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "positions_with_a_draft": float((trace.draft_limit > 0).mean()),
        "mean_match_len": float(trace.match_len.mean()),
    }
    rows = [["rule", ", ".join(f"{name} {value}" for name, value in document["rule"].items())]]
    rows += [[name, f"{document[name]:,}"] for name in ("sequences", "output_tokens")]
    rows += [[name, f"{document[name]:.3f}"] for name in ("positions_with_a_draft", "mean_match_len")]
    return Answer(document, partial(print_table, f"trace {options.out}", ["", "value"], rows))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
