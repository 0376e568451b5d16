"""The study of batches: real rounds against their prediction, what memory leaves out, and the report."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.decode.sampling import Sampler
from realrun.recording.record import RecordSettings, record
from specsim.acceptance.iid import IID
from specsim.acceptance.synthetic import generate
from specsim.cost.linear import LinearCost, LinearPass
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace
from studies.batches import real, run, servers
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
    found = json.loads(json.dumps(real.measure_batch(tiny_pair(), texts, trace, 2, 0, REAL, seed=0)))
    assert set(found["arms"]) == {"0", "-1", "1", "2"} and {"verify 3", "draft 1", "behind"} < set(found["probes"])
    for k in real.arms_of(REAL):
        told = lockstep(drafts_of(trace, FixedK(k=k) if k > 0 else None), COST, 2)
        arm = found["arms"][str(k)]
        assert real.differences(arm, trace, told) == 0
        assert [len(group["rows"]) for group in arm] == [2, 2, 1]
        assert sum(len(group["seconds"]) for group in arm) == len(told.seconds.sequences)
    arm[0]["rows"][1][2][0][1] += 1  # another draft length in one round
    assert real.differences(arm, trace, told) == 1


def pretended(trace: Trace) -> dict[str, Any]:
    """A run on a machine of linear costs, in which one repeat of three met an interruption of every round."""
    batches: dict[str, Any] = {}
    contexts = real.middle_too(trace)
    for batch in REAL["batches"]:
        arms: dict[str, Any] = {}
        for k in real.arms_of(REAL):
            told = lockstep(drafts_of(trace, FixedK(k=k) if k > 0 else None), COST, batch)
            arms[str(k)] = []
            for together in real.groups(trace.sequences, batch):
                mine = np.isin(told.rounds.sequence, together)
                first = told.rounds.batch_round[mine].min()
                last = told.rounds.batch_round[mine].max()
                seconds = told.seconds.total_s[first : last + 1]
                rows = []
                for number in together:
                    facts = (told.rounds.t, told.rounds.drafted, told.rounds.accepted)
                    columns = [fact[told.rounds.sequence == number].tolist() for fact in facts]
                    rounds = [list(one) for one in zip(*columns, strict=True)]
                    rows.append([number, int(trace.output_tokens[number]), rounds])
                arms[str(k)].append({"rows": rows, "round_s": [(seconds * slow).tolist() for slow in (1, 9, 1)]})
        probes: dict[str, Any] = {"step": [[c, 0.001] for c in contexts], "round": [[c, 0.0015] for c in contexts]}
        for name, (which, tokens) in {"verify 1": (COST.target, 1), "verify 2": (COST.target, 2),
                                      "verify 3": (COST.target, 3), "draft 0": (COST.drafter, 1),
                                      "draft 1": (COST.drafter, 1), "behind": (COST.drafter, 2)}.items():  # fmt: skip
            probes[name] = [[c, float(which.seconds(tokens, c, batch))] for c in contexts for _ in range(9)]
        batches[str(batch)] = {"arms": arms, "probes": probes, "ticks": [[100.0, 60.0, 20.0, 0.0]] * 3}
    made = {"device": "a machine", "threads": 1, "dtype": "float64", "date": "2026-11-23T00:00:00"}
    return {"batches": batches, "provenance": made}


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
    assert {one.form: one.median_error < 0.005 for one in about["step_times"]} == {
        "linear": True, "tokens, cached": True, "batch, tokens": False
    }  # fmt: skip
    text = "\n".join(run.real_lines(cases, about, REAL))
    assert "(goal 7 %: met)" in text and "others used 40 %" in text and "All rounds are those" in text


def test_batches_that_the_memory_does_not_hold_are_left_out() -> None:
    """90 % of an H100's 80 GB less weights; a token takes 2 x 8 x 128 numbers in 32 layers, and in EAGLE's one."""
    constants, h100, *_ = servers.servers(SERVERS)
    weights = sum(one.weight_bytes for one in (h100.memory.target, h100.memory.draft_passes) if one)
    assert h100.sequences(8192) == constants.sequences(8192) == int((0.9 * 80e9 - weights) / (8192 * 33 * 2048 * 2))
    trace = generate(IID(0.8), sequences=6, output_tokens=20, depth=2, seed=1)
    maps = servers.server_map(trace, constants, SERVERS, seed=0)
    rows = [*servers.map_rows(maps, SERVERS)]
    assert [row[0] for row in rows] == ["1", "64", "512"]
    assert rows[0][1].startswith("K=") and rows[0][3].startswith("K=") and rows[1][3] == rows[2][3] == "no memory"
    (short, _) = servers.schedule_rows({("greedy", "H100"): maps})
    assert short[:3] == ["greedy", "H100", "128"] and short[3].startswith("1: 2")


def test_what_steps_cost_is_worked_out_by_hand() -> None:
    """SpecDecode-Bench's at context 8192, drafting once a round.

    A pass takes 5.88590713 ms, 0.0210103129 a token, 39.2645679 ns a cached one, a step 1.20683946 beside it.
    """
    row = next(servers.cost_rows(SERVERS))
    step_ms = 5.88590713 + 0.0210103129 + 8192 * 39.2645679e-6 + 1.20683946
    one_ms, four_ms = (2.13526175 + (k + 1) * 0.841429603e-3 + 8192 * 2.37768493e-6 for k in (1, 4))
    assert row[:3] == ["SpecDecode-Bench, H100", "1", f"{step_ms:.2f}"]
    assert row[3:5] == [f"{one_ms / step_ms:.3f}", f"{four_ms / step_ms:.3f}"]
    assert row[5:] == [f"{(step_ms + 4 * 0.0210103129) / step_ms:.3f}"]


def test_the_report_is_written_from_what_is_there(real_run: Path) -> None:
    trace = generate(IID(0.7), sequences=4, output_tokens=12, depth=2, seed=1)
    config = {**CONFIG, "real": REAL, "servers": SERVERS}
    for one in CONFIG["traces"]["runs"]:
        write_trace(trace, real_run / "traces" / one["name"])
    run.main(real_run, config)
    report = (real_run / "report.md").read_text()
    assert "### roofline L40S, greedy" in report and "| T08 | roofline H200 | 8192 | " in report
    assert "| 4 | baseline again | 1.000 [1.000, 1.000] | 1.000 [1.000, 1.000] | +0.0 |" in report
    for name in ("servers-greedy", "servers-T08", "real"):
        assert f"figures/{name}.svg" in report
        assert (real_run / "figures" / f"{name}.svg").read_text().startswith("<svg")
