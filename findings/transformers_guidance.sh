#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-28
# finding: With guidance_scale, a draft model or prompt lookup changes the greedy text from its first tokens on, though drafts
#   are said to change no text: guided texts with drafts are not the target's.
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

TOKENS = 20
set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
target, draft = (LlamaForCausalLM(config).eval() for _ in range(2))
prompt = torch.tensor([[5, 9, 7, 3] * 4])
ways = {"alone": {}, "draft model": {"assistant_model": draft}, "prompt lookup": {"prompt_lookup_num_tokens": 4}}


def texts(**settings):
    settings |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": TOKENS, "do_sample": False}
    return {name: target.generate(prompt, **settings, **way)[0, prompt.shape[1] :].tolist() for name, way in ways.items()}


plain, guided = texts(), texts(guidance_scale=1.5)
print(f"transformers 5.24.0, {TOKENS} greedy tokens, guidance_scale=1.5")
print("expected: a draft model or prompt lookup changes no text, or an error says that guidance is not supported")
print("seen: without guidance all texts are equal:", all(text == plain["alone"] for text in plain.values()))
for name, text in guided.items():
    print(f"seen: guided, {name}:", *text[:10])
changed = any(text != plain["alone"] for text in plain.values())
changed |= any(guided[name] == guided["alone"] for name in ("draft model", "prompt lookup"))
sys.exit("the behaviour has changed" if changed else 0)
EOF
venv/bin/python find.py
