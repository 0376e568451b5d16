"""Dense traces recorded inside vLLM; slow: against realrun's own recorder, and against vLLM's normal rounds."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
import shutil
import struct
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import Eagle
from realrun.drafters.eagle3 import LAYERS_KEY, Eagle3, default_config
from realrun.engines.check import as_lookups, check_recording, recording
from realrun.engines.dense import job_of, own_columns, record_with_engine
from realrun.engines.drafts import check_drafts
from realrun.engines.engine import Setting
from realrun.engines.hugging_face import HuggingFaceEngine
from realrun.engines.processes import vllm_recorder
from realrun.engines.processes.vllm_recorder import Recorder, Texts, adapter_of, draft_statistics, row_type
from realrun.engines.vllm import VllmEngine, job_document, sampling_of
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter, write_drafter
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from specsim.engines.conventions import CONVENTIONS
from specsim.engines.formats.registry import read_format
from specsim.engines.formats.vllm_dense import read_part
from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.lookup.ngram import NgramRule
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.checks import unsupported_reason
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import NO_TOKEN, Trace
from tests.realrun.engines.test_vllm import answer_of, greedy, outputs_of, vllm_rounds
from tests.specsim.engines.test_as_engine import replayed_rounds
from tests.support import ROOT
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.tiny import tiny_pair, tiny_prompts

TOKENS, DEPTH, EOS = 20, 4, 92
COLUMNS = ("prob", "confidence", "entropy_nats", "top10_confidence")


FACTS = {
    "name": "vllm", "version": "0.32.0", "runner": "V1", "method": "draft_model", "target": "lab/target",
    "drafter": "lab/draft", "drafter_facts": {}, "vocabulary": 97, "eos_token_id": EOS, "dtype": "float32",
    "device": "cpu", "max_num_batched_tokens": 2048, "max_num_seqs": 3,
}  # fmt: skip


def state_of(prompt: Sequence[int], count: int = 0, temperature: float = 0.0) -> SimpleNamespace:
    """What a recorder reads of vLLM's state of a request, which has `count` output tokens."""
    sampling = SimpleNamespace(max_tokens=TOKENS, temperature=temperature)
    return SimpleNamespace(prompt_token_ids=[*prompt], output_token_ids=[0] * count, sampling_params=sampling)


def test_a_folder_of_a_server_is_described_and_written_step_by_step(tmp_path: Path) -> None:
    """Rows are read here by the layout written out by hand, and nothing waits in a buffer."""
    recorder = Recorder(tmp_path, Texts(None))
    recorder.begin(2, FACTS)
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    for name, prompt in (("b-17", [5, 6]), ("a-18", [7]), ("b-17", [5, 6])):
        recorder.request(name, state_of(prompt))
    recorder.take([1, 0], [1, 1], [11, 12], [[1, 2], [3, 4]], values[:2])
    recorder.take([], [], [], [], values[:0])  # a step that read parts of prompts alone
    recorder.take([1, 0], [2, 2], [13, 14], [[5, 6], [7, 8]], values[2:])
    recorder.take([1], [3], [15], [[9]], None)
    part = read_part(tmp_path / "part-0")
    assert part.facts == {**FACTS, "depth": 2}
    assert [(r["request"], r["id"], r["prompt_tokens"]) for r in part.requests] == [
        (0, "b-17", [5, 6]),
        (1, "a-18", [7]),
    ]
    rows = part.rows
    assert len(rows) == 5 and rows.dtype.itemsize == 4 * (3 + 2 + 3 * 2)
    assert rows["request"].tolist() == [1, 0, 1, 0, 1] and rows["token"].tolist() == [11, 12, 13, 14, 15]
    assert rows["draft"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, NO_TOKEN]]
    assert rows["prob"][1].tolist() == [6, 9] and rows["entropy_nats"][1].tolist() == [7, 10]
    assert rows["top10_confidence"][3].tolist() == [20, 23] and not rows["prob"][4].any()
    file = tmp_path / "part-0" / "drafts.npy"
    whole = file.read_bytes()
    first, *_ = struct.iter_unpack("<3i2i2f2f2f", whole[-5 * 44 :])
    assert first == (1, 1, 11, 1, 2, 0, 3, 1, 4, 2, 5)
    file.write_bytes(whole[:-5])  # a killed server
    assert read_part(tmp_path / "part-0").rows["token"].tolist() == [11, 12, 13, 14]
    recorder.begin(2, FACTS)
    assert sorted(part.name for part in tmp_path.iterdir()) == ["part-0", "part-1"]
    file.write_bytes(whole[:40])
    refusal(lambda: read_part(tmp_path / "part-0"), "part-0 holds no recorded drafts")
    np.save(file, rows[["request", "token"]])
    refusal(lambda: read_part(tmp_path / "part-0"), "has other columns than request, position, token, draft, prob")


