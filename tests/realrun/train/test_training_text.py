"""Text for training: folders and the lab's files, and what the target writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import realrun.lm.static.llama
from realrun.pairs.library_text import SourceFile
from realrun.pairs.prompts import Prompt, around_question
from realrun.pairs.training_tasks import training_questions
from realrun.train.common import distill
from realrun.train.common.distill import (
    Corpus,
    DistillSettings,
    TextSettings,
    free,
    generate,
    load_corpus,
    made_up,
    read_text,
    save_text,
    training_text,
    written_text,
)
from specsim.io.errors import InputError
from specsim.io.examples import TASKS
from tests.support.llama_models import Recorder, with_garbage
from tests.support.small_targets import ARCHITECTURES, alone, quiet, small_target, text_folder
from tests.support.tiny import tiny_tokenizer
from tests.support.trainings import word_text

SETTINGS = DistillSettings(prompt_tokens=6, new_tokens=10, batch=4)
CORPUS = Corpus("test", np.random.default_rng(0).integers(1, 97, 500).astype(np.int32), np.zeros(0, np.int32))


def decoded(tokens: Sequence[int]) -> str:
    return str(tiny_tokenizer().decode(tokens, clean_up_tokenization_spaces=False)).replace("<eos>", "|")


def corpus_of(folder: Path, eos: int | None = 0) -> tuple[str, str]:
    corpus = load_corpus(tiny_tokenizer(), eos, folder, folder.parent / "cache")
    assert corpus.name == folder.name and corpus.train.dtype == np.int32
    train, held = ("".join(decoded([token]) for token in part) for part in (corpus.train, corpus.held_out))
    return train, held


# Corpora


def test_every_tenth_document_of_a_folder_is_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for number, letter in enumerate("abcdefgh"):
        (folder / f"{number}.{('txt', 'md', 'py')[number % 3]}").write_text(letter * 3)
    rows = [json.dumps({"text": letter, "other": 1}) for letter in "ijklmn"]
    (folder / "sub" / "x.jsonl").write_text("\n\n".join(rows))
    (folder / "z.csv").write_text("no text")
    (folder / "empty.txt").write_text(" \n")
    train, held = corpus_of(folder)
    assert train == "aaa|bbb|ccc|ddd|eee|fff|ggg|hhh|i|k|l|m|n|" and held == "j|"
    assert corpus_of(folder, eos=None) == (train.replace("|", ""), "j")


def test_few_documents_are_cut(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text("0123456789" * 2)
    (tmp_path / "t" / "b.md").write_text("abcdefghij")
    assert corpus_of(tmp_path / "t") == ("012345678901234567|abcdefghi|", "89|j|")


def test_encoded_text_is_kept_until_the_text_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = text_folder(tmp_path / "t")
    first = corpus_of(folder)
    saved: list[Path] = []
    real = distill.save_tokens
    monkeypatch.setattr(distill, "save_tokens", lambda tokens, path: (saved.append(path), real(tokens, path)))
    assert corpus_of(folder) == first and not saved
    (folder / "00.txt").write_text("changed")
    assert corpus_of(folder)[0].startswith("changed|") and len(saved) == 1
    assert corpus_of(folder, eos=None)[0].startswith("changed") and len(saved) == 3


def test_the_labs_text_keeps_to_its_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"train": [SourceFile("a.py", "ab"), SourceFile("b.py", "cd")], "held_out": [SourceFile("c.py", "ef")]}
    monkeypatch.setattr(distill, "library_files", lambda split: files[split])
    corpus = load_corpus(tiny_tokenizer(), 0, None, tmp_path)
    assert corpus.name == "lab" and decoded(corpus.held_out.tolist()).replace(" ", "") == "ef|"
    assert len(corpus.train) == 6


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"x", "holds no text"),
        ("a.txt", b"\xff\xfe\xff", "a.txt is not UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', r"a.jsonl:2 is malformed"),
        ("a.jsonl", b"[1]", r"a.jsonl:1 is malformed"),
        ("a.jsonl", b'{"text": 3}', r"a.jsonl:1 is malformed"),
    ],
)
def test_bad_texts_are_refused(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / name).write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        corpus_of(tmp_path / "t")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="does not exist"):
        corpus_of(tmp_path / "nowhere")


# What the target writes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_the_targets_own_choice(architecture: str) -> None:
    target = small_target(architecture)
    prompts = torch.randint(1, 97, (3, 5), generator=torch.Generator().manual_seed(0))
    rows = generate(target, prompts, 12)
    assert rows.shape == (3, 17) and torch.equal(rows[:, :5], prompts)
    with torch.no_grad():
        assert torch.equal(rows[:, 5:], target(input_ids=rows[:, :-1]).logits.argmax(-1)[:, 4:])


def test_sampled_text_follows_the_targets_distribution() -> None:
    target = small_target()
    prompts = torch.tensor([[5, 9, 4]]).expand(4000, 3)
    counts = torch.bincount(generate(target, prompts, 1, temperature=0.7, seed=3)[:, 3], minlength=97) / 4000
    with torch.no_grad():
        expected = (target(input_ids=prompts[:1]).logits[0, -1] / 0.7).softmax(-1)
    assert float((counts - expected).abs().sum()) < 0.2  # sampled from the distribution itself: about 0.1
    flat = (expected**0.7) / (expected**0.7).sum()
    assert float((counts - flat).abs().sum()) > 0.2  # temperature 1 would be told apart
    assert torch.equal(generate(target, prompts[:9], 5, seed=1), generate(target, prompts[:9], 5, seed=1))
    assert not torch.equal(generate(target, prompts[:9], 5, seed=1), generate(target, prompts[:9], 5, seed=2))


def test_prompts_of_any_length_are_continued_as_alone() -> None:
    target = small_target()
    prompts = [np.arange(first, first + length, dtype=np.int32) for first, length in ((3, 7), (40, 2), (60, 5))]
    rows = generate(target, prompts, 9)
    assert rows.shape == (3, 16)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row[7 - len(prompt) :].tolist() == generate(target, [prompt], 9)[0].tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_static_cache_changes_no_token(architecture: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of less and more than a piece; sequences that end early; a batch in the buffers of a larger one.

    Slots that nothing may read hold NaN, and each pass overwrites the result of the last, as with a graph.
    """
    make = distill.StaticLlama
    monkeypatch.setattr(distill, "StaticLlama", lambda model, **how: with_garbage(make(model, graphs=True, **how)))
    if device == "cpu":
        monkeypatch.setattr(realrun.lm.static.llama, "Graphs", Recorder)
    target = small_target(architecture).to(device)
    target.config.known_tokens, ends = 60, tuple(range(3, 60, 12))
    prompts = [np.arange(1, 1 + length, dtype=np.int32) for length in (1, 16, 17, 40, 5, 33)]
    free()
    batches, lengths = [], list[set[int]]()
    for some, new_tokens, seed in ((prompts, 40, None), (prompts[:4], 30, 1), (prompts[::-1], 120, 2)):
        rows = []
        for static in (False, True, True):
            monkeypatch.setattr(distill, "static_serves", lambda _, static=static: static)
            out = generate(target, some, new_tokens, ends, 1.5, seed)[:, max(map(len, some)) :].numpy()
            last = [[*np.flatnonzero(np.isin(row, ends)), new_tokens][0] for row in out]
            rows.append([row[: end + 1].tolist() for row, end in zip(out, last, strict=True)])
        assert rows[0] == rows[1] == rows[2] and max(max(row) for row in rows[0]) < 60
        lengths.append({len(row) for row in rows[0]})
        batches.append(distill._kept[0])
    assert all(len(each) > 1 for each in lengths)
    assert batches[0] is batches[1] is not batches[2] and batches[2].batch == 6  # the third batch is longer
    assert len(batches[0].recorded.replays) == 2  # pieces of the prompts, and single tokens
    free()


