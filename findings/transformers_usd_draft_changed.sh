#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-29
# finding: Sampling with a draft model of another tokenizer leaves that model changed: its head is cut to the shared tokens and
#   its embedding sees the last token alone, so that what is measured or decoded with it later is another model.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > find.py <<'EOF'
import sys

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

transformers.logging.set_verbosity_error()


def tokenizer_of(words):
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def model_of(tokenizer, seed):
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits_of(model):
    return model(other("w1 w2 w3 w4", return_tensors="pt").input_ids).logits[0]


shared = [f"w{number}" for number in range(8)]
tokenizer, other = tokenizer_of(["<unk>", *shared]), tokenizer_of(["<unk>", "x0", *shared, "x1", "x2"])
target, draft = model_of(tokenizer, 0), model_of(other, 1)
ids = tokenizer("w1 w2 w3 w4", return_tensors="pt").input_ids
print("transformers 5.24.0, a draft model of 12 tokens, 9 of which the target has too")
print("expected: generate() of the target leaves the draft model and its logits as they were")
before = logits_of(draft)
shapes, same = [tuple(before.shape)], []
for do_sample in (False, True):
    target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, max_new_tokens=6, assistant_model=draft,
        tokenizer=tokenizer, assistant_tokenizer=other,
    )
    after = logits_of(draft)
    shapes.append(tuple(after.shape))
    same.append(after.shape == before.shape and torch.allclose(after, before, atol=1e-5))
    print(
        f"seen: after a {'sampled' if do_sample else 'greedy'} answer of the target: the draft model's own logits of a text of",
        f"4 tokens are {shapes[-1][0]} x {shapes[-1][1]} (before: {shapes[0][0]} x {shapes[0][1]}), those of before: {same[-1]}",
    )
found = shapes[1] == shapes[0] == (4, 12) and shapes[2] == (1, 9) and same == [True, False]
sys.exit(0 if found else "the behaviour has changed")
EOF
venv/bin/python find.py
