"""A Llama of random weights as a GGUF file, for scripts beside it: `write(path, seed)`. Prompts are given as ids."""

import gguf
import numpy as np

HEAD = 64


def write(path, seed, *, layers=2, hidden=256, vocabulary=2048, scale=1.0, context=1024):
    """Write float16 weights of a fixed seed; `scale` multiplies the logits, so that greedy choices are clear."""
    rng = np.random.default_rng(seed)
    heads, wide = hidden // HEAD, 2 * hidden
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "a", "b", "ab", *(f"t{number}" for number in range(4, vocabulary))])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (vocabulary - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)

    def matrix(name, rows, columns):
        writer.add_tensor(f"{name}.weight", (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float16))

    def norm(name, value=1.0):
        writer.add_tensor(f"{name}.weight", (value * rng.uniform(0.5, 1.5, hidden)).astype(np.float32))

    matrix("token_embd", vocabulary, hidden)
    matrix("output", vocabulary, hidden)
    norm("output_norm", scale)
    for layer in range(layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        for name, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", hidden // 2, hidden),
            ("attn_v", hidden // 2, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", wide, hidden),
            ("ffn_up", wide, hidden),
            ("ffn_down", hidden, wide),
        ):
            matrix(f"{block}.{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
