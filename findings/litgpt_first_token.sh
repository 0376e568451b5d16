#!/usr/bin/env bash
# engine: litgpt
# version: 0.5.13
# date: 2026-11-29
# finding: With a draft model every answer lacks its first token: the token that the target chooses after the prompt is
#   decoded from and never output, so that each text begins with its second token.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q litgpt==0.5.13 torch==2.13.0
cat > find.py <<'EOF'
import copy
import sys

import torch
from litgpt import GPT, Config
from litgpt.generate.base import generate
from litgpt.generate.speculative_decoding import generate as generate_speculatively

NEW = 20
config = Config(
    block_size=128, vocab_size=32, padded_vocab_size=32, n_layer=2, n_head=4, n_query_groups=2, n_embd=32,
    rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    intermediate_size=64,
)
torch.manual_seed(0)
target = GPT(config).eval()
for parameter in target.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)
draft = copy.deepcopy(target)


def prepared(*models):
    for model in models:
        model.max_seq_length = 64
        model.set_kv_cache(batch_size=1)


print("litgpt 0.5.13, greedy decoding, the target as its own draft model, K = 3: every draft is accepted")
print("expected: the text with the draft model is the target's text")
lacks_first = []
for prompt in ([3, 7, 9, 11], [1, 2, 3], [30, 4, 4, 8, 15]):
    ids = torch.tensor(prompt)
    prepared(target, draft)
    alone = generate(target, ids, len(prompt) + NEW, temperature=0.0, include_prompt=False).tolist()
    prepared(target, draft)
    drafted, rate = generate_speculatively(
        draft, target, ids, len(prompt) + NEW, temperature=0.0, include_prompt=False, speculative_k=3
    )
    drafted = drafted.tolist()
    print(f"seen: after {prompt} alone:", *alone[:10])
    print(f"seen: after {prompt} with the draft model (acceptance rate {rate:.0%}):", *drafted[:10])
    lacks_first.append(drafted[: NEW - 1] == alone[1:] and drafted[:NEW] != alone)
sys.exit(0 if all(lacks_first) else "the behaviour has changed")
EOF
venv/bin/python find.py
