"""The command `dsd`: look at checkpoints, and check them. Needs the extra `cli`."""
