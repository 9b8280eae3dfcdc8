import re

import keras
import pytest
from keras import layers

import tfmixed
from tfmixed import policy as policy_lib
from tfmixed.convert.choice import Choice

MIXED = ["mixed_float16", "mixed_bfloat16"]
USABLE = (
    "prepare: the policy {!r} cannot be used. Expected one of 'auto', "
    "'mixed_float16', 'mixed_bfloat16' and 'float32', whose variables are "
    "float32: in 16 bits small updates are lost."
)


def policy_map(default="mixed_float16", **entries):
    entries = {k.replace("__", "/"): v for k, v in entries.items()}
    made = keras.dtype_policies.DTypePolicyMap(default)
    for key, value in entries.items():
        made[key] = keras.DTypePolicy(value)
    return made


def dense(name):
    return layers.Dense(2, name=name)


def kept(choice, path, layer=None):
    name = path.rpartition("/")[2]
    return choice.keeps_float32(layer or dense(name), path)


@pytest.fixture
def best(monkeypatch):
    """Makes this machine one for which bfloat16 is best."""
    decide = policy_lib.decide

    def for_another(policy="auto"):
        return decide("mixed_bfloat16" if policy == "auto" else policy)

    monkeypatch.setattr(policy_lib, "decide", for_another)
    return "mixed_bfloat16"


@pytest.mark.filterwarnings("ignore:tfmixed.enable")
@pytest.mark.parametrize("policy", [*MIXED, "float32"])
def test_none_is_what_enable_chose(policy, best):
    tfmixed.enable(policy, verbose=False)
    assert Choice(None).policy.name == policy
    assert Choice("auto").policy.name == best


@pytest.mark.parametrize("policy", [*MIXED, "float32"])
def test_none_is_the_policy_of_a_block(policy, best):
    with tfmixed.precision(policy):
        assert Choice(None).policy.name == policy
        assert Choice("auto").policy.name == best
    assert Choice(None).policy.name == best


@pytest.mark.parametrize("policy", MIXED)
def test_none_is_a_global_policy_that_the_program_set(policy, best):
    keras.config.set_dtype_policy(policy)
    assert Choice(None).policy.name == policy
    assert Choice("auto").policy.name == best


def test_none_is_the_best_for_this_machine_where_nothing_was_said(best):
    choice = Choice(None)
    assert choice.policy.name == best
    assert choice.dtype == "bfloat16"
    # Keras's default says nothing; nobody has asked for float32.
    keras.config.set_dtype_policy("float32")
    assert Choice(None).policy.name == best


@pytest.mark.parametrize("policy", ["float16", "float64"])
def test_a_policy_in_force_may_be_one_that_cannot_be_used(policy):
    with (
        tfmixed.precision(policy),
        pytest.raises(ValueError, match="cannot be used") as raised,
    ):
        Choice(None)
    assert str(raised.value) == USABLE.format(policy)
    tfmixed.enable("float32", verbose=False)
    keras.config.set_dtype_policy(policy)
    with pytest.raises(ValueError, match="cannot be used"):
        Choice(None)


def test_the_choice_of_this_machine_is_that_of_enable():
    assert Choice(None).policy.name == policy_lib.decide("auto").policy
    assert keras.config.dtype_policy().name == "float32"


def test_the_environment_has_its_say(monkeypatch):
    monkeypatch.setenv("TFMIXED_POLICY", "mixed_float16")
    assert Choice(None).policy.name == Choice("auto").policy.name == MIXED[0]
    assert Choice("float32").policy.name == "float32"


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("mixed_float16", "float16"),
        ("mixed_bfloat16", "bfloat16"),
        ("float32", "float32"),
    ],
)
def test_a_policy_by_name_and_as_an_object(policy, dtype):
    for given in (policy, keras.DTypePolicy(policy)):
        choice = Choice(given)
        assert (choice.policy.name, choice.dtype) == (policy, dtype)
        assert choice.is_16_bit == (dtype != "float32")
    assert Choice(policy).fast
    assert not Choice(policy, fast=False).fast


@pytest.mark.parametrize(
    "policy",
    ["float16", "bfloat16", "float64", "int8_from_mixed_bfloat16"],
)
def test_policies_that_cannot_be_used(policy):
    for given in (policy, keras.dtype_policies.get(policy)):
        with pytest.raises(ValueError, match="cannot be used") as raised:
            Choice(given)
        assert str(raised.value) == USABLE.format(policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nonsense", "Cannot convert 'nonsense'"),
        ("int8", "int8"),
        (3, "Received: dtype=3"),
        (["mixed_float16"], r"\['mixed_float16'\]"),
    ],
)
def test_what_is_no_policy_at_all(policy, message):
    with pytest.raises(ValueError, match=message):
        Choice(policy)


def test_an_entry_of_a_map_that_cannot_be_used():
    with pytest.raises(ValueError, match="cannot be used") as raised:
        Choice(policy_map(head="float64"))
    assert str(raised.value) == USABLE.format("float64")
    with pytest.raises(ValueError, match="'float16' cannot be used"):
        Choice(policy_map("float16"))


def test_a_map_is_asked_by_name_path_and_pattern():
    choice = Choice(
        policy_map(
            "mixed_bfloat16",
            head="float32",
            tower__dense="mixed_float16",
            **{"block_[0-9]+": "float32"},
        )
    )
    assert choice.policy.name == "mixed_bfloat16"

    def asked(path):
        found = choice.explicit(dense(path.rpartition("/")[2]), path)
        return found and found.name

    assert asked("head") == asked("tower/head") == "float32"
    assert asked("tower/dense") == "mixed_float16"
    assert asked("dense") is None
    assert asked("block_12") == "float32"
    # The whole of the name has to match.
    assert asked("block_12_conv") is None
    assert asked("my_block_1") is None
    choice.check_all_used()


