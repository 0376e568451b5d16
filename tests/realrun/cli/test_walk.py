"""A new user's walk, from an empty folder, line by line: in a terminal of 60 columns, and without one.

python -m tests.realrun.cli.test_walk FOLDER [COLUMNS]      prints what a user sees
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.support import ROOT

WALK = """
specsim --version
realrun record trace --target big --draft-model small --prompts chats.jsonl --max-new-tokens 24 --max-draft-tokens 4
realrun record trace --target big --draft-model small --prompts chats.jsonl
realrun profile profile.json --for trace --target big --draft-model small --minutes 0
realrun profile profile.json --for trace --target big --draft-model small --minutes 0
specsim info trace
specsim replay trace --policy adaedl --cost profile.json
specsim tune trace --policy max_confidence --cost profile.json --trials 20
specsim leaderboard trace --cost profile.json --policy fixed_k --policy p_min --policy vct --trials 8 --out board
realrun validate --trace trace --target big --draft-model small --policy fixed_k --policy p_min --trials 8 --repeats 3
realrun train eagle --target big --text text --out eagle --tokens 0.02 --window 64 --batch 4 --generated-share 0
realrun record a/inside --target big --drafter ./eagle --prompts chats.jsonl --max-new-tokens 24 --max-draft-tokens 4
"""
REFUSED = (2, 4)  # lines that would replace a trace, or a profile
MAY_RESOLVE_NOTHING = 9
PADDED = {"big": 128, "small": 112}  # rows of the embeddings, more than there are tokens
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def prepare(home: Path) -> None:
    """A pair with embeddings padded beyond the vocabulary, a chat template, chats and text."""
    characters = ["<end>", "<|user|>", "<|assistant|>", "<|system|>", *map(chr, range(32, 127)), "\n"]
    inside = Tokenizer(models.WordLevel({character: at for at, character in enumerate(characters)}, unk_token="<end>"))
    inside.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inside, eos_token="<end>", chat_template=CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": characters[1:4]})
    for name, layers in (("big", 3), ("small", 1)):
        torch.manual_seed(1)
        config = Qwen2Config(
            vocab_size=PADDED[name], hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=0,
            bos_token_id=None, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    questions = ["What is 2 + 2?", "Name a city.", "Write a line of Python.", "Who are you?", "Why?", "Tell me a joke."]
    rows = [
        {"messages": [{"role": "user", "content": question}], "domain": "ab"[at % 2]}
        for at, question in enumerate(questions * 2)
    ]
    (home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "text").mkdir()
    for number in range(24):
        (home / "text" / f"{number}.txt").write_text(
            f"Page {number} says that {number} and {number} are {2 * number}. " * 12
        )


def run(line: str, home: Path, columns: int | None) -> tuple[int, str]:
    """The exit code of a line and what it shows, in a terminal of so many columns or in none."""
    command, *words = shlex.split(line)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    argv = [sys.executable, "-m", command, *words]
    if columns is None:
        done = subprocess.run(
            argv, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.returncode, done.stdout
    ours, theirs = pty.openpty()
    environment["COLUMNS"] = str(columns)
    process = subprocess.Popen(argv, cwd=home, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # as Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, None])
def test_a_new_user_walks_through(columns: int | None, tmp_path: Path) -> None:
    prepare(tmp_path)
    for number, line in enumerate(WALK.strip().splitlines()):
        code, text = run(line, tmp_path, columns)
        expected = (2,) if number in REFUSED else (0, 1) if number == MAY_RESOLVE_NOTHING else (0,)
        assert code in expected, f"{line}\n{text}"
        assert "Traceback" not in text and "Loading" not in text and "Warning" not in text, f"{line}\n{text}"
        tables = [line for line in text.splitlines() if re.match("[┏┃┡│└]", line)]
        assert not tables or max(map(len, tables)) <= (columns or 200), f"{line}\n{text}"
        if number in REFUSED:
            assert text.startswith("error: ") and text.count("\n") == 1 and "--overwrite" in text


if __name__ == "__main__":
    folder, width = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    folder.mkdir(parents=True)
    prepare(folder)
    for line in WALK.strip().splitlines():
        print(f"$ {line}", flush=True)
        exit_code, output = run(line, folder, width)
        print(output + (f"[exit {exit_code}]\n" if exit_code else ""), flush=True)
