"""`realrun engine check` from end to end: record or take a recording, run the engine, compare every round."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.engines.batches import compare_batch
from realrun.engines.compare import Agreement, BestTwo, Models, NearTie, compare_sequence
from realrun.engines.engine import Engine, EngineRun, Job, Setting, Sums
from realrun.measure.record import RecordSettings, record
from realrun.measure.reuse import check_first_drafts, check_pair, prompts_of, sampler_of
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.acceptance.sources import Rounds
from specsim.engines.as_engine import as_engine, counters_of
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import NgramRule
from specsim.serving.draft_length import ScheduledK
from specsim.trace.joined import LOOKUP
from specsim.trace.trace import NO_TOKEN, Trace


def settings_of(engine: Engine, ks: Sequence[int], p_mins: Sequence[float], batch: int = 1) -> list[Setting]:
    """Return a setting for every K, and for every p_min with the largest K; InputError if the engine lacks it."""
    if not ks or min(ks) < 1 or max(ks) > RecordSettings.max_draft_tokens:
        raise InputError(f"--k of {', '.join(map(str, ks))}; give numbers from 1 to {RecordSettings.max_draft_tokens}")
    if p_mins and not engine.takes_p_min:
        raise InputError(f"{engine.name} has no rule for --p-min that a replay knows; leave it out")
    if not all(0 < p_min < 1 for p_min in p_mins):
        raise InputError(f"--p-min of {', '.join(map(str, p_mins))}; give numbers between 0 and 1")
    check_batch(engine, batch)
    return [*(Setting(k, batch=batch) for k in ks), *(Setting(max(ks), p_min, batch) for p_min in p_mins)]


def scheduled(engine: Engine, lengths: Mapping[int, int], batch: int) -> Setting:
    """Return the setting of a schedule, K by batch size; InputError if it is invalid or the engine takes none."""
    schedule = ScheduledK(dict(sorted(lengths.items())))
    if not 1 <= schedule.max_draft_tokens <= RecordSettings.max_draft_tokens:
        raise InputError(
            f"--schedule drafts up to {schedule.max_draft_tokens} tokens; give 1 to {RecordSettings.max_draft_tokens}"
        )
    check_batch(engine, batch)
    if batch == 1:
        raise InputError("--schedule is of batches; give --batch, the most sequences at once")
    return Setting(schedule.max_draft_tokens, batch=batch, schedule=schedule)


def check_batch(engine: Engine, batch: int) -> None:
    """Raise InputError if the engine does not run so many sequences at once."""
    if batch > 1 and not engine.takes_batches:
        raise InputError(f"{engine.name} is run one sequence at a time; choose vllm, or leave --batch out")


def recording(
    pair: Pair, prompts: Sequence[Prompt], engine: Engine, depth: int, max_new_tokens: int, progress: Progress
) -> Trace:
    """Record a dense trace, as long as the engine's rounds reach.

    Some engines count what they accept beyond the limit and behind an end of text; then the recording goes on there.
    """
    settings = RecordSettings(depth, recorded_tokens(engine, depth, max_new_tokens), Sampler("greedy"))
    endless = replace(pair, eos_token_ids=()) if engine.conventions.counts_past_end else pair
    trace = record(endless, prompts, settings, lambda done, total: progress("record", done, total))
    return replace(trace, meta={**trace.meta, "eos_token_id": list(pair.eos_token_ids)})


def recorded_tokens(engine: Engine, depth: int, max_new_tokens: int) -> int:
    """Return the maximum output tokens of a recording for this engine."""
    return max_new_tokens + (depth if engine.conventions.counts_past_end else 0)


def check_recording(
    trace: Trace, pair: Pair, engine: Engine, depth: int, max_new_tokens: int, name: str
) -> list[Prompt]:
    """Return the prompts of a recording; InputError if it is of another pair, not greedy, or too short."""
    check_pair(trace, pair, name)
    if engine.conventions.first_token == "round":
        check_first_drafts(trace, name)
    if sampler_of(trace, name).mode != "greedy":
        raise InputError(
            f"{name} was not recorded greedily, as engines are run here; record it by `realrun record --mode greedy`"
        )
    if trace.depth < depth or int(trace.budget_tokens.min()) < max_new_tokens:
        raise InputError(
            f"{name} has drafts of {trace.depth} tokens and outputs of {int(trace.budget_tokens.min())}, fewer than "
            f"{depth} and {max_new_tokens}; record it again, or ask for less"
        )
    if cut := as_engine(trace.shallower(depth), engine.conventions, max_output_tokens=max_new_tokens).cut_off:
        raise InputError(
            f"{name}: {engine.name} also accepts drafts past the token limit or after the end of text, and {cut} of "
            f"{trace.sequences} sequences are recorded no further; leave --trace out to record them again"
        )
    return prompts_of(trace, name)


def as_lookups(trace: Trace, rule: NgramRule, depth: int, *, past_end: bool) -> Trace:
    """Record what prompt lookup by this rule drafts on a recording's texts; past_end : also after an end of text."""
    assert trace.prompts is not None
    outputs = np.split(trace.token, trace.offsets[1:-1])
    columns = zip(trace.prompts, outputs, trace.domain.tolist(), trace.budget_tokens.tolist(), strict=True)
    texts = [TokenText(prompt.tolist(), output.tolist(), domain, most) for prompt, output, domain, most in columns]
    lookups = lookup_trace(texts, rule, depth)
    lookups = replace(lookups, meta={**lookups.meta, "eos_token_id": trace.eos_token_ids})
    if past_end:
        return lookups
    ended = np.logical_or.accumulate(np.isin(lookups.draft_token, trace.eos_token_ids), axis=1)
    return replace(
        lookups,
        draft_token=np.where(ended, NO_TOKEN, lookups.draft_token).astype(lookups.draft_token.dtype),
        match_len=np.minimum(lookups.match_len, (~ended).sum(axis=1)).astype(lookups.match_len.dtype),
    )


