#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-28
# finding: Prompt lookup drafts past the limit: with two tokens left of max_new_tokens it still drafts
#   prompt_lookup_num_tokens, which the model verifies and which cannot be output.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.24.0
cat > find.py <<'EOF'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
widths = []
model.model.register_forward_pre_hook(
    lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
)
prompt = torch.tensor([[5, 9, 7, 3] * 8])
length = prompt.shape[1]


def drafted(new, **drafter):
    """Tokens drafted in the first round: those of its pass that are not the prompt's."""
    widths.clear()
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, **drafter)
    assert output.shape[1] == length + new
    return widths[0] - length


lookup = drafted(2, prompt_lookup_num_tokens=10)
model_drafts = drafted(2, assistant_model=LlamaForCausalLM(config).eval())
print("transformers 5.24.0, max_new_tokens=2: a round yields the target's token, so that one draft is of use")
print("expected: 1 drafted token")
print(f"seen: prompt_lookup_num_tokens=10 drafts {lookup}, a draft model {model_drafts}")
sys.exit(0 if (lookup, model_drafts) == (10, 1) else "the behaviour has changed")
EOF
venv/bin/python find.py
