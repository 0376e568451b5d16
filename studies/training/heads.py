"""MEDUSA's first head: how often it says what the target will, how often it could, and what keeps it below.

Head 1 says the token after the next from the target's state alone; the target itself, asked the same, would say

    argmax_y  sum_x p(x | context) p(y | context, x)

with x the next token, here over the likeliest ones. That is attainable by a drafter that could do all that the target
does. The lab's head is trained further as it is, and, from the same start on the same text, with more in it: a second
residual block, or below the block a layer of the target's kind, which reads the states of all tokens so far. What is
added starts as a function that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F

from realrun.lm.variants.block_expansion import expand
from realrun.pairs.drafter_files import describe_target, read_drafter
from realrun.pairs.lab_drafters import drafter_training, lab_drafter
from realrun.pairs.pair import load_target
from realrun.train.common.distill import TextSettings, training_text
from realrun.train.common.jobs import ModuleJob, cross_entropy_nats
from realrun.train.common.loop import Job, LoopSettings
from realrun.train.space import group_mask
from specsim.io.progress import Progress
from specsim.replaying.intervals import Comparison, ratio_difference, ratio_interval
from studies.common import Config, Document, named
from studies.training.held_out import held_out_windows, measured

SHIPPED = "medusa-1"
SAME, BLOCKS, LAYER = "as it is", "two residual blocks", "a layer below the block"
FORMS: Mapping[str, tuple[int, int]] = {SAME: (1, 0), BLOCKS: (2, 0), LAYER: (1, 1)}  # blocks, layers


class Head(torch.nn.Module):
    """A head as MEDUSA's, perhaps with further residual blocks, or on layers of the target's kind.

    residual : [d, d]; vocabulary : [V, d], of the head that it starts as
    """

    def __init__(self, target: Any, residual: torch.Tensor, vocabulary: torch.Tensor, blocks: int, layers: int):
        super().__init__()
        added = residual.new_zeros(blocks - 1, *residual.shape)
        self.residual = torch.nn.Parameter(torch.cat([residual[None], added]))
        self.vocabulary = torch.nn.Parameter(vocabulary.clone())
        depth = int(target.config.num_hidden_layers)
        new = expand(target, depth + layers).model.layers[depth:] if layers else ()
        self.layers = torch.nn.ModuleList(new)
        self.rotary = target.model.rotary_emb

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] at states [B, T, d] of whole windows."""
        x, count = hidden, hidden.shape[1]
        if self.layers:
            at = torch.arange(count, device=x.device)[None]
            later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu_(1)
            mask = torch.zeros(count, count, dtype=x.dtype, device=x.device)
            mask.masked_fill_(later, torch.finfo(x.dtype).min)
            for layer in self.layers:
                places = self.rotary(x, position_ids=at)
                x = layer(x, attention_mask=mask[None, None], position_ids=at, position_embeddings=places)
        for weight in self.residual:
            x = F.silu(F.linear(x, weight)) + x
        return F.linear(x, self.vocabulary)


class HeadTraining(ModuleJob):
    """Trains a head on the tokens after the next, as MEDUSA-1 trains its first."""

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Cross-entropy of a batch [B, T + 1], in nats a token."""
        return cross_entropy_nats(self.module(self._states(batch))[:, :-1], batch[:, 2:]), {}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """head_1, its loss in nats; head_1_agreement, how often it predicts the target's next choice."""
        hidden = self._states(batch)
        logits, preferred = self.module(hidden)[:, :-1], self.target.get_output_embeddings()(hidden).argmax(-1)
        same = (logits.argmax(-1) == preferred[:, 1:]).double().mean()
        return {"head_1": float(cross_entropy_nats(logits, batch[:, 2:])), "head_1_agreement": float(same)}

    @torch.no_grad()
    def _states(self, batch: torch.Tensor) -> torch.Tensor:
        """The target's states [B, T, d] after its final norm, at all tokens of a batch [B, T + 1] but the last."""
        states: torch.Tensor = self.target.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return states


@torch.no_grad()
def marginal_guesses(target: Any, tokens: torch.Tensor, places: torch.Tensor, likeliest: int) -> tuple[Any, Any]:
    """What the target says of the token after the next, not knowing the next: guesses [n], and their x's share [n].

    tokens : [T], a window; places : [n], after each of which the next token is unknown; likeliest : x's to sum over
    """
    logits = target(input_ids=tokens[None], use_cache=False).logits[0].float()
    probs, nexts = logits[places].softmax(-1).topk(likeliest, dim=-1)  # [n, m]
    count, groups = len(tokens), nexts.numel()
    cuts = (places + 1).repeat_interleave(likeliest)  # tokens that each x sees beside itself
    embedded = target.get_input_embeddings()(torch.cat([tokens, nexts.flatten()]))[None]
    after: torch.Tensor = target(
        inputs_embeds=embedded,
        position_ids=torch.cat([torch.arange(count), cuts])[None],
        attention_mask=group_mask(cuts[None], 1, count, embedded.dtype),
        use_cache=False,
        logits_to_keep=groups,
    ).logits[0]
    later = after.float().softmax(-1).unflatten(0, probs.shape)  # [n, m, V]
    return (probs[..., None] * later).sum(1).argmax(-1), probs.sum(-1)