def test_statistics_are_scipys() -> None:
    """In float64, also where a part of the vocabulary cannot be drafted."""
    logits = 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    logits[2, 5:] = -torch.inf
    logits[3, :-1] = -torch.inf
    tokens = logits.argmax(dim=-1)
    probs = scipy.special.softmax(logits.double().numpy(), axis=-1)
    best = np.sort(probs, axis=-1)[:, ::-1]
    expected = [best[:, 0], scipy.stats.entropy(probs, axis=-1), best[:, 0] / best[:, :10].sum(axis=-1)]
    np.testing.assert_allclose(draft_statistics(logits, tokens).numpy(), np.stack(expected, axis=-1), atol=2e-6)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0.post2"])
def test_versions_that_are_recorded(version: str) -> None:
    assert adapter_of(version) is vllm_recorder.record_v1


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0"])
def test_versions_that_are_not_recorded(version: str) -> None:
    with pytest.raises(ValueError, match=rf"^drafts of vLLM {version} cannot be recorded; install a version of 0\.32"):
        adapter_of(version)


class Runner:
    """What a recorder touches of vLLM's model runner: two sequences, the second a part of a prompt at first."""

    def __init__(self, drafter: Any, **speculation: Any):
        self.drafter, self.use_async_scheduling, self.num_spec_tokens = drafter, False, 2
        given = {
            "method": "draft_model",
            "model": "draft",
            "num_speculative_tokens_per_batch_size": None,
            **speculation,
        }
        self.speculative_config: Any = SimpleNamespace(**given)
        self.parallel_config, self.device = SimpleNamespace(world_size=1), torch.device("cpu")
        model = SimpleNamespace(
            model="target", dtype=torch.float32, get_vocab_size=lambda: 3, hf_config=SimpleNamespace(eos_token_id=2)
        )
        scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=2)
        self.vllm_config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        self.input_batch = SimpleNamespace(req_ids=["1-9ff46863", "0-11aa22bb"])
        self.requests = {"1-9ff46863": state_of([1, 2]), "0-11aa22bb": state_of([3])}
        self.discard_request_mask = SimpleNamespace(np=np.array([False, True, False, False]))
        self.ready = False

    def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
        self.ready = not is_profiling

    def _sample(self, logits: torch.Tensor, metadata: Any) -> SimpleNamespace:
        return SimpleNamespace(sampled_token_ids=logits.argmax(dim=-1, keepdim=True))

    def propose_draft_token_ids(self, scheduler_output: Any, sampled: Any, *rest: Any) -> Any:
        return self.drafter.propose(sampled)

    def take_draft_token_ids(self) -> str:
        return "drafts"


