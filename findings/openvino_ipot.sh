#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-29
# finding: With a draft model IPOT, the inference time per output token, is the time per round, up to K + 1 times as much: drafts
#   that make tokens faster seem to slow them down. With prompt lookup IPOT and the inference duration are 0.
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

K, ROUNDS = 3, 20
TOKENS = 1 + ROUNDS * (K + 1)
Path("model").mkdir()
random_gguf.write("model/model.gguf", 0, scale=4.0)
genai.LLMPipeline("model/model.gguf", "CPU", enable_save_ov_model=True)
full = {"INFERENCE_PRECISION_HINT": "f32"}
ways = {
    "the target alone": ({}, {}),
    "itself as draft model": ({"draft_model": genai.draft_model("model", "CPU", **full)}, {"num_assistant_tokens": K}),
    "prompt lookup": ({"prompt_lookup": True}, {"num_assistant_tokens": K, "max_ngram_size": 2}),
}
ids = np.tile(np.arange(10, 20), 3)[None]
print(f"OpenVINO GenAI 2026.4.1, greedy, K = {K}, {TOKENS} tokens")
print("expected: IPOT is about the inference duration over the tokens, as for the target alone, with any drafts")
seen = {}
for name, (drafter, settings) in ways.items():
    pipe = genai.LLMPipeline("model", "CPU", **drafter, **full)
    config = genai.GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
    for key, value in settings.items():
        setattr(config, key, value)
    for _ in range(2):  # the first one warms up
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        metrics = pipe.generate(inputs, config).perf_metrics
    assert metrics.get_num_generated_tokens() == TOKENS
    ipot, tpot, inference = (getattr(metrics, f"get_{field}")().mean for field in ("ipot", "tpot", "inference_duration"))
    seen[name] = ipot, tpot, inference
    print(f"seen: {name}: IPOT {ipot:.2f} ms, TPOT {tpot:.2f} ms, {inference / TOKENS:.2f} ms of inference per token")
alone, drafts = (ipot * TOKENS / inference for ipot, _, inference in [*seen.values()][:2])
ipot, tpot, inference = seen["prompt lookup"]
as_it_was = alone < 1.5 and drafts > 3 and ipot == inference == 0 and tpot > 0
sys.exit(0 if as_it_was else "the behaviour has changed")
EOF
venv/bin/python find.py
