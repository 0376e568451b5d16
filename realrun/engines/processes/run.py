"""Run an engine on a job: `python run.py JOB RESULT ENGINE`, by an interpreter that has the engine.

ENGINE is a module beside this file, whose `run` makes a result of a job. Both are JSON files.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main(job: str, result: str, engine: str) -> None:
    done = importlib.import_module(engine).run(json.loads(Path(job).read_text()))
    Path(result).write_text(json.dumps(done))


if __name__ == "__main__":  # vLLM may start processes that import this file
    main(*sys.argv[1:])
