"""What speculation is predicted to gain on servers, by batch and context, as rows of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from specsim.api.predict import predict
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.policy.chain.fixed_k import FixedK
from specsim.progress import Progress
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, GoodputK
from specsim.serving.drafts import drafts_of
from specsim.serving.speedup_map import Cell, SpeedupMap, speedup_map
from specsim.speedup.intervals import interval_text
from specsim.trace.trace import Trace
from studies.common import Config

SHOWN_BATCHES = (1, 64)  # in the table of costs
DRAFTED = 4  # tokens of the longer draft in it
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
        free -= sum(one.weight_bytes for one in passes if one)
        return int(free / sum(float(one.kv_bytes(context)) for one in passes if one))


def servers(config: Config) -> list[Server]:
    """Published constants, then a roofline of each hardware."""
    found = []
    for hardware in config["hardware"]:
        target = Roofline(find_architecture(config["target"]), find_hardware(hardware))
        cost = RooflineCost(target, find_drafter(config["drafter"], target.model))
        found.append(Server(f"roofline {hardware.upper()}", cost, cost))
    constants = batch_cost(read_cost(config["constants"]))
    return [Server("SpecDecode-Bench, H100", constants, found[0].memory), *found]


def cost_rows(config: Config) -> Iterator[list[str]]:
    """Of every server at its middle context, milliseconds of a step without speculation, and what others take."""
    context = config["contexts"][len(config["contexts"]) // 2]
    for server in servers(config):
        for batch in SHOWN_BATCHES:
            one, five = (BatchTokens.alike(batch, tokens, context) for tokens in (1, 5))
            cost = server.cost
            step_s, wide_s = (float(cost.batch_verify(tokens)) + cost.step_s for tokens in (one, five))
            drafts_s = [float(cost.batch_draft(k, BatchTokens.alike(batch, 1, context + k))) for k in range(DRAFTED)]
            ratios = (drafts_s[0] / step_s, sum(drafts_s) / step_s, wide_s / step_s)
            yield [server.name, str(batch), f"{1e3 * step_s:.2f}", *(f"{ratio:.3f}" for ratio in ratios)]


def server_map(trace: Trace, server: Server, config: Config, seed: int) -> dict[int, SpeedupMap]:
    """By context, over the batches that the memory holds."""
    found = {}
    for context in config["contexts"]:
        arms: list[FixedK | DraftLengthRule] = [FixedK(k=k) for k in range(1, config["max_draft_tokens"] + 1)]
        arms.append(GoodputK(server.cost, config["max_draft_tokens"]))
        batches = [batch for batch in config["batches"] if batch <= server.sequences(context)]
        found[context] = speedup_map(trace, server.cost, arms, batches, contexts=[context], seed=seed)
    return found


def server_maps(
    traces: Mapping[str, Trace], config: Config, seed: int, report: Progress
) -> dict[tuple[str, str], dict[int, SpeedupMap]]:
    """By trace and server."""
    asked = [(name, server) for name in traces for server in servers(config)]
    found = {}
    for number, (name, server) in enumerate(asked):
        report("maps", number, len(asked))
        found[name, server.name] = server_map(traces[name], server, config, seed)
    return found


def best_fixed(found: SpeedupMap, cell: Cell) -> str:
    """The label of the best fixed K."""
    return max(found.lengths, key=lambda label: cell.speedup[label].estimate)


def drafted_ms(config: Config) -> float:
    """Milliseconds of a drafted token by the costs of a single batch."""
    two_s, one_s = (float(read_cost(config["one_batch"]).draft(k, 0)) for k in (2, 1))
    return 1e3 * (two_s - one_s)


def one_batch_rows(traces: Mapping[str, Trace], config: Config) -> Iterator[list[str]]:
    """At batch 1, the best fixed K and its speedup by costs that know no other batch, and by the constants."""
    for name, trace in traces.items():
        row = [name]
        for costs in (config["one_batch"], config["constants"]):
            found = [predict(trace, read_cost(costs), "fixed_k", k=k) for k in range(1, config["max_draft_tokens"] + 1)]
            best = max(found, key=lambda one: one.speedup.estimate)
            row.append(f"K={best.policy.k}: {interval_text(best.speedup.as_dict())}")
        yield row


def map_rows(maps: Mapping[int, SpeedupMap], config: Config) -> Iterator[list[str]]:
    """Per batch, at every context, the best fixed K with its speedup, and the goodput rule's."""
    cells = {(cell.batch, context): cell for context, found in maps.items() for cell in found.cells}
    for batch in config["batches"]:
        row = [str(batch)]
        for context, found in maps.items():
            cell = cells.get((batch, context))
            if cell is None:
                row += ["no memory", ""]
                continue
            label = best_fixed(found, cell)
            one = cell.speedup[label]
            rule = next(cell.speedup[name].estimate for name in cell.speedup if name not in found.lengths)
            row += [f"K={found.lengths[label]}: {one.estimate:.2f} [{one.low:.2f}, {one.high:.2f}]", f"{rule:.2f}"]
        yield row


def schedule_rows(
    all_maps: Mapping[tuple[str, str], Mapping[int, SpeedupMap]],
) -> Iterator[list[str]]:
    """Of every trace and server at every context, K by batch, and the batch beyond which it loses."""
    for (trace, server), maps in all_maps.items():
        for context, found in maps.items():
            lengths = ", ".join(f"{batch}: {k}" for batch, k in found.schedule(context).items())
            (even,) = found.break_even
            yield [trace, server, str(context), lengths, str(even)]


def acceptance_rows(traces: Mapping[str, Trace], config: Config) -> Iterator[list[str]]:
    """Tokens per round by fixed K; at a batch of one or any other."""
    for name, trace in traces.items():
        means = []
        for k in range(1, config["max_draft_tokens"] + 1):
            drafts = drafts_of(trace, FixedK(k=k))
            means.append(trace.output_tokens.sum() / np.sum(drafts.num_rounds))  # type: ignore[union-attr]
        yield [name, str(trace.sequences), *(f"{mean:.2f}" for mean in means)]
