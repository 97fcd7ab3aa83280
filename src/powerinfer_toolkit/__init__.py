"""PowerInfer toolkit: from a dense Hugging Face checkpoint to fast sparse inference."""

__version__ = "0.1.0"
