"""Hugging Face's `generate` in a process of its own.

Nothing of a round leaves `generate`, so the candidate generator that it makes is watched: what it proposes, and how
much of that it is told to have matched.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class Watched:
    """The rounds of a model's assisted generations."""

    def __init__(self, model: Any):
        self.rounds: list[tuple[int, int]] = []
        self._make = model._get_candidate_generator
        model._get_candidate_generator = self._watch

    def _watch(self, **given: Any) -> Any:
        generator = self._make(**given)
        propose, learn = generator.get_candidates, generator.update_candidate_strategy

        def get_candidates(input_ids: torch.Tensor, **rest: Any) -> Any:
            found = propose(input_ids, **rest)
            self.rounds.append((found[0].shape[1] - input_ids.shape[1], 0))
            return found

        def update_candidate_strategy(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            self.rounds[-1] = self.rounds[-1][0], int(num_matches)
            learn(input_ids, scores, num_matches)

        generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
        return generator


def run(job: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    folder, k = Path(job["folder"]), job["k"]
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    how: dict[str, Any] = {"prompt_lookup_num_tokens": k}
    if not job["lookup"]:
        draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).eval()
        config = draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
        config.assistant_confidence_threshold = 0.0
        how = {"assistant_model": draft}
    temperature = job["temperature"]
    sampling: dict[str, Any] = {"do_sample": bool(temperature)}
    if temperature:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    watched = Watched(target)
    outputs, rounds = [], []
    for number, prompt in enumerate(job["prompts"]):
        torch.manual_seed(job["seed"] + number)
        watched.rounds = []
        ids = torch.tensor([prompt])
        found = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job["max_new_tokens"],
            **sampling,
            eos_token_id=job["eos_token_ids"] or None,
            pad_token_id=0,
            **how,
        )
        outputs.append(found[0, len(prompt) :].tolist())
        rounds.append(watched.rounds)
    return {"outputs": outputs, "rounds": rounds}
