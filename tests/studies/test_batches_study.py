"""The study of batches: real rounds against their prediction, and what memory leaves out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.linear import LinearCost, LinearPass
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace
from studies.batches import real, run
from tests.support.tiny import tiny_pair, tiny_prompts

CONFIG = tomllib.loads((Path(run.__file__).parent / "config.toml").read_text())
REAL = {**CONFIG["real"], "prompts": 5, "max_new_tokens": 24, "batches": [1, 2, 4], "lengths": [1, 2], "repeats": 3}
SERVERS = {**CONFIG["servers"], "batches": [1, 64, 512], "contexts": [128, 8192], "max_draft_tokens": 2}
COST = LinearCost(LinearPass(0.01, 3e-4, 2e-6), LinearPass(0.002, 1e-4, 5e-7), step_s=0.001, round_s=0.0005)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(tiny_pair(), tiny_prompts(5), RecordSettings(4, 24, Sampler()))


def test_what_is_decoded_has_the_rounds_of_the_simulation(trace: Trace) -> None:
    """Of batches that the last group does not fill; all arms, and probes beside them."""
    texts = [prompt.tokens for prompt in tiny_prompts(5)]
    measured = json.loads(json.dumps(real.measure_batch(tiny_pair(), texts, trace, 2, 0, REAL, seed=0)))
    assert set(measured["arms"]) == {"0", "-1", "1", "2"}
    assert {"verify 3", "draft 1", "behind"} < set(measured["probes"])
    for k in real.arms_of(REAL):
        run = lockstep(drafts_of(trace, FixedK(k=k) if k > 0 else None), COST, 2)
        arm = measured["arms"][str(k)]
        assert real.differences(arm, trace, run) == 0
        assert [len(group["rows"]) for group in arm] == [2, 2, 1]
        assert sum(len(group["seconds"]) for group in arm) == len(run.seconds.sequences)
    arm[0]["rows"][1][2][0][1] += 1  # another draft length in a round
    assert real.differences(arm, trace, run) == 1


def pretended(trace: Trace) -> dict[str, Any]:
    """A run on a machine of linear costs, in which every round is interrupted in the second of three repeats."""
    batches: dict[str, Any] = {}
    contexts = real.middle_too(trace)
    for batch in REAL["batches"]:
        arms: dict[str, Any] = {}
        for k in real.arms_of(REAL):
            run = lockstep(drafts_of(trace, FixedK(k=k) if k > 0 else None), COST, batch)
            arms[str(k)] = []
            for together in real.groups(trace.sequences, batch):
                mine = np.isin(run.rounds.sequence, together)
                first = run.rounds.batch_round[mine].min()
                last = run.rounds.batch_round[mine].max()
                seconds = run.seconds.total_s[first : last + 1]
                rows = []
                for number in together:
                    facts = (run.rounds.t, run.rounds.drafted, run.rounds.accepted)
                    columns = [fact[run.rounds.sequence == number].tolist() for fact in facts]
                    rounds = [list(round_) for round_ in zip(*columns, strict=True)]
                    rows.append([number, int(trace.output_tokens[number]), rounds])
                arms[str(k)].append({"rows": rows, "round_s": [(seconds * slow).tolist() for slow in (1, 9, 1)]})
        probes: dict[str, Any] = {"step": [[c, 0.001] for c in contexts], "round": [[c, 0.0015] for c in contexts]}
        for name, (which, tokens) in {"verify 1": (COST.target, 1), "verify 2": (COST.target, 2),
                                      "verify 3": (COST.target, 3), "draft 0": (COST.drafter, 1),
                                      "draft 1": (COST.drafter, 1), "behind": (COST.drafter, 2)}.items():  # fmt: skip
            probes[name] = [[c, float(which.seconds(tokens, c, batch))] for c in contexts for _ in range(9)]
        batches[str(batch)] = {"arms": arms, "probes": probes, "ticks": [[100.0, 60.0, 20.0, 0.0]] * 3}
    provenance = {"device": "a machine", "threads": 1, "dtype": "float64", "date": "2026-11-23T00:00:00"}
    return {"batches": batches, "provenance": provenance}


@pytest.fixture
def real_run(tmp_path: Path, trace: Trace) -> Path:
    write_trace(trace, tmp_path / "real" / "trace")
    (tmp_path / "real" / real.MEASURED).write_text(json.dumps(pretended(trace)))
    return tmp_path


def test_probes_predict_a_machine_of_linear_costs(real_run: Path) -> None:
    """Batches of 3 were not probed, in ragged ones not all draft as much; the median leaves the interruption out."""
    cases, about = real.results(real_run / "real", REAL)
    assert [(case.batch, case.k) for case in cases] == [(b, k) for b in (1, 2, 4) for k in (real.NULL, 1, 2)]
    for case in cases:
        assert case.error == pytest.approx(0, abs=0.005)
        assert case.predicted_s == pytest.approx(case.measured_s, rel=0.01)
        assert (case.k == real.NULL) == (case.measured.estimate == 1)
    assert about["differing"] == 0 and about["load"].others_percent == pytest.approx(40)
    best = run.best_cases(cases)
    assert [(predicted.batch, predicted.k == measured.k) for predicted, measured in best] == [
        (1, True), (2, True), (4, True)
    ]  # fmt: skip


def test_batches_that_the_memory_does_not_hold_are_left_out() -> None:
    """90 % of an H100's 80 GB less weights; a token takes 2 x 8 x 128 numbers in 32 layers, and in EAGLE's layer."""
    constants, h100, *_ = run.servers(SERVERS)
    weights = sum(passes.weight_bytes for passes in (h100.memory.target, h100.memory.draft_passes) if passes)
    assert h100.sequences(8192) == constants.sequences(8192) == int((0.9 * 80e9 - weights) / (8192 * 33 * 2048 * 2))
    trace = generate(IID(0.8), sequences=6, output_tokens=20, depth=2, seed=1)
    maps = run.server_map(trace, constants, SERVERS, seed=0)
    rows = [*run.map_rows({"H100": maps})]
    assert [(row.batch, row.context) for row in rows] == [(1, 128), (64, 128), (512, 128), (1, 8192)]
    assert all(row.k in (1, 2) and row.costs == "H100" for row in rows)
