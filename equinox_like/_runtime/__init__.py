"""Layer 4: what acts while a program runs."""

from .enumeration import Enumeration as Enumeration
