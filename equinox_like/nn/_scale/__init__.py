"""Large models: stacked and reversible layers, mixed precision, loss scales."""