@dataclass(frozen=True)
class SettingRow:
    """An engine's rounds and counters in a setting beside the replay's.

    rounds, rounds_identical : rounds compared, and those that the replay has too before near ties are applied
    drafted : tokens; None where the engine does not say
    counters_equal : None where it has no counters
    """

    setting: Setting
    sequences: int
    sequences_identical: int
    rounds: int
    rounds_identical: int
    drafted: int | None
    accepted: int
    accepted_per_position: list[int]
    counters_equal: bool | None
    near_ties: list[NearTie]
    differences: list[str]

    @property
    def accounted(self) -> bool:
        """Whether rounds were compared, and all that differs are near ties."""
        return self.rounds > 0 and not self.differences and self.counters_equal is not False

    def as_dict(self) -> dict[str, Any]:
        near_ties = [{**tie._asdict(), "text": str(tie)} for tie in self.near_ties]
        own = {**vars(self), "near_ties": near_ties, "accounted": self.accounted}
        del own["setting"]
        return {"setting": str(self.setting), **self.setting.as_dict(), **own}


@dataclass(frozen=True)
class DraftsRow:
    """Two recordings of an engine's drafts, compared position by position."""

    check: str
    unit: str
    total: int
    equal: int
    other_tokens: int
    largest_prob_difference: float
    first_difference: str | None
    passed: bool


