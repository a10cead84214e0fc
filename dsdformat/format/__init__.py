"""Bytes to values and back, as `spec/dsd-1.md` has them. Pure: no files, no clock."""
