"""Drafts judged by vLLM's own samplers: `python vllm_sampler.py ROUNDS RESULT`, in an interpreter that has vLLM.

Target and drafter are bigrams over 6 tokens; every round drafts 2 tokens behind token 0. The result, JSON, has both
tables of probabilities, and by sampler and draft method the drafted and the emitted tokens of every round; -1: none.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # or vLLM takes no Triton where there is no GPU

import torch
from vllm.triton_utils import tl
from vllm.v1.sample import rejection_sampler as first_runner
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as second_runner

VOCAB, K = 6, 2
second_runner.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x))  # the interpreter has no libdevice


def drafted(draft: torch.Tensor, rounds: int, method: str) -> torch.Tensor:
    """Draft tokens [n, K]."""
    tokens = [torch.zeros(rounds, dtype=torch.long)]
    for _ in range(K):
        probs = draft[tokens[-1]]
        tokens.append(probs.argmax(-1) if method == "greedy" else torch.multinomial(probs, 1)[:, 0])
    return torch.stack(tokens[1:], 1)


def by_first_runner(target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, method: str) -> torch.Tensor:
    """Emitted tokens [n, K + 1], the one behind a draft that was accepted as a whole left out."""
    rounds, before = (
        len(tokens),
        torch.cat([torch.zeros(len(tokens), 1, dtype=torch.long), tokens[:, :-1]], 1).flatten(),
    )
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(rounds), generators={})
    return first_runner.rejection_sample(
        tokens.flatten().int(),
        [K] * rounds,
        K,
        torch.arange(K, K * rounds + 1, K, dtype=torch.int32),
        draft[before] if method == "probabilistic" else None,
        target[before].log(),
        torch.full((rounds, 1), -1, dtype=torch.int32),
        sampling,
    )


def by_second_runner(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, method: str, *, block: bool = False
) -> torch.Tensor:
    rounds = len(tokens)
    rows = torch.cat([torch.zeros(rounds, 1, dtype=torch.long), tokens], 1)
    number = torch.arange(rounds)
    emitted, count = second_runner.rejection_sample(
        target[rows].log().flatten(0, 1),
        draft[rows[:, :K]].log() if method == "probabilistic" else None,
        rows.flatten(),
        torch.arange(0, rows.numel() + 1, K + 1, dtype=torch.int32),
        torch.arange(K + 1).repeat(rounds),
        number.int(),
        number.repeat_interleave(K + 1).int(),
        torch.arange(K + 1).repeat(rounds).int(),
        torch.ones(rounds),
        number + 12345,
        K,
        use_block_verification=block,
    )
    return emitted.masked_fill(torch.arange(K + 1) >= count[:, None], -1)


def main(rounds: int, result: Path) -> None:
    torch.manual_seed(1)
    target, draft = ((1.2 * torch.randn(VOCAB, VOCAB)).softmax(-1) for _ in range(2))
    draft = (target.log() + draft.log()).mul(0.6).softmax(-1)
    made = {}
    for method in ("greedy", "probabilistic"):
        tokens = drafted(draft, rounds, method)
        few = tokens[: rounds // 4]
        for name, of, emitted in (
            ("first", tokens, by_first_runner(target, draft, tokens, method)),
            ("second", few, by_second_runner(target, draft, few, method)),
            ("block", few, by_second_runner(target, draft, few, method, block=True)),
        ):
            made[f"{name} {method}"] = {"drafted": of.tolist(), "emitted": emitted.tolist()}
    result.write_text(json.dumps({"target": target.tolist(), "draft": draft.tolist(), "rounds": made}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
