"""onnxruntime-genai in a process of its own.

A job with "convert" runs the package's model builder, which needs torch. Another one decodes prompts, and reads the
counters of rounds after every token.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

BUILDER = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
CONFIG = "genai_config.json"
COUNTERS = ("rounds", "draft_tokens_proposed", "draft_tokens_accepted")


def convert(folder: Path, names: list[str]) -> None:
    """Build models out of Hugging Face folders, in float32: onnx/ with the target's, onnx/draft with the draft's."""
    for name in names:
        out = folder / "onnx" / ("" if name == "target" else name)
        command = [sys.executable, str(BUILDER), "-i", str(folder / name), "-o", str(out), "-p", "fp32", "-e", "cpu"]
        subprocess.run([*command, "-c", str(folder / "cache")], check=True)


def configure(job: dict[str, Any]) -> Path:
    """Say in the model's configuration what drafts, and what ends a text; return the model's folder."""
    folder = Path(job["folder"]) / "onnx"
    config = json.loads((folder / CONFIG).read_text())
    model = config["model"]
    model["eos_token_id"] = job["eos_token_ids"] or [-1]
    model.pop("draft", None)
    if not job["lookup"]:
        draft = json.loads((folder / "draft" / CONFIG).read_text())["model"]["decoder"]
        model["draft"] = {**draft, "filename": "draft/model.onnx"}
    for part in ("decoder", "draft"):
        if part in model:
            model[part]["session_options"]["intra_op_num_threads"] = 1
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def run(job: dict[str, Any]) -> dict[str, Any]:
    if "convert" in job:
        convert(Path(job["folder"]), job["convert"])
        return {}
    model = onnxruntime_genai.Model(str(configure(job)))
    speculation: dict[str, Any] = {"max_draft_tokens": job["k"], "min_adaptive_k": 0, "cooldown": False}
    if job["lookup"]:
        speculation["ngram_size"] = job["ngram_size"]
    search: dict[str, Any] = {"batch_size": 1, "do_sample": bool(job["temperature"])}
    if job["temperature"]:
        search |= {"temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
    outputs, counters = [], []
    for number, prompt in enumerate(job["prompts"]):
        parameters = onnxruntime_genai.GeneratorParams(model)
        limit = len(prompt) + job["max_new_tokens"]
        parameters.set_search_options(**search, max_length=limit, random_seed=job["seed"] + number)
        parameters.set_speculative_options(**speculation)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(prompt, np.int32))
        output, counted = [], []
        while not generator.is_done():
            generator.generate_next_token()
            output.append(int(generator.get_next_tokens()[0]))
            statistics = generator.get_speculative_stats()
            counted.append([statistics[name] for name in COUNTERS])
        outputs.append(output)
        counters.append(counted)
    return {"outputs": outputs, "counters": counters}
