"""The engines by name."""

from __future__ import annotations

from realrun.engines.engine import Engine
from realrun.engines.hugging_face import HuggingFaceEngine
from realrun.engines.llamacpp import LlamaCppEngine
from realrun.engines.mlx import MlxEngine
from realrun.engines.onnxruntime import OnnxruntimeEngine
from realrun.engines.openvino import OpenVinoEngine
from realrun.engines.vllm import VllmEngine
from specsim.io.errors import InputError
from specsim.io.names import find_name

KINDS = (LlamaCppEngine, VllmEngine, HuggingFaceEngine, OpenVinoEngine, OnnxruntimeEngine, MlxEngine)
ENGINES: dict[str, type[Engine]] = {kind.name: kind for kind in KINDS}


def find_engine(name: str) -> Engine:
    """The engine of that name; InputError where there is none, or it is not installed."""
    name = find_name("engine", name, ENGINES) or name
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not run here; choose one of {', '.join(ENGINES)}")
    engine = ENGINES[name]()
    engine.check_installed()
    return engine
