"""Decode for `realrun compare` with the version of realrun that this Python imports: `python -P worker.py`.

Reads a JSON object {"do": method, ...arguments} from each line of standard input, runs that method of `Worker`, and
writes a JSON object on a line of standard output: the result, or {"error": text}. Computes nothing between commands.

Checkouts of other dates run this very file, so it uses as little of them as it can: `load_pair`, `Sampler`, `Decoder`,
`Decoding`, `make_policy`, and `use_clock` and `use_kernels` where a job asks for them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 24


class Worker:
    """A pair, with a decoder for every policy."""

    def __init__(self) -> None:
        self.job: Mapping[str, Any] = {}
        self.arms: list[tuple[Any, Any]] = []  # decoder and policy
        self.decoding: Any = None
        self.begin_decoding: Any = None
        self.in_use = ExitStack()

    def start(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Import what the job needs and load its pair; return where the code lies, and versions.

        job : "pair", arguments of `load_pair`; "sampler", of `Sampler`; "policies", name and settings of each, None for
            the baseline; "prompts", tokens of each; "max_new_tokens"; "seed"; "clock" and "kernels", empty for defaults
        """
        import realrun
        import specsim

        if job["kernels"]:
            from realrun.lm.kernels import use_kernels

            self.in_use.enter_context(use_kernels(job["kernels"]))
        if job["clock"]:
            from realrun.lm.clock import use_clock

            self.in_use.enter_context(use_clock(job["clock"]))
        self.job = job
        facts = {"specsim": specsim.__version__, "python": sys.version.split()[0]}
        facts |= {name: version(name) for name in ("torch", "transformers")}
        return {"folder": str(Path(realrun.__file__).resolve().parents[1]), **facts, **self.load()}

    def load(self) -> dict[str, str]:
        """Load the pair anew, make a decoder for every policy, and warm up; return a hash of its weights.

        Weights and caches come to lie elsewhere in memory than before.
        """
        import realrun
        import specsim
        from realrun.decode.decoder import Decoding

        self.arms, self.decoding, self.begin_decoding = [], None, Decoding
        gc.collect()
        job = self.job
        pair = realrun.load_pair(**job["pair"])
        for policy in job["policies"]:
            decoder = realrun.Decoder(*pair.make_drafter(), pair.eos_token_ids, realrun.Sampler(**job["sampler"]))
            self.arms.append((decoder, None if policy is None else specsim.make_policy(*policy)))
        for decoder, policy in self.arms:
            decoder.decode(job["prompts"][0], min(WARM_UP_TOKENS, job["max_new_tokens"]), policy)
        return {"weights": pair.fingerprint}

    def begin(self, arm: int, prompt: int) -> dict[str, str]:
        """Prefill this prompt for the policy of this number; the prompt's number keys its noise."""
        (decoder, policy), job = self.arms[arm], self.job
        tokens, limit = job["prompts"][prompt], job["max_new_tokens"]
        self.decoding = self.begin_decoding(decoder, tokens, limit, policy, prompt, job["seed"])
        return {}

    def advance(self, rounds: int) -> dict[str, Any]:
        """Run so many rounds, or up to the end of the text.

        Returns the output position and, at the end, tokens, and rounds: drafted, accepted, seconds.
        """
        decoding, run = self.decoding, None
        for _ in range(rounds):
            decoding.advance()
            if decoding.done:
                result = decoding.result
                times = [[round_.drafted, round_.accepted, round_.seconds] for round_ in result.rounds]
                run = {"tokens": result.tokens, "rounds": times}
                break
        return {"position": decoding.position, "run": run}


def main() -> None:
    """Answer commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with answers
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