class Proposer:
    """Drafts two tokens by given logits [B, V]."""

    use_local_argmax_reduction = use_heterogeneous_vocab = _enable_probabilistic_draft_probs = False

    def __init__(self, logits: torch.Tensor):
        self.model = SimpleNamespace(compute_logits=lambda states: logits * states)

    def _greedy_sample(self, states: torch.Tensor) -> torch.Tensor:
        raise AssertionError("is replaced")

    def propose(self, sampled: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._greedy_sample(torch.tensor(scale)) for scale in (1.0, -1.0)], dim=1)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> tuple[type[Proposer], type[Runner]]:
    """Replace the modules of vLLM that the recorder imports by fake ones with these classes."""
    proposer, runner = type("Proposer", (Proposer,), {}), type("Runner", (Runner,), {})
    parts = "vllm", "vllm.v1", "vllm.v1.spec_decode", "vllm.v1.worker"
    for name in (*parts, "vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.worker.gpu_model_runner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    sys.modules["vllm.v1.spec_decode.llm_base_proposer"].SpecDecodeBaseProposer = proposer  # type: ignore[attr-defined]
    sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner = runner  # type: ignore[attr-defined]
    return proposer, runner


def test_the_adapter_records_what_is_drafted_and_hands_no_draft_on(tmp_path: Path, classes: Any) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, -1.0]])
    vllm_recorder.install(tmp_path, "0.32.0")
    runner = classes[1](classes[0](logits))
    runner.initialize_kv_cache("config", is_profiling=True)
    assert not [*tmp_path.iterdir()]
    runner.initialize_kv_cache("config")
    sampled = torch.tensor([[5], [6]])
    drafts = runner.propose_draft_token_ids("output", sampled, "more")
    assert runner.ready and drafts.tolist() == [[1, 0], [0, 2]] and runner.take_draft_token_ids() is None
    runner.discard_request_mask.np[1] = False
    runner.requests["1-9ff46863"].output_token_ids.append(5)
    runner.propose_draft_token_ids("output", torch.tensor([[7], [8]]))
    part = read_part(tmp_path / "part-0")
    described = {"target": "target", "drafter": "draft", "vocabulary": 3, "eos_token_id": 2, "depth": 2}
    assert part.facts == {**FACTS, **described, "max_num_batched_tokens": 64, "max_num_seqs": 2}
    assert [request["prompt_tokens"] for request in part.requests] == [[1, 2], [3]]
    rows = part.rows
    assert rows["request"].tolist() == [0, 0, 1] and rows["token"].tolist() == [5, 7, 8]
    assert rows["position"].tolist() == [1, 2, 1] and rows["draft"].tolist() == [[1, 0], [1, 0], [0, 2]]
    probs = scipy.special.softmax(np.stack([logits.numpy(), -logits.numpy()], axis=1), axis=-1).max(axis=-1)
    np.testing.assert_allclose(rows["prob"], probs[[0, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(rows["top10_confidence"], rows["prob"], atol=1e-6)  # of three tokens


def test_the_adapter_records_lookups(tmp_path: Path, classes: Any) -> None:
    """Which gives lists, shorter ones too, no token of a part of a prompt, and the token is in the output already."""
    vllm_recorder.install(tmp_path, "0.32.0")
    lookup = {"method": "ngram", "model": None, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    runner = classes[1](SimpleNamespace(propose=lambda sampled: [[3], [4, 5]]), **lookup)
    runner.initialize_kv_cache("config")
    runner.requests["1-9ff46863"].output_token_ids.append(8)
    runner.propose_draft_token_ids("output", [[8], []])
    part = read_part(tmp_path / "part-0")
    assert part.facts["drafter"] == "ngram"
    assert NgramRule(**part.facts["drafter_facts"]) == NgramRule(2, 5, "first", "stop")
    assert part.rows["draft"].tolist() == [[3, NO_TOKEN]] and part.rows["token"].tolist() == [8]
    assert part.rows["position"].tolist() == [1]


def test_texts_are_forced_on_requests_with_their_prompts(tmp_path: Path, classes: Any) -> None:
    """Two of the same prompt in turn; where a text ends or none is given, the target chooses."""
    texts = tmp_path / "texts.jsonl"
    lines = [{"prompt_tokens": [1, 2], "output_tokens": [9, 8]}, {"prompt_tokens": [1, 2], "output_tokens": [7]}]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    vllm_recorder.install(tmp_path / "out", "0.32.0", texts)
    runner = classes[1](classes[0](torch.eye(2)))
    runner.initialize_kv_cache("config")
    runner.requests["0-11aa22bb"] = state_of([1, 2])
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert runner._sample(logits, None).sampled_token_ids.tolist() == [[9], [7]]
    for state in runner.requests.values():
        state.output_token_ids.append(0)
    assert runner._sample(logits, None).sampled_token_ids.tolist() == [[8], [0]]
    runner.input_batch.req_ids[1] = "2-33"
    runner.requests["2-33"] = state_of([1, 2])
    assert runner._sample(logits, None).sampled_token_ids.tolist() == [[8], [0]]
    assert [request["forced_tokens"] for request in read_part(tmp_path / "out" / "part-0").requests] == [2, 1, None]


def test_a_server_that_would_not_be_dense_does_not_start(tmp_path: Path, classes: Any) -> None:
    vllm_recorder.install(tmp_path, "0.32.0")
    runner = classes[1](classes[0](torch.eye(2)))
    runner.initialize_kv_cache("config")
    with pytest.raises(RuntimeError, match="vLLM verified a draft"):
        runner.propose_draft_token_ids("output", [[8, 9], [7]])

    def refused(says: str, **changes: Any) -> None:
        runner = classes[1](classes[0](torch.eye(2)))
        vars(runner).update(changes)
        with pytest.raises(RuntimeError, match=f"drafts of this server cannot be recorded: .*{says}"):
            runner.initialize_kv_cache("config")
        assert not runner.ready

    refused("--no-async-scheduling", use_async_scheduling=True)
    refused("give --speculative-config", speculative_config=None)
    refused("run it in one", parallel_config=SimpleNamespace(world_size=2))
    scheduled = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 4, 3)])
    refused("remove num_speculative_tokens_per_batch_size", speculative_config=scheduled)
    for name in ("use_local_argmax_reduction", "use_heterogeneous_vocab", "_enable_probabilistic_draft_probs"):
        refused(f"its drafter has {name.strip('_')}", drafter=SimpleNamespace(**{name: True}))


def test_the_plugin_does_nothing_unless_a_folder_is_named(
    tmp_path: Path, classes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert pkgutil.resolve_name(points["vllm.general_plugins"]["specsim"]) is vllm_recorder.register
    original = classes[1].propose_draft_token_ids
    vllm_recorder.register()
    assert classes[1].propose_draft_token_ids is original
    monkeypatch.setenv(vllm_recorder.FOLDER, str(tmp_path))
    with pytest.raises(RuntimeError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        vllm_recorder.register()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    vllm_recorder.register()
    replaced = classes[1].propose_draft_token_ids
    vllm_recorder.register()  # as vLLM may
    assert original is not replaced is classes[1].propose_draft_token_ids


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Recorded by realrun, behind ends of texts, too."""
    return recording(tiny_pair((EOS,)), tiny_prompts(6), VllmEngine(), DEPTH, TOKENS, lambda what, done, total: None)


def rows_like(trace: Trace, lengths: Sequence[int]) -> Array:
    """As vLLM would record this trace, all sequences at once: step by step, and after the last token as well."""
    rows = []
    for t in range(1, max(lengths) + 1):
        for sequence, length in enumerate(lengths):
            if t <= length:
                row, at = np.zeros((), row_type(trace.depth)), trace.offsets[sequence] + min(t, length - 1)
                row["request"], row["position"] = sequence, t
                row["token"] = trace.token[trace.offsets[sequence] + t - 1]
                row["draft"] = trace.draft_token[at]
                for name in vllm_recorder.STATISTICS:
                    column = getattr(trace, name)
                    row[name] = 0 if column is None else column[at]
                rows.append(row)
    return np.array(rows)


def write_rows(
    folder: Path,
    rows: Array,
    requests: int,
    facts: dict[str, Any] | None = None,
    texts: Texts | None = None,
    temperature: float = 0.0,
) -> None:
    """Write rows of these requests, whose prompts are tiny, as a server's recorder does."""
    recorder = Recorder(folder, texts or Texts(None))
    recorder.begin(rows["draft"].shape[1], {**FACTS, **(facts or {})})
    for number, prompt in enumerate(tiny_prompts(requests)):
        recorder.request(f"{number}-9ff46863", state_of(prompt.tokens, temperature=temperature))
    columns = [rows[name].tolist() for name in ("request", "position", "token", "draft")]
    recorder.take(*columns, np.stack([rows[name] for name in vllm_recorder.STATISTICS], axis=2))


def tell(interpreter: Path, name: str, rows: Array, outputs: Sequence[Sequence[int]]) -> None:
    """Let the interpreter answer with these rows and outputs."""
    shutil.rmtree(interpreter / name, ignore_errors=True)
    write_rows(interpreter / name, rows, len(outputs))
    answer = {**answer_of(outputs, []), "whole_s": 1.0, "draft_s": 0.75}
    (interpreter / f"{name}.json").write_text(json.dumps(answer))


def test_a_recording_is_imported_as_a_trace(trace: Trace, interpreter: Path) -> None:
    """It is realrun's own trace of the same texts, but for the first position, and replays as vLLM runs the same."""
    pair, settings = tiny_pair((EOS,)), RecordSettings(DEPTH, TOKENS, Sampler("greedy"))
    expected, outputs = record(pair, tiny_prompts(6), settings), outputs_of(trace)
    tell(interpreter, "dense", rows_like(trace, [len(output) for output in outputs]), outputs)
    made = record_with_engine(pair, tiny_prompts(6), settings, VllmEngine(), batch=3)
    asked = json.loads((interpreter / "asked.json").read_text())
    assert asked["batch"] == 3 and asked["speculation"]["num_speculative_tokens"] == DEPTH
    assert asked["sampling"] == [{"temperature": 0.0}] * 6
    assert min(map(len, outputs)) < TOKENS and made.offsets.tolist() == expected.offsets.tolist()
    first, later = made.position == 0, made.position > 0
    for name in ("token", "match_len", "draft_token", *COLUMNS):
        np.testing.assert_array_equal(getattr(made, name)[later], getattr(expected, name)[later])
    assert (made.draft_token[first] == NO_TOKEN).all() and not made.match_len[first].any()
    assert (made.prob[first] == made.prob[np.flatnonzero(first) + 1]).all()
    assert not made.draft_limit[first].any() and (made.token == expected.token).all() and made.true_rank is None
    assert made.meta["engine"] == {
        "name": "vllm", "version": "0.32.0", "runner": "V1", "max_num_batched_tokens": 2048, "max_num_seqs": 3,
        "first_position_drafted": False,
    }  # fmt: skip
    assert made.meta["weights"] == expected.meta["weights"]
    assert made.meta["record_seconds"]["generate"] == pytest.approx(0.25)
    with pytest.raises(InputError, match="trace was recorded inside vllm and has no draft at the first position"):
        check_recording(made, pair, HuggingFaceEngine(), DEPTH, TOKENS, "trace")
    for k in (1, 3):
        both = [replayed_rounds(each, FixedK(k), TOKENS, CONVENTIONS["vllm"]) for each in (made, expected)]
        assert both[0] == both[1]


def test_a_sampled_recording_asks_for_the_sampler(trace: Trace, interpreter: Path) -> None:
    outputs = outputs_of(trace)
    tell(interpreter, "dense", rows_like(trace, [len(output) for output in outputs]), outputs)
    settings = RecordSettings(DEPTH, TOKENS, Sampler("greedy-draft", 0.7, seed=5, top_p=0.9))
    record_with_engine(tiny_pair((EOS,)), tiny_prompts(6), settings, VllmEngine())
    sampling = json.loads((interpreter / "asked.json").read_text())["sampling"]
    assert sampling[2] == {"temperature": 0.7, "seed": 7, "top_p": 0.9, "top_k": 0} and len(sampling) == 6


def test_an_output_of_one_token_has_no_draft() -> None:
    columns = own_columns(np.zeros(1, row_type(2)), [0], 2)
    assert columns["draft_token"].tolist() == [[NO_TOKEN] * 2] and columns["match_len"].tolist() == [0]


def test_folders_of_a_server_are_imported_as_one_trace(trace: Trace, tmp_path: Path) -> None:
    """Of two starts: realrun's trace of the same texts, behind the first position."""
    rows = rows_like(trace, trace.output_tokens.tolist())
    write_rows(tmp_path, rows, 6)
    write_rows(tmp_path, rows[rows["request"] < 2], 6)  # the other four were still without a token
    imported = read_format("vllm-dense", [tmp_path])
    made = imported.source
    assert isinstance(made, Trace) and imported.skipped == {"requests without output": 4} and imported.requests == 8
    assert imported.version == "0.32.0" and imported.holds == "dense trace"
    expected = trace.select([*range(6), 0, 1])
    later = made.position > 0
    for name in ("token", "match_len", "draft_token", *COLUMNS):
        np.testing.assert_array_equal(getattr(made, name)[later], getattr(expected, name)[later])
    assert made.prompts is not None and made.prompts[7].tolist() == tiny_prompts(6)[1].tokens
    assert made.budget_tokens.tolist() == np.maximum(TOKENS, made.output_tokens).tolist()
    assert made.meta["decoding"] == "greedy" and made.eos_token_ids == [EOS] and made.informed
    write_trace(made, tmp_path / "trace")
    assert read_trace(tmp_path / "trace").meta["engine"]["max_num_seqs"] == 3


def test_what_is_imported_of_forced_sampled_and_incomplete_requests(trace: Trace, tmp_path: Path) -> None:
    rows = rows_like(trace, trace.output_tokens.tolist())
    texts = tmp_path / "texts.jsonl"
    given = trace.token[: trace.offsets[1]].tolist()[:7]
    texts.write_text(json.dumps({"prompt_tokens": tiny_prompts(6)[0].tokens, "output_tokens": given}))
    write_rows(tmp_path / "forced", rows, 6, texts=Texts(texts))
    imported = read_format("vllm-dense", [tmp_path / "forced"])
    made = imported.source
    assert isinstance(made, Trace) and made.token[: made.offsets[1]].tolist() == given
    assert made.budget_tokens[0] == 7 and made.meta["decoding"] == "unknown"
    assert "the texts of 1 of 6 requests were given, not chosen by vLLM" in imported.notes
    write_rows(tmp_path / "sampled", rows, 6, temperature=0.7)
    assert read_format("vllm-dense", [tmp_path / "sampled"]).source.meta["decoding"] == "greedy-draft"  # type: ignore[union-attr]
    gap = ~((rows["request"] == 3) & (rows["position"] == 5))
    for name in vllm_recorder.STATISTICS:
        rows[name] = 0
    write_rows(tmp_path / "gap", rows[gap], 6, {"method": "suffix"})
    imported = read_format("vllm-dense", [tmp_path / "gap"])
    assert imported.skipped == {"requests with steps that drafted nothing, near the server's longest text": 1}
    assert not imported.source.informed and imported.requests == 5  # type: ignore[union-attr]
    assert imported.source.meta["drafter_kind"] == "suffix"  # type: ignore[union-attr]
    write_rows(tmp_path / "gap", rows, 6)
    with pytest.raises(InputError, match="part-1 was recorded with another method than .*part-0; import them sep"):
        read_format("vllm-dense", [tmp_path / "gap"])
    write_rows(tmp_path / "none", rows[:0], 6)
    for folder in ("none", "missing"):
        with pytest.raises(InputError, match=f"{folder}.*record again, or remove this folder"):
            read_format("vllm-dense", [tmp_path / folder])


def test_missing_and_other_drafts_are_errors(trace: Trace, interpreter: Path) -> None:
    outputs = outputs_of(trace)
    rows = rows_like(trace, [len(output) for output in outputs])
    settings = RecordSettings(DEPTH, TOKENS, Sampler("greedy"))
    other = rows.copy()
    other["token"][8] += 1
    for wrong in (rows[rows["request"] != 3], rows[1:], other):
        tell(interpreter, "dense", wrong, outputs)
        with pytest.raises(InputError, match="the engine recorded drafts after"):
            record_with_engine(tiny_pair((EOS,)), tiny_prompts(6), settings, VllmEngine())
    (interpreter / "dense" / "part-0" / "drafts.npy").write_bytes(b"")
    with pytest.raises(InputError, match="part-0 holds no recorded drafts"):
        record_with_engine(tiny_pair((EOS,)), tiny_prompts(6), settings, VllmEngine())


def test_recorded_lookups_are_vllms_and_not_informed(trace: Trace, interpreter: Path) -> None:
    outputs = outputs_of(trace)
    rule = VllmEngine.lookup_rule
    lookups = as_lookups(trace, rule, DEPTH, past_end=True)
    tell(interpreter, "dense", rows_like(lookups, [len(output) for output in outputs]), outputs)
    target = tiny_pair((EOS,)).target
    pair = dataclasses.replace(load_pair(drafter="prompt-lookup"), target=target, eos_token_ids=(EOS,))
    made = record_with_engine(pair, tiny_prompts(6), RecordSettings(DEPTH, TOKENS, Sampler("greedy")), VllmEngine())
    assert made.meta["drafter_facts"] == dataclasses.asdict(NgramRule(2, 3, "first", "stop"))
    assert made.meta["drafter_kind"] == "lookup" and made.meta["weights"] != pair.fingerprint
    rows = np.concatenate([trace.offsets[s] + np.arange(1, len(output)) for s, output in enumerate(outputs)])
    assert (made.draft_token[made.position > 0] == lookups.draft_token[rows]).all()
    assert (made.draft_token[:, 0] != NO_TOKEN).sum() > 5
    assert "confidence" in (unsupported_reason(made, AdaEDL) or "") and unsupported_reason(made, FixedK) is None


def test_what_cannot_be_recorded_is_refused(interpreter: Path, tmp_path: Path) -> None:
    inside = ("realrun", "record", tmp_path / "trace", "--engine", "vllm")
    greedy = (*inside, "--mode", "greedy")
    check = ("realrun", "engine", "check", "--engine")
    for command, says in (
        (
            (*inside, "--mode", "gumbel"),
            "vLLM drafts the likeliest tokens, unlike --mode gumbel; give --mode greedy or greedy-draft",
        ),
        ((*greedy, "--dtype", "float64"), "--engine already decides --dtype; remove one of them"),
        ((*greedy, "--tree-nodes", 32), "--engine already decides --tree-nodes; remove one of them"),
        ((*greedy, "--drafter", "eagle", "--num-prompts", 2), "train one by `realrun train eagle --for-vllm`"),
        ((*greedy, "--drafter", "self-sd", "--num-prompts", 2), "vLLM runs draft models, EAGLE and EAGLE-3 drafters"),
        ((*inside[:3], "--batch", 4), "--batch is for recordings inside vLLM; give --engine vllm, or remove it"),
        (
            (*inside[:4], "transformers"),
            "transformers does not record what it drafts at every position; choose vllm or llamacpp",
        ),
        ((*check, "vllm", "--drafts", "--k", 20), "--k of 20; give numbers from 1 to 16"),
        ((*check, "vllm", "--drafts", "--trace", tmp_path), "--drafts already decides --trace; remove one of them"),
        ((*check, "vllm", "--drafter", "eagle"), "--drafter and --allow-tokenizer-difference go with --drafts; add it"),
        ((*check, "transformers", "--drafts"), "transformers does not record what it"),
    ):
        assert_refused(call(*command), says)
    (interpreter / "version").write_text("0.33.0")
    assert_refused(call(*greedy), "drafts of vLLM 0.33.0 cannot be recorded; install a version of 0.32.*")
    assert not (tmp_path / "trace").exists()


def test_the_command_writes_a_trace(lab_pair32: Pair, prompts: list[Prompt], interpreter: Path, tmp_path: Path) -> None:
    expected = record(lab_pair32, prompts[:2], RecordSettings(3, 6, Sampler("greedy")))
    outputs = [output.tolist() for output in np.split(expected.token, expected.offsets[1:-1])]
    tell(interpreter, "dense", rows_like(expected, [len(output) for output in outputs]), outputs)
    sizes = ("--num-prompts", 2, "--max-new-tokens", 6, "--max-draft-tokens", 3, "--batch", 2)
    result = call("realrun", "record", tmp_path / "trace", "--engine", "vllm", "--mode", "greedy", *sizes)
    assert result.code == 0, result.err
    made = read_trace(tmp_path / "trace")
    assert made.meta["engine"]["name"] == "vllm" and (made.token == expected.token).all()
    assert_refused(call("realrun", "record", tmp_path / "trace", "--engine", "vllm", "--mode", "greedy"), "exists")
    validation = (
        "realrun",
        "validate",
        "--trace",
        tmp_path / "trace",
        "--out",
        tmp_path / "out",
        "--policy",
        "fixed_k",
    )
    assert_refused(call(*validation), "was recorded inside vllm and has no draft at the first position of an output")


def test_a_check_of_drafts_finds_what_differs(trace: Trace, interpreter: Path) -> None:
    """Nothing at first, then a draft of the chunked prompts and a probability of the batch."""
    pair, prompts, engine = tiny_pair((EOS,)), tiny_prompts(6), VllmEngine()
    whole = [output.tolist() for output in np.split(trace.token, trace.offsets[1:-1])]
    rows = rows_like(trace, trace.output_tokens.tolist())
    tell(interpreter, "dense", rows, whole)
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), vllm_rounds(trace, 3))))

    def checked() -> dict[str, Any]:
        return check_drafts(pair, prompts, engine, [Setting(3)], TOKENS, depth=DEPTH).as_dict()

    document = checked()
    assert json.loads(json.dumps(document)) == document
    (rounds,) = document["settings"]
    assert document["identical"] and rounds["rounds_identical"] == rounds["rounds"] > 30
    assert [row["equal"] for row in document["checks"]] == 2 * [len(trace.token) - 6]
    assert [row["total"] for row in document["checks"]] == 2 * [len(trace.token) - 6]
    chunked, together = rows.copy(), rows.copy()
    at = int(np.flatnonzero(rows["request"] == 2)[4])  # drafts after five tokens
    chunked["draft"][at, 1], chunked["prob"][at, 1] = 7, 0.125
    together["prob"][at, 3] += 0.001
    tell(interpreter, "chunked", chunked, whole)
    tell(interpreter, "together", together, whole)
    document = checked()
    chunks, batch = document["checks"]
    assert document["settings"][0]["accounted"] and not document["identical"]
    assert not chunks["passed"] and not batch["passed"]
    assert chunks["total"] - chunks["equal"] == batch["total"] - batch["equal"] == 1
    was = trace.draft_token[trace.offsets[2] + 5, 1]
    assert chunks["first_difference"].startswith(
        f"sequence 2, position 5: token 2 of the draft is 7 instead of {was}, with probability 0.1250 instead of 0."
    )
    assert (chunks["other_tokens"], batch["other_tokens"]) == (1, 0)
    last = trace.draft_token[trace.offsets[2] + 5, 3]
    assert batch["first_difference"].startswith(f"sequence 2, position 5: token 4 of the draft is {last}, with prob")
    wrong = vllm_rounds(trace, 3)
    wrong[0][1] = (3, (wrong[0][1][1] + 1) % 4)
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), wrong)))
    (rounds,) = checked()["settings"]
    assert not rounds["accounted"] and rounds["differences"][0].startswith("sequence 0: round 1 at position")


