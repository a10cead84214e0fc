"""Invalid cases: each has one fault, and the code that names it."""
