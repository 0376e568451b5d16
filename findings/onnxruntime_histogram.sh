#!/usr/bin/env bash
# engine: onnxruntime-genai
# version: 0.18.0
# date: 2026-11-28
# finding: acceptance_length_histogram stays all zeros with a draft model and with prompt lookup, whatever is accepted: rates by
#   position, from which a draft length is chosen, cannot be had from the statistics.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0 torch==2.13.0 transformers==5.23.0
cat > find.py <<'EOF'
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

K = 3
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=0,
)
words = {f"t{number}": number for number in range(256)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token="t0")
set_seed(0)
target = LlamaForCausalLM(config)
for name in ("target", "draft"):
    if name == "draft":  # the target with noise: it agrees with it now and then
        with torch.no_grad():
            for weight in target.parameters():
                weight += 0.05 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    target.save_pretrained(name)
    tokenizer.save_pretrained(name)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", name, "-o", f"onnx_{name}"]
    subprocess.run([*command, "-p", "fp32", "-e", "cpu", "-c", "cache"], check=True, capture_output=True)

import onnxruntime_genai as og

shutil.copytree("onnx_target", "onnx_lookup")
settings = json.loads(Path("onnx_target/genai_config.json").read_text())
draft = json.loads(Path("onnx_draft/genai_config.json").read_text())["model"]["decoder"]
settings["model"]["draft"] = draft | {"filename": "draft/model.onnx"}
Path("onnx_target/genai_config.json").write_text(json.dumps(settings))
Path("onnx_draft").rename("onnx_target/draft")


def statistics(**options):
    """Of 100 greedy tokens after a prompt that repeats itself."""
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(min_length=140, max_length=140, do_sample=False)
    parameters.set_speculative_options(max_draft_tokens=K, **options)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.tile(np.arange(10, 20, dtype=np.int32), 4))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_speculative_stats()


changed = False
print(f"onnxruntime-genai 0.18.0, K = {K}, 100 greedy tokens")
print("expected: acceptance_length_histogram counts the completed rounds by their accepted tokens")
for name, options in (("draft model", {}), ("prompt lookup", {"ngram_size": 3})):
    folder = "onnx_lookup" if options else "onnx_target"
    model = og.Model(folder)
    stats = statistics(**options)
    rounds, histogram = stats["completed_rounds"], stats["acceptance_length_histogram"]
    accepted = stats["draft_tokens_accepted"]
    print(f"seen: {name}: {rounds} completed rounds, {accepted} accepted tokens, histogram {histogram}")
    changed |= any(histogram) or not rounds or not accepted
sys.exit("the behaviour has changed" if changed else 0)
EOF
venv/bin/python find.py
