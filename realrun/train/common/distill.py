"""Text to train on: the lab's library files, a user's folder, and text that the target writes.

Documents are separated by the end-of-text token if the model has such a token. Held-out text comes from other files
than training text; the lab's split is that of its prompts.

In self-distillation (EESD 3.2, MEDUSA 3.3.2) the target goes on with pieces of training text cut at random, answers
questions, or makes up questions and answers them (Xu et al. 2024, "Magpie", arXiv:2406.08464). Batches are greedy and
sampled in turn because drafters here must serve both ways of decoding. EESD asks for such a hybrid without describing
it; the work that it cites (LLM-QAT) decodes the first few tokens of a text greedily and samples the rest.

With `loss_on` "answers", the loss is taken on answers alone: text of questions and answers is then an array [n, 2],
tokens beside 1 where they are an answer's and 0 where a question's or the chat template's. In a conversation of several
turns the target answers each question after its own answers. A data set's answers can take a share of the text.

The target continues many prompts at once. Models that the fused pass supports decode over a static cache on a GPU: a
step is a CUDA graph, and nothing waits for the device between steps. A sequence that has ended keeps its row, but
attends to nothing any more. Other models, and all models on the CPU, decode through the library's cache, which grows by
a copy at every step.
"""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict
from zipfile import BadZipFile

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from realrun.lm.choice import static_serves
from realrun.lm.static.llama import StaticLlama
from realrun.pairs.drafter_files import weights_digest
from realrun.pairs.library_text import library_files
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, around_question, prompt_digest
from realrun.train.common.loop import Tokens, marked, text_digest
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.files import digest, replacing
from specsim.io.json import parse_json
from specsim.io.progress import Progress
from specsim.io.settings import Settings, setting

CHECK_EVERY = 16  # steps on a GPU: to look whether all sequences have ended is to wait for the device
PIECE = 16  # tokens of each prompt that a pass over the static cache takes
CAPACITY_STEP = 128  # slots by which the static cache grows, so that few sizes are recorded

# (next tokens [B] or None for the prompts, whether a sequence has ended [B]) -> logits [B, V]
Follow = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]

_kept: list[StaticLlama] = []  # of the last batch; the next batch that fits into it needs no recording


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Sequence[Tokens],
    new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int | None = None,
) -> torch.Tensor:
    """Continue B prompts, the longest of P tokens: int64 [B, P + n] on the CPU, a shorter prompt behind padding.

    n = new_tokens, less if all sequences end earlier.

    seed : of the sampling; None is greedy.
    Tokens of a row after its end of text are meaningless. A cache on a GPU is kept for the next batch: call `free`
    after the last.
    """
    device = target.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    known = getattr(target.config, "known_tokens", None)  # later ids are none of the tokenizer's
    eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    lengths = np.array([*map(len, prompts)])
    longest = int(lengths.max())
    padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts]).astype(np.int64)
    follow = _static(target, prompts, new_tokens) if static_serves(target) else _dynamic(target, padded, lengths)
    every = CHECK_EVERY if device.type == "cuda" else 1
    feed, new = None, []
    for count in range(1, new_tokens + 1):
        logits = follow(feed, ended)
        if known is not None:
            logits[:, known:] = -torch.inf
        if generator is None:
            feed = logits.argmax(-1)
        else:  # the tokens that torch.multinomial draws, which waits for the device to check the shares
            shares = torch.softmax(logits.float() / temperature, -1)
            feed = shares.div_(torch.empty_like(shares).exponential_(generator=generator)).argmax(-1)
        new.append(feed)
        ended |= torch.isin(feed, eos)
        if count % every == 0 and bool(ended.all()):
            break
    return torch.cat([torch.from_numpy(padded), torch.stack(new, dim=1).cpu()], dim=1)


def free() -> None:
    """Free the GPU memory that `generate` keeps for its next batch."""
    if _kept:
        _kept.clear()
        gc.collect()  # layers and their model refer to each other
        torch.cuda.empty_cache()  # graphs' memory, too; without a GPU it does nothing


