"""Bytes at rest: the only place that opens files. Knows labels and byte ranges, no format."""
