"""ReLUfication: swap a model's FFN activation for a sparse one and fine-tune it (pi-relufy)."""
