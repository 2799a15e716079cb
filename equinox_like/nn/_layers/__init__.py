"""Layers of one input: linear maps, convolutions, pooling, norms, embeddings, chains."""
