"""NVIDIA's measured operator latencies, through the package aiconfigurator-core: all that touches it.

Matrix products, attention of a single query per sequence, layers of experts and all-reduces were measured on a grid,
between and beyond which the package interpolates; norms, activations and embeddings are its formulas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from specsim.io.errors import InputError

SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
FRAMEWORKS = ("vllm", "trtllm", "sglang")  # whose kernels were measured
MODES = {"bfloat16": "bfloat16", "float8": "fp8"}  # the package's names of dtypes
ROUTINGS = ("balanced", "power_law_1.01", "power_law_1.2")  # how tokens were dealt to experts
LARGEST_CONTEXT = 2**17  # in cached tokens, that attention was measured at
MISSING = (
    "silicon costs need NVIDIA's tables, which are not installed; pip install -c constraints.txt '.[silicon]', or "
    "write a cost file of the form roofline"
)


class Tables:
    """The tables of a system and framework."""

    def __init__(self, hardware: str, framework: str) -> None:
        if hardware not in SYSTEMS:
            raise InputError(f"silicon: hardware {hardware!r} has no tables; known: {', '.join(SYSTEMS)}")
        if framework not in FRAMEWORKS:
            raise InputError(f"silicon: framework {framework!r} is unknown; known: {', '.join(FRAMEWORKS)}")
        try:
            from aiconfigurator_core.sdk import common, engine, operations, perf_database
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("aiconfigurator"):
                raise InputError(MISSING) from None
            raise
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns of tables that are not asked
        database = perf_database.get_database(SYSTEMS[hardware], framework, "current")
        if database is None:
            raise InputError(f"silicon: {hardware} has no tables of {framework}; choose another framework")
        self.hardware, self.framework, self.version = hardware, framework, str(database.version)
        self.operations, self._engine, self._common = operations, engine, common
        self._handle = engine.EngineHandle.for_database(database)

    @property
    def name(self) -> str:
        return f"{self.framework} {self.version}"

    def mode(self, kind: str, dtype: str) -> Any:
        """The package's name of a dtype. kind : "GEMM", "MoE" or "KVCache"."""
        if dtype not in MODES:
            raise InputError(f"silicon: dtype {dtype!r} has no tables; known: {', '.join(MODES)}")
        return getattr(self._common, f"{kind}QuantMode")[MODES[dtype]]

    def wire(self, operations: Sequence[Any]) -> str:
        """Operations as the package's engine takes them."""
        return str(self._engine.build_ops_json(list(operations)))

    def seconds(self, wire: str, *, sequences: int = 1, context: int = 1, rows: int = 1) -> float:
        """All of these operations: attention over so many sequences and cached tokens, the others over so many rows."""
        try:
            latencies = self._handle.evaluate_ops_json(wire, is_context=False, batch_size=sequences, s=context, x=rows)
        except (ValueError, RuntimeError) as error:  # the package raises these
            what = str(error).partition(" at /")[0]
            raise InputError(
                f"silicon: the tables of {self.name} on {self.hardware} lack an operation: {what:.160}; choose other "
                "hardware or another framework"
            ) from None
        return 1e-3 * float(sum(milliseconds for _, milliseconds, *_ in latencies))


@cache
def tables(hardware: str, framework: str) -> Tables:
    """Load the tables of a system and framework, once."""
    return Tables(hardware, framework)
