"""Record inside vLLM what its drafter proposes after every output token.

`install` replaces methods of the model runner before a server is made. The scheduler gets no drafts, so that the target
decodes one token a step, and the text is the one without speculation. Every step still drafts after each sequence's
newest token, from the states that a normal run has there: a drafter computes the keys and values of accepted tokens
anew from the target's.

`register` is the entry point by which vLLM's own processes, such as those of `vllm serve`, install it. It does nothing
unless the environment names a folder.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FOLDER = "SPECSIM_VLLM_RECORD"  # names the folder to record into
TEXTS = "SPECSIM_VLLM_TEXTS"  # names a file of texts to force: JSON Lines of prompt_tokens and output_tokens
FACTS, REQUESTS, DRAFTS = "engine.json", "requests.jsonl", "drafts.npy"  # of a server, in a folder of its own
NO_TOKEN = -1  # where nothing is drafted
STATISTICS = ("prob", "entropy_nats", "top10_confidence")


def row_type(depth: int) -> np.dtype[Any]:
    """Make the type of a row: a request, how many output tokens it has, the last of them, and the draft behind it."""
    lists = [(name, np.float32, (depth,)) for name in STATISTICS]
    numbers = [(name, np.int32) for name in ("request", "position", "token")]
    return np.dtype([*numbers, ("draft", np.int32, (depth,)), *lists])


def draft_statistics(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute `STATISTICS` [n, 3] of the likeliest tokens [n] from their logits [n, V], in float32."""
    probs = logits.float().softmax(dim=-1)
    own = probs.gather(-1, tokens[:, None])[:, 0]
    best = probs.topk(min(10, probs.shape[-1]), dim=-1).values.sum(dim=-1)
    return torch.stack([own, torch.special.entr(probs).sum(dim=-1), own / best], dim=-1)


class Texts:
    """Texts to force, by prompt; of several with the same prompt each is used once.

    file : JSON Lines of {"prompt_tokens": [...], "output_tokens": [...]}; None for no texts
    """

    def __init__(self, file: Path | None):
        self._outputs: dict[tuple[int, ...], deque[list[int]]] = {}
        for line in file.read_text().splitlines() if file else ():
            row = json.loads(line)
            self._outputs.setdefault(tuple(row["prompt_tokens"]), deque()).append(row["output_tokens"])

    def take(self, prompt: Sequence[int]) -> list[int] | None:
        """Take the next text of this prompt, None if there is no other."""
        outputs = self._outputs.get(tuple(prompt))
        return outputs.popleft() if outputs else None


class Recorder:
    """Writes the drafts of a server, step by step, into a new folder in `folder`.

    The rows lie in an npy file whose header has their type and no length, so that all but a last row is read from the
    file of a server that was killed.

    texts : to force
    draft_s : seconds that drafting and recording took
    """

    def __init__(self, folder: Path, texts: Texts):
        self._folder, self._texts, self.draft_s = folder, texts, 0.0

    def begin(self, depth: int, facts: Mapping[str, Any]) -> None:
        """Begin with a server that drafts `depth` tokens. facts : about it"""
        self._depth, self._type = depth, row_type(depth)
        self._requests: dict[str, tuple[int, list[int] | None]] = {}
        part = new_part(self._folder)
        (part / FACTS).write_text(json.dumps({**facts, "depth": depth}))
        self._described, self._drafts = part / REQUESTS, part / DRAFTS
        self._described.touch()
        np.save(self._drafts, np.zeros(0, self._type))

    def request(self, name: str, state: Any) -> tuple[int, list[int] | None]:
        """Return a request's number and the text to force on it; describe it when it is new. state : vLLM's"""
        if name not in self._requests:
            number, prompt = len(self._requests), [*state.prompt_token_ids]
            text, sampling = self._texts.take(prompt), state.sampling_params
            described = {
                "request": number,
                "id": name,
                "prompt_tokens": prompt,
                "max_output_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "forced_tokens": None if text is None else len(text),
            }
            append(self._described, json.dumps(described).encode() + b"\n")
            self._requests[name] = number, text
        return self._requests[name]

    def take(
        self,
        requests: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        drafts: Sequence[Sequence[int]],
        statistics: npt.NDArray[np.float32] | None,
    ) -> None:
        """Write a row for each request of a step. statistics : [n, D, 3], None of a drafter without probabilities"""
        if not requests:
            return
        rows = np.zeros(len(requests), self._type)
        rows["request"], rows["position"], rows["token"] = requests, positions, tokens
        rows["draft"] = [[*draft, *[NO_TOKEN] * (self._depth - len(draft))] for draft in drafts]
        if statistics is not None:
            for column, name in enumerate(STATISTICS):
                rows[name] = statistics[:, :, column]
        append(self._drafts, rows.tobytes())


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as handle:
        handle.write(content)


