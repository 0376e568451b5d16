"""GGUF files of plain Llama and Qwen3 models: float32, every weight as it is, for llama.cpp; float16 for OpenVINO.

Prompts go in and outputs come out as token ids. The vocabulary is therefore none of text: token 17 is called "t17",
whatever the tokenizer calls it, so that a tokenizer of any kind converts and an output's text tells its ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from realrun.lm.llama import supported
from specsim.io.errors import InputError

TOKEN = re.compile(r"t(\d+)")
# Printable ASCII, and the space as GPT-2 writes it.
CHARACTERS = [*(chr(code) for code in range(33, 127)), chr(256 + 32)]
ENDS = ("add_eos_token_id", "add_eot_token_id", "add_eom_token_id")  # tokens that may end a text, by what sets them


class Architecture(NamedTuple):
    """What llama.cpp calls a model, and whether it rotates neighbouring pairs where Hugging Face rotates halves."""

    name: str
    rotates_pairs: bool


ARCHITECTURES = {"llama": Architecture("llama", True), "qwen3": Architecture("qwen3", False)}


def ids_of(text: str) -> list[int]:
    """The tokens of a text that such a file's vocabulary put out."""
    return [int(number) for number in TOKEN.findall(text)]


def write_gguf(model: PreTrainedModel, eos_token_ids: Sequence[int], path: Path, *, half: bool = False) -> None:
    """Write a model. InputError if it is not plain Llama or Qwen3, or has more than three ends of text.

    half : round matrices to float16, and name the first tokens by characters, as a reader needs that encodes a text
    """
    import gguf

    config: Any = model.config
    rope = config.rope_parameters
    kind = ARCHITECTURES.get(config.model_type)
    if kind is None or not supported(model) or rope["rope_type"] != "default":
        raise InputError(
            f"a model of type {config.model_type}, rope {rope.get('rope_type')}, is not written as GGUF here; give a "
            f"plain one of {', '.join(ARCHITECTURES)}"
        )
    if len(eos_token_ids) > len(ENDS):
        raise InputError(f"{len(eos_token_ids)} end-of-text tokens; GGUF has room for {len(ENDS)}")
    head_dim = model.model.layers[0].self_attn.head_dim
    writer = gguf.GGUFWriter(path, kind.name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, int(config.vocab_size), eos_token_ids, characters=half)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.name.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.to(torch.float32).numpy()
        module = name.split(".")[-2]
        if kind.rotates_pairs and module in heads:
            values = paired(values, heads[module])
        known = names.get_name(name, try_suffixes=(".weight",))
        if known is None:
            raise InputError(f"tensor {name} has no place in a GGUF file; give a plain model")
        writer.add_tensor(known, np.ascontiguousarray(values, np.float16 if half and values.ndim == 2 else None))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, size: int, eos_token_ids: Sequence[int], *, characters: bool) -> None:
    import gguf

    names, merge = [f"t{number}" for number in range(size)], "t 0"  # llama.cpp requires a merge
    if characters:
        if size <= len(CHARACTERS):
            raise InputError(f"a vocabulary of {size} tokens has no room for {len(CHARACTERS)} characters and a merge")
        names[: len(CHARACTERS)] = CHARACTERS
        names[-1], merge = "tt", "t t"

    kinds = [gguf.TokenType.NORMAL] * size
    for token, add in zip(eos_token_ids, ENDS, strict=False):
        kinds[token] = gguf.TokenType.CONTROL
        getattr(writer, add)(token)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge])
    writer.add_add_bos_token(False)


def paired(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of every head, [heads * D, hidden], reordered from two halves that are rotated together to pairs."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.swapaxes(halves, 1, 2).reshape(weight.shape)
