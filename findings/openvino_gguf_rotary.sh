#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: A GGUF model saved with enable_save_ov_model keeps its rotary frequencies as float16: after a few thousand tokens of
#   context the saved model writes other texts than the GGUF, and the two no longer agree as target and draft model.
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

TOKENS, SHORT, LONG = 16, 10, 4000
full = {"INFERENCE_PRECISION_HINT": "f32"}
Path("model").mkdir()
random_gguf.write("model/model.gguf", 0, scale=4.0, context=8192)
direct = genai.LLMPipeline("model/model.gguf", "CPU", enable_save_ov_model=True, **full)
saved = genai.LLMPipeline("model", "CPU", **full)


def text(pipe, length):
    ids = np.random.default_rng(1).integers(4, 2048, length)[None]
    config = genai.GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
    return pipe.generate(genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))), config).tokens[0]


def equal(length):
    return sum(one == other for one, other in zip(text(direct, length), text(saved, length), strict=True))


short, long = equal(SHORT), equal(LONG)
exact = 10000.0 ** (-np.arange(32) / 32)
constants = [op for op in openvino.Core().read_model("model/openvino_model.xml").get_ops() if op.get_type_name() == "Constant"]
kept = [np.array(op.data, float).ravel() for op in constants if np.prod(op.shape) == 32]
frequencies = next(values for values in kept if np.allclose(values, exact, rtol=1e-2, atol=0))
print(f"OpenVINO GenAI 2026.4.1, a GGUF model of float16 weights, read directly and as saved; {TOKENS} greedy tokens")
print("expected: the same model: equal texts at any length, rotary frequencies", *exact[1:4].round(7))
print("seen: rotary frequencies of the saved model", *frequencies[1:4].round(7))
print(f"seen: after {SHORT} tokens {short} of {TOKENS} tokens are equal, after {LONG} tokens {long}")
rounded = np.array_equal(frequencies, exact.astype(np.float16).astype(float))
sys.exit(0 if rounded and short == TOKENS > 2 * long else "the behaviour has changed")
EOF
venv/bin/python find.py
