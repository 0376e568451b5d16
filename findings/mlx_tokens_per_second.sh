#!/usr/bin/env bash
# engine: mlx-lm
# version: 0.32.2
# date: 2026-11-28
# finding: The printed tokens per second divide all tokens by the time after the first one: a request that one round of
#   drafts answers shows a thousandfold speed, and short answers look faster with a draft model than they are.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0
cat > find.py <<'EOF'
import sys
import time

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

words = {f"t{number}": number for number in range(1000)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")))
mx.random.seed(0)
size = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=8)
model = Model(ModelArgs(model_type="llama", num_hidden_layers=8, rms_norm_eps=1e-6, vocab_size=1000, **size))
K = 7
for attempt in range(2):  # the first warms up
    rows = []
    for tokens in (K + 1, 10 * (K + 1)):
        start = time.perf_counter()
        drafts = {"draft_model": model, "num_draft_tokens": K}
        *_, last = stream_generate(model, tokenizer, [5, 6, 7], max_tokens=tokens, **drafts)
        rows.append((tokens, last.generation_tps, tokens / (time.perf_counter() - start)))
print(f"mlx-lm 0.32.2, the model as its own draft model, K = {K}: every round yields {K + 1} tokens")
print("expected: tokens per second of a round are about the same for a short and for a long answer")
for tokens, printed, measured in rows:
    print(f"seen: {tokens} tokens: printed {printed:,.1f} tokens/s, by the clock over all rounds {measured:,.1f}")
sys.exit(0 if rows[0][1] > 10 * rows[0][2] and rows[1][1] > rows[1][2] else "the behaviour has changed")
EOF
venv/bin/python find.py
