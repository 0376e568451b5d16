"""Time per output token of a server that keeps a number of requests running.

While a request decodes, the prompts of the others are read in the same steps: a request that leaves after `osl` tokens
makes room for a prompt, so each of the other `concurrency - 1` requests adds a prompt every `osl` output tokens.
If an engine reads prompts in separate steps, or several in one step, a request waits for a share of that time
(`RooflineCost.prompt_share`).
"""

from __future__ import annotations

from dataclasses import replace

from specsim.cost.batches import BatchTokens
from specsim.cost.model import CostModel
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.passes import Roofline
from specsim.io.errors import InputError


def with_prompt(prompt_tokens: float, decoding: BatchTokens) -> BatchTokens:
    """Add a prompt to a decoding step. A token of the prompt attends to half of the prompt on average."""
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    sizes = decoding.sequences + 1, decoding.new + prompt_tokens, decoding.cached, decoding.pairs + pairs
    return BatchTokens(*sizes, decoding.prompts + prompt_tokens)


def prompt_s(passes: Roofline, prompt_tokens: float, decoding: BatchTokens) -> float:
    """Seconds by which a prompt lengthens the decode step that it is prefilled with.

    Only the prompt's last token gets logits, so the layers alone count.
    """
    with_s, without_s = (
        float(passes.total(passes.layers(passes.model, tokens)))
        for tokens in (with_prompt(prompt_tokens, decoding), decoding)
    )
    return with_s - without_s


def prompts_s(cost: CostModel, isl: float, osl: float, k: int = 0) -> float:
    """Seconds of the other requests' prompts, for each output token of a request.

    cost : at the batch of the requests that run at once; isl, osl, k : as of `tpot_s`

    Raises InputError for a length below 1, and for costs that are not of shapes and hardware.
    """
    if min(isl, osl) < 1:
        raise InputError(f"isl={isl:g}, osl={osl:g}; give at least 1 each")
    if not isinstance(cost, RooflineCost):
        raise InputError("isl and osl need costs of shapes and hardware; give a GPU, a target and a drafter")
    decoding = BatchTokens.alike(cost.batch, k + 1, isl + osl / 2)
    return cost.prompt_share * (cost.batch - 1) / osl * prompt_s(cost.target, isl, decoding)


def tpot_s(
    cost: RooflineCost, isl: float, osl: float, concurrency: int, k: int = 0, acceptance: float | None = None
) -> float:
    """Predict the time per output token (TPOT) of a request on a server.

    Parameters
    ----------
    cost : RooflineCost
        Target, drafter, hardware and engine; its batch is replaced by `concurrency`.
    isl, osl : float
        Input and output length of a request, in tokens, on average.
    concurrency : int
        Requests that run at once.
    k : int
        Draft tokens of a round; 0 without speculation.
    acceptance : float, optional
        Mean acceptance length, output tokens of a round; with k.

    Returns
    -------
    float
        Seconds per output token of a request, without its own prompt.

    Raises
    ------
    InputError
        For a length or a number of requests below 1.

    Examples
    --------
    >>> from specsim.cost.roofline.document import roofline_from_document
    >>> from specsim.cost.roofline.serving import tpot_s
    >>> cost = roofline_from_document({"target": "llama-3.1-8b", "drafter": "eagle", "hardware": "h100"})
    >>> tpot_s(cost, isl=1024, osl=512, concurrency=32) > tpot_s(cost, isl=1024, osl=512, concurrency=1)
    True
    """
    if k and acceptance is None:
        raise InputError(f"k={k}: give the mean acceptance length as well")
    at = replace(cost, batch=concurrency)
    return at.round_seconds(k, isl + osl / 2) / (acceptance or 1.0) + prompts_s(at, isl, osl, k)
