#!/usr/bin/env bash
# engine: litgpt
# version: 0.5.13
# date: 2026-11-29
# finding: With a draft model and temperature 0 drafted tokens that are not the target's best one are accepted by chance, and
#   a rejected one is replaced by the best of the difference of the models: the text is not the target's greedy text.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q litgpt==0.5.13 torch==2.13.0
cat > find.py <<'EOF'
import sys

import torch
from litgpt import GPT, Config
from litgpt.generate.speculative_decoding import generate

NEW, PROMPT = 40, [3, 7, 9, 11]
config = Config(
    block_size=128, vocab_size=32, padded_vocab_size=32, n_layer=2, n_head=4, n_query_groups=2, n_embd=32,
    rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    intermediate_size=64,
)


def random_model(seed):
    torch.manual_seed(seed)
    model = GPT(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
def best_after(model, ids):
    model.clear_kv_cache()
    model.max_seq_length = 64
    return model(torch.tensor([ids]))[0, -1].argmax().item()


def agreeing(target, draft, seed):
    """Tokens of a greedy text that are the target's best after those before them, and all tokens of the text."""
    # The token after the prompt is the target's own, and this release leaves it out of the text.
    first = best_after(target, PROMPT)
    for model in (target, draft):
        model.max_seq_length = 64
        model.set_kv_cache(batch_size=1)
    torch.manual_seed(seed)
    ids = torch.tensor(PROMPT)
    text, _ = generate(draft, target, ids, len(PROMPT) + NEW, temperature=0.0, include_prompt=False, speculative_k=3)
    text = text.tolist()
    before = [*PROMPT] if text[0] == first else [*PROMPT, first]
    agree = [best_after(target, before + text[:at]) == text[at] for at in range(len(text))]
    return sum(agree), len(agree), text


target, other = random_model(0), random_model(1)
print(f"litgpt 0.5.13, {NEW} tokens at temperature 0, K = 3")
print("expected: every token is the target's most probable one after the tokens before it, whatever the draft model is")
own = agreeing(target, random_model(0), 0)
print(f"seen: the target as its own draft model: {own[0]} of {own[1]} tokens are the target's best")
texts = []
for seed in range(4):
    best, length, text = agreeing(target, other, seed)
    texts.append((best / length, tuple(text)))
    print(f"seen: another draft model, seed {seed}: {best} of {length} tokens are the target's best; it begins", *text[:8])
print("seen: different texts of the four seeds:", len({text for _, text in texts}))
found = own[0] == own[1] and all(share < 0.8 for share, _ in texts)
sys.exit(0 if found else "the behaviour has changed")
EOF
venv/bin/python find.py