def test_without_a_map_nothing_is_explicit():
    assert Choice("mixed_float16").explicit(dense("a"), "a") is None
    empty = Choice(policy_map())
    assert empty.explicit(dense("a"), "a") is None
    empty.check_all_used()


def test_keep_float32_by_name_and_path():
    choice = Choice("mixed_float16", "head")
    assert kept(choice, "head")
    assert kept(choice, "tower/head")
    assert not kept(choice, "heads")
    choice = Choice("mixed_float16", ["tower/head"])
    assert kept(choice, "tower/head")
    assert not kept(choice, "head")
    assert not kept(choice, "tower")


def test_a_string_is_a_pattern_of_the_whole_name():
    choice = Choice("mixed_float16", "block_.*")
    assert kept(choice, "block_1")
    assert not kept(choice, "my_block_1")
    # A name may contain what a pattern cannot.
    choice = Choice("mixed_float16", "dense(1")
    assert kept(choice, "dense(1")
    assert not kept(choice, "dense")


def test_a_compiled_pattern_may_match_a_part():
    choice = Choice("mixed_float16", re.compile("block_[12]$"))
    assert kept(choice, "my_block_1")
    assert kept(choice, "tower/block_2")
    assert not kept(choice, "block_3")
    assert not kept(choice, "block_12_conv")


def test_keep_float32_by_class():
    class Mine(layers.Dense):
        pass

    choice = Choice("mixed_float16", layers.Dense)
    assert kept(choice, "a")
    assert kept(choice, "a", Mine(2))
    assert not kept(choice, "a", layers.Flatten())
    assert not kept(Choice("mixed_float16", Mine), "a")


def test_several_entries_of_every_kind():
    entries = ["a", re.compile("^b"), layers.Flatten]
    for given in (entries, tuple(entries), set(entries), iter(entries)):
        choice = Choice("mixed_float16", given)
        assert kept(choice, "a")
        assert kept(choice, "big")
        assert kept(choice, "c", layers.Flatten())
        assert not kept(choice, "c")
        choice.check_all_used()


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        (3, "3 of type int"),
        (None, "None of type NoneType"),
        ([layers.Dense, 2.5], "2.5 of type float"),
        (int, "<class 'int'> of type type"),
        ([["a"]], "['a'] of type list"),
        (b"head", "104 of type int"),
        (
            layers.Dense(1, name="d"),
            "<Dense name=d, built=False> of type Dense",
        ),
    ],
)
def test_entries_of_another_type(entries, shown):
    with pytest.raises(TypeError) as raised:
        Choice("mixed_float16", entries)
    assert str(raised.value) == (
        "prepare: `keep_float32` takes names of layers, regular expressions "
        f"and layer classes. Received: {shown}."
    )


def test_an_entry_that_nothing_matches_is_an_error_with_a_hint():
    choice = Choice("mixed_float16", ["dnse", "head"])
    assert not kept(choice, "tower/dense")
    assert kept(choice, "head")
    with pytest.raises(ValueError, match="dnse") as raised:
        choice.check_all_used()
    assert str(raised.value) == (
        "prepare: 'dnse' in `keep_float32` matches no layer of the model. Did "
        "you mean 'dense'? Layers are matched by name, by path "
        "('encoder/dense') or by class."
    )


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (layers.GRU, "'GRU'"),
        (re.compile("^zz+"), "'^zz+'"),
        ("zz(", "'zz('"),
    ],
)
def test_an_entry_that_is_like_nothing_has_no_hint(entry, shown):
    choice = Choice("mixed_float16", entry)
    assert not kept(choice, "dense")
    with pytest.raises(ValueError, match="matches no layer") as raised:
        choice.check_all_used()
    assert str(raised.value) == (
        f"prepare: {shown} in `keep_float32` matches no layer of the model. "
        "Layers are matched by name, by path ('encoder/dense') or by class."
    )


def test_an_entry_of_a_map_that_nothing_matches():
    choice = Choice(policy_map(head="float32", tail="float32"))
    assert choice.explicit(dense("head"), "head")
    with pytest.raises(ValueError, match="'tail' in `policy` matches no"):
        choice.check_all_used()


def test_two_entries_for_one_layer_are_both_used():
    choice = Choice("mixed_float16", ["head", layers.Dense, re.compile("h")])
    assert kept(choice, "head")
    choice.check_all_used()


def test_the_first_entry_of_a_map_that_matches_wins():
    """Whether it is a name, which is looked up, or an expression."""
    choice = Choice(
        policy_map(
            block__a="float32",
            **{"block__.*": "mixed_bfloat16", "block__b": "float32"},
        )
    )
    a = choice.explicit(dense("a"), "block/a")
    b = choice.explicit(dense("b"), "block/b")
    assert (a.name, b.name) == ("float32", "mixed_bfloat16")
    with pytest.raises(ValueError, match="'block/b' in `policy` matches no"):
        choice.check_all_used()


@pytest.mark.parametrize(
    ("name", "matching"),
    [
        ("plain", ["plain", "pl.*"]),
        ("plainer", ["pl.*"]),
        ("a+b", ["a+b"]),
        ("aab", ["a+b"]),
        ("open[", ["open["]),
        ("other", []),
    ],
)
def test_a_string_is_a_name_and_an_expression(name, matching):
    strings = ["plain", "pl.*", "a+b", "open["]
    unused = [f"never_{i}" for i in range(1000)]
    for entry in strings:
        choice = Choice("mixed_float16", [*unused, entry])
        assert kept(choice, name, layers.Dense(2)) == (entry in matching)
        assert not kept(choice, f"block/{name}", layers.Dense(2))