def test_questions_are_trained_on_with_the_targets_answers(tmp_path: Path) -> None:
    """Every tenth is held out; a text is its question and what the target goes on with, to its end of text."""
    target = small_target()
    ends = int(generate(target, [np.array([7, 8], dtype=np.int32)], 4)[0, 4])
    questions = [Prompt("all", [7 + number % 3] * (1 + number % 4) + [8 + number]) for number in range(24)]
    distill_ = replace(SETTINGS, greedy_share=1.0)
    settings = TextSettings(generated_tokens=400, distill=distill_, questions=questions, loss_on="answers")
    text = training_text(alone(target, (ends,)), settings, tmp_path, quiet)
    assert [share for _, share in text.sources] == [1.0] and text.facts["questions"] == 24
    found: set[int] = set()
    for marks, allowed in ((text.sources[0][0], range(24)), (text.held_out, (9, 19))):
        written = marks[:, 0]
        at, numbers = 0, set[int]()
        while at < len(written):
            (number,) = (
                n for n in allowed if written[at : at + len(questions[n].tokens)].tolist() == questions[n].tokens
            )
            alone_ = generate(target, [np.array(questions[number].tokens, dtype=np.int32)], 10, (ends,))[0].tolist()
            assert written[at : at + len(alone_)].tolist() == alone_
            at += len(alone_)
            numbers.add(number)
        assert not found & numbers
        found |= numbers
    assert found == set(range(24))


