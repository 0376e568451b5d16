#!/usr/bin/env bash
# engine: AIConfigurator
# version: 0.12.0
# date: 2026-11-29
# finding: With MTP (nextn) a step is charged for reading a request's context once per verified token, nextn + 1 times, where
#   attention kernels read it once for all of them: at long contexts drafts are forecast to be of no use, or to slow tokens down.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q aiconfigurator==0.12.0
cat > find.py <<'EOF'
import logging
import sys

from aiconfigurator.cli.api import cli_estimate

logging.disable(logging.WARNING)
SHORT, LONG, REQUESTS, DRAFTED, ACCEPTED = 1024, 131072, 8, 3, 1.5  # tokens of context, requests, tokens per step


def step_ms(context, requests, drafted=0, accepted=0.0):
    """A decoding step in ms: the forecast time per output token times the tokens of a step."""
    result = cli_estimate(
        "Qwen/Qwen3.5-27B",
        "h200_sxm",
        mode="static_gen",
        backend_name="vllm",
        tp_size=2,
        isl=context,
        osl=256,
        batch_size=requests,
        nextn=drafted,
        nextn_accepted=accepted,
    )
    return result.tpot * (1 + accepted)


plain = [step_ms(context, REQUESTS) for context in (SHORT, LONG)]
drafts = [step_ms(context, REQUESTS, DRAFTED, ACCEPTED) for context in (SHORT, LONG)]
many = step_ms(LONG, REQUESTS * (1 + DRAFTED))
context_ms = [long - short for short, long in (plain, drafts)]
right = plain[1] + drafts[0] - plain[0]  # the context is read once, all else is as in short contexts
print(f"AIConfigurator 0.12.0, Qwen3.5-27B on 2 H200 with vLLM, {REQUESTS} requests, nextn = {DRAFTED}, {ACCEPTED} accepted")
print(f"a step with contexts of {SHORT} tokens: {plain[0]:.1f} ms, with drafts {drafts[0]:.1f} ms")
print(f"expected: {LONG} tokens of context cost {context_ms[0]:.1f} ms more, with drafts about as much, as they are read once;")
print(f"expected: TPOT {right / (1 + ACCEPTED):.1f} ms with drafts, {plain[1]:.1f} ms without")
print(f"seen: they cost {context_ms[1]:.1f} ms more with drafts, {context_ms[1] / context_ms[0]:.2f} times as much;")
print(f"seen: TPOT {drafts[1] / (1 + ACCEPTED):.1f} ms with drafts, {plain[1]:.1f} ms without;")
print(f"seen: the step costs {drafts[1]:.1f} ms, as much as one of {REQUESTS * (1 + DRAFTED)} requests of their own, {many:.1f} ms")
as_it_was = context_ms[1] > 3.5 * context_ms[0] and drafts[1] > many and drafts[1] / (1 + ACCEPTED) > plain[1]
sys.exit(0 if as_it_was else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
