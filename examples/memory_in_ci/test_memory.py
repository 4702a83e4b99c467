"""In a test suite: the fixture `peak` comes with shoestring."""

import torch
from models import build, loss

BATCH = torch.zeros(256, 64), torch.zeros(256, dtype=torch.int64)


def test_fits_the_card(peak):
    assert peak(build(), BATCH, loss=loss, optimizer="adamw", device="cuda") < "80 MB"


def test_needs_no_more_than_it_did(peak):
    assert peak(build(), BATCH, loss=loss, optimizer="sgd", device="cuda") <= "75 MB"