def new_part(folder: Path) -> Path:
    """Make the next folder of a server: part-0, part-1 and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        part = folder / f"part-{number}"
        try:
            part.mkdir()
        except FileExistsError:
            continue
        return part
    raise AssertionError


def record_v1(recorder: Recorder) -> None:
    """Record the V1 model runner of vLLM 0.32."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, propose = GPUModelRunner._sample, GPUModelRunner.propose_draft_token_ids
    initialize = GPUModelRunner.initialize_kv_cache  # after the models are loaded
    steps: list[torch.Tensor] = []  # statistics [B, 3] of each depth of the drafts that are being made

    def initialize_kv_cache(self: Any, *rest: Any, **named: Any) -> None:
        if not named.get("is_profiling"):
            if reasons := [*obstacles(self)]:
                raise RuntimeError(f"drafts of this server cannot be recorded: {'; '.join(reasons)}")
            recorder.begin(self.num_spec_tokens, facts_of(self))
        initialize(self, *rest, **named)

    def sample_next(self: Any, *rest: Any, **named: Any) -> Any:
        output = sample(self, *rest, **named)
        for row, name in enumerate(self.input_batch.req_ids):
            state = self.requests[name]
            _, text = recorder.request(name, state)
            position = len(state.output_token_ids)
            if text is not None and position < len(text):
                output.sampled_token_ids[row, 0] = text[position]
        return output

    def greedy_sample(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.model.compute_logits(hidden_states)
        tokens = logits.argmax(dim=-1)
        steps.append(draft_statistics(logits, tokens))
        return tokens

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled: Any, *rest: Any, **named: Any) -> Any:
        start = time.monotonic()
        steps.clear()
        drafts = propose(self, scheduler_output, sampled, *rest, **named)
        names = self.input_batch.req_ids
        # Where only a part of a prompt was read, the sampled token is dropped.
        kept = np.flatnonzero(~self.discard_request_mask.np[: len(names)]).tolist()
        # A drafter that runs on the device gets its tokens before they are added to the requests, others afterwards.
        added = 0 if torch.is_tensor(sampled) else 1
        tokens, drafted = (value.tolist() if torch.is_tensor(value) else value for value in (sampled, drafts))
        if any(len(tokens[row]) != 1 for row in kept):
            raise RuntimeError("vLLM verified a draft while its drafts were recorded")
        # A drafter that drafts all tokens in parallel calls `greedy_sample` once, with the rows of a request together.
        statistics = torch.stack(steps, dim=1).view(len(names), -1, len(STATISTICS)).cpu().numpy() if steps else None
        states = [self.requests[names[row]] for row in kept]
        recorder.take(
            [recorder.request(names[row], state)[0] for row, state in zip(kept, states, strict=True)],
            [len(state.output_token_ids) + 1 - added for state in states],
            [tokens[row][0] for row in kept],
            [drafted[row] for row in kept],
            None if statistics is None else statistics[kept],
        )
        recorder.draft_s += time.monotonic() - start
        return drafts

    SpecDecodeBaseProposer._greedy_sample = greedy_sample
    GPUModelRunner.initialize_kv_cache = initialize_kv_cache
    GPUModelRunner._sample = sample_next
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    GPUModelRunner.take_draft_token_ids = lambda self: None


