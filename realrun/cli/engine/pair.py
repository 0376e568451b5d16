"""The pair that a command of `realrun engine` runs, and the trace whose rounds are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from realrun.cli.options import MachineSettings, ModelSettings, PromptSettings, refuse_beside
from specsim.io.settings import setting

if TYPE_CHECKING:
    from realrun.engines.engine import Engine
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
