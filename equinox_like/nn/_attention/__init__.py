"""Attention: its layer, its function, their kernels, masks and cache."""

# Other libraries import these two from here.
from .dot_product import (
    dot_product_attention as dot_product_attention,
    dot_product_attention_weights as dot_product_attention_weights,
)
