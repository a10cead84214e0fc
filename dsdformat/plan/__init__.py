"""Who holds and moves which boxes. Pure: no files, no torch, no communication."""