def test_the_command_prints_every_comparison_of_drafts(
    lab_pair32: Pair, prompts: list[Prompt], interpreter: Path
) -> None:
    trace = recording(lab_pair32, prompts[:2], VllmEngine(), 16, TOKENS, lambda what, done, total: None)
    whole = [output.tolist() for output in np.split(trace.token, trace.offsets[1:-1])]
    rows = rows_like(trace, trace.output_tokens.tolist())
    tell(interpreter, "dense", rows, whole)
    rows["draft"][3, 1] = 7
    tell(interpreter, "chunked", rows, whole)
    (interpreter / "answer.json").write_text(json.dumps(answer_of(outputs_of(trace), vllm_rounds(trace, 3))))
    sizes = ("--k", 3, "--num-prompts", 2, "--max-new-tokens", TOKENS)
    result = call("realrun", "engine", "check", "--engine", "vllm", "--drafts", *sizes)
    assert result.code == 1
    rounds, chunks, batch = result.out.splitlines()[-3:]
    assert rounds.startswith("every round equals the replay's")
    assert "against whole prompts: 1 of" in chunks and "1 of them in drafted tokens; first: sequence 1, posi" in chunks
    assert batch.startswith("4 sequences at once against one at a time: equal (")


def eagle3_pair(pair: Pair, states: tuple[int, ...], folder: Path, **more: Any) -> Pair:
    """An EAGLE-3 drafter of random weights and a third of the vocabulary, from its checkpoint."""
    tokens = torch.arange(0, 2048, 3)
    eagle = Eagle3(pair.target, {**default_config(pair.target), LAYERS_KEY: states, **more}, seed=4, tokens=tokens)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in eagle.parameters():
            parameter += 0.08 * torch.randn(parameter.shape, generator=generator)
    write_drafter(eagle, 2048, folder)
    return dataclasses.replace(pair, drafter=load_drafter(folder, pair.target)[1], predictor=None)


