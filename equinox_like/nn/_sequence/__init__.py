"""Sequences: recurrent cells and networks, and the generation of tokens."""
