"""Layer 3: what every transformation stands on."""

from .caches import clear_caches as clear_caches
