"""Pickles without unpickling: `machine` parses, `resolving` applies closed lists of names."""
