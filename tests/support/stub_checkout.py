"""A checkout that stands in for realrun: it decodes in known seconds, without a model."""

from __future__ import annotations

from pathlib import Path

# A round of a policy drafts 3 tokens, accepts ACCEPTED and takes SLOWER longer; noise is at most 0.2 %.
STUB = """
import random
from types import SimpleNamespace

class Sampler(SimpleNamespace): pass

class Pair:
    eos_token_ids, fingerprint = (), "weights"
    def make_drafter(self): return None, None

def load_pair(**options): return Pair()

class Decoder:
    def __init__(self, target, drafter, eos_token_ids, sampler): pass
    def decode(self, prompt, max_new_tokens, policy): pass

class Decoding:
    def __init__(self, decoder, prompt, max_new_tokens, policy, sequence, seed):
        self.policy, self.limit, self.tokens, self.rounds = policy, max_new_tokens, [], []
    position = property(lambda self: len(self.tokens))
    done = property(lambda self: len(self.tokens) >= self.limit)
    result = property(lambda self: self)
    def advance(self):
        accepted = 0 if self.policy is None else ACCEPTED
        self.tokens += range(min(accepted + 1, self.limit - len(self.tokens)))
        seconds = random.uniform(1, 1.002) * (1 if self.policy is None else 1.5 * (1 + SLOWER))
        self.rounds.append(SimpleNamespace(drafted=3, accepted=accepted, seconds=seconds))
"""


def stub_checkout(folder: Path, slower: float = 0.0, accepted: int = 1) -> str:
    """Write a checkout whose policy takes this much longer per round, and accepts so many tokens."""
    code = STUB.replace("SLOWER", str(slower)).replace("ACCEPTED", str(accepted))
    files = {
        "specsim/__init__.py": "__version__ = 'stub'\ndef make_policy(name, settings): return name\n",
        "realrun/__init__.py": code,
        "realrun/decode/__init__.py": "",
        "realrun/lm/__init__.py": "",
        "realrun/lm/clock.py": "from contextlib import nullcontext as use_clock\n",
        "realrun/decode/decoder.py": "from realrun import Decoding\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)
