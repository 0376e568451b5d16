#!/usr/bin/env bash
# engine: mlx-vlm
# version: 0.7.10
# date: 2026-11-29
# finding: With a draft model only the first token sees logit_bias, penalties and logits_processors: later tokens are
#   chosen without them, in silence, so that a forbidden token is written and a penalised text is the unpenalised one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-vlm==0.7.10 'mlx[cpu]==0.32.4'
cat > find.py <<'EOF'
import sys

import mlx.core as mx
from mlx_vlm.generate import generate_step
from mlx_vlm.models.gemma4 import Model, ModelConfig
from mlx_vlm.models.gemma4.config import TextConfig, VisionConfig
from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel
from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config

WORDS, WIDTH, TOKENS, PROMPT = 64, 64, 40, mx.array([[1, 2, 3, 4, 5]])
mx.random.seed(0)
target = Model(ModelConfig(
    text_config=TextConfig(
        hidden_size=WIDTH, num_hidden_layers=6, intermediate_size=128, num_attention_heads=4, head_dim=16,
        global_head_dim=16, num_key_value_heads=2, vocab_size=WORDS, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, use_double_wide_mlp=False,
    ),
    vision_config=VisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                               num_key_value_heads=2, head_dim=16),
    vocab_size=WORDS, hidden_size=WIDTH,
))
inner = target.language_model.model
inner.norm.weight = mx.random.normal((WIDTH,))
for layer in inner.layers:
    for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
        norm.weight = 3 * norm.weight
size = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
draft = Eagle3DraftModel(Eagle3Config(
    transformer_layer_config={**size, "vocab_size": WORDS}, draft_vocab_size=WORDS,
    eagle_aux_hidden_state_layer_ids=[2, 3, 4],
))


def text(draft=None, **settings):
    """Greedy tokens of the target, alone or with the draft model."""
    steps = generate_step(PROMPT, target, None, None, max_tokens=TOKENS, temperature=0.0, draft_model=draft,
                          draft_kind="eagle3", draft_block_size=3, **settings)
    return [int(token) for token, _ in steps]


def forbid(tokens, logits):
    """A logits processor that forbids one token, as a grammar does."""
    return mx.where(mx.arange(WORDS) == forbidden, -mx.inf, logits)


plain = text()
forbidden = plain[3]
cases = {
    "logit_bias": {"logit_bias": {forbidden: -100.0}}, "logits_processors": {"logits_processors": [forbid]},
    "repetition_penalty": {"repetition_penalty": 1.5}, "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
}
print(f"mlx-vlm 0.7.10, greedy decoding of {TOKENS} tokens, alone and with an EAGLE-3 draft model")
print("expected: a draft model changes no text, or the settings that it cannot follow are refused")
print("seen: without any of these settings the texts are equal:", text(draft) == plain)
as_found = text(draft) == plain
for name, settings in cases.items():
    alone, drafts = text(**settings), text(draft, **settings)
    line = f"seen: {name}: equal {alone == drafts}, with the draft model the text of no {name} {drafts == plain}"
    if name.startswith("log"):
        line += f", the forbidden token {forbidden} is written {alone.count(forbidden)} and {drafts.count(forbidden)} times"
    print(line)
    as_found = as_found and alone != drafts and drafts == plain
sys.exit(0 if as_found else "the behaviour has changed")
EOF
venv/bin/python find.py
