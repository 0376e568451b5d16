#!/usr/bin/env bash
# engine: speculators
# version: 0.9.0
# date: 2026-11-29
# finding: An EAGLE-3 draft for a Qwen3.5 or Gemma 3 target is trained on other logits than the target's: its copy of the
#   target's last norm multiplies by w where these models multiply by 1 + w, while DFlash drafts get the target's logits.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 numpy==2.4.6 transformers==5.19.0 loguru==0.7.3 pydantic==2.14.4
venv/bin/pip install -q openai==3.57.0 datasets==5.1.0
venv/bin/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
cat > find.py <<'EOF'
import sys

import torch
import transformers
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3.core import Eagle3DraftModel

torch.manual_seed(0)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
TARGETS = {
    "Qwen3": (transformers.Qwen3Config, {}),
    "Qwen3.5": (transformers.Qwen3_5TextConfig, LINEAR),
    "Gemma 3": (transformers.Gemma3TextConfig, {}),
}
DRAFTS = {
    "EAGLE-3": (Eagle3DraftModel, transformers.LlamaConfig, {"ttt_steps": 3, "norm_before_residual": True}),
    "DFlash": (DFlashDraftModel, transformers.Qwen3Config, {"block_size": 4, "mask_token_id": 0}),
}


def agreement(folder, target, draft):
    """Share of positions whose best token is the target's, and the greatest difference of a logit."""
    kind, layer, settings = DRAFTS[draft]
    model = kind.from_training_args(
        layer(num_hidden_layers=1, **SIZES), verifier_name_or_path=folder, draft_vocab_size=SIZES["vocab_size"],
        target_layer_ids=[1, 2, 3], draft_attn_impl="eager", **settings,
    )
    before = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    with torch.no_grad():
        logits = target(torch.arange(60)[None]).logits
        # what both training losses compare a draft with, from the hidden states that were captured before the norm
        learnt = model.verifier_lm_head(model.verifier_norm(before[0]))
    hook.remove()
    return (logits.argmax(-1) == learnt.argmax(-1)).float().mean().item(), (logits - learnt).abs().max().item()


print("speculators 0.9.0, the logits that a draft learns from, against those of the target (random weights)")
print("expected: they are the target's, whatever the kind of draft")
seen = {}
for name, (config, more) in TARGETS.items():
    folder = name.replace(" ", "")
    target = transformers.AutoModelForCausalLM.from_config(config(num_hidden_layers=4, **SIZES, **more)).eval()
    with torch.no_grad():
        target.model.norm.weight.normal_(0.5, 0.5)
    target.save_pretrained(folder)
    for draft in DRAFTS:
        same, gap = seen[name, draft] = agreement(folder, target, draft)
        print(f"seen: {name}, {draft}: same best token at {same:.0%} of positions, logits differ by up to {gap:.2f}")
wrong = [key for key, (same, gap) in seen.items() if gap > 0.01]
right = [key for key, (same, gap) in seen.items() if gap < 1e-4]
as_found = wrong == [("Qwen3.5", "EAGLE-3"), ("Gemma 3", "EAGLE-3")] and len(right) == 4
sys.exit(0 if as_found else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
