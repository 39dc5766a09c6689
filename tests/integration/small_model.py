"""A model for whole runs that cost little: a section `model`, drawn at random, with an alphabet of digits."""

MODEL = """
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: {model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64,
    tie_word_embeddings: true, rope_theta: 10000.0, pad_token_id: 0, eos_token_id: 1}
"""
