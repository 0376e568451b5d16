"""Join traces of several drafters, however they are given."""

from __future__ import annotations

from collections.abc import Mapping

from specsim.trace.files import TraceLike, as_trace
from specsim.trace.joined import JoinedTrace
from specsim.trace.joined import join_traces as join


def join_traces(traces: Mapping[str, TraceLike]) -> JoinedTrace:
    """Join traces of one target with the same outputs, each of another drafter.

    Records of trees are left behind, and all drafts are cut to the depth of the shallowest. A trace made from texts
    (`specsim record-text`) says neither its target nor how it was decoded, and takes both from the others.

    Parameters
    ----------
    traces : mapping
        Two or three traces, or where they are as `read_trace` takes it, by the names that errors give them; the order
        is that of the drafters.

    Returns
    -------
    JoinedTrace

    Raises
    ------
    InputError
        Says what differs, and where: target, decoding, prompts, outputs, limits, or the tokens that end a text; also
        for outputs of rejection sampling, which depend on the drafter, for SPACE, and for a trace without text.

    Examples
    --------
    >>> import specsim
    >>> joined = specsim.join_traces({"lookup": "example:lab-lookup", "EAGLE": "example:lab-eagle"})
    >>> [part.meta["drafter"] for part in joined.parts]
    ['prompt-lookup', 'lab/eagle']
    """
    if not isinstance(traces, Mapping):
        raise TypeError(
            f"traces is a {type(traces).__name__}; expected a mapping of two or three traces by name, such as "
            "{'lookup': 'lookup/', 'eagle': 'eagle/'}"
        )
    return join({name: as_trace(trace) for name, trace in traces.items()})
