import pickle
import traceback
import warnings

import pytest

from shoestring.errors import (
    BudgetError,
    InputError,
    NoEffectWarning,
    ShoestringError,
    SizeError,
    TraceError,
    TrainingStopped,
    UnknownOperationWarning,
    VerificationError,
    did_you_mean,
    render,
)

EXIT_STATUS = {
    ShoestringError: 2,
    InputError: 2,
    SizeError: 2,
    TraceError: 2,
    BudgetError: 1,
    VerificationError: 1,
    TrainingStopped: 1,
}


@pytest.mark.parametrize(("kind", "status"), EXIT_STATUS.items())
def test_every_error_is_of_the_family_and_knows_its_exit_status(kind, status):
    error = kind("it broke")
    assert isinstance(error, ShoestringError)
    assert error.exit_status == status


def test_a_traceback_shows_the_hint():
    error = InputError("it broke", hint="mend it")
    assert traceback.format_exception(error)[-1] == "hint: mend it\n"
    assert error.__notes__ == pickle.loads(pickle.dumps(error)).__notes__


def test_a_hint_names_what_is_close():
    assert did_you_mean("losless", ["near", "lossless"]) == "did you mean lossless?"
    assert did_you_mean("x", ["near", "lossless"]) == "one of near, lossless"


def test_only_input_errors_are_value_errors():
    assert {kind for kind in EXIT_STATUS if issubclass(kind, ValueError)} == {InputError, SizeError}


def test_str_is_the_message_alone():
    assert str(InputError("density is 1.5", hint="use 0 < density <= 1")) == "density is 1.5"


def test_render_with_and_without_a_hint():
    assert render(BudgetError("no plan fits 2.0 MB")) == "BudgetError: no plan fits 2.0 MB"
    assert (
        render(SizeError("cannot read '6M'", hint="write 6 MB"))
        == "SizeError: cannot read '6M'\nhint: write 6 MB"
    )


@pytest.mark.parametrize("kind", EXIT_STATUS)
def test_errors_cross_process_boundaries_whole(kind):
    error = pickle.loads(pickle.dumps(kind("it broke", hint="mend it")))
    assert (type(error), error.message, error.hint) == (kind, "it broke", "mend it")


@pytest.mark.parametrize("kind", [NoEffectWarning, UnknownOperationWarning])
def test_warnings_can_be_filtered_as_user_warnings(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.warn(kind("nothing matched"), stacklevel=1)
