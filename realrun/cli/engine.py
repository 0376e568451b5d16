"""`realrun engine`: inference engines run for real; an engine's rounds and tokens per second beside a replay's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from realrun.cli.options import (
    REPEATS_HELP,
    DrafterSettings,
    MachineSettings,
    ModelSettings,
    PromptSettings,
    refuse_beside,
)
from specsim.cli.command import Answer, command
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.settings import setting

if TYPE_CHECKING:
    from realrun.engines.check import DraftsRow, EngineCheck
    from realrun.engines.engine import Engine, Setting
    from realrun.engines.lossless import LosslessCheck, Score
    from realrun.engines.validate import EngineValidation
    from realrun.pairs.pair import Pair
    from specsim.io.progress import Progress
    from specsim.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class EnginePrompts(PromptSettings):
    """Which prompts an engine decodes."""

    trace: Path | None = setting(
        None, "Decode the prompts of this trace of the pair, made by `realrun record --mode greedy`."
    )

    def pair_and_trace(
        self, ctx: typer.Context, models: ModelSettings, engine: Engine, depth: int, progress: Progress
    ) -> tuple[Pair, Trace]:
        """Load the models and the trace, or record one with drafts of `depth` tokens."""
        from realrun.engines.check import check_recording, recorded_tokens, recording
        from realrun.measure.record import longest_prompt
        from realrun.pairs.prompts import prompts_source
        from specsim.trace.files import read_trace

        if self.trace is not None:
            refuse_beside(ctx, "trace", ("prompts", "num_prompts"))
        else:
            prompts_source(models.target, self.prompts)
        pair = models.load(MachineSettings())
        if self.trace is not None:
            trace = read_trace(self.trace)
            check_recording(trace, pair, engine, depth, self.max_new_tokens, str(self.trace))
            return pair, trace
        longest = longest_prompt(pair, recorded_tokens(engine, depth, self.max_new_tokens), depth)
        return pair, recording(pair, self.load(pair, longest), engine, depth, self.max_new_tokens, progress)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(EnginePrompts):
    """Which engine runs, in which settings."""

    engine: str = setting(..., "Engine to run: llamacpp, vllm, transformers, openvino, onnxruntime or mlx.")
    k: tuple[int, ...] = setting((1, 2, 3, 5, 8), "Draft lengths K, each a run of its own.")
    p_min: tuple[float, ...] | None = setting(
        None, "llama.cpp's p-min values, each run with the longest K: drafts end before a less probable token."
    )
    lookup: bool = setting(False, "Draft with the engine's prompt lookup instead of the draft model.", flag="--lookup")
    batch: int = setting(1, "Maximum batch size (vLLM).", low=1)
    schedule: str | None = setting(None, "vLLM's K by batch size instead of --k, such as 1:5,3:3,4:0.")
    drafts: bool = setting(
        False,
        "Record every draft inside the engine (vLLM), and check that none changes when prompts are read in chunks or "
        "several sequences run at once. Takes --drafter, too.",
        flag="--drafts",
    )
    temperature: float | None = setting(
        None,
        "Sample at this temperature, and check whether the output is lossless and drafts are accepted as the engine's "
        "rule says. Default: compare greedy rounds.",
        above=0,
        below=100,
    )


def check(ctx: typer.Context, options: CheckOptions, models: DrafterSettings) -> Answer:
    """Compare an engine's rounds with a replay.

    The engine decodes greedily on the CPU, in float32, in a process of its own, with the pair converted for it. Every
    round and counter is compared with a trace's replay. Where float32 may swap numerically tied logits, or a
    probability next to p_min, the replay follows the engine and the tie is listed. Exits with 1 where rounds differ
    otherwise. With --batch, a simulated server must draft as the engine does in every round, too. With --drafts, the
    replayed trace is recorded inside the engine. A drafter whose drafts depend on how the engine runs changes
    acceptance, but not the output, so that no metric of the engine shows the defect. vLLM needs an
    environment of its own: `nox -s vllm` makes it in the source tree, or SPECSIM_VLLM_PYTHON names its interpreter.

    With --temperature, the engine draws noise of its own, so that its rounds are no replay's. Instead, the mean
    log-probability of its output under the target is compared with its expectation, and so is acceptance. z is the
    distance in standard errors. Exits with 1 where |z| reaches 4.

    Example: realrun engine check --engine llamacpp --target MODEL --draft-model SMALL_MODEL --k 1,3,5 --p-min 0.5

    Example: realrun engine check --engine vllm --drafts --target MODEL --drafter EAGLE3_FOLDER --k 3 --num-prompts 12

    Example: realrun engine check --engine llamacpp --temperature 0.8 --num-prompts 10 --k 1,3,5
    """
    from realrun.engines.check import check as run_check
    from realrun.engines.check import scheduled, settings_of
    from realrun.engines.registry import find_engine
    from specsim.io.errors import InputError
    from specsim.serving.draft_length import as_schedule

    if options.temperature is not None:
        refuse_beside(ctx, "temperature", ("trace", "p_min", "schedule", "drafts"))
    if options.schedule is not None:
        refuse_beside(ctx, "schedule", ("k", "p_min"))
    engine, lookup, tokens = find_engine(options.engine), options.lookup, options.max_new_tokens
    if lookup and engine.lookup_rule is None:
        raise InputError(f"{options.engine}'s prompt lookup follows a rule that no replay knows; leave --lookup out")
    if options.schedule is None:
        settings = settings_of(engine, list(options.k), list(options.p_min or ()), options.batch)
    else:
        settings = [scheduled(engine, as_schedule(options.schedule).lengths, options.batch)]
    if options.temperature is not None:
        if models != DrafterSettings(target=models.target, draft_model=models.draft_model):
            raise InputError("--temperature checks draft models and prompt lookup; remove --drafter")
        sampled = _checked_sampling(options, models, engine, settings, options.temperature)
        return Answer(sampled.as_dict(), partial(_print_lossless, sampled), sampled.passed)
    if options.drafts:
        refuse_beside(ctx, "drafts", ("trace",))
        checked = _checked_drafts(options, models, engine, settings)
    elif models != DrafterSettings(target=models.target, draft_model=models.draft_model):
        raise InputError("--drafter and --allow-tokenizer-difference go with --drafts; add it, or remove them")
    else:
        depth = max(setting.k for setting in settings)
        with progress_bar() as report:
            pair, trace = options.pair_and_trace(ctx, models, engine, depth, report)
            checked = run_check(pair, trace, engine, settings, tokens, lookup=lookup, progress=report)
    return Answer(checked.as_dict(), partial(_print_check, checked), checked.identical)


def _checked_drafts(
    options: CheckOptions, models: DrafterSettings, engine: Engine, settings: Sequence[Setting]
) -> EngineCheck:
    from realrun.decode.sampling import Sampler
    from realrun.engines.check import check_batch, recorded_tokens
    from realrun.engines.drafts import BATCH, check_drafts
    from realrun.measure.record import RecordSettings, longest_prompt
    from realrun.pairs.prompts import prompts_source

    engine.check_dense(Sampler("greedy"))
    check_batch(engine, BATCH)
    prompts_source(models.target, options.prompts)
    depth, tokens = RecordSettings.max_draft_tokens, options.max_new_tokens
    with progress_bar() as report:
        pair = models.load(MachineSettings(), **({"drafter": "prompt-lookup"} if options.lookup else {}))
        prompts = options.load(pair, longest_prompt(pair, recorded_tokens(engine, depth, tokens) + depth, depth))
        return check_drafts(pair, prompts, engine, settings, tokens, progress=report)


def _checked_sampling(
    options: CheckOptions, models: DrafterSettings, engine: Engine, settings: Sequence[Setting], temperature: float
) -> LosslessCheck:
    from realrun.engines.lossless import check_lossless
    from realrun.measure.record import longest_prompt
    from realrun.pairs.prompts import prompts_source

    source = prompts_source(models.target, options.prompts)
    depth, tokens = max(setting.k for setting in settings), options.max_new_tokens
    with progress_bar() as report:
        pair = models.load(MachineSettings())
        prompts = options.load(pair, longest_prompt(pair, tokens + depth, depth))
        return check_lossless(
            pair,
            prompts,
            engine,
            settings,
            tokens,
            temperature,
            lookup=options.lookup,
            source=source,
            progress=report,
        )


CHECK_COLUMNS = [
    "setting",
    "sequences identical",
    "rounds identical",
    "drafted",
    "accepted",
    "counters",
    "tied logits",
]
COUNTERS = {None: "none", True: "equal", False: "differ"}


def _print_check(checked: EngineCheck) -> None:
    rows = [
        [
            str(row.setting),
            f"{row.sequences_identical} of {row.sequences}",
            f"{row.rounds_identical:,} of {row.rounds:,}",
            "not reported" if row.drafted is None else f"{row.drafted:,}",
            f"{row.accepted:,}",
            COUNTERS[row.counters_equal],
            str(len(row.near_ties)),
        ]
        for row in checked.rows
    ]
    title = f"{checked.engine.name} {checked.engine.version()}, {checked.target} with {checked.drafter}"
    if rule := checked.lookup_rule:
        title += f" of {rule.min_ngram} to {rule.max_ngram} tokens"
    size = f"{len(checked.prompts)} prompts, up to {checked.max_new_tokens} tokens"
    print_table(f"{title}: {size}", CHECK_COLUMNS, rows)
    for row in checked.rows:
        for tie in row.near_ties:
            print(f"numerically tied logits, {row.setting}: {tie}")
        for difference in row.differences:
            print(f"differs, {row.setting}: {difference}")
        if not row.rounds:
            print(f"not compared, {row.setting}: no round had a draft; give another --schedule or other prompts")
    print(
        "every round equals the replay's, apart from numerically tied logits listed above"
        if all(row.accounted for row in checked.rows)
        else "rounds or counters differ from the replay's, or a setting was not compared"
    )
    for drafts in checked.checks:
        print(f"{drafts.check}: {_drafts_text(drafts)}")


SAMPLED_COLUMNS = [
    "setting",
    "tokens",
    "mean log-probability",
    "expected",
    "z",
    "judged drafts",
    "accepted",
    "expected",
    "z",
]


def _print_lossless(checked: LosslessCheck) -> None:
    def cells(score: Score | None) -> list[str]:
        if score is None:
            return ["0", "", "", ""]
        return [f"{score.count:,}", f"{score.measured:.3f}", f"{score.expected:.3f}", f"{score.z:+.1f}"]

    rows = [[str(row.setting), *cells(row.text), *cells(row.acceptance)] for row in checked.rows]
    title = f"{checked.engine.name} {checked.engine.version()}, {checked.target} with {checked.drafter}, temperature "
    title += f"{checked.temperature:g}, rule {checked.rule}"
    size = f"{len(checked.prompts)} prompts, up to {checked.max_new_tokens} tokens"
    print_table(f"{title}: {size}", SAMPLED_COLUMNS, rows)
    print(checked.verdict)


def _drafts_text(row: DraftsRow) -> str:
    if row.passed:
        return f"equal ({row.total:,} positions, probabilities within {row.largest_prob_difference:.1g})"
    differing = f"{row.total - row.equal:,} of {row.total:,} positions differ"
    return f"{differing}, {row.other_tokens:,} of them in drafted tokens; first: {row.first_difference}"


@dataclass(frozen=True, kw_only=True)
class EngineValidateOptions(EnginePrompts, SeedSettings):
    """Which engine runs, in which settings."""

    engine: str = setting("llamacpp", "Engine to run: llamacpp.")
    profile_k: tuple[int, ...] = setting((1, 2, 4, 8), "Draft lengths K to measure costs from.")
    k: tuple[int, ...] | None = setting((3, 5, 6, 7), "Draft lengths K to predict.")
    p_min: tuple[float, ...] | None = setting((0.3, 0.5, 0.75, 0.9), "p-min values to predict, each at the largest K.")
    repeats: int = setting(3, REPEATS_HELP)


def validate(ctx: typer.Context, options: EngineValidateOptions, models: ModelSettings) -> Answer:
    """Predict and measure an engine's speed.

    Predicts tokens per second in settings that were not profiled, and measures them. Settings take turns, prompt by
    prompt, in one process. Costs come from the seconds that the engine itself reports without speculation and for the
    draft lengths of --profile-k; acceptance comes from a trace. A second run without speculation (A/A test) gives the
    noise floor.

    Example: realrun engine validate --target lab-deep --num-prompts 12
    """
    from realrun.engines.registry import find_engine
    from realrun.engines.validate import plan_of
    from realrun.engines.validate import validate as run_validation
    from realrun.experiment.timing import check_repeats

    check_repeats(options.repeats)
    engine = find_engine(options.engine)
    plan = plan_of(list(options.profile_k), list(options.k or ()), list(options.p_min or ()))
    depth = max(setting.k for setting in plan.arms)
    with progress_bar() as report:
        pair, trace = options.pair_and_trace(ctx, models, engine, depth, report)
        validation = run_validation(
            pair,
            trace,
            engine,
            plan,
            options.max_new_tokens,
            repeats=options.repeats,
            seed=options.seed,
            progress=report,
        )
    return Answer(validation.as_dict(), partial(_print_validation, validation))


VALIDATION_COLUMNS = [
    "setting",
    "predicted tokens/s",
    "measured tokens/s",
    "error %",
    "measured speedup [95 % interval]",
    "",
]


def _print_validation(validation: EngineValidation) -> None:
    from specsim.replaying.intervals import noise_floor_percent
    from specsim.report.page import choice_text, floor_text, load_text, speculation_text

    forecasts = validation.forecasts
    floor_percent, errors = noise_floor_percent(forecasts.null_arm), forecasts.errors_percent
    print(f"machine: {load_text(*validation.load)}")
    print(floor_text(floor_percent, forecasts.null_arm))
    rows = [
        [
            str(row.setting),
            f"{row.predicted_tokens_per_second:.1f}",
            f"{row.measured_tokens_per_second:.1f}",
            f"{row.error_percent:+.1f}",
            str(row.measured_speedup),
            "profiled" if row.profiled else "",
        ]
        for row in forecasts.rows
    ]
    engine = validation.engine
    title = f"{engine.name} {engine.version()}, {validation.target} with {validation.drafter}"
    print_table(f"{title}: {len(validation.prompts)} prompts, {validation.repeats} repeats", VALIDATION_COLUMNS, rows)
    print(
        f"absolute error of settings that were not profiled: median {median(errors):.2f} %, largest {max(errors):.2f} %"
    )
    print(choice_text(forecasts.choice))
    fastest = max(forecasts.rows[1:], key=lambda row: row.measured_tokens_per_second)
    print(speculation_text(str(fastest.setting), fastest.measured_speedup, floor_percent))


engine = typer.Typer(help="Run an engine and compare it with replays.", no_args_is_help=True)
for _command in (check, validate):
    command(engine)(_command)
