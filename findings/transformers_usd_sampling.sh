#!/usr/bin/env bash
# engine: transformers
# version: 5.24.0
# date: 2026-11-29
# finding: Sampling with a draft model of another tokenizer (universal speculative decoding) does not follow the target: where
#   the draft has tokens that the target lacks, its probabilities are given to other tokens than it drew, in silence.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > find.py <<'EOF'
import sys
from collections import Counter

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SAMPLES = 400
SHARED = [f"w{number}" for number in (5, 2, 7, 0, 3, 6, 1, 4)]
transformers.logging.set_verbosity_error()


class Ordered(PreTrainedTokenizerFast):
    """The same tokenizer, whose get_vocab() names tokens by their number: that of fast tokenizers has no order."""

    def get_vocab(self):
        return dict(sorted(super().get_vocab().items(), key=lambda item: item[1]))


def tokenizer_of(words, kind=PreTrainedTokenizerFast):
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return kind(tokenizer_object=tokenizer, unk_token="<unk>")


def model_of(tokenizer, seed):
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def distance(kind=None):
    """Total variation between the exact chances of the first token and its shares in many answers."""
    tokenizer = tokenizer_of(["<unk>", *(f"w{number}" for number in range(8))])
    target = model_of(tokenizer, 0)
    ids = tokenizer("w1 w2 w3 w4", return_tensors="pt").input_ids
    more = {}
    if kind:
        other = tokenizer_of(["<unk>", "x0", *SHARED, "x1", "x2"], kind)
        more = {"assistant_model": model_of(other, 1), "tokenizer": tokenizer, "assistant_tokenizer": other}
    with torch.no_grad():
        exact = target(ids).logits[0, -1].softmax(-1)
    set_seed(2)
    counts = Counter()
    for _ in range(SAMPLES):
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, temperature=1.0, max_new_tokens=2, **more
        )
        counts[output[0, ids.shape[1]].item()] += 1
    shares = torch.tensor([counts[token] / SAMPLES for token in range(len(tokenizer))])
    # Draws of the exact distribution are about this far from it, by chance.
    noise = (exact * (1 - exact) / SAMPLES).sqrt().sum().item()
    return (shares - exact).abs().sum().item() / 2, noise


print(f"transformers 5.24.0, the first token of {SAMPLES} sampled answers, total variation to the target's chances")
print("expected: about the same with and without a draft model (the method is said to be lossless)")
seen = {
    "the target alone": distance(),
    "a draft model with 12 tokens, 3 of which the target lacks": distance(PreTrainedTokenizerFast),
    "the same, its vocabulary in the order of its numbers": distance(Ordered),
}
for name, (variation, noise) in seen.items():
    print(f"seen: {name}: {variation:.3f} (by chance up to about {noise:.3f})")
(alone, noise), (drafted, _), (ordered, _) = seen.values()
sys.exit(0 if max(alone, ordered) < noise < 2 * noise < drafted else "the behaviour has changed")
EOF
venv/bin/python find.py