def eagle_pair(pair: Pair, folder: Path) -> Pair:
    """An EAGLE drafter of random weights, in the form that vLLM runs."""
    eagle = Eagle(pair.target, seed=4, for_vllm=True)
    save_drafter(folder, "eagle", eagle.state_dict(), {"target": describe_target(pair.target, pair.target_name)})
    return dataclasses.replace(pair, drafter=load_drafter(folder, pair.target)[1], predictor=None)


def assert_same(made: Trace, expected: Trace, columns: Sequence[str] = COLUMNS) -> None:
    """All drafts of recorded positions are equal, and so are their probabilities in float32."""
    later = made.position > 0
    assert (made.token == expected.token).all() and made.offsets.tolist() == expected.offsets.tolist()
    assert (made.draft_token[later] == expected.draft_token[later]).all()
    assert (made.match_len[later] == expected.match_len[later]).all()
    for name in columns:
        gap = np.abs(getattr(made, name)[later] - getattr(expected, name)[later]).max()
        print(name, f"largest difference {gap:.2e} of {later.sum()} positions")
        assert gap < (1e-4 if name == "entropy_nats" else 1e-5)  # an entropy sums 2,048 terms p log p


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_vllm_records_what_realrun_records_of_a_draft_model(vllm: VllmEngine, lab_pair32: Pair, batch: int) -> None:
    prompts, settings = lab_prompts(lab_pair32.tokenizer, 24), RecordSettings(8, 48, Sampler("greedy"))
    made = record_with_engine(lab_pair32, prompts, settings, vllm, batch=batch)
    assert_same(made, record(lab_pair32, prompts, settings))
    print(made.meta["record_seconds"])


