#!/usr/bin/env bash
# engine: onnxruntime-genai
# version: 0.18.0
# date: 2026-11-29
# finding: The model builder takes an MLP projection as wide as the vocabulary for the head: where intermediate_size equals
#   vocab_size, as small draft models may have it, the exported logits come from inside the first layer, without an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0 torch==2.13.0 transformers==5.23.0
cat > find.py <<'EOF'
import subprocess
import sys

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

VOCABULARY, PROMPTS = 256, np.arange(10, 60, dtype=np.int32).reshape(10, 5)
words = {f"t{number}": number for number in range(VOCABULARY)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token="t0")
models = {}
for wide in (VOCABULARY - 64, VOCABULARY, VOCABULARY + 64):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=wide, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=0,
    )
    models[wide] = LlamaForCausalLM(config).eval()
    models[wide].save_pretrained(f"torch_{wide}")
    tokenizer.save_pretrained(f"torch_{wide}")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", f"torch_{wide}", "-o", f"onnx_{wide}"]
    subprocess.run([*command, "-p", "fp32", "-e", "cpu", "-c", "cache"], check=True, capture_output=True)

import onnxruntime_genai as og

print(f"onnxruntime-genai 0.18.0, Llamas of 2 layers and a vocabulary of {VOCABULARY}, exported as float32")
print(f"expected: the exported model chooses the same token as the checkpoint after each of {len(PROMPTS)} prompts")
same = {}
for wide, model in models.items():
    exported = og.Model(f"onnx_{wide}")
    same[wide], worst = 0, 0.0
    for prompt in PROMPTS:
        parameters = og.GeneratorParams(exported)
        parameters.set_search_options(max_length=16, do_sample=False)
        generator = og.Generator(exported, parameters)
        generator.append_tokens(prompt)
        found = np.asarray(generator.get_logits()).reshape(-1)
        with torch.no_grad():
            wanted = model(torch.tensor(prompt[None], dtype=torch.long)).logits[0, -1].numpy()
        same[wide] += int(found.argmax() == wanted.argmax())
        worst = max(worst, float(np.abs(found - wanted).max()))
    print(f"seen: intermediate_size {wide}: {same[wide]} of {len(PROMPTS)} tokens are the same, logits differ by up to {worst:.1e}")
right = [count == len(PROMPTS) for wide, count in same.items() if wide != VOCABULARY]
sys.exit(0 if all(right) and same[VOCABULARY] < len(PROMPTS) // 2 else "the behaviour has changed")
EOF
venv/bin/python find.py
