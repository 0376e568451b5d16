"""OpenVINO GenAI in a process of its own.

A job with "convert" makes folders that OpenVINO reads out of GGUF files. Another one decodes prompts. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
CACHE_GIB = 1


def convert(folder: Path) -> None:
    """Make model.gguf in this folder a model of float32 weights, which stand in weights.npz.

    OpenVINO reads no float32 GGUF file, and what it saves of a float16 one is rounded to float16 throughout, the
    rotary frequencies included. So each constant is replaced by the array that it is the rounding of.
    """
    openvino_genai.LLMPipeline(folder / "model.gguf", "CPU", enable_save_ov_model=True)
    file = folder / "openvino_model.xml"
    model = openvino.Core().read_model(file)
    with np.load(folder / "weights.npz") as weights:
        exact = {array.astype(np.float16).tobytes(): array for array in map(weights.get, weights.files)}
    missing = set(exact)
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != openvino.Type.f16:
            continue
        array = exact.get(rounded := node.get_data().tobytes())
        if array is None:
            continue
        missing.discard(rounded)
        constant = openvino.opset13.constant(array.reshape(node.get_data().shape))
        for use in node.output(0).get_target_inputs():
            for converted in use.get_node().output(0).get_target_inputs():  # behind the conversion to float32
                converted.replace_source_output(constant.output(0))
    if missing:
        raise ValueError(f"{len(missing)} of {len(exact)} weights are not in the model that OpenVINO made of the file")
    exact_file = folder / "exact.xml"
    openvino.save_model(model, exact_file, compress_to_fp16=False)
    del model  # its file is mapped into memory
    for suffix in (".xml", ".bin"):
        exact_file.with_suffix(suffix).replace(file.with_suffix(suffix))


def pipeline(job: dict[str, Any]) -> Any:
    """Make a server of the target with the draft model or prompt lookup."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GIB, False
    folder = Path(job["folder"])
    how: dict[str, Any] = {"prompt_lookup": True}
    if not job["lookup"]:
        how = {"draft_model": openvino_genai.draft_model(folder / "draft", "CPU", **FLOAT32)}
    return openvino_genai.LLMPipeline(folder / "target", "CPU", scheduler_config=scheduler, **how, **FLOAT32)


def run(job: dict[str, Any]) -> dict[str, Any]:
    if "convert" in job:
        for folder in job["convert"]:
            convert(Path(folder))
        return {}
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.num_assistant_tokens = job["max_new_tokens"], job["k"]
    config.ignore_eos = not job["eos_token_ids"]
    config.stop_token_ids = set(job["eos_token_ids"])
    config.do_sample = bool(job["temperature"])
    if config.do_sample:
        config.temperature, config.top_p, config.top_k = job["temperature"], 1.0, 2**31 - 1
    if job["lookup"]:
        config.max_ngram_size = job["max_ngram"]
    outputs, emitted, draft_passes = [], [], []
    for number, prompt in enumerate(job["prompts"]):
        config.rng_seed = job["seed"] + number
        server = pipeline(job)  # for each, because a second request's metrics begin with a draft that was not made
        ids = np.array([prompt], np.int64)
        asked = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        answer = server.generate(asked, config)
        outputs.append([*answer.tokens[0]])
        emitted.append([*answer.perf_metrics.raw_metrics.m_batch_sizes])
        metrics = answer.extended_perf_metrics
        draft_passes.append(None if metrics is None else len(metrics.draft_model_metrics.raw_metrics.m_batch_sizes))
    return {"outputs": outputs, "emitted": emitted, "draft_passes": draft_passes}
