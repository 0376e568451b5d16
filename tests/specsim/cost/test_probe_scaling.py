"""Profiles rescaled by probes: simulated machines whose states are known are recovered, and errors cover the truth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

import specsim
from specsim.cost.files import read_cost
from specsim.cost.probe import Change, Probe, rescaled, with_probe
from specsim.cost.probe import changes as changes_of
from specsim.cost.profile import Profile
from specsim.io.errors import InputError
from tests.support.checks import refusal

CONTEXTS, PROBED = [32, 128, 512], [64, 300]
DEPTH, SIZES = 7, [1, 2, 4, 5, 9]
PASSES = (1.35, 1.22, 1.15, 1.1, 1.07)  # what a loaded machine takes over an idle one, for 1 to 5 tokens
DRAFTS = 1.28


def pass_s(tokens: int, context: float, state: bool) -> float:
    """A pass of an idle or a loaded machine, linear between the profile's contexts, as profiles take it."""
    return (0.02 + 1e-3 * tokens + 1e-5 * context) * (PASSES[min(tokens, 5) - 1] if state else 1.0)


def draft_s(place: int, context: float, state: bool) -> float:
    return (2e-3 / place + 1e-6 * context) * (DRAFTS if state else 1.0)


def machine(state: bool = False) -> dict[str, Any]:
    """The profile of a machine without noise."""
    drafting = DRAFTS if state else 1.0

    def over(cost: Any, sizes: Any) -> list[list[float]]:
        return [[cost(size, context, state) for context in CONTEXTS] for size in sizes]

    return {
        "kind": "specsim-profile",
        "version": 2,
        "target": "t",
        "drafter": "d",
        "contexts": CONTEXTS,
        "mean_s": {
            "draft_step": over(draft_s, range(1, DEPTH + 1)),
            "catch_up": [1e-4 * drafting] * 3,
            "catch_up_many": {"tokens": [4, 16], "seconds": [[2e-4 * drafting] * 3, [4e-4 * drafting] * 3]},
            "verify": over(pass_s, range(1, DEPTH + 2)),
            "autoregressive": over(pass_s, [1])[0],
            "policy_step": 1e-5 * drafting,
            "round_overhead": 1e-4 * drafting,
            "score_step": 2e-5 * drafting,
            "tree": {
                "sizes": SIZES,
                "wider": [[1e-4 * size * drafting] * 3 for size in SIZES],
                "verify": over(pass_s, SIZES),
                "policy_step": 2e-5 * drafting,
                "round_overhead": 3e-4 * drafting,
            },
        },
    }


@cache
def student(freedom: int) -> float:
    return float(stats.t.ppf(0.975, freedom))


