#!/usr/bin/env bash
# engine: llama.cpp
# version: 2026.10 (xllamacpp 2026.10.11549)
# date: 2026-11-28
# finding: A draft model without a speculation type (`-md` without `--spec-type`) is loaded and never asked, without a
#   warning: memory is spent, nothing is faster, and the counts of drafts are missing from responses.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cp "$here/random_gguf.py" .
python3 -m venv venv
venv/bin/pip install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cat > find.py <<'EOF'
import sys

import random_gguf
import xllamacpp

random_gguf.write("model.gguf", 0)


def timings(kinds):
    """A completion's timings, with the model as its own draft model."""
    settings = xllamacpp.CommonParams()
    settings.model.path = settings.speculative.draft.mparams.path = "model.gguf"
    settings.n_ctx, settings.n_parallel, settings.port, settings.fit_params = 512, 1, 0, False
    settings.speculative.draft.n_max = 3
    if kinds:
        settings.speculative.types = kinds
    server = xllamacpp.Server(settings)
    asked = {"prompt": [*range(10, 20)], "n_predict": 20, "temperature": 0.0, "ignore_eos": True}
    return server.handle_completions(asked)["timings"]


without = timings([])
named = timings([xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE])
print("llama.cpp 2026.10 (xllamacpp 2026.10.11549), 20 tokens with a draft model, n_max = 3")
print("expected: tokens are drafted by the draft model that was given, or an error says that it is not used")
print(f"seen: draft_n is {without.get('draft_n')}; with the type draft-simple {named.get('draft_n')}")
sys.exit(0 if "draft_n" not in without and named.get("draft_n") else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
echo "seen: the log of both servers says: $(grep -o "loading draft model.*" log | uniq -c)"
