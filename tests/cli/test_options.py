"""Options that several verbs share."""

import pytest

from shoestring import Checkpointing, Plan, Sparsity
from shoestring.cli.options import named_values
from shoestring.errors import InputError


def test_settings_without_a_flag_are_read_as_toml_or_text():
    given = ["sparsity.fraction_multiplier=2", "sparsity.method = set", "sparsity.density=0.25"]
    found = named_values(given)
    assert found == {
        "sparsity.fraction_multiplier": 2,
        "sparsity.method": "set",
        "sparsity.density": 0.25,
    }
    plan = Plan.of([Sparsity(0.5), Checkpointing("no-bn")]).changed(found)
    assert plan == Plan.of(
        [Sparsity(0.25, method="set", fraction_multiplier=2), Checkpointing("no-bn")]
    )


@pytest.mark.parametrize("text", ["density=0.5", "sparsity.method", ""])
def test_what_names_no_setting_of_a_technique_is_refused(text):
    with pytest.raises(InputError, match="cannot read --set"):
        named_values([text])


def test_a_setting_no_technique_has_is_named():
    with pytest.raises(InputError, match="sparsity has no setting 'densty'"):
        Plan.of([Sparsity(0.5)]).changed({"sparsity.densty": 0.3})
    with pytest.raises(InputError, match="a plan has no part 'sparsty'"):
        Plan().changed({"sparsty.density": 0.3})


def test_names_without_a_dot_where_the_example_has_none() -> None:
    assert named_values(["lr=0.2", "data = digits"], "--only", "density=0.2") == {
        "lr": 0.2,
        "data": "digits",
    }
    with pytest.raises(InputError, match="cannot read --only 'lr'"):
        named_values(["lr"], "--only", "density=0.2")
