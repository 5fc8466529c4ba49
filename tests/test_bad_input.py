# SPDX-License-Identifier: Apache-2.0
"""Bad ids, rows and options: what is said of them, and that nothing changes."""

import numpy as np
import pytest

from models import SCHEDULE, SMALL, batches, bits, trainer, weights
from mojolearn import LanguageModelConfig, LanguageModelTrainer, MojolearnError


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (batches(1)[0].tolist(), TypeError, "ids must be an array of dtype int32, not list"),
        (batches(1)[0].astype(">i4"), TypeError, "ids must have dtype int32, not int32 in foreign byte order"),
        (batches(1)[0][:, :-1], ValueError, r"ids must have shape \(batch, length \+ 1\) = \(2, 7\), not \(2, 6\)"),
        (np.full((2, 7), 33, np.int32), ValueError, "33"),
        (np.full((2, 7), -1, np.int32), ValueError, "-1"),
    ],
)
@pytest.mark.parametrize("resident", [None, False])
def test_bad_ids_are_refused_and_change_nothing(ids, error, text, resident):
    model = trainer(resident=resident)
    model.train_step(batches(1)[0])
    before = bits(model.state_dict()), None if resident is False else bits(model.export_gradients())
    for method in (model.train_step, model.evaluate):
        with pytest.raises(error, match=text):
            method(ids)
    assert before == (bits(model.state_dict()), None if resident is False else bits(model.export_gradients()))


ROWS = np.zeros((2, 6), np.int32)


@pytest.mark.parametrize(
    ("ids", "lengths", "error", "text"),
    [
        (ROWS[0], None, ValueError, "two dimensions"),
        (ROWS[:0], None, ValueError, "from 1 to 1024 rows, not 0"),
        (np.zeros((1025, 1), np.int32), None, ValueError, "from 1 to 1024 rows, not 1025"),
        (ROWS[:, :0], None, ValueError, "length from 1 to shape.length = 6, not 0"),
        (np.zeros((1, 7), np.int32), None, ValueError, "length from 1 to shape.length = 6, not 7"),
        (ROWS + 33, None, ValueError, "33"),
        (ROWS, [1], ValueError, "one entry for each of the 2 rows"),
        (ROWS, [0, 1], ValueError, r"lengths\[0\] must be an int in \[1, 6\], not 0"),
        (ROWS, [1, 7], ValueError, r"lengths\[1\] must be an int in \[1, 6\], not 7"),
        (ROWS, [1, 1.0], TypeError, r"lengths\[1\] must be an int, not 1.0"),
        (ROWS, [1, True], TypeError, r"lengths\[1\] must be an int, not True"),
        (ROWS, 3, TypeError, "lengths must be a sequence of int"),
        (ROWS.astype(np.int64), None, TypeError, "int64"),
    ],
)
def test_bad_rows_are_refused(ids, lengths, error, text):
    for method in (trainer().logits, trainer().next_bytes):
        with pytest.raises(error, match=text):
            method(ids, lengths=lengths)


def test_too_many_logits_are_refused():
    shape = LanguageModelConfig(
        batch=1, length=8, d_model=2, n_heads=1, n_kv=1, head_dim=2, intermediate=1, n_layers=1, vocab_size=2**16
    )
    with pytest.raises(ValueError, match=r"ids ask for .* = 268959744 logits, more than 268435456"):
        trainer(shape).logits(np.zeros((513, 8), np.int32))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"resident": 1}, TypeError, "resident must be True, False or None, not 1"),
        ({"resident": np.True_}, TypeError, "resident"),
        ({"step_result": "x"}, ValueError, "step_result must be 'full', 'lean' or None, not 'x'"),
        ({"step_result": "lean"}, ValueError, "needs resident=True"),
        ({"step_result": "lean", "resident": False}, ValueError, "needs resident=True"),
        ({"shape": {"batch": 1}}, TypeError, "shape must be a LanguageModelConfig or None, not dict"),
        ({"vendor": "tpu"}, ValueError, "vendor must be 'cpu', 'cuda' or 'hip', not 'tpu'"),
        ({"vendor": "metal"}, MojolearnError, "no backend"),
        ({"device": -1}, ValueError, r"device must be an index in \[0, 2\*\*31\), not -1"),
        ({"device": True}, TypeError, "device must be an int or None, not True"),
        ({"device": 0.0}, TypeError, "device must be an int or None"),
    ],
)
def test_bad_options_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        LanguageModelTrainer(weights(), **{"data_schedule": SCHEDULE, "shape": SMALL} | options)


@pytest.mark.parametrize("options", [{"vendor": "cpu", "device": 99}, {"vendor": "hip", "device": 99}])
def test_a_device_that_is_not_there_is_refused_at_the_first_call_that_needs_it(options):
    model = trainer(**options)
    with pytest.raises(MojolearnError, match=r"\w"):
        model.train_step(batches(1)[0])
    assert model.step_ == 0
    assert bits(np.asarray(model.parameters_)) == bits(weights())
