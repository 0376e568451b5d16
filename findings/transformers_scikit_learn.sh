#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-28
# finding: assistant_confidence_threshold is adjusted while decoding only where scikit-learn is installed, which neither its
#   documentation nor a warning says: the same call drafts more than twice as much in one environment as in another.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.24.0
cat > passes.py <<'EOF'
"""Draft passes of three equal calls, and the text's length."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
with torch.no_grad():  # the draft model is the target with noise: it agrees with it now and then
    for weight, other in zip(draft.parameters(), target.parameters(), strict=True):
        weight.copy_(other + 0.1 * other.std() * torch.randn_like(other) if other.dim() > 1 else other)
draft.generation_config.num_assistant_tokens = 10
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.9
passes = []
draft.register_forward_pre_hook(lambda *_: passes.__setitem__(-1, passes[-1] + 1))
prompt = torch.tensor([[5, 9, 7, 3]])
for _ in range(3):
    passes.append(0)
    target.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False, assistant_model=draft
    )
print(*passes)
EOF
without=$(venv/bin/python passes.py)
venv/bin/pip install -q scikit-learn==1.9.1
with=$(venv/bin/python passes.py)
echo "transformers 5.24.0, num_assistant_tokens = 10, assistant_confidence_threshold = 0.9, three calls for 60 tokens each"
echo "expected: as many draft passes in any environment; later calls go on with the adjusted threshold, as documented"
echo "seen: $without draft passes; with scikit-learn installed $with, of which each call begins with 0.9 again"
read -r first second _ <<< "$with"
if [ "$first" != "$second" ] || [ "$first" -lt $((2 * ${without%% *})) ]; then
    echo "the behaviour has changed" >&2
    exit 1
fi
