#!/usr/bin/env bash
# engine: speculators
# version: 0.9.0
# date: 2026-11-29
# finding: Converting an EAGLE-3 checkpoint whose config.json transformers 5 wrote, with rope_theta inside rope_parameters, and
#   dtype, sets rope_theta to 10000 and doubles the file to float32, in silence: the converted draft is another model.
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
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.convert import convert_model

H, I, V, THETA = 32, 64, 64, 500000.0
SIZES = {"vocab_size": V, "hidden_size": H, "intermediate_size": I, "num_attention_heads": 4, "num_key_value_heads": 4,
         "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
SHAPES = {
    "fc": (H, 3 * H), "norm": (H,), "lm_head": (V, H), "midlayer.hidden_norm": (H,), "midlayer.input_layernorm": (H,),
    "midlayer.post_attention_layernorm": (H,), "midlayer.self_attn.q_proj": (H, 2 * H),
    "midlayer.self_attn.k_proj": (H, 2 * H), "midlayer.self_attn.v_proj": (H, 2 * H), "midlayer.self_attn.o_proj": (H, H),
    "midlayer.mlp.gate_proj": (I, H), "midlayer.mlp.up_proj": (I, H), "midlayer.mlp.down_proj": (H, I),
}


def converted(name, change):
    """Rope's theta and the dtype of a draft after conversion, and the theta that its rotary embedding has when loaded."""
    folder = Path(name)
    layer = transformers.LlamaConfig(num_hidden_layers=1, dtype="bfloat16", draft_vocab_size=V, **SIZES)
    layer.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(written)))
    weights = {f"{key}.weight": torch.ones(shape, dtype=torch.bfloat16) for key, shape in SHAPES.items()}
    save_file(weights, folder / "model.safetensors")
    convert_model(model=name, verifier="target", algorithm="eagle3", output_path=name + "-converted")
    saved = json.loads(Path(name + "-converted", "config.json").read_text())["transformer_layer_config"]
    kinds = {str(value.dtype) for value in load_file(name + "-converted/model.safetensors").values()}
    slowest = SpeculatorModel.from_pretrained(name + "-converted").rotary_emb.inv_freq[1].item()
    return saved["rope_parameters"]["rope_theta"], kinds, round(slowest ** -4)


def as_transformers_4(config):
    """The same config as transformers 4 would have written it."""
    config["rope_theta"], config["torch_dtype"] = config.pop("rope_parameters")["rope_theta"], config.pop("dtype")
    return config


transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=12, **SIZES)).save_pretrained("target")
new, old = converted("new", lambda config: config), converted("old", as_transformers_4)
print(f"speculators 0.9.0, an EAGLE-3 checkpoint in bfloat16 with rope_theta = {THETA}, converted")
print("expected: the converted checkpoint has the same rope_theta and dtype, however its config.json is written")
for name, (theta, kinds, loaded) in (("transformers 5", new), ("transformers 4", old)):
    print(f"seen: config.json as {name} writes it: rope_theta {theta}, tensors {sorted(kinds)}, loaded theta {loaded}")
as_found = new == (10000.0, {"torch.float32"}, 10000) and old[:2] == (THETA, {"torch.bfloat16"}) and old[2] > 400000
sys.exit(0 if as_found else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
