"""Prompts for a server: specsim's tasks, or JSON Lines."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from specsim.io.errors import InputError
from specsim.io.examples import TASKS
from specsim.io.json import parse_json

FORMS = ("messages", "turns", "prompt", "text")
INVALID = 'give {"prompt": ...}, a text or a list of token ids, {"turns": [...]} or {"messages": [...]}'


class Prompt(NamedTuple):
    """What a request asks.

    name : digest of the content, by which the arms are paired
    content : a text or token ids to continue, or the messages of a chat
    """

    name: str
    content: Any

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return isinstance(self.content, list) and isinstance(self.content[0], dict)

    def as_text(self) -> Prompt:
        """The same prompt as a text to continue, for servers without a chat template."""
        return Prompt(self.name, "\n\n".join(message["content"] for message in self.content)) if self.chat else self


def read_prompts(path: Path | None = None, *, seed: int = 0) -> list[Prompt]:
    """Read prompts in random order, by default specsim's 240 tasks.

    path : JSON Lines, each {"prompt": text or token ids}, {"turns": [question, ...]} or {"messages": [...]}

    Raises InputError for a line that is no prompt, with its number.
    """
    path = path or TASKS
    if not path.is_file():
        raise InputError(f"prompt file {path} does not exist; give JSON Lines, or leave out --prompts")
    prompts = [
        _prompt(parse_json(line, f"{path}:{number}", invalid=INVALID), f"{path}:{number}")
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f"{path} holds no prompt; {INVALID}")
    random.Random(seed).shuffle(prompts)
    return prompts


def _prompt(row: Any, place: str) -> Prompt:
    form = next((form for form in FORMS if isinstance(row, dict) and row.get(form)), None)
    content = row[form] if form else None
    if form == "turns" and isinstance(content, list) and isinstance(content[0], str):
        content = [{"role": "user", "content": content[0]}]
    texts = [message.get("content") if isinstance(message, dict) else message for message in content or [None]]
    ids = form == "prompt" and all(isinstance(token, int) for token in texts)
    if not (ids or all(isinstance(text, str) for text in texts)):
        raise InputError(f"{place} is not a prompt; {INVALID}")
    return Prompt(sha256(repr(content).encode()).hexdigest()[:12], content)
