#!/usr/bin/env bash
# engine: mlx-lm
# version: 0.32.2
# date: 2026-11-28
# finding: With sampling, a drafted token is accepted only if an independent sample of the target is the same token: texts
#   follow the target, but acceptance falls with temperature, and the model as its own draft model has less than half accepted.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
cat > find.py <<'EOF'
import sys

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_sampler

TOKENS = 2000
mx.random.seed(0)
model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
    rms_norm_eps=1e-6, vocab_size=32, tie_word_embeddings=False,
))
model.lm_head.weight = 6 * model.lm_head.weight  # so that some tokens are likely


def acceptance(temperature):
    """Accepted over drafted tokens, a draft per round, and the mean over tokens of the sum of squared probabilities."""
    steps = list(speculative_generate_step(
        mx.array([1, 2, 3, 4, 5]), model, model, num_draft_tokens=1, max_tokens=TOKENS, sampler=make_sampler(temperature)
    ))
    accepted = sum(drafted for *_, drafted in steps)
    coincidence = sum(float(mx.exp(2 * logprobs).sum()) for _, logprobs, _ in steps) / len(steps)
    return accepted / (len(steps) - accepted), coincidence


greedy, _ = acceptance(0.0)
sampled, coincidence = acceptance(1.0)
print(f"mlx-lm 0.32.2, a model as its own draft model, one draft per round, {TOKENS} tokens")
print("expected: all drafts accepted at any temperature: speculative sampling accepts with min(1, p / q), which is 1")
print(f"seen: {greedy:.1%} accepted with greedy decoding, {sampled:.1%} at temperature 1")
print(f"two independent samples are the same token with probability {coincidence:.1%}, the sum of p * q")
sys.exit(0 if greedy > 0.99 and abs(sampled - coincidence) < 0.06 < 0.5 * (1 - sampled) else "the behaviour has changed")
EOF
venv/bin/python find.py
