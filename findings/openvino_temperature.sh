#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: With a draft model and sampling, what is output does not follow the target's distribution: at
#   temperature 0.01, where sampling is greedy decoding, the text is not the target's.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cp "$here/random_gguf.py" .
python3 -m venv venv
venv/bin/pip install -q openvino-genai==2026.4.1.0 gguf==0.19.0 numpy==2.4.6
cat > find.py <<'EOF'
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
import random_gguf

for seed, name in enumerate(("target", "draft")):
    Path(name).mkdir()
    random_gguf.write(f"{name}/model.gguf", seed, scale=20.0)
    genai.LLMPipeline(f"{name}/model.gguf", "CPU", enable_save_ov_model=True)
full = {"INFERENCE_PRECISION_HINT": "f32"}
alone = genai.LLMPipeline("target", "CPU", **full)
both = genai.LLMPipeline("target", "CPU", draft_model=genai.draft_model("draft", "CPU", **full), **full)
ids = np.arange(10, 20)[None]


def text(pipe, temperature, **settings):
    config = genai.GenerationConfig(max_new_tokens=24, ignore_eos=True)
    if temperature:
        settings |= {"do_sample": True, "temperature": temperature, "rng_seed": 1}
    for name, value in settings.items():
        setattr(config, name, value)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    return [*pipe.generate(inputs, config).tokens[0]]


greedy, cold = text(alone, 0), text(alone, 0.01)
greedy_drafts, cold_drafts = text(both, 0, num_assistant_tokens=3), text(both, 0.01, num_assistant_tokens=3)
print("OpenVINO GenAI 2026.4.1, a target and a draft model of independent random weights")
print("expected: a draft model changes no text: greedy and at temperature 0.01 the target's 24 tokens")
print(f"target alone: greedy and at 0.01 equal: {greedy == cold}; greedy with drafts equal: {greedy == greedy_drafts}")
same = sum(one == other for one, other in zip(cold, cold_drafts, strict=True))
print(f"seen: at temperature 0.01 with drafts {same} of {len(cold)} tokens are the target's")
print("target:", *cold[:8], "with drafts:", *cold_drafts[:8])
sys.exit(0 if greedy == cold == greedy_drafts != cold_drafts else "the behaviour has changed")
EOF
venv/bin/python find.py
