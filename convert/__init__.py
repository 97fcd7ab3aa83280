"""Checkpoint or GGUF in, PowerInfer-GGUF out: read, quantise, reorder, pack."""
