#!/usr/bin/env bash
# engine: OpenVINO GenAI
# version: 2026.4.1
# date: 2026-11-28
# finding: min_new_tokens is not kept with a draft model or prompt lookup: a stop token ends the text before its minimum,
#   which it does not with the target alone.
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

LEAST, STOP_AT = 20, 9
for seed, name in enumerate(("target", "draft")):
    Path(name).mkdir()
    random_gguf.write(f"{name}/model.gguf", seed, scale=4.0)
    genai.LLMPipeline(f"{name}/model.gguf", "CPU", enable_save_ov_model=True)
full = {"INFERENCE_PRECISION_HINT": "f32"}
alone = genai.LLMPipeline("target", "CPU", **full)
drafts = genai.LLMPipeline("target", "CPU", draft_model=genai.draft_model("draft", "CPU", **full), **full)
lookup = genai.LLMPipeline("target", "CPU", prompt_lookup=True, **full)
ids = np.tile(np.arange(10, 20), 3)[None]


def text(pipe, **settings):
    config = genai.GenerationConfig(max_new_tokens=40)
    for name, value in settings.items():
        setattr(config, name, value)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    return [*pipe.generate(inputs, config).tokens[0]]


stop = text(alone, ignore_eos=True)[STOP_AT]  # a token that the target would output
settings = {"stop_token_ids": {stop}, "min_new_tokens": LEAST}
lengths = {
    "the target alone": len(text(alone, **settings)),
    "with a draft model": len(text(drafts, num_assistant_tokens=3, **settings)),
    "with prompt lookup": len(text(lookup, num_assistant_tokens=3, max_ngram_size=2, **settings)),
}
print(f"OpenVINO GenAI 2026.4.1, greedy, min_new_tokens = {LEAST}, a stop token that would be output after {STOP_AT} others")
print(f"expected: at least {LEAST} tokens")
print("seen: " + ", ".join(f"{length} tokens {name}" for name, length in lengths.items()))
least, *others = lengths.values()
sys.exit(0 if least >= LEAST and all(length < LEAST for length in others) else "the behaviour has changed")
EOF
venv/bin/python find.py