def _static(target: PreTrainedModel, prompts: Sequence[Tokens], new_tokens: int) -> Follow:
    """Decode over a static cache. If it has more rows than prompts, the last rows stay empty."""
    batch, longest = len(prompts), max(map(len, prompts))
    lm = _with_room(target, batch, longest + new_tokens)
    padded = np.zeros((lm.batch, min(_rounded(longest, PIECE), lm.capacity)), np.int64)
    lengths = np.zeros(lm.batch, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    cached = torch.from_numpy(lengths).to(lm.device)  # [lm.batch], tokens before the next
    tokens = torch.zeros(lm.batch, 1, dtype=torch.long, device=lm.device)
    rows = slice(None, batch)

    def follow(feed: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
        if feed is None:
            return lm.logits_of(_last_states(lm, torch.from_numpy(padded).to(lm.device), cached)[rows])
        tokens[rows, 0] = feed
        cached[rows].masked_fill_(ended, 0)  # what has ended need not read its cache
        logits = lm.step(tokens, cached)[rows, 0]
        cached[rows].add_(1)
        return logits

    return follow


def _last_states(lm: StaticLlama, padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Cache prompts int64 [B, P], padded behind their lengths [B]; the states [B, d] of their last tokens.

    Padding enters the cache behind a sequence's length, where its next tokens overwrite it.
    """
    every = torch.arange(len(padded), device=lm.device)
    last, start = lm.embedding.new_zeros(len(padded), lm.embedding.shape[1]), 0
    for piece in padded.split(PIECE, dim=1):
        n = piece.shape[1]
        states = lm.step_states(piece, torch.full_like(lengths, start))
        place = lengths - 1 - start  # of the last token in this piece
        here = (place >= 0) & (place < n)
        last = torch.where(here[:, None], states[every, place.clamp(0, n - 1)], last)
        start += n
    return last


def _with_room(target: PreTrainedModel, batch: int, length: int) -> StaticLlama:
    """Find or make a static cache for so many sequences of this length."""
    kept = next((lm for lm in _kept if lm.model is target), None)
    if kept is None or kept.batch < batch or kept.capacity < length:
        if kept is not None:
            batch, length = max(batch, kept.batch), max(length, kept.capacity)
            del kept
        free()
        most = int(target.config.max_position_embeddings)
        capacity = max(length, min(_rounded(length, CAPACITY_STEP), most))
        # Compiled operations would take longer to compile than they save.
        kept = StaticLlama(target, capacity=capacity, batch=batch, compiled=False)
        _kept.append(kept)
    return kept


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _dynamic(target: PreTrainedModel, padded: Ints, lengths: Ints) -> Follow:
    """Decode through the library's cache. padded : int64 [B, P], prompts behind their padding; lengths : [B]"""
    cache = DynamicCache(config=target.config)
    padding = padded.shape[1] - lengths
    first = torch.from_numpy(padding).to(target.device)[:, None] if padding.any() else None  # slots of first tokens

    def follow(feed: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
        fed = torch.from_numpy(padded).to(target.device) if feed is None else feed[:, None]
        places = {}
        if first is not None:
            at = torch.arange(cache.get_seq_length() + fed.shape[1], device=target.device)
            positions = (at[-fed.shape[1] :] - first).clamp(min=0)
            places = {"attention_mask": (at >= first).long(), "position_ids": positions}
        logits: torch.Tensor = target(
            input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1, **places
        ).logits
        return logits[:, -1]

    return follow


SUFFIXES = (".txt", ".md", ".py", ".jsonl")
HELD_OUT_EVERY = 10  # every tenth document is held out
BATCH_DOCUMENTS = 64
Turns = Sequence[Tokens]  # of a conversation: the tokens before each of the target's answers
LONGEST_QUESTION = 160  # tokens of a question that the target makes up; longer ones are left out


class Row(TypedDict):
    """A line of a .jsonl file."""

    text: str


@dataclass(frozen=True)
class Corpus:
    """Token arrays [n], int32. name : "lab", or the last part of the folder's path."""

    name: str
    train: Tokens
    held_out: Tokens


def load_corpus(
    tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None, folder: Path | None, cache: Path
) -> Corpus:
    """Encode the lab's text or that of a folder; text that was encoded before is read from the cache.

    A folder, with its subfolders, gives *.txt, *.md and *.py files, a document each, and *.jsonl files, a document
    {"text": ...} per line. Every tenth document is held out; of fewer than ten documents, the last tenth of each.
    Raises InputError if the folder does not exist or holds no text.
    """
    if folder is None:
        parts = [[source.text for source in library_files(split)] for split in ("train", "held_out")]
    else:
        parts = _split(list(_documents(folder)))
        if not parts[0]:
            raise InputError(f"{folder} holds no text; put {', '.join(f'*{s}' for s in SUFFIXES)} files there")
    tokens = [_encoded(tokenizer, eos_token_id, documents, cache) for documents in parts]
    return Corpus("lab" if folder is None else folder.resolve().name, *tokens)


def _split(documents: Sequence[str]) -> list[list[str]]:
    last = HELD_OUT_EVERY - 1
    if len(documents) <= last:
        cuts = [len(document) - len(document) // HELD_OUT_EVERY for document in documents]
        pieces = [(document[:cut], document[cut:]) for document, cut in zip(documents, cuts, strict=True)]
        return [[before for before, _ in pieces], [after for _, after in pieces]]
    train = [document for number, document in enumerate(documents) if number % HELD_OUT_EVERY != last]
    return [train, list(documents[last::HELD_OUT_EVERY])]


def _documents(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        raise InputError(f"text folder {folder} does not exist; give a folder of {', '.join(SUFFIXES)} files")
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text ({error}); save it as UTF-8 or remove it") from None
        yield from (d for d in (_rows(path, text) if path.suffix == ".jsonl" else [text]) if d.strip())


def _rows(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):  # JSON text may hold other line separators
        if not line.strip():
            continue
        yield parse_json(
            line, f"{path}:{number}", Row, invalid='correct the line: {"text": ...}; give conversations by --prompts'
        )["text"]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None, documents: Sequence[str], cache: Path
) -> Tokens:
    texts = (bytes.fromhex(digest(document.encode(errors="surrogatepass"), length=64)) for document in documents)
    vocabulary = digest(json.dumps(sorted(tokenizer.get_vocab().items())))
    path = cache / f"corpus-{digest(f'{vocabulary} {eos_token_id}', *texts)}.npy"
    if not path.exists():
        save_tokens(encode(tokenizer, eos_token_id, documents), path)
    return read_tokens(path)


def encode(tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None, documents: Sequence[str]) -> Tokens:
    """Encode all documents as an array, each followed by the end-of-text token if the model has it."""
    arrays = [np.zeros(0, np.int32)]
    for begin in range(0, len(documents), BATCH_DOCUMENTS):
        rows = tokenizer(list(documents[begin : begin + BATCH_DOCUMENTS]), verbose=False)["input_ids"]
        parts: list[int] = []
        for ids in rows:
            parts += ids
            if eos_token_id is not None and (not ids or ids[-1] != eos_token_id):
                parts.append(eos_token_id)
        arrays.append(np.array(parts, dtype=np.int32))
    return np.concatenate(arrays)


def read_tokens(path: Path) -> Tokens:
    """Read what `save_tokens` wrote."""
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.int32)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is damaged ({' '.join(str(error).split()):.200}); delete it") from None


def save_tokens(tokens: Tokens, path: Path) -> None:
    """Write a token array, atomically."""
    content = io.BytesIO()  # written to a file itself, numpy would not say why a write fails
    np.save(content, tokens)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getvalue())


@dataclass(frozen=True)
class DistillSettings(Settings):
    """Settings of self-distillation."""

    prompt_tokens: int = setting(64, low=1, smoke=16)
    new_tokens: int = setting(192, low=1, smoke=48)  # after each prompt, at most: an end of text ends a sequence
    batch: int = setting(64, low=1, smoke=32)  # sequences at once, either all greedy or all sampled
    greedy_share: float = setting(0.5, low=0, high=1)  # of the batches
    temperature: float = setting(1.0, above=0, doc="Temperature of the sampled half of the generated text.")
    seed: int = setting(0)

    def greedy(self, shard: int) -> bool:
        """Decide whether a batch is greedy by its number alone, so that more text extends less text."""
        return int((shard + 1) * self.greedy_share) > int(shard * self.greedy_share)


@dataclass(frozen=True)
class TextSettings(Settings):
    """Settings of the training text."""

    folder: Path | None = setting(None)  # of text; None for the lab's library files
    generated_share: float = setting(0.5, low=0, high=1)  # of the training windows, from text that the target wrote
    generated_tokens: int = setting(300_000)  # of such text, prompts included; windows repeat
    distill: DistillSettings = setting(DistillSettings)
    questions: Sequence[Prompt] = setting(())  # whose answers by the target are the text, in place of a folder
    asked_share: float = setting(0.0, low=0, high=1)  # beside questions: of the text, where the target asks as well
    own_answers: float = setting(1.0, low=0, high=1)  # of the answers to questions, the target's; the rest, as given
    loss_on: Literal["answers", "all"] = setting("all")  # tokens of questions and answers that have a loss

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generated_share and self.generated_tokens < 1:
            raise InputError(f"{self.generated_tokens} generated tokens; give some, or a share of 0")
        if self.questions and min(len(self.questions), self.generated_tokens) < HELD_OUT_EVERY:
            raise InputError(
                f"{len(self.questions)} questions and {self.generated_tokens} tokens; a tenth is held out, so give at "
                f"least {HELD_OUT_EVERY} of each"
            )
        if self.own_answers < 1 and not all(any(q.answers for q in part) for part in self.parted_questions()):
            raise InputError(
                f"{sum(bool(q.answers) for q in self.questions)} of {len(self.questions)} questions have an answer in "
                "the file; give conversations with answers, or --own-answers 1"
            )

    def parted_questions(self) -> tuple[list[Prompt], list[Prompt]]:
        """Divide the questions into those to train on and every tenth, which is held out."""
        held = list(self.questions[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        return [question for number, question in enumerate(self.questions, 1) if number % HELD_OUT_EVERY], held


@dataclass(frozen=True)
class TrainingText:
    """Tokens to train on.

    sources : list of (int32 array [n], float), token arrays with their share of the training windows
    held_out : int32 array [m], tokens that training never sees
    facts : description of the text for the drafter's file
    """

    sources: list[tuple[Tokens, float]]
    held_out: Tokens
    facts: dict[str, Any] = field(default_factory=dict)


def training_text(pair: Pair, settings: TextSettings, cache: Path, progress: Progress) -> TrainingText:
    """Encode the corpus and let the target write text; reuse what the cache holds of either.

    Of questions, every tenth is held out with its answer.
    """
    if settings.questions:
        train, held = settings.parted_questions()
        asked, own = settings.asked_share, settings.own_answers
        texts: list[list[tuple[Tokens, float]]] = []
        for number, (questions, part_of) in enumerate(((train, 1), (held, HELD_OUT_EVERY))):
            tokens = settings.generated_tokens // part_of
            parts: list[tuple[Tokens, float]] = []
            if asked < 1 and own:
                share = (1 - asked) * own
                count = round(tokens * share)
                parts.append((answered(pair, questions, count, settings.distill, cache, progress), share))
            if asked < 1 and own < 1:
                parts.append((given_answers(questions), (1 - asked) * (1 - own)))
            if asked:
                apart = replace(settings.distill, seed=settings.distill.seed + number)  # held-out text is another
                parts.append((made_up(pair, round(tokens * asked), apart, cache, progress), asked))
            texts.append([(part[:, 0] if settings.loss_on == "all" else part, share) for part, share in parts])
        given = len(given_answers(train)) if asked < 1 and own < 1 else 0
        about = {
            "questions": len(settings.questions),
            "asked_share": asked,
            "own_answers": own,
            "loss_on": settings.loss_on,
            "share_of_answers": round(float(np.concatenate([marked(part) for part, _ in texts[0]])[:, 1].mean()), 3),
            "generated_tokens": sum(len(part) for part, _ in texts[0]) - given,
            "given_tokens": given,
            "distill": asdict(settings.distill),
        }
        return TrainingText(texts[0], np.concatenate([part for part, _ in texts[1]]), about)
    eos = pair.eos_token_ids[0] if pair.eos_token_ids else None
    corpus = load_corpus(pair.tokenizer, eos, settings.folder, cache)
    share = settings.generated_share
    sources = [(corpus.train, 1 - share)] if share < 1 else []
    facts = {"corpus": corpus.name, "corpus_tokens": len(corpus.train), "generated_share": share}
    if share:
        generated = written_text(pair, corpus, settings.generated_tokens, settings.distill, cache, progress)
        sources.append((generated, share))
        facts |= {"generated_tokens": len(generated), "distill": asdict(settings.distill)}
    return TrainingText(sources, corpus.held_out, facts)


def check_length(target: Any, tokens: int, name: str) -> None:
    """Raise InputError if so many tokens exceed the target's positions. name : of the text, for the error"""
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise InputError(f"{name} of {tokens} tokens; this target reads at most {limit}, so make them shorter")


def written_text(
    pair: Pair, corpus: Corpus, tokens: int, settings: DistillSettings, cache: Path, progress: Progress
) -> Tokens:
    """Let the target write text, prompts included, until it has `tokens` tokens; each batch is a file in the cache."""
    if len(corpus.train) <= settings.prompt_tokens:
        raise InputError(
            f"the text has {len(corpus.train)} tokens, too few for a prompt of {settings.prompt_tokens}; give more text"
        )
    check_length(pair.target, settings.prompt_tokens + settings.new_tokens, "prompt and new text")
    decisive = [weights_digest(pair.target), pair.number_type, text_digest(corpus.train), asdict(settings)]

    def prompts(shard: int, rng: np.random.Generator) -> list[Turns]:
        starts = rng.integers(0, len(corpus.train) - settings.prompt_tokens, size=settings.batch)
        return [[corpus.train[start : start + settings.prompt_tokens]] for start in starts]

    return _written(pair, prompts, tokens, settings, cache, "generated", decisive, progress)[:, 0]


def answered(
    pair: Pair, questions: Sequence[Prompt], tokens: int, settings: DistillSettings, cache: Path, progress: Progress
) -> Tokens:
    """Let the target answer questions, again and again, until questions and answers have `tokens` tokens.

    A batch has questions of about the same length, since shorter ones are padded. Of a conversation, the next question
    follows the target's own answer. Returns tokens [n, 2] that are marked as answers or not.
    """
    check_length(pair.target, max(len(q.tokens) for q in questions) + settings.new_tokens, "question and answer")
    decisive: list[Any] = [weights_digest(pair.target), pair.number_type, prompt_digest(questions), asdict(settings)]
    if any(question.followed for question in questions):
        decisive.append([list(question.followed) for question in questions])
    turns = ([np.array(turn, dtype=np.int32) for turn in (q.tokens, *q.followed)] for q in questions)
    by_length = sorted(turns, key=lambda asked: len(asked[0]))
    batches = [by_length[begin : begin + settings.batch] for begin in range(0, len(by_length), settings.batch)]

    def prompts(shard: int, rng: np.random.Generator) -> list[Turns]:
        order = np.random.default_rng((settings.seed, shard // len(batches))).permutation(len(batches))
        return batches[order[shard % len(batches)]]

    return _written(pair, prompts, tokens, settings, cache, "answers", decisive, progress)


def given_answers(questions: Sequence[Prompt]) -> Tokens:
    """Write the conversations that have answers as they are, int32 [n, 2], marked as answers or not."""
    parts = []
    for question in questions:
        for asked, answer in zip((question.tokens, *question.followed), question.answers, strict=False):
            parts += [marked(np.array(asked, np.int32), False), marked(np.array(answer, np.int32))]
    return np.concatenate(parts)


def made_up(pair: Pair, tokens: int, settings: DistillSettings, cache: Path, progress: Progress) -> Tokens:
    """Let the target make up questions and answer them, until both have `tokens` tokens.

    Questions are sampled at temperature 1 behind the chat template's beginning of a user's turn. Returns what
    `answered` returns.
    """
    before, after = around_question(pair.tokenizer)
    check_length(pair.target, len(before) + LONGEST_QUESTION + len(after) + settings.new_tokens, "question and answer")
    decisive = [weights_digest(pair.target), pair.number_type, before, after, LONGEST_QUESTION, asdict(settings)]

    def prompts(shard: int, rng: np.random.Generator) -> list[Turns]:
        begun = [np.array(before, dtype=np.int32)] * settings.batch
        seed = int(rng.integers(2**62))
        rows = generate(pair.target, begun, LONGEST_QUESTION, pair.eos_token_ids, 1.0, seed).numpy()
        ends = np.isin(rows[:, len(before) :], pair.eos_token_ids)
        whole = ends[:, 1:].any(axis=1) & ~ends[:, 0]
        if not whole.any():
            raise InputError(f"{pair.target_name} makes up no questions; give --prompts, or text to train on by --text")
        rows = rows[whole].astype(np.int32)
        lengths = len(before) + ends[whole].argmax(axis=1)
        return [[np.append(row[:length], np.array(after, np.int32))] for row, length in zip(rows, lengths, strict=True)]

    return _written(pair, prompts, tokens, settings, cache, "made-up", decisive, progress)


def _written(
    pair: Pair,
    prompts: Callable[[int, np.random.Generator], Sequence[Turns]],
    tokens: int,
    settings: DistillSettings,
    cache: Path,
    kind: str,
    decisive: list[Any],
    progress: Progress,
) -> Tokens:
    """Let the target go on with the prompts of shards 0, 1, ... until it has `tokens` tokens; a shard is a file.

    kind : of text; with what decides it, the name of its folder in the cache
    """
    folder = cache / f"marked-{kind}-{digest(repr(decisive))}"
    parts: list[Tokens] = []
    written = 0
    try:
        while written < tokens:
            path = folder / f"{len(parts):06d}.npy"
            if not path.exists():
                rng = np.random.default_rng((settings.seed, len(parts)))
                save_tokens(_shard(pair, prompts(len(parts), rng), settings, len(parts), rng), path)
            parts.append(read_tokens(path))
            written += len(parts[-1])
            progress(f"self-distillation, {kind}", min(written, tokens), tokens)
    finally:
        free()
    return np.concatenate(parts)


def _shard(
    pair: Pair, prompts: Sequence[Turns], settings: DistillSettings, shard: int, rng: np.random.Generator
) -> Tokens:
    """Write a batch of conversations, concatenated, int32 [n, 2]; an answer ends with its end of text.

    A turn that does not fit into the target's positions, and those after it, are left out.
    """
    seed = None if settings.greedy(shard) else int(rng.integers(2**62))
    limit = getattr(pair.target.config, "max_position_embeddings", None) or np.inf
    texts: list[Tokens] = [np.zeros((0, 2), np.int32)] * len(prompts)
    for turn in range(max(map(len, prompts))):
        asked = {
            number: np.concatenate([texts[number], _ended(texts[number], pair), marked(turns[turn], False)])
            for number, turns in enumerate(prompts)
            if turn < len(turns)
        }
        asked = {number: text for number, text in asked.items() if not turn or len(text) + settings.new_tokens <= limit}
        if not asked:
            break
        longest = max(map(len, asked.values()))
        read = [text[:, 0] for text in asked.values()]
        again = None if seed is None else seed + turn
        rows = generate(pair.target, read, settings.new_tokens, pair.eos_token_ids, settings.temperature, again).numpy()
        for (number, text), row in zip(asked.items(), rows, strict=True):
            ends = np.flatnonzero(np.isin(row[longest:], pair.eos_token_ids))
            answer = row[longest : longest + ends[0] + 1 if len(ends) else None].astype(np.int32)
            texts[number] = np.concatenate([text, marked(answer)])
        prompts = [turns if number in asked else turns[:turn] for number, turns in enumerate(prompts)]
    return np.concatenate(texts)


def _ended(text: Tokens, pair: Pair) -> Tokens:
    """Give the end of text, int32 [0 or 1, 2], that an answer cut short lacks before the next question."""
    cut = len(text) and pair.eos_token_ids and text[-1, 0] not in pair.eos_token_ids
    return np.array([[pair.eos_token_ids[0], 0]] if cut else np.zeros((0, 2)), np.int32)


def save_text(text: TrainingText, path: Path) -> None:
    """Write token arrays, their shares and the facts to a .npz file, atomically."""
    arrays: dict[str, Any] = {f"source_{number}": tokens for number, (tokens, _) in enumerate(text.sources)}
    shares = np.array([share for _, share in text.sources])
    content = io.BytesIO()  # written to a file itself, numpy would not say why a write fails
    np.savez(content, shares=shares, held_out=text.held_out, facts=np.array(json.dumps(text.facts)), **arrays)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getvalue())


def read_text(path: Path) -> TrainingText:
    """Read what `save_text` wrote; InputError if it is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            sources = [(file[f"source_{number}"], float(share)) for number, share in enumerate(file["shares"])]
            return TrainingText(sources, file["held_out"], json.loads(str(file["facts"])))
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--text {path} is no training text ({reason:.200}); give a folder, or make it again"
        ) from None