@torch.no_grad()
def correct(target: Any, head: Any, batch: torch.Tensor) -> list[int]:
    """Count, in each window [B, T + 1], at how many of its T - 1 places the head predicts the target's next choice."""
    counts = []
    for window in batch[:, :-1]:
        hidden = target.model(input_ids=window[None], use_cache=False).last_hidden_state
        preferred = target.get_output_embeddings()(hidden).argmax(-1)
        counts.append(int((head(hidden)[:, :-1].argmax(-1) == preferred[:, 1:]).sum()))
    return counts


@torch.no_grad()
def attainable(target: Any, head: Any, batch: torch.Tensor, places: int, likeliest: int) -> Document:
    """The target's own guesses beside the head's at some places of each window: how many of them are right."""
    rows: Document = {"places": [], "attainable": [], "head": [], "mass": []}
    for window in batch[:, :-1]:
        at = torch.linspace(0, len(window) - 2, places).round().long().unique()
        guesses, mass = marginal_guesses(target, window, at, likeliest)
        hidden = target.model(input_ids=window[None], use_cache=False).last_hidden_state
        truth = target.get_output_embeddings()(hidden)[0].argmax(-1)[at + 1]
        rows["places"].append(len(at))
        rows["attainable"].append(int((guesses == truth).sum()))
        rows["head"].append(int((head(hidden)[0, at].argmax(-1) == truth).sum()))
        rows["mass"].append(float(mass.sum()))
    return rows


def shipped_head(target: Any, blocks: int = 1, layers: int = 0) -> Head:
    """The lab's first head, in the target's type."""
    tensors = read_drafter(lab_drafter(SHIPPED)).tensors
    residual, vocabulary = (tensors[name][0].to(target.dtype) for name in ("residual", "vocabulary"))
    return Head(target, residual, vocabulary, blocks, layers).eval()


def measure(out: Path, config: Config, report: Progress) -> Document:
    """Train the head in every form, and measure all, the lab's own and what is attainable on the same windows."""
    asked, train = config["heads"], config["train"]
    pair = load_target(config["target"], dtype=train["dtype"], threads=config["threads"])
    exact = load_target(config["target"], dtype="float32").target
    text = training_text(pair, TextSettings(), out / "text", report)
    plain = LoopSettings(steps=1, warmup_steps=train["warmup_steps"], dtype=train["dtype"])
    loop = plain.lasting(1e6 * asked["tokens"])
    batch = held_out_windows(text, asked["windows"], loop.window_tokens)
    target = describe_target(pair.target, pair.target_name)

    def training(blocks: int, layers: int) -> HeadTraining:
        return HeadTraining(pair.target, shipped_head(pair.target, blocks, layers), asked["lr"])

    def figures(job: Job) -> Document:
        return {"correct": correct(exact, job.module, batch)}  # type: ignore[attr-defined]

    forms = {
        name: measured(
            out / "heads" / name.replace(" ", "-"),
            partial(training, *form),
            loop,
            text,
            {"drafter": f"a head, {name}", "lr": asked["lr"], "target": target},
            figures,
            named(report, f"head, {name}"),
        )
        for name, form in FORMS.items()
    }
    shipped = drafter_training(SHIPPED)
    return {
        "shipped_tokens": shipped["tokens"],
        "places": [loop.window_tokens - 1] * asked["windows"],
        "attainable": attainable(exact, shipped_head(exact), batch, asked["places"], asked["likeliest"]),
        "forms": forms,
    }


def gain(a: npt.ArrayLike, b: npt.ArrayLike, places: npt.ArrayLike) -> Comparison:
    """Return the difference of two shares of right guesses at the same places."""
    return ratio_difference(a, places, b, places)


def rows(document: Document) -> list[dict[str, Any]]:
    """Return the agreement of the lab's head, of what it was trained to, and what is attainable."""
    places, forms, best = document["places"], document["forms"], document["attainable"]
    start, same = (forms[SAME][when]["correct"] for when in ("before", "after"))
    trained = [
        {
            "variant": f"trained further, {name}",
            "parameters": form["parameters"],
            "tokens": document["shipped_tokens"] + form["tokens"],
            "agreement": ratio_interval(form["after"]["correct"], places).as_dict(),
            "agreement_difference": gain(form["after"]["correct"], start, places).difference.as_dict(),
            "over_training_alone": gain(form["after"]["correct"], same, places).difference.as_dict(),
        }
        for name, form in forms.items()
    ]
    attainable_share = ratio_interval(best["attainable"], best["places"]).as_dict()
    gap = gain(best["attainable"], best["head"], best["places"]).difference.as_dict()
    return [
        {
            "variant": "the lab's head",
            "tokens": document["shipped_tokens"],
            "agreement": ratio_interval(start, places).as_dict(),
        },
        *trained,
        {"variant": "attainable by the target itself", "agreement": attainable_share, "agreement_difference": gap},
    ]
