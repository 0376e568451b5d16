#!/usr/bin/env bash
# engine: mlx-lm
# version: 0.32.2
# date: 2026-11-28
# finding: A Llama checkpoint that transformers 5 saved, with rope_theta inside rope_parameters, is decoded with
#   rope_theta = 10000 in silence: texts are another model's, and a draft model loses its acceptance.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0 torch==2.13.0
cat > find.py <<'EOF'
import json
import sys
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
LlamaForCausalLM(config).save_pretrained("model")
saved = json.loads(Path("model/config.json").read_text())
model = LlamaForCausalLM.from_pretrained("model")
ids = list(range(1, 200))
with torch.no_grad():
    expected = model(torch.tensor([ids])).logits[0].numpy()


def largest_difference():
    read, _ = load_model(Path("model"))
    return float(abs(torch.tensor(read(mx.array([ids]))[0].tolist()).numpy() - expected).max())


nested = largest_difference()
Path("model/config.json").write_text(json.dumps(saved | {"rope_theta": 500000.0}))
flat = largest_difference()
print("mlx-lm 0.32.2, config.json as transformers 5.23.0 saves it:", saved["rope_parameters"])
print("expected: logits are those of transformers, or an error")
print(f"seen: logits differ by up to {nested:.3g}; with rope_theta at the top level as well by {flat:.2g}")
sys.exit(0 if flat < 1e-3 < 0.1 < nested else "the behaviour has changed")
EOF
venv/bin/python find.py
