"""Trees of SGLang's EAGLE, grown by its own functions: `python -m tests.support.sglang_trees SGLANG`.

SGLANG is the folder of the package's source, such as an unpacked wheel's; neither it nor a GPU is needed to run. Writes
tests/specsim/engines/fixtures/sglang_trees.json: for every flag's values, the nodes that SGLang would verify.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.specsim.policy.test_tree_policies import Drafter, Node
from tests.support import ROOT

FIXTURE = ROOT / "tests/specsim/engines/fixtures/sglang_trees.json"
FLAGS = [(2, 2, 4), (3, 4, 13), (5, 4, 8), (6, 10, 60), (1, 4, 5), (3, 2, 11)]  # steps, topk, draft tokens
SOURCES = {
    "srt/utils/common.py": ["fast_topk"],
    "srt/speculative/spec_utils.py": [
        "_select_top_k_tokens_first",
        "_select_top_k_tokens_later",
        "select_top_k_tokens",
    ],
    "srt/speculative/eagle_utils.py": ["organize_draft_results"],
}


def functions(package: Path) -> dict[str, Callable[..., Any]]:
    """SGLang's functions by name, without its imports and decorators."""
    scope: dict[str, Any] = {"torch": torch, "maybe_detect_oob": lambda *_: None}
    for path, names in SOURCES.items():
        tree = ast.parse((package / path).read_text())
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
        for function in found:
            function.decorator_list, function.returns = [], None
            for argument in function.args.args:
                argument.annotation = None
        assert len(found) == len(names), path
        exec(compile(ast.Module(found, []), path, "exec"), scope)
    return scope


def verified(sglang: SimpleNamespace, drafter: Drafter, steps: int, top_k: int, draft_tokens: int) -> list[Node]:
    """The nodes that SGLang's EAGLE worker verifies, with the calls of its `draft_forward`."""
    nodes: list[Node] = []
    beam: list[Node] = [()]
    lists: tuple[list[Any], ...] = ([], [], [])
    scores = None
    for i in range(steps):
        probs = torch.tensor([drafter.after(node)[:top_k].tolist() for node in beam])  # [beam, top_k]
        ranks = torch.arange(top_k).repeat(len(beam), 1)
        nodes += [(*node, rank) for node in beam for rank in range(top_k)]
        _, _, scores, info = sglang.select_top_k_tokens(i, probs, ranks, torch.zeros(len(beam), 1), scores, top_k)
        for kept, part in zip(lists, info, strict=True):
            kept.append(part)
        beam = [nodes[j] for j in info[2][0].tolist() if j >= 0]
    _, chosen, tokens = sglang.organize_draft_results(*lists, draft_tokens)
    kept_nodes = [nodes[j] for j in chosen[0].tolist()]
    assert tokens[0].tolist() == [node[-1] for node in kept_nodes]
    return kept_nodes


if __name__ == "__main__":
    sglang = SimpleNamespace(**functions(Path(sys.argv[1])))
    cases = []
    for seed, (steps, top_k, draft_tokens) in product((1, 2, 3), FLAGS):
        tree = verified(sglang, Drafter(seed), steps, top_k, draft_tokens)
        flags = {"steps": steps, "top_k": top_k, "draft_tokens": draft_tokens}
        cases.append({"seed": seed, **flags, "verified": tree})
    FIXTURE.write_text(json.dumps({"sglang": "0.5.23", "trees": cases}).replace('{"seed', '\n{"seed') + "\n")
