"""Join traces of several drafters, given as objects or paths."""

from __future__ import annotations

from collections.abc import Mapping

from specsim.trace.files import TraceLike, as_trace
from specsim.trace.joined import JoinedTrace
from specsim.trace.joined import join_traces as join


def join_traces(traces: Mapping[str, TraceLike]) -> JoinedTrace:
    """Join traces of the same target and outputs, each with a different drafter.

    Recorded trees are dropped, and all drafts are cut to the depth of the shallowest trace. A trace made from texts
    (`specsim record-text`) names neither its target nor its decoding, and takes both from the others.

    Parameters
    ----------
    traces : mapping
        Two or three traces, or their paths as `read_trace` takes them, by the names to use in errors; their order is
        the order of the drafters.

    Returns
    -------
    JoinedTrace

    Raises
    ------
    InputError
        If target, decoding, prompts, outputs, limits or end tokens differ; also for outputs of rejection sampling,
        which depend on the drafter, for SPACE, and for a trace without text.

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
