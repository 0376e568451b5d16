#!/usr/bin/env bash
# engine: sequential-speculative-decoding
# version: 0.1.1
# date: 2026-11-29
# finding: With capped_hsd, the fastest of its methods, texts are not the target's, though decoding is said to change no
#   distribution: whether the last drafted token is kept does not depend on it, so that even impossible tokens are written.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.24.0
venv/bin/pip install -q --no-deps sequential-speculative-decoding==0.1.1
cat > find.py <<'EOF'
import sys

import torch
from seqspecdecod import baseline_generate, speculative_generate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS, TOKENS, COLD = 100, 40, 1e-5  # at this temperature of the target, sampling is greedy decoding
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)} | {"?": WORDS}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="?")
tokenizer.chat_template = "{{ messages[0].content }}"


def model(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS + 1, initializer_range=0.3, **sizes)).eval()


target, draft = model(0), model(1)
prompts = [" ".join(f"w{(7 * row + 11 * place) % WORDS}" for place in range(8)) for row in range(4)]


def run(method, drafted):
    """Texts, and the share of drafted tokens that was accepted."""
    torch.manual_seed(2)
    settings = {"max_new_tokens": TOKENS, "gamma": 3, "draft_temperature": 1.0, "target_temperature": COLD}
    results = [speculative_generate(drafted, target, tokenizer, prompt, method=method, **settings) for prompt in prompts]
    rate = sum(result["accepted_tokens"] for result in results) / sum(result["draft_tokens"] for result in results)
    return [result["text"].split()[:TOKENS] for result in results], rate


texts = [
    baseline_generate(target, tokenizer, prompt, max_new_tokens=TOKENS, target_temperature=COLD)["text"].split()
    for prompt in prompts
]
seen = {method: run(method, draft) for method in ("standard", "naive_hsd", "capped_hsd")}
same = {method: sum(map(list.__eq__, texts, found)) for method, (found, _) in seen.items()}
print("sequential-speculative-decoding 0.1.1, a random target and another random draft model, 3 drafted tokens a round")
print(f"expected: at the target's temperature {COLD} all texts are the target's own, by every method")
for method, count in same.items():
    print(f"seen: {method}: {count} of {len(prompts)} texts are the target's own; {seen[method][1]:.0%} of drafts accepted")
as_it_was = same["standard"] == len(prompts) and same["capped_hsd"] == 0
sys.exit(0 if as_it_was else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
