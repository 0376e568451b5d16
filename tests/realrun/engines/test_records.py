"""What each engine really put out on the lab, as its process returned it, read and compared with the replay.

`records.json` holds the results of runs of three prompts, up to 24 tokens each, K = 3, by engine and drafter. Where a
round drafted one token more than the engine drafts, the check must say so.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from realrun.engines import mlx, onnxruntime
from realrun.engines.check import check, recording
from realrun.engines.engine import Engine, Setting
from realrun.engines.registry import ENGINES
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.io.errors import InputError
from specsim.trace.trace import Trace
from tests.support.tiny import VOCAB, tiny_pair

RECORDS = json.loads((Path(__file__).parent / "records.json").read_text())
PROMPTS = RECORDS.pop("prompts")
TOKENS, K = 24, 3


@pytest.fixture(scope="module")
def traces(lab_pair32: Pair) -> dict[bool, Trace]:
    """The prompts' greedy recordings, by whether they go on behind the limit."""
    prompts = [Prompt("all", tokens) for tokens in PROMPTS]
    found = {}
    for name in ("mlx", "vllm"):
        engine = ENGINES[name]()
        trace = recording(lab_pair32, prompts, engine, K, TOKENS, lambda what, done, total: None)
        found[engine.conventions.counts_past_end] = trace
    return found


def checked(
    key: str, result: Any, lab_pair32: Pair, traces: dict[bool, Trace], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    name, _, lookup = key.partition(" ")
    engine = ENGINES[name]()
    monkeypatch.setattr(type(engine), "version", lambda self: "recorded")
    monkeypatch.setattr(type(engine), "convert", lambda self, pair, folder: None)

    def process(self: Engine, job: Any, folder: Path, *rest: Any) -> Any:
        (folder / "log.txt").write_text(result.get("log", ""))
        return result

    monkeypatch.setattr(Engine, "process", process)
    trace = traces[engine.conventions.counts_past_end]
    return check(lab_pair32, trace, engine, [Setting(K)], TOKENS, lookup=bool(lookup)).as_dict()


@pytest.mark.parametrize("key", RECORDS)
def test_rounds_that_an_engine_put_out_are_the_replays(
    key: str, lab_pair32: Pair, traces: dict[bool, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = checked(key, RECORDS[key], lab_pair32, traces, monkeypatch)
    (row,) = document["settings"]
    assert document["identical"] and row["rounds_identical"] == row["rounds"] >= 10 and not row["near_ties"]


def one_token_more(name: str, result: dict[str, Any]) -> None:
    """Let the second prompt's first round draft one token more, in whatever the engine counts."""
    if name == "openvino":
        result["draft_passes"][1] += 1
    elif name == "onnxruntime-genai":
        rows = result["counters"][1]
        begun = next(place for place, row in enumerate(rows) if row[0])
        for row in rows[begun:]:
            row[1] += 1
    elif name == "vllm":
        metrics = result["metrics"][1]
        metrics["per_step_drafted"][0] += 1
        metrics["num_draft_tokens"] += 1
    elif name == "llamacpp":
        lines = re.findall(r"draft tokens|.+?(?=draft tokens)|.+", result["log"], re.DOTALL)
        place = [number for number, line in enumerate(lines) if line == "draft tokens"][12] - 1
        lines[place] = re.sub(r"/\s*(\d+) $", lambda match: f"/ {int(match[1]) + 1} ", lines[place])
        result["log"] = "".join(lines)
    else:
        result["rounds"][1][0][0] += 1


# OpenVINO says of prompt lookup only how many tokens a round put out.
@pytest.mark.parametrize("key", sorted(set(RECORDS) - {"openvino lookup"}))
def test_a_round_that_drafts_a_token_more_is_found(
    key: str, lab_pair32: Pair, traces: dict[bool, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = copy.deepcopy(RECORDS[key])
    one_token_more(key.partition(" ")[0], result)
    assert result != RECORDS[key]
    document = checked(key, result, lab_pair32, traces, monkeypatch)
    (row,) = document["settings"]
    assert not document["identical"]
    if row["counters_equal"] is not False:
        found = re.search(
            r"(\d) of (\d) accepted in the replay, \1 of (\d) accepted in the engine", row["differences"][0]
        )
        assert found and int(found[3]) == int(found[2]) + 1


@pytest.mark.parametrize("counters", [[(1, 3, 1), (3, 6, 2)], [(1, 3, 1), (1, 4, 1)], [(1, 3, 1), (1, 3, 2)]])
def test_counters_that_do_not_grow_by_rounds_are_refused(counters: list[tuple[int, int, int]]) -> None:
    with pytest.raises(InputError, match="tokens more at a token"):
        onnxruntime.rounds_of(counters)


def test_a_model_that_onnxruntimes_builder_would_mistake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `findings/onnxruntime_builder_head.sh` shows."""
    pair = tiny_pair()
    monkeypatch.setattr(pair.drafter.model.config, "intermediate_size", VOCAB)
    with pytest.raises(InputError, match="MLPs of the draft model, which are as wide as its vocabulary"):
        onnxruntime.OnnxruntimeEngine().convert(pair, tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_engine_that_its_interpreter_lacks_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(mlx.MlxEngine):
        package = "mlx-lm-that-nobody-has"

    monkeypatch.setenv("SPECSIM_MLX_PYTHON", "")
    with pytest.raises(
        InputError, match=r"has no mlx-lm-that.*'\.\[mlx\]', or name another interpreter in SPECSIM_MLX"
    ):
        Absent().check_installed()
