#!/usr/bin/env bash
# engine: mlx-lm
# version: 0.32.2
# date: 2026-11-29
# finding: With a draft model the server's prompt cache lacks the last token of an answer where it is the target's own: the next
#   turn is answered as if that token had not been written, and differs from the answer without a draft model.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
cat > find.py <<'EOF'
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TALKS, TOKENS, VOCABULARY = 8, 12, 64
words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
settings = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
    "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}
for seed, name in enumerate(("target", "draft")):
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(**settings))
    for layer in model.layers:  # so that what was written before matters
        layer.self_attn.o_proj.weight = 4 * layer.self_attn.o_proj.weight
    model.lm_head.weight = 6 * model.lm_head.weight
    Path(name).mkdir()
    mx.save_safetensors(f"{name}/model.safetensors", dict(tree_flatten(model.parameters())), metadata={"format": "mlx"})
    Path(name, "config.json").write_text(json.dumps(settings | {"eos_token_id": VOCABULARY}))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(name)


def answers(prompts, *options):
    """Greedy answers of a new server, which is asked for one after the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", "target", "--port", str(port), *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path, header, texts = "/".join(("", "v1", "completions")), {"Content-Type": "application/json"}, []
    try:
        while len(texts) < len(prompts):
            body = json.dumps({"prompt": prompts[len(texts)], "max_tokens": TOKENS, "temperature": 0.0}).encode()
            connection = http.client.HTTPConnection("127.0.0.1", port)
            try:
                connection.request("POST", path, body, header)
                answer = json.load(connection.getresponse())
            except ConnectionRefusedError:  # it has not started yet
                assert server.poll() is None
                time.sleep(0.5)
                continue
            connection.close()
            texts.append(answer["choices"][0]["text"].split())
    finally:
        server.terminate()
        server.wait()
    return texts


drafts = ("--draft-model", "draft", "--num-draft-tokens", "3")
first = [f"t{number} t9 t7 t3 t8 t12" for number in range(40, 40 + TALKS)]
spoken = answers(first)
second = [" ".join([prompt, *text, "t20 t21"]) for prompt, text in zip(first, spoken)]
short = [" ".join([prompt, *text[:-1], "t20 t21"]) for prompt, text in zip(first, spoken)]  # without the answer's last token
alone, with_drafts = answers(first + second), answers(first + second, *drafts)
fresh, without_last = answers(second, *drafts), answers(short)


def equal(texts, others):
    return sum(text == other for text, other in zip(texts, others, strict=True))


turns = equal(with_drafts[:TALKS], alone[:TALKS]), equal(with_drafts[TALKS:], alone[TALKS:])
print(f"mlx-lm 0.32.2, mlx_lm.server, {TALKS} conversations of two turns, greedy answers of {TOKENS} tokens")
print(f"expected: a draft model changes no answer, so that {TALKS} first and {TALKS} second ones are as without it")
print(f"seen: {turns[0]} first and {turns[1]} second answers are as without it")
print(f"seen: {equal(fresh, alone[TALKS:])} second answers are, if a new server with the draft model is asked for them only")
print(f"seen: {equal(with_drafts[TALKS:], without_last)} second answers are as if the first answer's last token were missing")
changed = turns[0] != TALKS or turns[1] > TALKS // 2 or equal(fresh, alone[TALKS:]) != TALKS
sys.exit("the behaviour has changed" if changed or equal(with_drafts[TALKS:], without_last) < TALKS - 2 else 0)
EOF
venv/bin/python find.py
