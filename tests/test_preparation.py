import dataclasses
import gc

import keras
import pytest
from keras import layers

import tfmixed
from tfmixed.preparation import Account
from tfmixed.preparation import Change
from tfmixed.preparation import Preparation

HEAD = "It gives the output."
WHY = "This is where 16 bits pay."


def change(layer, after="mixed_float16", reason=WHY, kind="Dense", **options):
    return Change(layer, kind, "float32", after, reason, **options)


def preparation(*changes, policy="mixed_float16", **options):
    return Preparation("mine", policy, changes, **options)


def test_a_line_for_each_reason():
    assert str(
        preparation(
            change("in"),
            change("head", "float32", HEAD),
            change("tower/norm", "float32", "A sum.", "BatchNormalization"),
            change("probabilities", "float32", HEAD, "Softmax"),
            change("attention", reason="It scales.", kind="Mha", twin=True),
            notes=("One thing.", "Another."),
        )
    ) == (
        "Model 'mine' is prepared for mixed_float16: 2 of 5 layers compute in "
        "16 bits.\n"
        "  float32: head, probabilities (Dense, Softmax)\n"
        "    It gives the output.\n"
        "  float32: tower/norm (BatchNormalization)\n"
        "    A sum.\n"
        "  twin: attention (Mha)\n"
        "    It scales.\n"
        "  Note: One thing.\n"
        "  Note: Another."
    )


def test_one_reason_for_several_outcomes():
    why = "The policy map says so."
    assert str(
        preparation(
            change("a", "float32", why),
            change("b", "mixed_bfloat16", why),
            change("c", "float32", why),
            change("d", "mixed_float16", why, twin=True),
            change("e", "int8_from_float32", why),
        )
    ) == (
        "Model 'mine' is prepared for mixed_float16: 2 of 5 layers compute in "
        "16 bits.\n"
        "  float32: a, c (Dense)\n"
        "    The policy map says so.\n"
        "  mixed_bfloat16: b (Dense)\n"
        "    The policy map says so.\n"
        "  twin: d (Dense)\n"
        "    The policy map says so.\n"
        "  int8_from_float32: e (Dense)\n"
        "    The policy map says so."
    )


def test_a_long_list_is_cut():
    def listed(count):
        changes = [change(f"d{n}", "float32", HEAD) for n in range(count)]
        return str(preparation(*changes)).splitlines()[1]

    assert listed(1) == "  float32: d0 (Dense)"
    assert listed(4) == "  float32: d0, d1, d2, d3 (Dense)"
    assert listed(5) == "  float32: d0, d1, d2, d3 and 1 more (Dense)"
    assert listed(9) == "  float32: d0, d1, d2, d3 and 5 more (Dense)"


def test_nothing_to_say():
    assert str(preparation()) == (
        "Model 'mine' is prepared for mixed_float16: 0 of 0 layers compute in "
        "16 bits."
    )
    assert str(preparation(change("a"), change("b"))) == (
        "Model 'mine' is prepared for mixed_float16: 2 of 2 layers compute in "
        "16 bits."
    )


def test_float32_is_said_to_be_what_it_is():
    text = str(preparation(change("a", "float32"), policy="float32"))
    assert text == (
        "Model 'mine' is prepared for float32: 0 of 1 layers compute in 16 "
        "bits."
    )


def test_it_cannot_be_changed_and_compares_by_value():
    one = preparation(change("a"), notes=("b",), in_place=True)
    assert one == preparation(change("a"), notes=("b",), in_place=True)
    assert one != preparation(change("a"), notes=("b",))
    assert hash(one) == hash(dataclasses.replace(one))
    for name in ("model", "changes", "in_place"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.changes[0].after = "float32"


def test_a_later_word_replaces_an_earlier_in_its_place():
    account = Account()
    layer, other = object(), object()
    account.record(layer, change("a"))
    account.record(other, change("b"))
    account.record(layer, change("a", "float32", HEAD))
    assert account.of(layer).reason == HEAD
    assert account.of(object()) is None
    closed = account.close("mine", "mixed_float16", True)
    assert closed == preparation(
        change("a", "float32", HEAD), change("b"), in_place=True
    )


def test_a_note_is_taken_once():
    account = Account()
    for text in ("a", "b", "a"):
        account.note(text)
    assert account.close("m", "float32", False).notes == ("a", "b")


def test_what_was_recorded_stays_alive_as_long_as_the_account():
    """Ids of dead objects would come again."""
    account = Account()
    for number in range(100):
        account.record(layers.Flatten(), change(f"f{number}"))
        gc.collect(0)
    assert len(account.close("m", "float32", False).changes) == 100


def test_a_closed_account_does_not_change_any_more():
    account = Account()
    layer = object()
    account.record(layer, change("a"))
    closed = account.close("m", "float32", False)
    account.record(layer, change("z"))
    account.note("late")
    assert closed.changes == (change("a"),)
    assert closed.notes == ()


def test_the_account_of_a_real_model_is_readable():
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="body")(inputs)
    x = layers.UnitNormalization(name="norm")(x)
    x = layers.Activation("relu", name="relu")(x)
    outputs = layers.Dense(2, "softmax", name="head")(x)
    model = keras.Model(inputs, outputs, name="small")
    _, report = tfmixed.prepare(model, "mixed_bfloat16", report=True)
    assert str(report) == (
        "Model 'small' is prepared for mixed_bfloat16: 2 of 4 layers compute "
        "in 16 bits.\n"
        "  float32: norm (UnitNormalization)\n"
        "    Means, variances and norms are sums of many values or squares: "
        "inputs above 256 overflow float16 when they are squared.\n"
        "  float32: head (Dense)\n"
        "    It gives the output of the model: losses, probabilities and "
        "metrics need float32."
    )
    assert [one.layer for one in report.changes] == [
        "body",
        "norm",
        "relu",
        "head",
    ]
    assert report.changes[0].before == "float32"