def obstacles(runner: Any) -> Iterator[str]:
    """Say why drafts of a loaded V1 runner would not be recorded at every position, and what to do."""
    speculation, drafter = runner.speculative_config, getattr(runner, "drafter", None)
    if speculation is None:
        yield "it does not speculate; give --speculative-config"
        return
    if runner.use_async_scheduling:
        yield "with async scheduling vLLM verifies drafts all the same; give --no-async-scheduling"
    if speculation.num_speculative_tokens_per_batch_size:
        yield "the draft length follows the batch size; remove num_speculative_tokens_per_batch_size"
    if runner.parallel_config.world_size > 1:
        yield "its model is split over several processes; run it in one"
    for name in ("use_local_argmax_reduction", "use_heterogeneous_vocab", "_enable_probabilistic_draft_probs"):
        if getattr(drafter, name, False):
            yield f"its drafter has {name.lstrip('_')}, and logits of what it drafts are not there; turn it off"


def facts_of(runner: Any) -> dict[str, Any]:
    """Describe a server."""
    import vllm

    config, speculation = runner.vllm_config, runner.speculative_config
    model, scheduler = config.model_config, config.scheduler_config
    return {
        "name": "vllm",
        "version": vllm.__version__,
        "runner": "V1",
        "method": speculation.method,
        "target": str(model.model),
        "drafter": str(speculation.model or speculation.method),
        "drafter_facts": rule_of(speculation),
        "vocabulary": model.get_vocab_size(),
        "eos_token_id": getattr(model.hf_config, "eos_token_id", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(runner.device.type),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
    }


def rule_of(speculation: Any) -> dict[str, Any]:
    """Describe the rule of a drafter that reads only the text, by the names of `specsim.lookup`."""
    if speculation.method == "ngram":
        lengths = {"min_ngram": speculation.prompt_lookup_min, "max_ngram": speculation.prompt_lookup_max}
        return {**lengths, "occurrence": "first", "at_end": "stop"}
    if speculation.method == "suffix":
        names = ("max_tree_depth", "max_spec_factor", "min_token_prob", "max_cached_requests")
        rule = {name: getattr(speculation, f"suffix_decoding_{name}") for name in names}
        return {**rule, "max_spec_offset": 0.0, "max_spec_tokens": speculation.num_speculative_tokens}
    return {}


ADAPTERS: dict[str, Callable[[Recorder], None]] = {"0.32": record_v1}  # by minor version


def adapter_of(version: str) -> Callable[[Recorder], None]:
    """Find what records this version of vLLM; ValueError if nothing does."""
    minor = ".".join(version.split(".")[:2])
    if minor not in ADAPTERS:
        known = ", ".join(f"{name}.*" for name in ADAPTERS)
        raise ValueError(f"drafts of vLLM {version} cannot be recorded; install a version of {known}")
    return ADAPTERS[minor]


@cache  # vLLM may load its plugins more than once
def install(folder: Path, version: str, texts: Path | None = None) -> Recorder:
    """Record the server that this process makes from now on.

    folder : to which a folder of the server is added; texts : file of texts to force, see `Texts`
    """
    record, recorder = adapter_of(version), Recorder(folder, Texts(texts))
    record(recorder)
    return recorder


def register() -> None:
    """Record the server of this process if the environment names a folder; vLLM calls this as a general plugin.

    Raises RuntimeError or ValueError, which end vLLM, if its version or its model runner cannot be recorded.
    """
    if not (folder := os.environ.get(FOLDER)):
        return
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise RuntimeError(f"{FOLDER} is set, and only vLLM's V1 runner is recorded; set VLLM_USE_V2_MODEL_RUNNER=0")
    import vllm

    texts = os.environ.get(TEXTS)
    install(Path(folder), vllm.__version__, Path(texts) if texts else None)