@pytest.mark.slow
def test_vllm_records_what_realrun_records_of_an_eagle_drafter(
    vllm: VllmEngine, lab_pair32: Pair, tmp_path: Path
) -> None:
    pair, settings = eagle_pair(lab_pair32, tmp_path / "eagle"), RecordSettings(DEPTH, 16, Sampler("greedy"))
    prompts = lab_prompts(pair.tokenizer, 24)
    made = record_with_engine(pair, prompts, settings, vllm, batch=8)
    assert_same(made, record(pair, prompts, settings))
    assert len({*map(tuple, made.draft_token.tolist())}) > 0.3 * len(made.token)  # or they would agree for nothing


@pytest.mark.slow
@pytest.mark.parametrize("states", [(2, 4, 5), (1, 3, 7)], ids=["default states", "states of config.json"])
@pytest.mark.parametrize("batch", [1, 3])
def test_vllm_records_what_realrun_records_of_an_eagle3_checkpoint(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, states: tuple[int, ...], batch: int, tmp_path: Path
) -> None:
    pair = eagle3_pair(lab_pair32, states, tmp_path / "eagle3")
    settings = RecordSettings(DEPTH, 24, Sampler("greedy"))
    made = record_with_engine(pair, prompts[:4], settings, vllm, batch=batch)
    assert_same(made, record(pair, prompts[:4], settings))
    assert len({*map(tuple, made.draft_token.tolist())}) > 0.5 * len(made.token)  # or they would agree for nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"norm_before_fc": True},
        {"num_hidden_layers": 2},
    ],
    ids=["EAGLE-3.1", "normed states", "two layers"],
)
def test_vllm_drafts_the_same_with_the_norms_of_published_drafters(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, form: dict[str, Any], tmp_path: Path
) -> None:
    pair = eagle3_pair(lab_pair32, (1, 3, 7), tmp_path / "eagle3", **form)
    settings = RecordSettings(DEPTH, 16, Sampler("greedy"))
    made = record_with_engine(pair, prompts[:3], settings, vllm, batch=3)
    # Two layers round more than the tolerance of one allows, so their tokens alone are compared.
    assert_same(made, record(pair, prompts[:3], settings), () if "num_hidden_layers" in form else COLUMNS)
    assert len({*map(tuple, made.draft_token.tolist())}) > 0.3 * len(made.token)  # or they would agree for nothing