def probe_of(
    state: bool, rng: np.random.Generator | None = None, sweeps: int = 8, noise: float = 0.03, contexts: Any = PROBED
) -> dict[str, Any]:
    """A probe of a machine whose sweeps vary, each with all of its contexts."""
    drawn: list[np.ndarray[Any, Any]] = []

    def measured(times: list[float]) -> tuple[list[float], float]:
        factors = np.ones(sweeps) if rng is None else np.exp(rng.normal(0.0, noise, sweeps))
        drawn.append(factors)
        width = student(sweeps - 1) * factors.std(ddof=1) / np.sqrt(sweeps) / factors.mean()
        return [float(time * factors.mean()) for time in times], float(width)

    passes = [measured([pass_s(n, context, state) for context in contexts]) for n in range(1, 6)]
    drafts = [[draft_s(place, context, state) for context in contexts] for place in range(1, 5)]
    total, width = measured(np.sum(drafts, axis=0).tolist())
    scale = total[0] / np.sum(drafts, axis=0)[0]
    step, step_width = measured([pass_s(1, context, state) for context in contexts])
    return {
        "kind": "specsim-probe",
        "version": 1,
        "target": "t",
        "drafter": "d",
        "contexts": list(contexts),
        "sweeps": sweeps,
        "mean_s": {
            "verify": [row for row, _ in passes],
            "draft_step": (scale * np.array(drafts)).tolist(),
            "autoregressive": step,
        },
        "relative_half_width": {"verify": [w for _, w in passes], "draft_step": width, "autoregressive": step_width},
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    return changes_of(Probe.from_json(before), Probe.from_json(after))


def probed_document(profile: Mapping[str, Any], probe: Mapping[str, Any], sources: Mapping[str, Any]) -> dict[str, Any]:
    return rescaled(Profile.from_json(profile, "given"), Probe.from_json(probe), sources).as_dict()


def same_costs(cost: Any, expected: Any, rtol: float) -> None:
    contexts = [32, 40, 128, 200, 512]
    for n in range(1, DEPTH + 2):
        np.testing.assert_allclose(cost.verify(n, contexts), expected.verify(n, contexts), rtol=rtol)
    for n in range(1, DEPTH + 1):
        np.testing.assert_allclose(cost.draft(n, contexts), expected.draft(n, contexts), rtol=rtol)
    for n in range(1, 10):
        np.testing.assert_allclose(cost.tree_verify(n, contexts), expected.tree_verify(n, contexts), rtol=rtol)
        np.testing.assert_allclose(cost.wider(n, contexts), expected.wider(n, contexts), rtol=rtol)
    np.testing.assert_allclose(cost.catch_up_by(9, contexts), expected.catch_up_by(9, contexts), rtol=rtol)
    assert cost.score_step_s == pytest.approx(expected.score_step_s, rel=rtol)
    for name in ("policy_step", "round_overhead", "tree_policy_step", "tree_round_overhead"):
        assert getattr(cost, name)() == pytest.approx(getattr(expected, name)(), rel=rtol)
    np.testing.assert_allclose(cost.autoregressive_step(contexts), expected.autoregressive_step(contexts), rtol=rtol)


@pytest.mark.parametrize(("noisy", "rtol"), [(False, 2e-3), (True, 0.03)])
def test_an_idle_machines_profile_with_a_loaded_machines_probe_is_the_loaded_machines(noisy: bool, rtol: float) -> None:
    """The probe's contexts are none of the profile's. Trees of 6 tokens lie between measured sizes of two factors."""
    probe = probe_of(True, np.random.default_rng(2) if noisy else None, sweeps=40)
    now, expected = with_probe(read_cost(machine()), Probe.from_json(probe)), read_cost(machine(state=True))
    same_costs(now, expected, rtol)
    assert specsim.calibrate(machine(), probe).verify(3, 100) == now.verify(3, 100)


def test_a_written_profile_is_read_as_it_was_rescaled() -> None:
    probe = probe_of(True)
    document = probed_document({**machine(), "median_s": machine()["mean_s"]}, probe, {"probe": "of today"})
    same_costs(read_cost(document), with_probe(read_cost(machine()), Probe.from_json(probe)), 1e-12)
    assert document["probed"]["probe"] == "of today" and "median_s" not in document
    assert document["probed"]["passes"] == pytest.approx(PASSES, rel=1e-6)


def test_errors_of_the_probe_add_to_those_of_the_profile() -> None:
    rng = np.random.default_rng(3)
    widths = {
        "draft_step": [[0.03] * 3] * DEPTH,
        "verify": [[0.04, 0.0, None]] * (DEPTH + 1),
        "autoregressive": [0.04] * 3,
        "tree_sizes": SIZES,
        "tree_verify": [[0.0] * 3] * len(SIZES),
    }
    probe = probe_of(True, rng)
    passes, drafting = (probe["relative_half_width"][key] for key in ("verify", "draft_step"))
    wider = probed_document({**machine(), "relative_half_width": widths}, probe, {})["relative_half_width"]
    assert wider["verify"][1] == [pytest.approx(np.hypot(0.04, passes[1])), pytest.approx(passes[1]), None]
    assert wider["verify"][7][1] == pytest.approx(passes[4]) and wider["tree_verify"][2][0] == pytest.approx(passes[3])
    assert wider["draft_step"][5][0] == pytest.approx(np.hypot(0.03, drafting))


def test_changes_are_covered_by_their_intervals_and_nothing_is_found_where_nothing_changed() -> None:
    """95 % intervals of pairs of probes cover the factors that the machines were made with."""
    rng = np.random.default_rng(5)
    moved = [changes(probe_of(False, rng), probe_of(True, rng, sweeps=5)) for _ in range(300)]
    true = [*PASSES, DRAFTS, PASSES[0]]
    covered = [c.low <= factor <= c.high for parts in moved for c, factor in zip(parts, true, strict=True)]
    assert 0.935 < np.mean(covered) < 0.97
    same = [changes(probe_of(False, rng), probe_of(False, rng)) for _ in range(300)]
    assert np.mean([any(change.significant for change in parts) for parts in same]) < 0.08
    assert np.mean([parts[0].significant for parts in moved]) > 0.95


def test_parts_are_named_and_ordered() -> None:
    parts = changes(probe_of(False), probe_of(True))
    assert [part.part for part in parts] == [f"pass of {n}" for n in range(1, 6)] + ["draft step", "decoding step"]
    assert all(isinstance(part, Change) and part.significant for part in parts)
    assert [part.factor for part in parts] == pytest.approx([*PASSES, DRAFTS, PASSES[0]])
    assert all(later.factor < earlier.factor for earlier, later in pairwise(parts[:5]))


@pytest.mark.parametrize("contexts", [[16, 64], [64, 600]])
def test_a_probe_outside_the_profile_is_refused(contexts: list[int]) -> None:
    with pytest.raises(InputError, match="probe with `realrun probe --contexts 32,512`"):
        with_probe(read_cost(machine()), Probe.from_json(probe_of(True, contexts=contexts)))


def edited(**changed: Any) -> Mapping[str, Any]:
    return {**probe_of(True), **changed}


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 2},
        {"contexts": [300, 64]},
        {"contexts": [64]},
        {"sweeps": 1},
        {"mean_s": {"verify": [[0.0, 1.0]], "draft_step": [[1.0, 1.0]], "autoregressive": [1.0, 1.0]}},
        {"relative_half_width": {"verify": [0.1], "draft_step": 0.1, "autoregressive": 0.1}},
        {"relative_half_width": {"verify": [-0.1] * 5, "draft_step": 0.1, "autoregressive": 0.1}},
    ],
)
def test_a_malformed_probe_is_refused(broken: dict[str, Any]) -> None:
    refusal(lambda: Probe.from_json(edited(**broken)), "probe again")


