"""Parts draw what the whole batch drew, row by row; recomputation draws it again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shoestring.techniques.splitting.draws import Drawn, Slices

X = torch.ones(6, 5)


def draws(x: torch.Tensor) -> list[torch.Tensor]:
    """Some of everything, with the examples first, second, times heads, and nowhere."""
    n = len(x)
    return [
        F.dropout(x, 0.5),
        torch.randn_like(x),
        torch.rand(3, n, 2).transpose(0, 1),
        torch.randint(0, 1000, (n,)),
        torch.randn(n * 4, 2).view(n, 4, 2),
        torch.empty(n, 3).uniform_(),
        torch.bernoulli(x * 0.5),
        torch.multinomial(x, 2),
        torch.rand(()).expand(n),
    ]


def test_rows_of_the_whole() -> None:
    with Drawn() as seen:
        whole = draws(X)
    slices = Slices(seen.draws, (0, 2), 6)
    with slices:
        parts = []
        for rows in ((0, 2), (2, 5), (5, 6)):
            slices.select(rows)
            parts.append(draws(X[rows[0] : rows[1]]))
    assert slices.unmatched is None and seen.hidden is None
    for number, expected in enumerate(whole):
        assert torch.equal(expected, torch.cat([part[number] for part in parts])), number


def test_the_generators_advance_as_they_would() -> None:
    torch.manual_seed(0)
    draws(X)
    plain = torch.get_rng_state()
    torch.manual_seed(0)
    with Drawn() as seen:
        draws(X)
    assert torch.equal(plain, torch.get_rng_state())
    torch.manual_seed(0)
    with Slices(seen.draws, (0, 6), 6):
        draws(X)
    assert torch.equal(plain, torch.get_rng_state())


@pytest.mark.parametrize("preserve", [True, False])
def test_recomputation_draws_it_again_if_it_puts_the_stream_back(preserve: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.5) ** 2, 0.5)

    x = torch.ones(6, 50, requires_grad=True)
    with Drawn() as seen:
        run(x).sum().backward()
    (expected,), x.grad = (x.grad,), None
    part = x[2:4].detach().requires_grad_()
    with Slices(seen.draws, (2, 4), 6):
        checkpoint(run, part, use_reentrant=False, preserve_rng_state=preserve).sum().backward()
    assert torch.equal(expected[2:4], part.grad) is preserve  # type: ignore[index]


def test_what_has_no_rows_is_named() -> None:
    with Drawn() as seen:
        torch.randperm(6)
    slices = Slices(seen.draws, (0, 2), 6)
    with slices:
        torch.randperm(2)
    assert slices.unmatched == "randperm"
    with Drawn() as seen:
        torch.randint(0, 6, (6,))
    slices = Slices(seen.draws, (0, 2), 6)
    with slices:
        assert int(torch.randint(0, 2, (2,)).max()) < 2  # never an index outside of the part
    assert slices.unmatched == "randint"


def test_a_generator_of_the_users_stays_where_it_was() -> None:
    own = torch.Generator().manual_seed(5)
    state = own.get_state()
    with Drawn() as seen:
        torch.rand(6, 2, generator=own)
    assert torch.equal(state, own.get_state()) and len(seen.draws) == 1