@pytest.mark.slow
def test_vllm_records_its_lookups(vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair) -> None:
    pair = load_pair(drafter="prompt-lookup")
    settings = RecordSettings(8, 48, Sampler("greedy"))
    made = record_with_engine(pair, prompts[:6], settings, vllm, batch=4)
    ours = record(lab_pair32, prompts[:6], settings)
    assert_same(made, as_lookups(ours, vllm.lookup_rule, 8, past_end=True), ())
    assert made.match_len.max() > 3


@pytest.mark.slow
def test_vllm_records_a_sampled_text(vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, tmp_path: Path) -> None:
    """The text is the one of a run without speculation, and the drafts are the draft model's likeliest tokens."""
    count, settings = 16, RecordSettings(3, 16, Sampler("greedy-draft", 1.0, seed=1))
    made = record_with_engine(lab_pair32, prompts[:3], settings, vllm, batch=3)
    vllm.convert(lab_pair32, tmp_path)
    job = job_of(lab_pair32, prompts[:3], count, tmp_path)
    sampling = [sampling_of(settings.sampler, number) for number in range(3)]
    plain = {**job_document(job, Setting(3, batch=3), vllm.lookup_rule), "speculation": None, "sampling": sampling}
    texts = vllm.process(plain, tmp_path)["outputs"]
    assert [token for text in texts for token in text] == made.token.tolist()
    (draft,) = lab_pair32.drafter.weights(lab_pair32.target)
    for sequence, text in enumerate(texts):
        assert text != greedy(lab_pair32.target, prompts[sequence].tokens, len(text))
        for t in range(1, len(text)):
            drafted = made.draft_token[made.offsets[sequence] + t].tolist()
            assert drafted == greedy(draft, [*prompts[sequence].tokens, *text[:t]], 3)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "prompt-lookup"])
def test_vllms_rounds_are_its_recordings(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, drafter: str
) -> None:
    pair = lab_pair32 if drafter == "model" else load_pair(drafter=drafter)
    document = check_drafts(pair, prompts[:6], vllm, [Setting(k) for k in (2, 3, 5)], 40, depth=8).as_dict()
    print(json.dumps(document, indent=1))
    assert document["identical"], document


@pytest.mark.slow
def test_a_check_of_drafts_finds_vllms_defect_with_chunked_prompts(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, tmp_path: Path
) -> None:
    """At the end of a chunk vLLM 0.32 gives an EAGLE drafter the prompt's last token, not the one that follows."""
    pair = eagle3_pair(lab_pair32, (2, 4, 5), tmp_path / "eagle3")
    document = check_drafts(pair, prompts[:6], vllm, [Setting(3)], 24, depth=DEPTH).as_dict()
    print(json.dumps(document, indent=1))
    chunks, batch = document["checks"]
    assert document["settings"][0]["accounted"] and batch["passed"] and not chunks["passed"], document
    assert 0 < chunks["other_tokens"] < chunks["total"] - chunks["equal"] and chunks["largest_prob_difference"] > 0.01
