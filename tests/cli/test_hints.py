"""Hints of the library, as the command has them."""

from __future__ import annotations

import pytest

from dsdformat.cli.hints import as_options

HINTS = {
    None: None,
    "pass overwrite=True to replace it": "pass --overwrite to replace it",
    "leave it out with unknown='drop'": "leave it out with --unknown drop",
    "as with select='model/*'": "as with --select 'model/*'",
    "say what to cast, with select": "say what to cast, with --select",
    "pass max_shard_bytes='5GB'": "pass --max-shard-size 5GB",
    "pass weights_only=False to write what torch.load(weights_only=False) alone reads": (
        "pass --no-weights-only to write what torch.load(weights_only=False) alone reads"
    ),
    "save it with use_collectives=True": "save it with use_collectives=True",
}


@pytest.mark.parametrize("hint", HINTS)
def test_what_is_an_option_here_is_said_as_one_and_calls_of_others_stay(hint):
    assert as_options(hint) == HINTS[hint]
