"""The generator of spec/vectors: an encoder of its own, written from spec/ alone.

Imports nothing of dsdformat, so that the two can only agree through the text.
"""
