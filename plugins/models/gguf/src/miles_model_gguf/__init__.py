"""Miles model resolvers `.gguf` and `gguf:`: a GGUF file becomes a Hugging Face folder, once."""
