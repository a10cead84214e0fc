"""Valid cases: checkpoints that every verifier accepts, and what it finds in them."""
