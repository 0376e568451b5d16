#!/usr/bin/env bash
# engine: mlx-lm
# version: 0.32.2
# date: 2026-11-28
# finding: With a draft model, penalties on repeated tokens do not see the prompt, only its last token: with a repetition,
#   presence or frequency penalty greedy text changes when a draft model is added.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
cat > find.py <<'EOF'
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_logits_processors

TOKENS, PROMPT = 40, mx.array([1, 2, 3, 4, 5])
mx.random.seed(0)
model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
    rms_norm_eps=1e-6, vocab_size=32, tie_word_embeddings=False,
))
model.lm_head.weight = 6 * model.lm_head.weight


def texts(prompt, see=None, **penalty):
    """Greedy tokens of the model alone, and with itself as the draft model; `see` is told what penalties look at."""
    processors = make_logits_processors(**penalty)
    if see is not None:
        processors = [lambda tokens, logits: see.append(tokens.tolist()) or logits, *processors]
    settings = {"max_tokens": TOKENS, "logits_processors": processors}
    alone = [int(token) for token, _ in generate_step(prompt, model, **settings)]
    if see is not None:
        see[:] = see[:1]
    drafts = speculative_generate_step(prompt, model, model, num_draft_tokens=3, **settings)
    return alone, [int(token) for token, *_ in drafts]


equal = {}
for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
    alone, drafts = texts(PROMPT, **{name: 1.5})
    equal[name] = alone == drafts
plain, with_drafts = texts(PROMPT)
seen = []
texts(PROMPT, seen, repetition_penalty=1.5)
print(f"mlx-lm 0.32.2, greedy decoding of {TOKENS} tokens after the prompt {PROMPT.tolist()}")
print("expected: a draft model changes no text, with or without penalties")
print(f"seen: without penalties the texts are equal: {plain == with_drafts}; with a penalty of 1.5:", equal)
print(f"before the first token penalties see {seen[0]} without a draft model, {seen[1]} with one")
changed = plain != with_drafts or any(equal.values()) or seen[:2] != [PROMPT.tolist(), PROMPT.tolist()[-1:]]
sys.exit("the behaviour has changed" if changed else 0)
EOF
venv/bin/python find.py
