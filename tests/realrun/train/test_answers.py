"""Training on answers alone: questions carry no loss, by causality and by hand, and what conversations are read as."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.prompts import Prompt, read_conversations
from realrun.train.common.distill import TextSettings, answered, generate, training_text
from realrun.train.common.loop import Job, marked, run_loop, share_of, windows
from realrun.train.common.lora import AdapterSettings
from realrun.train.draft import DraftModelSettings, DraftModelTraining
from realrun.train.eagle import Eagle3Settings, Eagle3Training, EagleSettings, EagleTraining
from realrun.train.edd import DecoderTraining, EddSettings, VdmSettings
from realrun.train.eesd import EarlyExitTraining, EesdSettings
from realrun.train.medusa import HeadsTraining, JointTraining, Medusa2Settings, MedusaSettings
from realrun.train.space import MaskTraining, SpaceSettings, answer_cuts
from specsim.io.errors import InputError
from tests.realrun.train.test_space_training import EXACT, fed, job_on
from tests.realrun.train.test_training_text import SETTINGS
from tests.support.small_targets import alone, quiet, small_target
from tests.support.tiny import VOCAB, tiny_tokenizer
from tests.support.trainings import CASES, LOOP, words

LENGTH, ASKED = 21, 11  # tokens of a window, and of its question
ADAPTER = AdapterSettings(rank=4, alpha=8, dropout=0.0)


def joint(loss: Any) -> Callable[[Any], Job]:
    settings = Medusa2Settings(loss, lambda_0=0.3, adapter=ADAPTER)
    return lambda target: JointTraining(target, MedusaHeads(target, 3), settings, 10)


HEADS = {f"head_{k}": k + 1 for k in (1, 2, 3)}
# Every kind of loss, with its parts and how far ahead of a part's first row the first predicted token is.
JOBS: dict[str, tuple[Callable[[Any], Job], dict[str, int]]] = {
    "eesd": (lambda target: EarlyExitTraining(target, EesdSettings(1)), {"loss": 1}),
    "draft": (lambda target: DraftModelTraining(target, DraftModelSettings(1)), {"loss": 1}),
    "vdm": (lambda target: DecoderTraining(target, VdmSettings()), {"loss": 1}),
    "vdm text": (lambda target: DecoderTraining(target, VdmSettings(loss="text")), {"loss": 1}),
    "edd": (lambda target: DecoderTraining(target, EddSettings(shortest_block=5, longest_block=5)), {"loss": 1}),
    "eagle": (
        lambda target: EagleTraining(target, EagleSettings(noise=0.0)),
        {"loss": 1, "regression": 1, "classification": 1},
    ),
    "eagle3": (lambda target: Eagle3Training(target, Eagle3Settings(3)), {"first": 2}),
    "medusa": (lambda target: HeadsTraining(target, MedusaSettings(3)), HEADS),
    "medusa-2 text": (joint("text"), {"backbone": 1, **HEADS}),
    "medusa-2 distill": (joint("distill"), {"backbone": 1, **HEADS}),
    "space": (lambda target: MaskTraining(target, SpaceSettings(3, p_ar=1.0, adapter=ADAPTER)), {"loss": 1, "text": 1}),
}


@pytest.mark.parametrize("name", JOBS)
def test_questions_carry_no_loss(name: str) -> None:
    """A causal model's loss on the first tokens alone is that of a window that ends with them.

    The mean over all tokens is then made of that and of the loss on the others, by their numbers.
    """
    make, first = JOBS[name]
    job = make(small_target())
    with torch.no_grad():
        for parameter in (p for group in job.parameter_groups() for p in group.params):
            parameter += 0.05 * torch.randn(parameter.shape, dtype=parameter.dtype)
    batch = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    before = (torch.arange(LENGTH) < ASKED).expand(2, -1)

    def values(batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        loss, parts = job.loss(batch, 0, answers)
        return {"loss": float(loss.detach()), **parts}

    everything, begun, ended = values(batch), values(batch, before), values(batch, ~before)
    assert begun == pytest.approx(values(batch[:, :ASKED]), rel=1e-6)
    for part, ahead in first.items():
        tokens = range(ahead, LENGTH)
        if name == "edd":  # the first of a block is not drafted
            tokens = [token for token in tokens if token % 5]
        asked = sum(token < ASKED for token in tokens) / len(tokens)
        assert everything[part] == pytest.approx(asked * begun[part] + (1 - asked) * ended[part], rel=1e-6)
        assert begun[part] != pytest.approx(ended[part], rel=1e-3)
    figures = job.held_out(batch, before)
    if name not in ("space", "eagle3"):  # whose figures have a place at the end of a window
        assert figures == pytest.approx(job.held_out(batch[:, :ASKED]), rel=1e-6)


def test_pairs_of_space_by_hand() -> None:
    """X is the question, Y the answer: y_m .. y_{m+k} are of Y, and the sums are over Y alone."""
    job = job_on(small_target(), replace(EXACT, p_ar=0.0, examples=2, full=True))
    batch = torch.randint(1, VOCAB, (2, 14), generator=torch.Generator().manual_seed(0))
    answers = torch.tensor([[0] * 4 + [1] * 7 + [0] * 3, [1] * 5 + [0] * 4 + [1] * 5], dtype=torch.bool)
    possible = [{4, 5, 6, 7}, {1, 9, 10}]  # with k = 3; the first token of a window has nothing before it
    assert [set(row.nonzero().flatten().tolist()) for row in answer_cuts(answers, 3)] == possible
    torch.manual_seed(0)
    drawn = job._draw(2, 13, answers)
    many = torch.cat([job._draw(2, 13, answers) for _ in range(40)], dim=1)
    assert [set(row.tolist()) for row in many] == possible
    assert not job._draw(2, 13, torch.zeros_like(answers)).any()
    job._draw = lambda *_: drawn  # type: ignore[method-assign]
    total, _ = job.loss(batch, 0, answers)
    nats = []
    for window, answer, cuts in zip(batch.tolist(), answers.tolist(), drawn.tolist(), strict=True):
        for m in cuts:
            real, masked = fed(job, window[:-1], 0).detach(), fed(job, window[:m], 3).detach()
            nats += [-float(real[t - 1, window[t]]) for t in range(1, m + 1) if answer[t]]
            nats += [-float(masked[m - 1 + j, window[m + j]]) for j in (1, 2, 3)]
    assert float(total.detach()) == pytest.approx(sum(nats) / 2 / int(answers[:, 1:].sum()), rel=1e-9)


def test_pieces_of_a_step_count_by_their_answers(tmp_path: Path) -> None:
    """A step in pieces has the gradient of the whole, however many answers a piece has."""
    tokens = words(0)
    text = np.stack([tokens, (np.arange(len(tokens)) // 7 % 3 == 0).astype(np.int32)], axis=1)
    rows = []
    for micro in (0, 1):
        job = EarlyExitTraining(small_target(), EesdSettings(1, lr=1e-2))
        rows.append(run_loop(job, replace(LOOP, micro_windows=micro), text, text, tmp_path / str(micro), {}, quiet))
    for whole, pieces in zip(*rows, strict=True):
        figures = [{**(row.held_out or {}), **row.means} for row in (whole, pieces)]
        assert figures[1] == pytest.approx(figures[0], rel=1e-9)
    batch = windows([(text, 0.5), (tokens, 0.5)], 6, 20, (0, 0))
    assert batch.shape == (6, 21, 2) and share_of(batch[:2], batch) + share_of(batch[2:], batch) == pytest.approx(1)


@pytest.mark.parametrize("name", ["eagle shared", "eesd shared", "eagle3 shared", "space", "medusa two stages"])
def test_every_training_takes_marked_text(name: str, tmp_path: Path) -> None:
    from realrun.train.common.distill import TrainingText

    case = CASES.get(name) or replace(CASES["eagle"], settings=EagleSettings(lr=1e-2, draft_vocabulary=40))
    asked = np.full(8, 96, np.int32)  # a token that no answer has
    parts = [part for piece in words(0, 600).reshape(-1, 12) for part in (marked(asked, False), marked(piece))]
    text = np.concatenate(parts)
    document = case.run(tmp_path, text=TrainingText([(text, 1.0)], text), loop=replace(LOOP, steps=2))
    assert document["history"][-1]["loss"] > 0


# Conversations


def chat_tokenizer() -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}#{% else %}A:{{ m.content }}@\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    return tokenizer


ROWS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"messages": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]},
        ["Q:a#A:", "\nQ:c#A:"],
        ["b@"],
    ),
    (
        {"conversations": [{"from": f, "value": v} for f, v in (("gpt", "z"), ("human", "a"), ("gpt", "b"))]},
        ["Q:a#A:"],
        ["b@"],
    ),
    ({"instruction": "a", "input": "b", "output": "c"}, ["Q:a\n\nb#A:"], ["c@"]),
    ({"question": "a", "answer": "b"}, ["Q:a#A:"], ["b@"]),
    ({"turns": ["a", "b", "c"]}, ["Q:a#A:", "\nQ:b#A:", "\nQ:c#A:"], []),
    ({"prompt": "a"}, ["Q:a#A:"], []),
    ({"text": "a"}, ["a"], []),
]


@pytest.mark.parametrize(("row", "asked", "answers"), ROWS)
def test_rows_of_conversations(row: dict[str, Any], asked: list[str], answers: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({**row, "domain": "x"}))
    tokenizer = chat_tokenizer()
    encoded = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    (prompt,) = read_conversations(tmp_path / "c.jsonl", tokenizer, encoded("@"))
    assert [prompt.tokens, *prompt.followed] == [encoded(text) for text in asked]
    assert list(prompt.answers) == [encoded(text) for text in answers] and prompt.domain == "x"


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    (tmp_path / "c.jsonl").write_text(json.dumps(ROWS[0][0]))
    with pytest.raises(InputError, match="c.jsonl:1: the tokenizer's chat template changes earlier turns"):
        read_conversations(tmp_path / "c.jsonl", tokenizer, (9,))


def test_the_target_answers_each_turn_after_its_own_answers(tmp_path: Path) -> None:
    target = small_target()
    ends = int(generate(target, [np.array([7, 8], dtype=np.int32)], 4)[0, 4])
    turns = [[[7 + n % 3, 8 + n], [40 + n, 3], [50 + n]][: 1 + n % 3] for n in range(6)]
    questions = [Prompt("all", first, followed=more) for first, *more in turns]
    settings = replace(SETTINGS, greedy_share=1.0, batch=6)
    text = answered(alone(target, (ends,)), questions, 1, settings, tmp_path, quiet).tolist()
    expected = []
    for first, *more in sorted(turns, key=lambda asked: len(asked[0])):
        tokens: list[int] = []
        for asked in (first, *more):
            if tokens and tokens[-1] != ends:
                tokens.append(ends)
                expected.append([ends, 0])
            tokens += asked
            expected += [[token, 0] for token in asked]
            answer = generate(target, [np.array(tokens, np.int32)], 10, (ends,))[0].tolist()[len(tokens) :]
            tokens += answer
            expected += [[token, 1] for token in answer]
    assert text == expected


@pytest.mark.parametrize("own", [0.0, 0.25, 1.0])
def test_own_and_given_answers_are_mixed_by_share(own: float, tmp_path: Path) -> None:
    questions = [Prompt("all", [5, n + 1], followed=[[6]], answers=[[90, 91], [92]][: n % 2 + 1]) for n in range(20)]
    settings = TextSettings(
        generated_tokens=400, distill=SETTINGS, questions=questions, own_answers=own, loss_on="answers"
    )
    text = training_text(alone(small_target()), settings, tmp_path, quiet)
    assert [share for _, share in text.sources] == [share for share in (own, 1 - own) if share]
    if own < 1:
        given = [[5, 1, 90, 91], [5, 2, 90, 91, 6, 92]]
        assert text.sources[-1][0][:10].tolist() == [
            *([token, int(token > 80)] for row in given for token in row),
        ]
    assert text.facts["own_answers"] == own and text.held_out.shape[1] == 2
    everywhere = training_text(alone(small_target()), replace(settings, loss_on="all"), tmp_path, quiet)
    for (marked_, _), (plain, _) in zip(text.sources, everywhere.sources, strict=True):
        assert np.array_equal(marked_[:, 0], plain)


def test_answers_that_a_file_lacks_are_refused() -> None:
    questions = [Prompt("all", [5, n + 1]) for n in range(20)]
    with pytest.raises(InputError, match="0 of 20 questions have an answer in the file"):
        TextSettings(questions=questions, own_answers=0.5)
