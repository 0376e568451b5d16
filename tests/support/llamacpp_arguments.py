"""llama-server's own parser of arguments, and the server that they start: `python llamacpp_arguments.py JOB RESULT`.

The package xllamacpp has no command line, but the library in it has llama.cpp's parser, which fills the very
structure that a `CommonParams` holds. A job is {"starts": [[argument, ...], ...], "prompt": [token, ...]}; the result
has for each start what was parsed, and what the server said of a request, or None where either was refused.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp
from xllamacpp import xllamacpp as library

PARSER = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
PROGRAMS = range(24)  # that the parser serves, numbered by version; llama-server's has --metrics
TOKENS = 32


def parse(arguments: list[str], program: int) -> Any:
    """The parameters of a program of llama.cpp, or None where its parser refuses them."""
    parameters = xllamacpp.CommonParams()
    address = id(parameters) + object.__basicsize__
    parameters.n_predict = 4321
    assert ctypes.c_int32.from_address(address).value == 4321, "the structure is no longer where it was"
    parameters.n_predict = -1
    words = [b"llama-server", *(argument.encode() for argument in arguments)]
    parser = getattr(ctypes.CDLL(library.__file__), PARSER)
    parser.restype = ctypes.c_bool
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    return parameters if parser(len(words), argv, ctypes.c_void_p(address), program, None) else None


def start(arguments: list[str], program: int, prompt: list[int]) -> dict[str, Any] | None:
    """What a server with these arguments has understood, and how many tokens it drafted and accepted."""
    parsed = parse(arguments, program)
    if parsed is None:
        return None
    try:
        server = xllamacpp.Server(parsed)
    except RuntimeError:
        return None
    asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0.0, "top_k": 1, "cache_prompt": False}
    timings = server.handle_completions(asked)["timings"]
    draft = parsed.speculative.draft
    return {
        "n_max": draft.n_max,
        "p_min": draft.p_min,
        "synth_rates": list(parsed.speculative.synth_rates),
        "drafted": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
    }


def main(job_file: str, results_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    server = next(program for program in PROGRAMS if parse(["--metrics"], program) is not None)
    results = [start(arguments, server, job["prompt"]) for arguments in job["starts"]]
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
