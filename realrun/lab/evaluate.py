"""How good the lab's models are, on held-out text."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from realrun.drafters.independent import IndependentKind
from realrun.pairs.library_text import library_files
from realrun.pairs.pair import Pair

WINDOW_TOKENS = 256


@torch.inference_mode()
def evaluate(pair: Pair, windows: int = 128) -> dict[str, float]:
    """Nats per token of target and draft model, their gap, and top-1 agreement.

    On evenly spread windows of 256 tokens of the held-out files.
    """
    parts = [np.asarray(pair.tokenizer(f.text, verbose=False)["input_ids"]) for f in library_files("held_out")]
    tokens = np.concatenate(parts)
    starts = np.linspace(0, len(tokens) - WINDOW_TOKENS - 1, windows).astype(int)
    assert isinstance(pair.drafter, IndependentKind)
    nats = {"target": 0.0, "draft": 0.0}
    agree = 0.0
    for start in starts.tolist():
        window = torch.from_numpy(tokens[start : start + WINDOW_TOKENS + 1]).to(pair.device)
        top = []
        for name, model in (("target", pair.target), ("draft", pair.drafter.model)):
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            nats[name] += float(F.cross_entropy(logits, window[1:])) / windows
            top.append(logits.argmax(-1))
        agree += float((top[0] == top[1]).float().mean()) / windows
    return {
        "target_nats": nats["target"],
        "draft_nats": nats["draft"],
        "gap_nats": nats["draft"] - nats["target"],
        "top1_agreement": agree,
    }
