"""Translation models by name."""

import pytest

from shoestring.errors import InputError
from shoestring.lab.models import builtin


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dc-transformer", (512, 7, 6)),
        ("dc-transformer-width-256", (256, 7, 6)),
        ("dc-transformer-decoder-3", (512, 7, 3)),
        ("dc-transformer-width-128-encoder-4-decoder-2", (128, 4, 2)),
        ("dc-transformer-tiny", (64, 2, 2)),
        ("dc-transformer-tiny-width-16", (16, 2, 2)),
    ],
)
def test_sizes(name, sizes):
    config = builtin(name).build(source_vocabulary=24, target_vocabulary=16, dropout=0.2).config
    assert (config.width, config.encoder_layers, config.decoder_layers) == sizes
    assert (config.source_vocabulary, config.target_vocabulary, config.dropout) == (24, 16, 0.2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dc-transformer-width-64-width-32", "says a size twice"),
        ("dc-transformer-tiny-width-0", "width 0"),
        ("dc-transformer-heads-2", "no built-in model"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(InputError, match=message):
        builtin(name)
