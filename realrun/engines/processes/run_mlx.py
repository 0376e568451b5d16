"""mlx-lm in a process of its own.

It says of every token whether it was drafted. How many tokens a round drafted is read off what the target is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core
from mlx_lm.generate import speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model

STEP = 512  # tokens of a prompt that a pass reads


def watched(model: Any) -> list[int]:
    """Return a list to which every pass of the model appends its number of tokens."""
    widths: list[int] = []

    class Watched(type(model)):  # type: ignore[misc]
        def __call__(self, inputs: Any, *rest: Any, **named: Any) -> Any:
            widths.append(inputs.shape[1])
            return super().__call__(inputs, *rest, **named)

    model.__class__ = Watched
    return widths


def run(job: dict[str, Any]) -> dict[str, Any]:
    (target, _), (draft, _) = (load_model(Path(job["folder"]) / name) for name in ("target", "draft"))
    widths = watched(target)
    sampler = make_sampler(job["temperature"])
    outputs, all_rounds = [], []
    for number, prompt in enumerate(job["prompts"]):
        mlx.core.random.seed(job["seed"] + number)
        widths.clear()
        prefill = -(-(len(prompt) - 1) // STEP)  # passes; the prompt's last token goes into the first round
        output: list[int] = []
        accepted: list[int] = []
        for token, _, drafted in speculative_generate_step(
            mlx.core.array(prompt),
            target,
            draft,
            num_draft_tokens=job["k"],
            max_tokens=job["max_new_tokens"],
            sampler=sampler,
            prefill_step_size=STEP,
        ):
            while len(accepted) < len(widths) - prefill:
                accepted.append(0)
            accepted[-1] += bool(drafted)
            output.append(int(token))
            if output[-1] in job["eos_token_ids"]:  # as mlx_lm.stream_generate ends
                break
        outputs.append(output)
        all_rounds.append([(width - 1, count) for width, count in zip(widths[prefill:], accepted, strict=True)])
    return {"outputs": outputs, "rounds": all_rounds}
