"""onnxruntime-genai: the pair as its own model builder makes it, rounds by its counters after every token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from realrun.drafters.independent import IndependentKind
from realrun.engines.engine import Engine, EngineRun, Job, Setting, models_of
from realrun.pairs.pair import Pair
from specsim.io.errors import InputError
from specsim.lookup.ngram import NgramRule


class OnnxruntimeEngine(Engine):
    """With a draft model or its lookup of n-grams, both of constant length."""

    name = "onnxruntime-genai"
    package = "onnxruntime-genai"
    lookup_rule = NgramRule(2, 2, "last", "stop")

    def convert(self, pair: Pair, folder: Path) -> None:
        for name, model in models_of(pair):
            if getattr(model.config, "intermediate_size", None) == model.config.vocab_size:
                raise InputError(
                    f"onnxruntime-genai's model builder takes the MLPs of the {name} model, which are as wide as its "
                    f"vocabulary ({model.config.vocab_size}), for its head; choose another model or engine"
                )
        super().convert(pair, folder)
        names = ["target", *(["draft"] if isinstance(pair.drafter, IndependentKind) else [])]
        self.process({"folder": str(folder), "convert": names}, folder)

    def run(self, job: Job, setting: Setting) -> EngineRun:
        # Its ngram_size counts the token that an n-gram predicts, too.
        description = {**job.as_dict(), "k": setting.k, "ngram_size": self.lookup_rule.max_ngram + 1}
        result = self.process(description, job.folder)
        return EngineRun(result["outputs"], [rounds_of(counters) for counters in result["counters"]])


def rounds_of(counters: Sequence[tuple[int, int, int]]) -> list[tuple[int | None, int]]:
    """List a request's rounds (drafted, accepted) from its counters after every token.

    counters : rounds so far, and tokens drafted and accepted in them; these grow with a round's first token

    Raises InputError if tokens were drafted or accepted without a round, or several rounds are counted at a time.
    """
    rounds: list[tuple[int | None, int]] = []
    for before, after in pairwise([(0, 0, 0), *counters]):
        counted, drafted, accepted = (new - old for new, old in zip(after, before, strict=True))
        if counted == 1:
            rounds.append((drafted, accepted))
        elif counted or drafted or accepted:
            raise InputError(
                f"after round {before[0]}, onnxruntime-genai counts {counted} rounds, {drafted} drafted and {accepted} "
                "accepted tokens more at a token; take version 0.18"
            )
    return rounds
