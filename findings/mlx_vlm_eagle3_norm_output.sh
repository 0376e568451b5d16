#!/usr/bin/env bash
# engine: mlx-vlm
# version: 0.7.10
# date: 2026-11-29
# finding: norm_output and rope scaling in the config.json of an EAGLE-3 draft are ignored: a draft that speculators trained
#   (norm_output is its default) proposes other tokens from its second one on, one with llama3 rope from the first.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-vlm==0.7.10 'mlx[cpu]==0.32.4'
cat > find.py <<'EOF'
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel
from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config

WORDS, WIDTH, HEADS, LENGTH, DRAFTS = 512, 64, 4, 200, 5
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}


def config(rope, **more):
    """A config.json as speculators 0.9.0 writes it."""
    layer = {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": HEADS,
             "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS, "num_hidden_layers": 1, "vocab_size": WORDS,
             "rms_norm_eps": 1e-6, "rope_parameters": rope}
    return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": WORDS,
            "eagle_aux_hidden_state_layer_ids": [2, 3, 4], "transformer_layer_config": layer, **more}


mx.random.seed(0)
plain = {"rope_type": "default", "rope_theta": 10000.0}
first = Eagle3DraftModel(Eagle3Config.from_dict(config(plain)))
first.update({"norm": {"weight": 3 * mx.random.normal((WIDTH,))}})
weights = {name: 3 * value if "proj" in name or name == "fc.weight" else value
           for name, value in tree_flatten(first.parameters())}
tokens, hidden = mx.arange(LENGTH)[None] % WORDS, mx.random.normal((1, LENGTH, 3 * WIDTH))


def loaded(name, settings):
    """The draft model that mlx-vlm makes of a checkpoint with these settings, and the same weights each time."""
    Path(name).mkdir()
    Path(name, "config.json").write_text(json.dumps(settings))
    mx.save_safetensors(name + "/model.safetensors", weights)
    return load_drafter(name)[0]


def drafted(model):
    """Greedy drafts after the same tokens and hidden states."""
    model.reset(None)
    model.prefill_from_target_hidden(tokens, hidden, 7, None, mx.int32, True)
    return model.draft_block(7, hidden[:, -1:], None, DRAFTS + 1, None, mx.int32, True).tolist()[0]


class NormOutput(Eagle3DraftModel):
    """What norm_output means: the next step, too, is fed with the hidden state after the norm."""

    def _forward_tokens(self, *given):
        return self.norm(super()._forward_tokens(*given))

    def _logits(self, after_norm):
        return self.lm_head(after_norm)


def with_llama3(model):
    """The model with the frequencies of the llama3 scaling, as its definition gives them."""
    size = WIDTH // HEADS
    waves = 2 * mx.pi * LLAMA3["rope_theta"] ** (mx.arange(0, size, 2) / size)
    low, high, factor = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"], LLAMA3["factor"]
    share = mx.clip((LLAMA3["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    periods = 1 / ((1 - share) / waves / factor + share / waves) / (2 * mx.pi)
    rope = model.layers[0].self_attn
    rope.rope = lambda x, offset: mx.fast.rope(x, size, traditional=False, base=None, scale=1.0, offset=offset,
                                               freqs=periods)
    return model


base = drafted(loaded("base", config(plain)))
by_file = {"norm_output": drafted(loaded("norm", config(plain, norm_output=True))),
           "llama3 rope": drafted(loaded("rope", config(LLAMA3)))}
by_hand = NormOutput(Eagle3Config.from_dict(config(plain)))
by_hand.load_weights(list(weights.items()))
meant = {"norm_output": drafted(by_hand), "llama3 rope": drafted(with_llama3(loaded("hand", config(plain))))}
print(f"mlx-vlm 0.7.10, {DRAFTS} tokens of an EAGLE-3 draft model after {LENGTH} tokens")
print("expected: the draft model that the config.json describes, or an error")
print(f"seen: neither setting: {base}")
as_found = True
for name, tokens_by_file in by_file.items():
    print(f"seen: {name} in config.json: {tokens_by_file}; what it means, put in by hand: {meant[name]}")
    as_found = as_found and tokens_by_file == base != meant[name]
sys.exit(0 if as_found else "the behaviour has changed")
EOF
venv/bin/python find.py
