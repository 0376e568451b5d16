"""OpenVINO GenAI: the pair as models made of GGUF files; accepted tokens of every round, drafted ones in sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from realrun.drafters.independent import IndependentKind
from realrun.engines.engine import Engine, EngineRun, Job, Setting, Sums, models_of
from realrun.engines.gguf_file import write_gguf
from realrun.pairs.pair import Pair
from specsim.lookup.ngram import NgramRule


class OpenVinoEngine(Engine):
    """With a draft model or prompt lookup, in its continuous batching pipeline, one sequence at a time."""

    name = "openvino"
    modules = ("gguf",)
    package = "openvino-genai"
    lookup_rule = NgramRule(1, 3, "first", "stop")

    def convert(self, pair: Pair, folder: Path) -> None:
        models = models_of(pair) if isinstance(pair.drafter, IndependentKind) else [("target", pair.target)]
        for name, model in models:
            (folder / name).mkdir()
            write_gguf(model, pair.eos_token_ids, folder / name / "model.gguf", half=True)
            weights = {key: tensor.float().numpy() for key, tensor in model.state_dict().items()}
            weights["inverse frequencies"] = model.model.rotary_emb.inv_freq.float().numpy()
            np.savez(folder / name / "weights.npz", **weights)
        self.process({"convert": [str(folder / name) for name, _ in models]}, folder)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        description = {**job.as_dict(), "k": setting.k, "max_ngram": self.lookup_rule.max_ngram}
        return read_run(self.process(description, job.folder), job.max_new_tokens)


def read_run(result: dict[str, Any], max_new_tokens: int) -> EngineRun:
    """Read what a process returned.

    emitted : of every prompt, tokens that each pass of the target put out, the first of them over the prompt
    draft_passes : of every prompt, a drafted token each, but for one that is made when a single token is left, and
        that the target does not verify; None where lookup drafts
    """
    rounds: list[list[tuple[int | None, int]]] = [
        [(None, tokens - 1) for tokens in emitted[1:]] for emitted in result["emitted"]
    ]
    if None in result["draft_passes"]:
        return EngineRun(result["outputs"], rounds)
    accepted = sum(tokens for sequence in rounds for _, tokens in sequence)
    unverified = sum(sum(emitted[:-1]) == max_new_tokens - 1 for emitted in result["emitted"])
    return EngineRun(result["outputs"], rounds, Sums(None, sum(result["draft_passes"]) - unverified, accepted))
