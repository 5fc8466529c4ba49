# SPDX-License-Identifier: Apache-2.0
"""The trainer: what it answers, and that nothing which ought not to matter changes a bit of it."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models import SCHEDULE, SMALL, batches, bits, shapes, trainer, weights
from mojolearn import (
    LanguageModelConfig,
    LanguageModelTrainer,
    LostSessionError,
    NonFiniteError,
    SmallByteLanguageModelTrainer,
    _native,
)
from mojolearn._session import Session

few = settings(max_examples=15, deadline=None)


def run(model, ids):
    """Everything that a training run shows."""
    losses = [model.train_step(batch)["loss"] for batch in ids]
    return {"losses": losses, "evaluate": model.evaluate(ids[0]), "state": bits(model.state_dict())}


# ---- answers ---------------------------------------------------------------------------------------------------------


def described(value):
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return (
        (type(value).__name__, value.dtype.str, value.shape) if isinstance(value, np.ndarray) else type(value).__name__
    )


FLAT = ("Array", "<f4", (SMALL.n_total,))
NAMED = {row["name"]: ("Array", "<f4", row["shape"]) for row in LanguageModelTrainer.parameter_registry(SMALL)}
COUNTERS = {"loss": "float", "step": "int", "completed_steps": "int", "next_batch_index": "int"}
FLAGS = ("Array", "<i4", (SMALL.n_tensors,))


def test_there_are_two_names():
    assert LanguageModelTrainer is SmallByteLanguageModelTrainer


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {"flat_gradients": FLAT, "gradients": NAMED}),
        ({"resident": False}, {"flat_gradients": FLAT, "gradients": NAMED}),
        ({"resident": True, "step_result": "full"}, {"flat_gradients": FLAT, "gradients": NAMED}),
        ({"resident": True}, {"flags": FLAGS}),
        ({"resident": True, "step_result": "lean"}, {"flags": FLAGS}),
    ],
)
def test_what_a_step_answers(options, extra):
    model = trainer(**options)
    for step, ids in enumerate(batches(3), 1):
        result = model.train_step(ids)
        assert described(result) == COUNTERS | extra
        assert result["step"] == result["completed_steps"] == result["next_batch_index"] == model.step_ == step
        assert np.float32(result["loss"]) == result["loss"]


def test_gradients_by_name_are_views_of_the_flat_ones():
    result = trainer().train_step(batches(1)[0])
    assert all(np.shares_memory(tensor, result["flat_gradients"]) for tensor in result["gradients"].values())
    assert bits(np.concatenate([tensor.reshape(-1) for tensor in result["gradients"].values()])) == bits(
        result["flat_gradients"]
    )


def test_the_other_answers():
    model, ids = trainer(), batches(1)[0]
    assert described(model.evaluate(ids)) == "float"
    assert described(model.logits(ids[:, :-1])) == ("Array", "<f4", (2, 6, 33))
    tokens = model.next_bytes(ids[:, :-1])
    assert [type(token) for token in tokens] == [int, int]
    assert described(model.parameters_) == FLAT
    assert described(model.state_dict()) == {
        "schema": "str",
        "profile": "str",
        "numeric_mode": "str",
        "parameter_names": "list",
        "parameter_shapes": "list",
        "parameter_offsets": "list",
        "parameters": FLAT,
        "m": FLAT,
        "v": FLAT,
        "flags": FLAGS,
        "completed_steps": "int",
        "next_batch_index": "int",
        "config": {
            name: "int" if name == "kind" else "bool" if name == "nesterov" else "float"
            for name in (
                "lr",
                "beta1",
                "beta2",
                "eps",
                "weight_decay",
                "kind",
                "momentum",
                "dampening",
                "nesterov",
                "max_norm",
            )
        },
        "data_schedule": {"corpus": "str"},
        "model_shape": {name: "bool" if name == "chunked_lm_head_v2" else "int" for name in SMALL.to_dict()},
    }


def test_next_bytes_are_the_first_largest_logits():
    model = trainer()
    rows = batches(1)[0][:, :-1]
    for lengths in (None, [2, 5]):
        logits = model.logits(rows, lengths=lengths)
        ends = lengths or [6, 6]
        assert model.next_bytes(rows, lengths=lengths) == [
            int(np.argmax(logits[row, end - 1])) for row, end in enumerate(ends)
        ]
    flat = trainer(parameters=np.zeros(SMALL.n_total, np.float32))
    assert flat.next_bytes(rows) == [0, 0]


def test_learning_lowers_the_loss():
    model, ids = trainer(lr=1e-2), batches(1)[0]
    before = model.evaluate(ids)
    for _ in range(20):
        model.train_step(ids)
    assert model.evaluate(ids) < before / 2


def test_exports_share_nothing_with_the_trainer():
    model = trainer()
    for _ in range(2):
        state = model.export_state()
        kept = bits(state)
        for key in ("parameters", "m", "v", "flags"):
            state[key][:] = 7
        state["config"]["lr"] = 7.0
        state["model_shape"]["batch"] = 7
        state["parameter_shapes"][0][0] = 7
        assert bits(model.state_dict()) == kept
        model.evaluate(batches(1)[0])


def test_plain_attributes_cannot_be_set():
    for name in ("step_", "parameters_", "data_schedule"):
        with pytest.raises(AttributeError):
            setattr(trainer(), name, 3)


# ---- what must not matter --------------------------------------------------------------------------------------------


@few
@given(shapes(), st.integers(0, 99))
def test_neither_residence_nor_the_kind_of_result_matters(shape, seed):
    ids = batches(3, shape, seed)
    runs = [
        run(trainer(shape, weights(shape, seed), **options), ids)
        for options in ({}, {"resident": True}, {"resident": False})
    ]
    assert runs[0] == runs[1] == runs[2]
    full, lean, stateless = trainer(shape), trainer(shape, resident=True), trainer(shape, resident=False)
    for batch in ids:
        result = full.train_step(batch)
        lean.train_step(batch)
        wanted = bits({key: result[key] for key in ("flat_gradients", "gradients")})
        assert bits(lean.export_gradients()) == bits(full.export_gradients()) == wanted
        assert bits(stateless.train_step(batch)["gradients"]) == wanted["gradients"]


# Small models run on one thread whatever there are: these are large enough for their work to be shared.
SHARED = [
    LanguageModelConfig(4, 67, 120, 6, 3, 20, 390, 1, 333, chunked_lm_head_v2=chunked) for chunked in (False, True)
]


@few
@example(SHARED[0], 1, 2)
@example(SHARED[1], 2, 3)
@example(SHARED[0], 3, 5)
@given(shapes(), st.integers(0, 99), st.integers(2, 5))
def test_the_number_of_threads_does_not_matter(shape, seed, threads):
    ids = batches(2, shape, seed)
    runs = []
    for count in (1, threads):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOJOLEARN_THREADS", str(count))
            model = trainer(shape, weights(shape, seed), vendor="cpu")
            runs.append(run(model, ids))
            assert model.run_metadata()["device"]["threads"] == count
    assert runs[0] == runs[1]


UNITS = _native.describe_device(_native.vendor_number("cpu"), 0)["detail"].partition("available: ")[2].split()


@few
@given(shapes(), st.integers(0, 99))
def test_the_vector_unit_does_not_matter(shape, seed):
    ids = batches(2, shape, seed)
    runs = []
    for unit in UNITS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOJOLEARN_CPU", unit)
            model = trainer(shape, weights(shape, seed), vendor="cpu")
            runs.append(run(model, ids))
            assert model.run_metadata()["device"]["vector_unit"] == unit
    assert "plain" in UNITS
    assert runs == [runs[0]] * len(UNITS)


@few
@given(shapes(), st.integers(0, 99), st.data())
def test_logits_of_a_row_depend_on_its_real_ids_alone(shape, seed, data):
    rng = np.random.default_rng(seed)
    rows, length = data.draw(st.integers(1, 6)), data.draw(st.integers(1, shape.length))
    lengths = data.draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows))
    ids = rng.integers(0, shape.vocab_size, (rows, length)).astype(np.int32)
    model = trainer(shape)
    logits, ragged = model.logits(ids), model.logits(ids, lengths=lengths)
    padded = ids.copy()
    for row, real in enumerate(lengths):
        padded[row, real:] = -1
    assert bits(model.logits(padded, lengths=np.array(lengths))) == bits(ragged)
    for row, real in enumerate(lengths):
        assert bits(model.logits(ids[row : row + 1])[0]) == bits(logits[row])
        alone = model.logits(ids[row : row + 1, :real])[0]
        assert bits(ragged[row, :real]) == bits(alone) == bits(logits[row, :real])
        assert not ragged[row, real:].tobytes().strip(b"\0")


@few
@given(shapes(), st.integers(0, 99), st.sampled_from([None, False]))
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(shape, seed, resident):
    ids = batches(5, shape, seed)
    whole = run(trainer(shape), ids)
    first = trainer(shape, lr=1e-3, resident=resident)
    for batch in ids[:2]:
        first.train_step(batch)
    first.close()
    second = trainer(data_schedule={"other": 1}, lr=0.5, resident=resident).load_state_dict(first.state_dict())
    losses = [second.train_step(batch)["loss"] for batch in ids[2:]]
    assert losses == whole["losses"][2:]
    assert bits(second.state_dict()) == whole["state"]


def test_looking_does_not_change_the_state():
    model, ids = trainer(), batches(2)
    model.train_step(ids[0])
    before = bits(model.state_dict()), bits(model.export_gradients())
    model.evaluate(ids[1])
    model.logits(ids[1][:, :4], lengths=[1, 3])
    model.next_bytes(ids[1][:, :4])
    model.run_metadata()
    model.attention_stage_report()
    assert before == (bits(model.state_dict()), bits(model.export_gradients()))


def unaligned(values):
    memory = np.zeros(values.nbytes + 1, np.uint8)
    view = memory[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


@pytest.mark.parametrize(
    "change", [unaligned, np.asfortranarray, memoryview], ids=["unaligned", "Fortran", "memoryview"]
)
def test_the_layout_of_inputs_does_not_matter(change):
    ids = batches(3)
    plain = run(trainer(), ids)
    assert run(trainer(parameters=change(weights())), [change(batch) for batch in ids]) == plain
    state = trainer().state_dict()
    for key in ("parameters", "m", "v", "flags"):
        state[key] = change(state[key])
    assert run(trainer(lr=0.5).load_state_dict(state), ids) == plain


# ---- steps are transactions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [None, False])
@pytest.mark.parametrize(
    "extremes", [{"embed": 1e4, "lm_head": 1e38}, {"block0.w_q": 3e38, "block0.w_k": 3e38}], ids=["logits", "scores"]
)
def test_what_overflows_changes_nothing(resident, extremes):
    state = trainer().state_dict()
    for row in LanguageModelTrainer.parameter_registry(SMALL):
        if row["name"] in extremes:
            state["parameters"][row["offset"] : row["offset"] + row["size"]] = extremes[row["name"]]
    model, ids = trainer(resident=resident).load_state_dict(state), batches(1)[0]
    before = bits(model.state_dict())
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            model.train_step(ids)
        with pytest.raises(NonFiniteError):
            model.evaluate(ids)
        with pytest.raises(NonFiniteError):
            model.logits(ids[:, :-1])
        with pytest.raises(NonFiniteError):
            model.next_bytes(ids[:, :-1])
    assert model.step_ == 0
    assert bits(model.state_dict()) == before


def test_an_update_that_overflows_is_rolled_back_and_takes_the_gradient_with_it():
    model, ids = trainer(lr=1e37, weight_decay=0.0), batches(3)
    model.train_step(ids[0])
    model.export_gradients()
    before = bits(model.state_dict())
    with pytest.raises(NonFiniteError):
        model.train_step(ids[1])
    assert bits(model.state_dict()) == before
    with pytest.raises(RuntimeError, match="there is no gradient"):
        model.export_gradients()
    model.load_state_dict(trainer().state_dict()).train_step(ids[2])
    assert described(model.export_gradients(named=False)) == {"flat_gradients": FLAT}


def test_both_documented_exceptions_catch_a_number_that_is_not_finite():
    assert issubclass(NonFiniteError, RuntimeError)
    assert issubclass(NonFiniteError, ValueError)


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_gradients_are_there_between_a_step_and_whatever_ends_the_session():
    model, ids = trainer(), batches(1)[0]
    endings = [lambda: None, model.close, lambda: model.load_state_dict(model.state_dict())]
    for ending in endings:
        ending()
        with pytest.raises(RuntimeError, match="no gradient"):
            model.export_gradients()
        model.evaluate(ids)
        with pytest.raises(RuntimeError, match="no gradient"):
            model.export_gradients()
        model.train_step(ids)
        assert described(model.export_gradients()) == {"flat_gradients": FLAT, "gradients": NAMED}
    stateless = trainer(resident=False)
    stateless.train_step(ids)
    with pytest.raises(RuntimeError, match="with resident=False"):
        stateless.export_gradients()


def test_close_and_reopen_changes_nothing():
    ids = batches(4)
    wanted = run(trainer(), ids)
    model = trainer()
    model.close()
    losses = []
    for batch in ids:
        losses.append(model.train_step(batch)["loss"])
        model.close()
        model.close()
        assert model.attention_stage_report() is None
    assert losses == wanted["losses"]
    assert bits(model.state_dict()) == wanted["state"]


def test_load_state_dict_may_change_everything():
    other = trainer(LanguageModelConfig(), lr=0.5, betas=(0.1, 0.2), eps=1.0, weight_decay=0.0, data_schedule={"b": 2})
    other.train_step(batches(1, LanguageModelConfig())[0])
    model = trainer()
    model.train_step(batches(1)[0])
    state = other.state_dict()
    assert model.load_state_dict(state) is model
    ids = batches(2, LanguageModelConfig())
    assert run(model, ids) == run(other, ids)
    assert model.data_schedule == {"b": 2}
    assert len(model.export_gradients()["gradients"]) == 20


def test_load_state_dict_copies():
    state = trainer().state_dict()
    wanted = bits(state)
    model = trainer(lr=0.5).load_state_dict(state)
    for key in ("parameters", "m", "v", "flags"):
        state[key][:] = 1
    assert bits(model.state_dict()) == wanted


def test_flags_are_carried():
    state = trainer().state_dict()
    state["flags"][::2] = 1
    model = trainer(resident=True).load_state_dict(state)
    result = model.train_step(batches(1)[0])
    assert bits(result["flags"]) == bits(state["flags"]) == bits(model.state_dict()["flags"])


def test_attention_stage_report():
    model = trainer()
    assert model.attention_stage_report() is None
    model.evaluate(batches(1)[0])
    report = model.attention_stage_report()
    assert set(report) == {
        "forward_eager_cells",
        "forward_aexp_cells",
        "backward_eager_cells",
        "forward_eager_bytes",
        "forward_aexp_bytes",
        "backward_eager_bytes",
        "eager_bytes",
        "total_bytes",
        "layers",
    }
    assert report["layers"] == 2
    assert report["eager_bytes"] == report["forward_eager_bytes"] + report["backward_eager_bytes"]
    assert report["total_bytes"] >= report["eager_bytes"] + report["forward_aexp_bytes"] > 0
    stateless = trainer(resident=False)
    stateless.evaluate(batches(1)[0])
    assert stateless.attention_stage_report() is None


def test_run_metadata():
    model = trainer(resident=True)
    closed = model.run_metadata()
    assert closed["device"]["vendor"] in _native.VENDORS[1:]
    model.train_step(batches(1)[0])
    metadata = model.run_metadata()
    assert metadata | {"device": None} == closed | {"device": None, "completed_steps": 1, "next_batch_index": 1}
    assert metadata["device"]["vendor"] == closed["device"]["vendor"]
    assert metadata["device"]["memory_bytes"] > 12 * SMALL.n_total
    assert metadata["profile"] == SMALL.profile
    assert metadata["model_shape"] == SMALL.to_dict()
    assert metadata["config"] == model.state_dict()["config"]
    assert (metadata["device_state_lifetime"], metadata["step_result"]) == ("resident", "lean")
    assert metadata["data_schedule"] == SCHEDULE
    assert metadata["last_export_step"] == 0
    assert model.run_metadata()["last_export_step"] == 1
    assert trainer(resident=False).run_metadata()["device_state_lifetime"] == "call"


def test_a_lost_session_says_so_until_a_state_is_loaded(monkeypatch):
    model, ids = trainer(), batches(3)
    model.train_step(ids[0])
    state = model.export_state()
    model.train_step(ids[1])

    def lose(session, ids):
        raise LostSessionError("the device fell off")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", lose)
        with pytest.raises(
            LostSessionError, match=r"lost at step 2; the last exported state is that of step 1.*fell off"
        ):
            model.train_step(ids[2])
    calls = [
        lambda: model.train_step(ids[2]),
        lambda: model.evaluate(ids[2]),
        lambda: model.logits(ids[2][:, :3]),
        lambda: model.next_bytes(ids[2][:, :3]),
        model.export_state,
        model.state_dict,
        model.export_gradients,
        model.attention_stage_report,
        lambda: model.parameters_,
    ]
    for call in calls:
        with pytest.raises(LostSessionError, match="lost at step 2; the last exported state is that of step 1"):
            call()
    model.close()
    assert model.step_ == 2
    assert model.run_metadata()["completed_steps"] == 2
    with pytest.raises(LostSessionError):
        model.evaluate(ids[2])
    model.load_state_dict(state)
    assert model.step_ == 1
    wanted = trainer().load_state_dict(state)
    assert run(model, ids[1:]) == run(wanted, ids[1:])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [None, True, False])
def test_checkpoints_carry_the_state(tmp_path, resident):
    ids = batches(3)
    model = trainer()
    model.train_step(ids[0])
    model.save_checkpoint(tmp_path / "a.json")
    model.export_checkpoint_binary(tmp_path / "a.mjl")
    restored = [
        LanguageModelTrainer.from_checkpoint(tmp_path / "a.json", resident=resident),
        LanguageModelTrainer.from_checkpoint_bytes((tmp_path / "a.json").read_bytes(), resident=resident),
        LanguageModelTrainer.from_checkpoint_binary(tmp_path / "a.mjl", resident=resident),
    ]
    wanted = run(model, ids[1:])
    for other in restored:
        assert other.step_ == 1
        assert run(other, ids[1:]) == wanted
        assert ("flags" in other.train_step(ids[0])) == (resident is True)
