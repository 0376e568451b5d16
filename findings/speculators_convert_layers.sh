#!/usr/bin/env bash
# engine: speculators
# version: 0.9.0
# date: 2026-11-29
# finding: Converting an EAGLE-3 checkpoint drops the target layers that its config.json names (eagle_config, as vLLM reads
#   it): the converted draft is fed with hidden states of other layers than it was trained on, and no warning says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 numpy==2.4.6 transformers==5.19.0 loguru==0.7.3 pydantic==2.14.4
venv/bin/pip install -q openai==3.57.0 datasets==5.1.0
venv/bin/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
cat > find.py <<'EOF'
import json
import sys
from pathlib import Path

import torch
import transformers
from loguru import logger
from safetensors.torch import save_file
from speculators import SpeculatorModel
from speculators.convert import convert_model

H, I, V, LAYERS = 32, 64, 64, [1, 5, 10]
SIZES = {"vocab_size": V, "hidden_size": H, "intermediate_size": I, "num_attention_heads": 4, "num_key_value_heads": 4}
SHAPES = {
    "fc": (H, 3 * H), "norm": (H,), "lm_head": (V, H), "midlayer.hidden_norm": (H,), "midlayer.input_layernorm": (H,),
    "midlayer.post_attention_layernorm": (H,), "midlayer.self_attn.q_proj": (H, 2 * H),
    "midlayer.self_attn.k_proj": (H, 2 * H), "midlayer.self_attn.v_proj": (H, 2 * H), "midlayer.self_attn.o_proj": (H, H),
    "midlayer.mlp.gate_proj": (I, H), "midlayer.mlp.up_proj": (I, H), "midlayer.mlp.down_proj": (H, I),
}
said = []
logger.remove()
logger.add(said.append, level="WARNING", format="{message}")
transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=12, **SIZES)).save_pretrained("target")
layer = transformers.LlamaConfig(num_hidden_layers=1, draft_vocab_size=V, **SIZES)


def converted(name, place, **more):
    """Layers in the converted config.json, those of the loaded draft, and warnings of the conversion about layers."""
    folder = Path(name)
    layer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **place}))
    save_file({f"{key}.weight": torch.ones(shape) for key, shape in SHAPES.items()}, folder / "model.safetensors")
    said.clear()
    convert_model(model=name, verifier="target", algorithm="eagle3", output_path=name + "-converted", **more)
    warned = [text for text in said if "layer" in text]
    saved = json.loads(Path(name + "-converted", "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    return saved, list(SpeculatorModel.from_pretrained(name + "-converted").target_layer_ids), warned


named = {"eagle_aux_hidden_state_layer_ids": LAYERS}
seen = {
    "eagle_config": converted("nested", {"eagle_config": {**named, "use_aux_hidden_state": True}}),
    "the top level": converted("top", named),
    "an argument": converted("argument", {}, **named),
}
print(f"speculators 0.9.0, an EAGLE-3 checkpoint for layers {LAYERS} of a target with 12 layers, converted")
print("expected: the converted checkpoint names the layers that the checkpoint named, or a warning says that it does not")
for place, (saved, loaded, warned) in seen.items():
    print(f"seen: named by {place}: config.json has {saved}, the loaded draft reads {loaded}, warnings: {warned}")
lost = (None, [2, 6, 9], [])
as_found = [*seen.values()] == [lost, lost, (LAYERS, LAYERS, [])]
sys.exit(0 if as_found else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
