#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: num_accepted_tokens, num_draft_tokens and the acceptance rate leave out the last round of every
#   request: a rate over many short requests is not the engine's, and accepted + iterations is not the output.
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

K, ROUNDS = 3, 5
Path("model").mkdir()
random_gguf.write("model/model.gguf", 0)
genai.LLMPipeline("model/model.gguf", "CPU", enable_save_ov_model=True)
full = {"INFERENCE_PRECISION_HINT": "f32"}
pipe = genai.LLMPipeline("model", "CPU", draft_model=genai.draft_model("model", "CPU", **full), **full)
config = genai.GenerationConfig(max_new_tokens=1 + ROUNDS * (K + 1), ignore_eos=True)
config.num_assistant_tokens = K
ids = np.arange(10, 20)[None]
inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
metrics = pipe.generate(inputs, config).extended_perf_metrics
sizes, counted = [*metrics.raw_metrics.m_batch_sizes], metrics.get_num_accepted_tokens()
print(f"OpenVINO GenAI 2026.4.1, the model as its own draft model, K = {K}: tokens of the prompt's pass and each round: {sizes}")
print(f"expected: {K * ROUNDS} accepted tokens, {K} in each of {ROUNDS} rounds, of {K * ROUNDS} drafted")
print(f"seen: {counted} accepted of {metrics.get_num_draft_tokens()} drafted")
sys.exit(0 if sizes == [1] + [K + 1] * ROUNDS and counted == K * (ROUNDS - 1) else "the behaviour has changed")
EOF
venv/bin/python find.py
