"""What speculation is predicted to gain on servers, by batch and context, as rows of table.csv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from specsim.cost.batches import BatchCost
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.io.progress import Progress
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, TurboSpec
from specsim.serving.speedup_map import Cell, SpeedupMap, speedup_map
from specsim.trace.trace import Trace
from studies.common import Config

MEMORY_SHARE = 0.9  # of a device's memory that weights and caches may fill, as vLLM plans


class Server(NamedTuple):
    """Costs under a name, and the memory that bounds its batches."""

    name: str
    cost: BatchCost
    memory: RooflineCost

    def sequences(self, context: int) -> int:
        """The most sequences of so many cached tokens that fit beside the weights."""
        passes = [self.memory.target, self.memory.draft_passes]
        free = MEMORY_SHARE * self.memory.target.hardware.memory_bytes
        free -= sum(pass_.weight_bytes for pass_ in passes if pass_)
        return int(free / sum(float(pass_.kv_bytes(context)) for pass_ in passes if pass_))


def servers(config: Config) -> list[Server]:
    """Published constants, then a roofline of each hardware."""
    rooflines = []
    for hardware in config["hardware"]:
        target = Roofline(find_architecture(config["target"]), find_hardware(hardware))
        cost = RooflineCost(target, find_drafter(config["drafter"], target.model))
        rooflines.append(Server(f"roofline {hardware.upper()}", cost, cost))
    constants = batch_cost(read_cost(config["constants"]))
    return [Server("SpecDecode-Bench, H100", constants, rooflines[0].memory), *rooflines]


def server_map(trace: Trace, server: Server, config: Config, seed: int) -> dict[int, SpeedupMap]:
    """By context, over the batches that the memory holds."""
    maps = {}
    for context in config["contexts"]:
        arms: list[FixedK | DraftLengthRule] = [FixedK(k=k) for k in range(1, config["max_draft_tokens"] + 1)]
        arms.append(TurboSpec(server.cost, config["max_draft_tokens"]))
        batches = [batch for batch in config["batches"] if batch <= server.sequences(context)]
        maps[context] = speedup_map(trace, server.cost, arms, batches, contexts=[context], seed=seed)
    return maps


def server_maps(trace: Trace, config: Config, seed: int, report: Progress) -> dict[str, dict[int, SpeedupMap]]:
    """By server."""
    asked, maps = servers(config), {}
    for number, server in enumerate(asked):
        report("maps", number, len(asked))
        maps[server.name] = server_map(trace, server, config, seed)
    return maps


def drafted_ms(config: Config) -> float:
    """Milliseconds of a drafted token by the costs of a single batch."""
    two_s, one_s = (float(read_cost(config["one_batch"]).draft(k, 0)) for k in (2, 1))
    return 1e3 * (two_s - one_s)


def best_fixed(maps: SpeedupMap, cell: Cell) -> str:
    """Return the label of the best fixed K."""
    return max(maps.lengths, key=lambda label: cell.speedup[label].estimate)


def map_rows(maps: Mapping[str, Mapping[int, SpeedupMap]]) -> Iterator[dict[str, Any]]:
    """Yield, by costs, context and batch, the best fixed K with its speedup, and TurboSpec's speedup."""
    for server, by_context in maps.items():
        for context, speedups in by_context.items():
            for cell in speedups.cells:
                label = best_fixed(speedups, cell)
                rule = next(cell.speedup[name] for name in cell.speedup if name not in speedups.lengths)
                yield {
                    "decoded": "predicted",
                    "costs": server,
                    "context": context,
                    "batch": cell.batch,
                    "k": speedups.lengths[label],
                    "predicted": cell.speedup[label].as_dict(),
                    "turbospec": rule.estimate,
                }
