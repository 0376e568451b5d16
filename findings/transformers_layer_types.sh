#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-28
# finding: Gemma4TextConfig writes its last layer's type into the list that it was given: a target or draft model configured from
#   the same list before, of another architecture, is saved and built with full attention where it had a sliding window.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q transformers==5.24.0
cat > find.py <<'EOF'
import json
import sys
from pathlib import Path

from transformers import Gemma3TextConfig, Gemma4TextConfig

layer_types = ["full_attention", "sliding_attention"]
target = Gemma3TextConfig(num_hidden_layers=2, layer_types=layer_types)
before = list(target.layer_types)
Gemma4TextConfig(num_hidden_layers=2, layer_types=layer_types)
target.save_pretrained("target")
saved = json.loads(Path("target/config.json").read_text())["layer_types"]
print("transformers 5.24.0, Gemma3TextConfig and then Gemma4TextConfig from one list layer_types")
print(f"expected: the first configuration and the list stay {before}")
print(f"seen: after the second configuration the first is saved with {saved}, and the list is {layer_types}")
sys.exit(0 if saved == layer_types == ["full_attention"] * 2 != before else "the behaviour has changed")
EOF
venv/bin/python find.py
