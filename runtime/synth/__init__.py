"""Models of known shapes with random weights, engineered to be as sparse as real ones (docs/bench.md)."""