def test_a_chat_model_makes_up_questions_and_answers_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is the template around a question that ended, which is sampled, and the target's own answer."""
    monkeypatch.setattr(distill, "LONGEST_QUESTION", 40)
    target, tokenizer, ends = small_target(), copy.deepcopy(tiny_tokenizer()), 9
    tokenizer.chat_template = "{% for message in messages %}Q:{{ message.content }}#{% endfor %}A:"
    pair = replace(alone(target, (ends,)), tokenizer=tokenizer)
    before, after = around_question(tokenizer)
    assert [before, after] == tokenizer(["Q:", "#A:"])["input_ids"]
    settings = replace(SETTINGS, greedy_share=1.0, batch=16)
    written = made_up(pair, 300, settings, tmp_path, quiet)[:, 0].tolist()
    questions, at = set(), 0
    while at < len(written):
        assert written[at : at + 2] == before
        end = next(i for i in range(at, len(written)) if written[i : i + 3] == after)
        question = written[at + 2 : end]
        assert 0 < len(question) < 40 and ends not in question
        answer = generate(target, [np.array(written[at : end + 3], dtype=np.int32)], 10, (ends,))[0].tolist()
        assert written[at : at + len(answer)] == answer
        questions.add(tuple(question))
        at += len(answer)
    assert len(written) >= 300 and len(questions) > 5
    monkeypatch.delattr(distill, "generate")  # what the folder holds is not written again
    assert made_up(pair, 300, settings, tmp_path, quiet)[:, 0].tolist() == written


def test_a_model_that_ends_no_question_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "LONGEST_QUESTION", 1)  # which cannot end after its first token
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "Q:{{ messages[0].content }}"
    pair = replace(alone(small_target(), (9,)), tokenizer=tokenizer)
    with pytest.raises(InputError, match="tiny/target makes up no questions; give --prompts"):
        made_up(pair, 30, SETTINGS, tmp_path, quiet)


def test_questions_that_the_target_makes_up_come_beside_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, int]] = []

    def of(name: str) -> Any:
        def write(pair: Any, *args: Any) -> Any:
            *_, tokens, settings, _, _ = args
            calls.append((name, tokens, settings.seed))
            return np.full((tokens, 2), len(calls), np.int32)

        return write

    monkeypatch.setattr(distill, "answered", of("answered"))
    monkeypatch.setattr(distill, "made_up", of("made up"))
    questions = [Prompt("all", [5, number + 1]) for number in range(20)]
    settings = TextSettings(generated_tokens=1000, distill=SETTINGS, questions=questions, asked_share=0.6)
    written = training_text(alone(small_target()), settings, tmp_path, quiet)
    assert calls == [("answered", 400, 0), ("made up", 600, 0), ("answered", 40, 0), ("made up", 60, 1)]
    assert [(len(part), share) for part, share in written.sources] == [(400, 0.4), (600, 0.6)]
    assert np.unique(written.held_out).tolist() == [3, 4] and written.facts["generated_tokens"] == 1000


def test_own_questions_are_of_six_kinds_and_none_is_measured_on() -> None:
    questions = training_questions(120)
    assert len(set(questions)) == 120 and questions == training_questions(120) != training_questions(120, seed=1)
    tasks = [json.loads(line)["turns"][0] for line in TASKS.read_text().splitlines()]
    assert not set(tasks) & set(training_questions(2000))
    assert sum("```python" in question for question in questions[3::6]) > 5  # the fourth of each six is about code
    assert all(any(mark.isdigit() for mark in question) for question in questions[4::6])  # the fifth has numbers


def test_texts_end_at_their_end_of_text(tmp_path: Path) -> None:
    target = small_target()
    prompts = torch.randint(1, 97, (4, 6), generator=torch.Generator().manual_seed(1))
    whole = generate(target, prompts, 10)
    ends = whole[0, 8].item()  # the third new token of the first text
    cut = generate(target, prompts[:1], 10, (ends,))
    assert cut.shape[1] <= 9 and cut[0, -1] == ends and torch.equal(cut[0], whole[0, : cut.shape[1]])
    endless = written_text(alone(target), CORPUS, 200, SETTINGS, tmp_path, quiet)
    ended = written_text(alone(target, (ends,)), CORPUS, 200, replace(SETTINGS, seed=0), tmp_path / "e", quiet)
    assert len(endless) == 256  # 4 batches of 4 texts of 16 tokens
    assert np.isin(endless, [ends]).sum() > 0 and not np.array_equal(ended, endless)
    position = 0
    while position < len(ended):  # a text ends at its own end-of-text token, or after all new tokens
        row = ended[position : position + 16]
        stops = np.flatnonzero(row[6:] == ends)
        position += 6 + stops[0] + 1 if len(stops) else 16
    assert position == len(ended)


