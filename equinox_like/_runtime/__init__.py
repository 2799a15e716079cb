"""Features that act while a compiled program runs."""
