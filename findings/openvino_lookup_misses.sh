#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: With prompt lookup a step whose lookup finds nothing verifies K + 1 tokens all the same: a long K
#   slows down every step of a text that repeats nothing.
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

Path("model").mkdir()
random_gguf.write("model/model.gguf", 1, layers=4, hidden=512, vocabulary=4096)
genai.LLMPipeline("model/model.gguf", "CPU", enable_save_ov_model=True)
pipe = genai.LLMPipeline("model", "CPU", prompt_lookup=True, INFERENCE_PRECISION_HINT="f32")
ids = np.arange(10, 20)[None]


def run(k):
    """Tokens of every step, and the least milliseconds of a step, of a text of random tokens."""
    config = genai.GenerationConfig(max_new_tokens=32, ignore_eos=True, max_ngram_size=3)
    for name, value in {"do_sample": True, "temperature": 20.0, "rng_seed": 1, "num_assistant_tokens": k}.items():
        setattr(config, name, value)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    raw = pipe.generate(inputs, config).perf_metrics.raw_metrics
    return [*raw.m_batch_sizes], min(raw.m_durations) / 1000


run(1)
sizes, least_ms = {}, {}
for k in (1, 31, 1, 31):
    sizes[k], ms = run(k)
    least_ms[k] = min(ms, least_ms.get(k, ms))
print("OpenVINO GenAI 2026.4.1, prompt lookup over random tokens: every step yields one token at K = 1 and at K = 31")
print("expected: a step without a draft takes as long as one token, whatever K is")
print(f"seen: the fastest step takes {least_ms[1]:.1f} ms at K = 1 and {least_ms[31]:.1f} ms at K = 31")
single = all(set(tokens) == {1} for tokens in sizes.values())
sys.exit(0 if single and least_ms[31] > 2 * least_ms[1] else "the behaviour has changed")
EOF
venv/bin/python find.py
