#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: With greedy decoding assistant_confidence_threshold has no effect unless logprobs are asked for: without them one
#   token is drafted per round at any threshold, so that a draft model seems to be of no use.
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

TOKENS, THRESHOLDS = 24, (0.000001, 0.3, 0.9)
for seed, name in enumerate(("target", "draft")):
    Path(name).mkdir()
    random_gguf.write(f"{name}/model.gguf", seed, scale=4.0)
    genai.LLMPipeline(f"{name}/model.gguf", "CPU", enable_save_ov_model=True)
full = {"INFERENCE_PRECISION_HINT": "f32"}
pipe = genai.LLMPipeline("target", "CPU", draft_model=genai.draft_model("draft", "CPU", **full), **full)
ids = np.tile(np.arange(10, 20), 3)[None]


def drafted(threshold, logprobs):
    """Drafted tokens per round."""
    config = genai.GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, logprobs=logprobs)
    config.assistant_confidence_threshold = threshold
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    metrics = pipe.generate(inputs, config).extended_perf_metrics
    rounds = len(metrics.main_model_metrics.raw_metrics.m_batch_sizes) - 2  # the prompt's pass and the last one draft nothing
    return metrics.get_num_draft_tokens() / rounds


without, with_logprobs = ([drafted(threshold, logprobs) for threshold in THRESHOLDS] for logprobs in (0, 1))
print(f"OpenVINO GenAI 2026.4.1, {TOKENS} greedy tokens, assistant_confidence_threshold", *THRESHOLDS)
print("expected: the lower the threshold, the more is drafted; logprobs change what is reported, not what is drafted")
print("seen: drafted tokens per round without logprobs", *(f"{value:.1f}" for value in without))
print("seen: drafted tokens per round with logprobs=1", *(f"{value:.1f}" for value in with_logprobs))
lowest, *_, highest = with_logprobs
sys.exit(0 if len(set(without)) == 1 and without[0] < 1.2 and lowest > 5 > highest else "the behaviour has changed")
EOF
venv/bin/python find.py
