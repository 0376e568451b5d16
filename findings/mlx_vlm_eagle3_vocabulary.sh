#!/usr/bin/env bash
# engine: mlx-vlm
# version: 0.7.10
# date: 2026-11-29
# finding: An EAGLE-3 draft with a vocabulary of its own (d2t) changes greedy text: a drafted token is accepted if it is the
#   target's best among the draft's tokens, though the target's best token is another, which the draft cannot name.
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

WORDS, WIDTH, TOKENS, STEP = 64, 64, 40, 8
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


def drafter(words):
    """A random draft model with so many words of its own, every n-th one of the target's."""
    size = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = Eagle3DraftModel(Eagle3Config(
        transformer_layer_config={**size, "vocab_size": WORDS}, draft_vocab_size=words,
        eagle_aux_hidden_state_layer_ids=[2, 3, 4],
    ))
    if words < WORDS:
        model.d2t = (WORDS // words - 1) * mx.arange(words)
    return model


def text(prompt, draft=None):
    """Greedy tokens of the target, alone or with a draft model."""
    steps = generate_step(mx.array([prompt]), target, None, None, max_tokens=TOKENS, temperature=0.0, draft_model=draft,
                          draft_kind="eagle3", draft_block_size=3)
    return [int(token) for token, _ in steps]


prompts = [[1 + number, 20, 40, 2 * number + 3] for number in range(12)]
alone = [text(prompt) for prompt in prompts]
small, full = drafter(WORDS // STEP), drafter(WORDS)
with_full = [text(prompt, full) for prompt in prompts]
accepted, changed, explained = 0, 0, 0
for prompt, right in zip(prompts, alone):
    wrong = text(prompt, small)
    accepted += sum(small.accept_lens)
    if wrong == right:
        continue
    changed += 1
    at = next(place for place in range(TOKENS) if wrong[place] != right[place])
    # the target's own logits for the text up to there, in one pass without any cache or draft
    logits = target.language_model(mx.array([prompt + right[:at]])).logits[0, -1]
    best, best_of_draft = int(mx.argmax(logits)), STEP * int(mx.argmax(logits[::STEP]))
    explained += best == right[at] and best % STEP != 0 and wrong[at] == best_of_draft
print(f"mlx-vlm 0.7.10, {len(prompts)} greedy texts of {TOKENS} tokens with EAGLE-3 draft models")
print("expected: a draft model changes no greedy text")
print(f"seen: a draft model with all {WORDS} tokens: {sum(a != b for a, b in zip(with_full, alone))} texts are changed")
print(f"seen: one with {WORDS // STEP} of them: {changed} are changed, with {accepted} drafted tokens accepted in all")
print(f"seen: in {explained} of these the first wrong token is the draft vocabulary's best, not the vocabulary's best")
as_found = with_full == alone and changed and explained == changed
sys.exit(0 if as_found else "the behaviour has changed")
EOF
venv/bin/python find.py
