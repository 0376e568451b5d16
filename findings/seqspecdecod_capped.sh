#!/usr/bin/env bash
# engine: sequential-speculative-decoding
# version: 0.1.1
# date: 2026-11-29
# finding: method="capped_hsd", its fastest one, changes the distribution of the text: the ratios of one position
#   accept and replace the tokens of the next, so that its speed and acceptance are not those of a lossless method.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q sequential-speculative-decoding==0.1.1 torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > find.py <<'EOF'
import itertools
import sys
from collections import Counter
from types import SimpleNamespace

import torch
from seqspecdecod.capped_hsd import capped_hsd_step
from seqspecdecod.naive_hsd import naive_hsd_step
from seqspecdecod.standard_sd import standard_speculative_step

TOKENS, LENGTH, SAMPLES, START = 3, 3, 3000, 0


class Bigram(torch.nn.Module):
    """A language model whose next token depends on the last one alone, so that the chance of every text is known."""

    def __init__(self, seed):
        super().__init__()
        self.table = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed))
        self.device = torch.device("cpu")

    def forward(self, ids):
        return SimpleNamespace(logits=self.table[ids])


target, draft = Bigram(0), Bigram(1)
chances = target.table.softmax(-1)
exact = {
    text: torch.stack([chances[last, token] for last, token in itertools.pairwise((START, *text))]).prod().item()
    for text in itertools.product(range(TOKENS), repeat=LENGTH)
}


def sampled(step):
    """Share of each text of three tokens in many texts, drawn with K = 3 at temperature 1."""
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(SAMPLES):
        ids = torch.tensor([[START]])
        while ids.shape[1] <= LENGTH:
            ids, _, _ = step(draft, target, ids, gamma=3, draft_temperature=1.0, target_temperature=1.0)
        counts[tuple(ids[0, 1 : LENGTH + 1].tolist())] += 1
    return {text: counts[text] / SAMPLES for text in exact}


print(f"sequential-speculative-decoding 0.1.1, {SAMPLES} texts of {LENGTH} tokens by each method, K = 3, temperature 1")
print("expected: texts follow the target (the package accelerates 'without changing the output distribution')")
distance = {}
for step in (standard_speculative_step, naive_hsd_step, capped_hsd_step):
    shares = sampled(step)
    distance[step] = sum(abs(shares[text] - exact[text]) for text in exact) / 2
    first = [sum(share for text, share in shares.items() if text[0] == token) for token in range(TOKENS)]
    print(
        f"seen: {step.__name__}: total variation to the target {distance[step]:.3f};",
        "first token:", *(f"{share:.3f}" for share in first), "(target:", *(f"{p:.3f}" for p in chances[START].tolist()), ")",
    )
# Draws of the exact distribution are about this far from it, by chance.
noise = sum((p * (1 - p) / SAMPLES) ** 0.5 for p in exact.values())
found = max(distance[standard_speculative_step], distance[naive_hsd_step]) < noise < 0.3 < distance[capped_hsd_step]
sys.exit(0 if found else "the behaviour has changed")
EOF
venv/bin/python find.py
