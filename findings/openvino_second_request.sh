#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: From the second request on the draft model's metrics begin with a pass that was not made: its time to first token is
#   a few microseconds, and it counts a pass and a token more than the first request with the same text.
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
texts, sizes, first, generated = [], [], [], []
for _ in range(3):
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    output = pipe.generate(inputs, config)
    draft = output.extended_perf_metrics.draft_model_metrics
    texts.append([*output.tokens[0]])
    sizes.append([*draft.raw_metrics.m_batch_sizes])
    first.append(draft.get_ttft().mean)
    generated.append(draft.get_num_generated_tokens())
print(f"OpenVINO GenAI 2026.4.1, the model as its own draft model, K = {K}, the same request three times")
print("expected: the same passes of the draft model each time, the first of which reads the prompt")
for number in range(3):
    print(f"seen: request {number + 1}: {len(sizes[number])} passes {sizes[number]}, {generated[number]} tokens,", end=" ")
    print(f"time to first token {first[number]:.3g} ms")
same = texts[0] == texts[1] == texts[2]
changed = not same or sizes[1] != [1, *sizes[0]] or sizes[2] != sizes[1] or max(first[1:]) > 0.1 or first[0] < 0.1
sys.exit("the behaviour has changed" if changed else 0)
EOF
venv/bin/python find.py