def test_half_of_the_batches_are_greedy(tmp_path: Path) -> None:
    assert [SETTINGS.greedy(shard) for shard in range(4)] == [False, True, False, True]
    assert not any(replace(SETTINGS, greedy_share=0.0).greedy(shard) for shard in range(20))
    assert all(replace(SETTINGS, greedy_share=1.0).greedy(shard) for shard in range(20))
    target = small_target()
    written = written_text(alone(target), CORPUS, 256, SETTINGS, tmp_path, quiet).reshape(4, 4, 16)
    greedy = [
        torch.equal(generate(target, torch.from_numpy(shard[:, :6]).long(), 10), torch.from_numpy(shard).long())
        for shard in written
    ]
    assert greedy == [False, True, False, True]


def test_writing_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = alone(small_target())
    whole = written_text(pair, CORPUS, 250, SETTINGS, tmp_path / "a", quiet)
    calls: list[int] = []
    real = generate

    def count(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(distill, "generate", count)

    def kill(what: str, done: int, total: int) -> None:
        if done >= 128:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written_text(pair, CORPUS, 250, SETTINGS, tmp_path / "b", kill)
    assert len(calls) == 2
    assert np.array_equal(written_text(pair, CORPUS, 250, SETTINGS, tmp_path / "b", quiet), whole)
    assert len(calls) == 4  # 64 tokens each
    more = written_text(pair, CORPUS, 300, SETTINGS, tmp_path / "b", quiet)
    assert len(calls) == 5 and np.array_equal(more[:256], whole) and len(more) == 320
    written_text(pair, CORPUS, 60, replace(SETTINGS, temperature=0.5), tmp_path / "b", quiet)
    assert len(calls) == 6  # other settings, other text


def test_training_text_mixes_by_share(tmp_path: Path) -> None:
    pair = alone(small_target())
    settings = TextSettings(text_folder(tmp_path / "t"), 0.25, 100, SETTINGS)
    mixed = training_text(pair, settings, tmp_path / "c", quiet)
    assert [share for _, share in mixed.sources] == [0.75, 0.25] and len(mixed.sources[1][0]) == 128
    assert mixed.facts["generated_tokens"] == 128 and mixed.facts["corpus"] == "t"
    for share in (0.0, 1.0):
        alone_ = training_text(pair, replace(settings, generated_share=share), tmp_path / "c", quiet)
        assert [given for _, given in alone_.sources] == [1.0]
        assert np.array_equal(alone_.sources[0][0], mixed.sources[int(share)][0])


def test_bad_settings_of_self_distillation_are_refused(tmp_path: Path) -> None:
    for changes in ({"batch": 0}, {"greedy_share": 1.5}, {"temperature": 0.0}):
        with pytest.raises(InputError):
            replace(SETTINGS, **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="generated_share=1.5 of TextSettings"):
        TextSettings(generated_share=1.5)
    few = [Prompt("all", [3, 4])] * 9
    with pytest.raises(InputError, match="9 questions and 300000 tokens; a tenth is held out, so give at least 10"):
        TextSettings(questions=few)
    with pytest.raises(InputError, match="10 questions and 9 tokens"):
        TextSettings(generated_tokens=9, questions=[*few, few[0]])
    with pytest.raises(InputError, match="prompt and new text of 206 tokens; this target reads at most 160"):
        written_text(alone(small_target()), CORPUS, 9, replace(SETTINGS, new_tokens=200), tmp_path, quiet)
    with pytest.raises(InputError, match="too few for a prompt of 600"):
        written_text(alone(small_target()), CORPUS, 9, replace(SETTINGS, prompt_tokens=600), tmp_path, quiet)


def test_a_text_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    text, path = word_text(), tmp_path / "text.npz"
    save_text(text, path)
    again = read_text(path)
    assert again.facts == text.facts and again.held_out.tolist() == text.held_out.tolist()
    assert [(a.tolist(), share) for a, share in again.sources] == [(a.tolist(), share) for a, share in text.sources]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"text\.npz is no training text"):
        read_text(path)
