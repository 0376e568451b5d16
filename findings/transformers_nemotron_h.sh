#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-28
# finding: Nemotron-H clamps the time step to time_step_min in passes of several tokens and not in those of
#   one: verifying K + 1 tokens at once gives other logits than decoding them one by one, which is what drafts are checked by.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.24.0
cat > find.py <<'EOF'
import sys

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM, set_seed

TOKENS, PROMPT = 40, 8


@torch.no_grad()
def largest_difference(bias):
    """Between the logits of one pass over all tokens, and of a pass per token with a cache."""
    set_seed(0)
    config = NemotronHConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, layer_types=["mamba", "attention", "mamba", "mlp"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=2,
        ssm_state_size=16, chunk_size=16, initializer_range=0.2,
    )
    model = NemotronHForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.fill_(bias)
    ids = torch.randint(0, 256, (1, TOKENS))
    whole = model(ids, use_cache=False).logits
    step = model(ids[:, :PROMPT], use_cache=True)
    logits = [step.logits]
    for t in range(PROMPT, TOKENS):
        step = model(ids[:, t : t + 1], past_key_values=step.past_key_values, use_cache=True)
        logits.append(step.logits)
    return float((torch.cat(logits, 1) - whole).abs().max())


above, below = largest_difference(1.0), largest_difference(-9.0)
print("transformers 5.24.0, NemotronHForCausalLM, time_step_limit (0, inf), time_step_min 0.001")
print("expected: one pass over all tokens and a pass per token give the same logits up to rounding")
print(f"seen: they differ by {above:.1g} where time steps are about 1, by {below:.2g} where they are below 0.001")
sys.exit(0 if above < 1e-3 < 10 * 1e-3 < below else "the behaviour has changed")
EOF
venv/bin/python find.py
