"""One constant of a roofline changed at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.constants import Change, changes
from specsim.cost.roofline.cost import Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, Hardware
from specsim.cost.roofline.passes import Roofline
from specsim.io.errors import InputError

# So fast at computing that every operation waits for memory.
MEMORY_BOUND = Hardware("slow memory", memory_bytes_s=1e12, flops={"bfloat16": 1e20}, link_bytes_s=1e11)


def costs(drafter: str = "llama-68m", **other: float) -> RooflineCost:
    target = Roofline(find_architecture("llama-160m"), MEMORY_BOUND, derating=Derating(**other))
    return RooflineCost(target, find_drafter(drafter, target.model))


def named(cost: RooflineCost, share: float = 0.25) -> dict[str, Change]:
    return {change.constant: change for change in changes(cost, share)}


def test_memory_bound_passes_take_as_much_longer_as_memory_is_slower() -> None:
    cost = costs()
    both, target, drafter = (named(cost)[f"{whose}: memory bandwidth"] for whose in ("both", "target", "drafter"))
    for change, of_target, of_drafter in ((both, 1, 1), (target, 1, 0), (drafter, 0, 1)):
        for changed, factor in ((change.less, 0.75), (change.more, 1.25)):
            assert float(changed.verify(4, 100) / cost.verify(4, 100)) == pytest.approx(factor**-of_target)
            assert float(changed.draft(4, 100) / cost.draft(4, 100)) == pytest.approx(factor**-of_drafter)


def test_a_launch_and_an_overhead_add_what_they_are() -> None:
    cost = replace(costs(launch_s=1e-5), overheads=Overheads(step_s=0.002))
    launches = sum(operation.launches for operation in cost.target.operations(1, 100))
    changed = named(cost)
    slower = changed["target: time of a launch"].more
    assert float(slower.verify(1, 100) - cost.verify(1, 100)) == pytest.approx(0.25e-5 * launches)
    assert changed["overhead of a step"].less.round_overhead() == pytest.approx(0.0015)


def test_what_is_zero_is_not_listed_and_an_overlap_stays_a_share() -> None:
    changed = named(costs())
    of_three = {f"{whose}: {what}" for whose in ("both", "target", "drafter")
                for what in ("memory bandwidth", "matrix throughput", "overlap")}  # fmt: skip
    assert changed.keys() == of_three
    assert changed["both: overlap"].more.target.derating.overlap == 1
    assert changed["both: overlap"].less.target.derating.overlap == 0.75
    assert named(costs("prompt-lookup")).keys() == {name for name in of_three if name.startswith("target")}
    shared = replace(costs().target, tensor_parallel=2)
    assert "target: bandwidth between devices" in named(RooflineCost(shared, find_drafter("eagle", shared.model)))


@pytest.mark.parametrize(
    ("short", "long"), [("eesd:3", {"kind": "eesd", "layers": 3}), ("medusa:4", {"kind": "medusa", "heads": 4})]
)
def test_a_drafter_of_a_number_has_a_short_form(short: str, long: dict[str, object]) -> None:
    target = find_architecture("llama-2-7b")
    assert find_drafter(short, target) == find_drafter(long, target)


def test_a_short_form_without_a_fitting_number_is_refused() -> None:
    for drafter in ("eesd:x", "eesd:", "self-sd:0", "medusa"):
        with pytest.raises(InputError, match="give 1 to"):
            find_drafter(drafter, find_architecture("llama-2-7b"))
