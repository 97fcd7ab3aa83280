"""HF checkpoint in, PowerInfer-GGUF out: read, quantise, reorder, pack."""