def test_probes_of_other_pairs_and_other_costs_are_refused() -> None:
    refusal(lambda: probed_document(machine(), edited(target="u"), {}), "target u, the profile of t")
    refusal(lambda: changes(probe_of(True), probe_of(True, contexts=[64, 128])), "differ in their contexts")
    refusal(lambda: read_cost(probe_of(True)), "is a probe; rescale a profile")
    with pytest.raises(TypeError, match="expected a profile"):
        with_probe(specsim.ConstantCost(s_d=0.001, s_t=0.01), Probe.from_json(probe_of(True)))


@pytest.mark.parametrize("key", ["dtype", "threads", "kernels", "clock"])
def test_a_probe_of_other_settings_is_refused_where_the_profile_states_them(key: str) -> None:
    """CPU seconds of a probe over wall seconds of a profile say nothing about the machine's state."""

    def stated(document: Mapping[str, Any], value: str) -> dict[str, Any]:
        at_top = key in ("kernels", "clock")
        return {**document, key: value} if at_top else {**document, "provenance": {key: value}}

    with pytest.raises(InputError, match=f"{key} here, the profile of there"):
        probed_document(stated(machine(), "there"), stated(probe_of(True), "here"), {})
    for profile in (machine(), stated(machine(), "here")):
        assert probed_document(profile, stated(probe_of(True), "here"), {})["probed"]["passes"]


@pytest.mark.parametrize("widths", [{}, {"draft_step": 1.0, "verify": [], "autoregressive": []}, None])
def test_a_profile_with_malformed_half_widths_is_refused(widths: Any) -> None:
    with pytest.raises(InputError, match="relative_half_width"):
        probed_document({**machine(), "relative_half_width": widths}, probe_of(True), {})


def test_a_drafter_without_draft_steps_keeps_its_overheads() -> None:
    profile, probe = machine(), probe_of(True)
    profile["mean_s"]["draft_step"] = [[0.0] * 3] * DEPTH
    probe["mean_s"]["draft_step"], probe["relative_half_width"]["draft_step"] = [[0.0, 0.0]], None
    now = with_probe(read_cost(profile), Probe.from_json(probe))
    assert now.policy_step() == profile["mean_s"]["policy_step"] and float(now.draft(2, 64)) == 0.0
    assert float(now.verify(2, 64)) == pytest.approx(pass_s(2, 64, True))