@dataclass(frozen=True)
class EngineCheck:
    """An engine's rounds beside the replay's, setting by setting.

    lookup_rule : of the prompt lookup that drafted, if it did
    depth, checks : longest recorded draft, and recordings compared with each other, if drafts were recorded
    """

    engine: Engine
    target: str
    drafter: str
    lookup_rule: NgramRule | None
    prompts: Sequence[Prompt]
    max_new_tokens: int
    rows: list[SettingRow]
    depth: int | None = None
    checks: Sequence[DraftsRow] = ()

    @property
    def identical(self) -> bool:
        return all(row.accounted for row in self.rows) and all(row.passed for row in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Make what `realrun engine check --json` prints."""
        checks = {"depth": self.depth, "checks": [asdict(row) for row in self.checks]}
        return {
            "engine": self.engine.name,
            "version": self.engine.version(),
            "target": self.target,
            "drafter": self.drafter,
            "lookup_rule": self.lookup_rule and asdict(self.lookup_rule),
            "conventions": asdict(self.engine.conventions),
            "prompts": prompt_facts(self.prompts, "the trace's"),
            "max_new_tokens": self.max_new_tokens,
            "settings": [row.as_dict() for row in self.rows],
            "identical": self.identical,
            **(checks if self.checks else {}),
        }


def check(
    pair: Pair,
    trace: Trace,
    engine: Engine,
    settings: Sequence[Setting],
    max_new_tokens: int,
    *,
    lookup: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> EngineCheck:
    """Run an engine on the prompts of a trace and compare every round and counter with the trace's replay.

    pair : the trace's own
    trace : greedy, with its prompts; recorded by realrun or inside the engine
    settings : the engine is run once in each
    max_new_tokens : the engine's limit on output tokens
    lookup : whether the engine drafts by prompt lookup, under its own rule, and not with the draft model

    Raises InputError if the pair cannot be converted, or the engine fails.
    """
    prompts = prompts_of(trace, "the trace")
    drafts_alone = isinstance(pair.drafter, IndependentKind) and not lookup
    models = Models(best_two(pair.target), best_two(pair.drafter.weights(pair.target)[0]) if drafts_alone else None)
    eos = set(pair.eos_token_ids)
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), [prompt.tokens for prompt in prompts], max_new_tokens, pair.eos_token_ids, lookup)
        engine.convert(pair, job.folder)
        rows = []
        for done, setting in enumerate(settings):
            progress("run", done, len(settings))
            run = without_ends(engine.run(job, setting), eos)
            played = trace
            if lookup and trace.meta.get("drafter_kind") != LOOKUP:
                assert engine.lookup_rule is not None
                past_end = engine.conventions.drafts_past_end
                played = as_lookups(trace, engine.lookup_rule, setting.k, past_end=past_end)
            rows.append(compared(played, engine, setting, run, max_new_tokens, models))
        progress("run", len(settings), len(settings))
    drafter, rule = ("prompt lookup", engine.lookup_rule) if lookup else (pair.draft_name, None)
    return EngineCheck(engine, pair.target_name, drafter, rule, prompts, max_new_tokens, rows)


def without_ends(run: EngineRun, eos_token_ids: set[int]) -> EngineRun:
    """The run without end-of-text tokens behind its outputs, which some engines give and some do not."""
    outputs = [output[:-1] if output and output[-1] in eos_token_ids else output for output in run.outputs]
    return EngineRun(outputs, run.rounds, run.sums)


def compared(
    trace: Trace, engine: Engine, setting: Setting, run: EngineRun, max_new_tokens: int, models: Models
) -> SettingRow:
    """Compare an engine's run in a setting with the replay."""
    if setting.batch > 1:
        agreements = compare_batch(
            trace, setting.rule, setting.batch, engine.conventions, max_new_tokens, run.outputs, run.rounds, models
        )
    else:
        agreements = [
            compare_sequence(
                trace, sequence, engine.policy(setting), engine.conventions, max_new_tokens, output, rounds, models
            )
            for sequence, (output, rounds) in enumerate(zip(run.outputs, run.rounds, strict=True))
        ]
    accepted = [count for rounds in run.rounds for _, count in rounds]
    return SettingRow(
        setting,
        sequences=len(agreements),
        sequences_identical=sum(not agreement.near_ties and not agreement.difference for agreement in agreements),
        rounds=sum(agreement.rounds for agreement in agreements),
        rounds_identical=sum(agreement.identical for agreement in agreements),
        drafted=drafted_tokens(run),
        accepted=sum(accepted),
        accepted_per_position=[sum(n >= depth for n in accepted) for depth in range(1, max(accepted, default=0) + 1)],
        counters_equal=None if run.sums is None else counters_equal(run.sums, agreements),
        near_ties=[tie for agreement in agreements for tie in agreement.near_ties],
        differences=[f"sequence {i}: {each.difference}" for i, each in enumerate(agreements) if each.difference],
    )


def drafted_tokens(run: EngineRun) -> int | None:
    """Sum the drafted tokens, of rounds or as a counter has them; None where an engine says neither."""
    drafted = [count for rounds in run.rounds for count, _ in rounds]
    if None in drafted:
        return None if run.sums is None else run.sums.drafted
    return sum(count for count in drafted if count)


def counters_equal(sums: Sums, agreements: Sequence[Agreement]) -> bool:
    """Compare an engine's counters with the replay's; a text that diverges at numerically tied logits has others."""
    rounds = [row for agreement in agreements for row in agreement.replayed if row[1]]
    ours = Rounds(np.array([row[1] for row in rounds], np.int64), np.array([row[2] for row in rounds], np.int64))
    counters = counters_of(ours)
    by_position = sums.accepted_per_position
    return sums == Sums(
        None if sums.rounds is None else len(rounds),
        int(counters.drafted.sum()),
        int(counters.accepted.sum()),
        None if by_position is None else _trimmed(counters.accepted.tolist(), len(by_position)),
    )


def _trimmed(counts: list[int], length: int) -> list[int]:
    """To this length, by zeros alone: positions at which nothing was accepted may be left out."""
    while len(counts) > length and not counts[-1]:
        counts = counts[:-1]
    return [*counts, *[0] * (length - len(counts))]


def best_two(model: Any) -> BestTwo:
    """Return a function that computes the two highest probabilities of a model's next token by a plain pass."""

    @torch.inference_mode()
    def probabilities(tokens: Sequence[int]) -> tuple[float, float]:
        logits = model(input_ids=torch.tensor([[int(token) for token in tokens]]), use_cache=False).logits[0, -1]
        first, second = logits.double().softmax(-1).topk(2).values.tolist()
        return first, second

    return probabilities
