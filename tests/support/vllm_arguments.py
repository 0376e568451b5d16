"""vLLM's own parser of arguments and the configuration that it makes: `python vllm_arguments.py JOB RESULT`.

In vLLM's environment. A job is {"starts": [[argument, ...], ...]}; the result has for each start its speculation as an
engine would have it, or {"refused": error}, and at its end the methods that vLLM knows. No engine is started.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, get_args

FIELDS = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def configuration(arguments: list[str]) -> dict[str, Any]:
    """Of speculation, and where there is a schedule, the K of every batch size from 1 on, as the scheduler has it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments)
    engine = EngineArgs.from_cli_args(parsed).create_engine_config()
    settings = {name: getattr(engine.speculative_config, name) for name in FIELDS}
    if ranges := settings["num_speculative_tokens_per_batch_size"]:
        most, longest = engine.scheduler_config.max_num_seqs, settings["num_speculative_tokens"]
        settings["lookup"] = build_dynamic_sd_schedule_lookup([*ranges], most, longest)[1:]
    return settings


def names(literal: Any) -> list[str]:
    """The strings of a type that may be nested."""
    return [literal] if isinstance(literal, str) else [name for part in get_args(literal) for name in names(part)]


def main(job_file: str, results_file: str) -> None:
    os.environ |= ENVIRONMENT
    job = json.loads(Path(job_file).read_text())
    results: list[Any] = []
    for arguments in job["starts"]:
        try:
            results.append(configuration(arguments))
        except (Exception, SystemExit) as error:
            results.append({"refused": f"{type(error).__name__}: {error}"})
    from vllm.config.speculative import SpeculativeMethod

    results.append(names(SpeculativeMethod))
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
