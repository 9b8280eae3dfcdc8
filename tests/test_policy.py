import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmixed import _keras
from tfmixed import policy as policy_lib
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe
from tfmixed.hardware import hardware
from tfmixed.policy import check_policy_in_force
from tfmixed.policy import choose
from tfmixed.policy import current_plan
from tfmixed.policy import disable
from tfmixed.policy import enable
from tfmixed.policy import precision

ON_GPU = bool(tf.config.list_physical_devices("GPU"))
PLAIN = Cpu("Intel Xeon", "Linux", ("avx2",), onednn=True)
GENOA = Cpu("AMD EPYC", "Linux", ("avx512_bf16",), onednn=True)
SWITCHED_OFF = Cpu("AMD EPYC", "Linux", ("avx512_bf16",), False, "0")
T4 = Device("GPU", "Tesla T4", (7, 5))
H100 = Device("GPU", "NVIDIA H100", (9, 0))
P100 = Device("GPU", "Tesla P100", (6, 0))
AMD = Device("GPU", "AMD Instinct MI250X")
TPU = Device("TPU", "TPU v4")


@pytest.fixture(autouse=True)
def _disabled():
    disable()
    yield
    disable()


def in_thread(function):
    """Runs `function` in a thread of its own and returns what it returns."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def global_policy():
    return keras.config.dtype_policy().name


class TestChoose:
    @pytest.mark.parametrize(
        ("devices", "cpu", "policy", "xla", "words"),
        [
            ((T4,), PLAIN, "mixed_float16", True, "Tesla T4 (compute"),
            ((H100,), PLAIN, "mixed_float16", True, "tensor cores"),
            ((TPU,), PLAIN, "mixed_bfloat16", True, "no loss scaling"),
            ((), GENOA, "mixed_bfloat16", False, "avx512_bf16"),
            ((), PLAIN, "float32", False, "six times slower"),
            ((), SWITCHED_OFF, "float32", False, "TensorFlow cannot use"),
            ((P100,), GENOA, "float32", True, "GPU is too old"),
            ((P100,), GENOA, "float32", True, "capability 6.0"),
            ((P100,), GENOA, "float32", True, "begin at 7.0"),
            ((AMD,), GENOA, "float32", False, "no compute capability"),
            ((H100, P100), PLAIN, "float32", True, "Tesla P100"),
        ],
    )
    def test_plan(self, devices, cpu, policy, xla, words):
        plan = choose(describe(devices, cpu))
        assert plan.policy == policy
        assert plan.jit_compile == xla
        assert plan.loss_scaling == (policy == "mixed_float16")
        assert words in " ".join(plan.reasons)
        assert global_policy() == "float32"

    def test_text_is_one_wrapped_paragraph_with_the_findings(self):
        plan = choose(describe((), SWITCHED_OFF))
        lines = str(plan).splitlines()
        assert lines[0].startswith("tfmixed: float32, without loss scaling")
        assert all(0 < len(line) < 80 for line in lines)
        assert "TF_ENABLE_ONEDNN_OPTS=0" in " ".join(lines)


class TestEnable:
    def test_auto_follows_this_machine(self, capsys):
        plan = enable()
        assert plan == choose(hardware())
        assert global_policy() == plan.policy
        assert capsys.readouterr().out == f"{plan}\n"
        assert current_plan() is plan

    def test_prints_nothing_when_not_verbose(self, capsys):
        enable("float32", verbose=False)
        assert capsys.readouterr().out == ""

    @pytest.mark.skipif(ON_GPU, reason="float16 may be fast on a GPU")
    def test_slow_policy_is_obeyed_with_a_warning(self):
        with pytest.warns(UserWarning, match="six times slower"):
            plan = enable("mixed_float16", verbose=False)
        assert plan.loss_scaling
        assert global_policy() == "mixed_float16"

    @pytest.mark.skipif(ON_GPU, reason="float16 may be fast on a GPU")
    def test_warning_as_error_changes_nothing(self):
        with pytest.raises(UserWarning, match="was forced"):
            enable("mixed_float16", verbose=False)
        assert global_policy() == "float32"
        assert "not called" in current_plan().reasons[0]

    @pytest.mark.parametrize(
        ("policy", "hint"),
        [
            ("mixed_floot16", "Did you mean 'mixed_float16'?"),
            ("bfloat16", "Did you mean 'mixed_bfloat16'?"),
            ("float16", "Did you mean 'mixed_float16'?"),
            ("Auto", "Did you mean 'auto'?"),
            (16, "Expected one of 'auto', 'mixed_float16'"),
            (None, "'mixed_bfloat16', 'float32'."),
        ],
    )
    def test_unknown_policy_names_value_and_way_out(self, policy, hint):
        enable("float32", verbose=False)
        before = current_plan()
        with pytest.raises(ValueError, match="Unknown policy") as caught:
            enable(policy)
        assert repr(policy) in str(caught.value)
        assert hint in str(caught.value)
        assert current_plan() is before

    def test_environment_overrides(self, monkeypatch):
        monkeypatch.setenv("TFMIXED_POLICY", "float32")
        plan = enable("mixed_float16", verbose=False)
        assert plan.policy == "float32"
        assert "TFMIXED_POLICY=float32 overrides" in plan.reasons[0]
        assert "'mixed_float16'" in plan.reasons[0]

    def test_environment_auto_keeps_the_reasons_of_the_choice(
        self, monkeypatch
    ):
        monkeypatch.setenv("TFMIXED_POLICY", "auto")
        plan = enable("float32", verbose=False)
        chosen = choose(hardware())
        assert plan.policy == chosen.policy
        assert plan.reasons[1:] == chosen.reasons

    def test_empty_environment_variable_is_none(self, monkeypatch):
        monkeypatch.setenv("TFMIXED_POLICY", "")
        assert enable("float32", verbose=False).policy == "float32"

    def test_bad_environment_names_the_variable(self, monkeypatch):
        monkeypatch.setenv("TFMIXED_POLICY", "float61")
        with pytest.raises(ValueError, match="variable TFMIXED_POLICY"):
            enable("float32", verbose=False)


class TestDisable:
    def test_restores_what_stood_before_the_first_enable(self):
        keras.config.set_dtype_policy("mixed_float16")
        enable("float32", verbose=False)
        enable(verbose=False)
        disable()
        assert global_policy() == "mixed_float16"
        disable()
        assert global_policy() == "mixed_float16"

    def test_without_enable_does_nothing(self):
        keras.config.set_dtype_policy("float64")
        disable()
        assert global_policy() == "float64"
        keras.config.set_dtype_policy("float32")

    def test_ends_the_watch(self):
        enable_other_than_default()
        disable()
        keras.utils.clear_session(free_memory=False)
        assert not check_policy_in_force()
        assert global_policy() == "float32"


def enable_other_than_default():
    """Enables a policy that Keras's default is not, whatever machine this is.

    Returns:
        The plan.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return enable("mixed_bfloat16", verbose=False)


class TestPolicyInForce:
    def test_is_set_again_after_clear_session_and_told_once(self):
        plan = enable_other_than_default()
        keras.utils.clear_session(free_memory=False)
        with pytest.warns(UserWarning, match="clear_session") as caught:
            assert check_policy_in_force()
        assert len(caught) == 1
        assert "Layers that were built in between" in str(caught[0].message)
        assert global_policy() == "mixed_bfloat16"
        assert not check_policy_in_force()
        assert current_plan() is plan
        keras.utils.clear_session(free_memory=False)
        with pytest.warns(UserWarning, match="clear_session"):
            assert check_policy_in_force()

    def test_also_when_a_layer_was_built_in_between(self):
        plan = enable_other_than_default()
        keras.utils.clear_session(free_memory=False)
        assert layers.Dense(1).dtype_policy.name == "float32"
        with pytest.warns(UserWarning, match="clear_session"):
            assert current_plan() is plan
        assert layers.Dense(1).dtype_policy.name == "mixed_bfloat16"

    def test_is_set_again_in_another_thread(self):
        plan = enable_other_than_default()

        def work():
            with pytest.warns(UserWarning, match="per thread"):
                found = current_plan()
            return found, global_policy(), check_policy_in_force()

        assert in_thread(work) == (plan, "mixed_bfloat16", False)

    def test_thread_follows_a_later_enable(self):
        def work():
            enable_other_than_default()
            in_thread(lambda: enable("float32", verbose=False))
            with pytest.warns(UserWarning, match="'float32' again"):
                assert check_policy_in_force()
            return global_policy()

        assert in_thread(work) == "float32"

    @pytest.mark.parametrize("own", ["float32", "mixed_float16", "float64"])
    def test_policy_that_the_program_set_itself_wins(self, own):
        enable_other_than_default()
        keras.config.set_dtype_policy(own)
        assert not check_policy_in_force()
        assert global_policy() == own
        plan = current_plan()
        assert plan.policy == own
        assert plan.loss_scaling == (own == "mixed_float16")
        assert "after tfmixed.enable had chosen" in plan.reasons[0]

    def test_own_policy_after_clear_session_wins_unless_it_is_the_default(self):
        enable_other_than_default()
        keras.utils.clear_session(free_memory=False)
        keras.config.set_dtype_policy("mixed_float16")
        assert not check_policy_in_force()
        # Now that it was seen, the default is a choice as well.
        keras.config.set_dtype_policy("float32")
        assert not check_policy_in_force()
        assert global_policy() == "float32"

    def test_float32_plan_needs_no_word_after_clear_session(self):
        plan = enable("float32", verbose=False)
        keras.utils.clear_session(free_memory=False)
        assert not check_policy_in_force()
        assert current_plan() is plan

    def test_without_enable_current_plan_describes_keras(self):
        keras.config.set_dtype_policy("mixed_float16")
        plan = current_plan()
        assert plan.policy == "mixed_float16"
        assert plan.loss_scaling
        assert "tfmixed.enable was not called" in plan.reasons[0]
        assert plan.hardware == hardware()


class TestPrecisionGlobally:
    def test_sets_and_restores(self):
        with precision("mixed_bfloat16"):
            assert global_policy() == "mixed_bfloat16"
            with precision(keras.DTypePolicy("float64")):
                assert global_policy() == "float64"
            assert global_policy() == "mixed_bfloat16"
        assert global_policy() == "float32"

    def test_restores_after_an_exception(self):
        keras.config.set_dtype_policy("mixed_float16")
        with pytest.raises(KeyError), precision("float32"):
            raise KeyError
        assert global_policy() == "mixed_float16"

    def test_restores_the_policy_object(self):
        policy = keras.dtype_policies.DTypePolicyMap()
        keras.config.set_dtype_policy(policy)
        with precision("float16"):
            pass
        assert keras.config.dtype_policy() is policy

    def test_is_of_this_thread_alone(self):
        with precision("mixed_bfloat16"):
            assert in_thread(global_policy) == "float32"

        def work():
            with precision("mixed_float16"):
                return global_policy(), current_plan().policy

        assert in_thread(work) == ("mixed_float16", "mixed_float16")

    def test_the_plan_waits_outside(self):
        plan = enable_other_than_default()
        with precision("float32"):
            assert not check_policy_in_force()
            inside = current_plan()
        assert inside.policy == "float32"
        assert "tfmixed.precision block" in inside.reasons[0]
        assert current_plan() is plan

    def test_clear_session_inside_does_not_lose_the_plan(self):
        plan = enable_other_than_default()
        with precision("float32"):
            keras.utils.clear_session(free_memory=False)
        assert current_plan() is plan

    def test_new_thread_is_still_told_after_a_block(self):
        enable_other_than_default()

        def work():
            with precision("float32"):
                pass
            with pytest.warns(UserWarning, match="per thread"):
                return check_policy_in_force()

        assert in_thread(work)

    def test_enable_and_disable_inside_outlast_it(self):
        with precision("float32"):
            enable_other_than_default()
        assert global_policy() == "mixed_bfloat16"
        with precision("float64"):
            disable()
        assert global_policy() == "float32"

    @pytest.mark.parametrize(
        "policy", [None, "auto", "mixed_float61", "int8", 3.5, object()]
    )
    def test_bad_policy_changes_nothing(self, policy):
        model = small_model()
        with (
            pytest.raises(ValueError, match="does not know the policy"),
            precision(policy, model=model),
        ):
            pytest.fail("the block must not be entered")
        assert global_policy() == "float32"
        assert model.layers[-1].dtype_policy.name == "float32"


class CountsTraces(layers.Layer):
    """Counts how often Python runs it, which is once a trace."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.traces = 0

    def call(self, inputs):
        self.traces += 1
        return inputs


def small_model():
    model = keras.Sequential([layers.Dense(3), CountsTraces(), layers.Dense(1)])
    model.build((None, 4))
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(8, activation="gelu"), layers.Dense(4)]
        self.heads = {"only": layers.Dense(1)}

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.heads["only"](keras.ops.mean(inputs, axis=1))


def functional():
    inputs = keras.Input((6, 8))
    x = layers.Normalization(mean=0.3, variance=0.7)(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x)
    cells = [layers.LSTMCell(5), layers.GRUCell(5)]
    x = layers.RNN(cells, return_sequences=True)(x)
    x = layers.Bidirectional(layers.LSTM(3))(x)
    x = keras.ops.multiply(x, 3.0)
    return keras.Model(inputs, layers.Dense(1)(x))


def sequential():
    return keras.Sequential(
        [
            layers.Conv1D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def nested():
    inputs = keras.Input((6, 8))
    shared = sequential()
    backwards = keras.ops.flip(inputs, axis=1)
    x = layers.add([shared(inputs), shared(backwards), Subclassed()(inputs)])
    return keras.Model(inputs, layers.Dense(1)(x))


BUILDERS = [functional, sequential, Subclassed, nested]


@pytest.fixture
def batch():
    return np.random.default_rng(0).normal(size=(8, 6, 8)).astype("float32")


def twins(builder, policy, batch):
    """The same model in `policy` and in float32, with the same weights."""
    with precision(policy):
        model = builder()
        model(batch)
    reference = builder()
    reference(batch)
    reference.set_weights(model.get_weights())
    model.compile("sgd", "mse", jit_compile=False)
    reference.compile("sgd", "mse", jit_compile=False)
    return model, reference


def policies(model):
    return [
        (layer, _keras.layer_policy(layer), _keras.input_dtype(layer))
        for layer in _keras.flatten_layers(model)
    ]


def same(before, after):
    return len(before) == len(after) and all(
        old[0] is new[0] and old[1] is new[1] and old[2] == new[2]
        for old, new in zip(before, after, strict=True)
    )


class TestPrecisionOfModel:
    @pytest.mark.parametrize(
        ("builder", "policy"),
        [
            *((builder, "mixed_bfloat16") for builder in BUILDERS),
            (sequential, "mixed_float16"),
        ],
    )
    def test_float32_inside_is_really_float32(self, builder, policy, batch):
        model, reference = twins(builder, policy, batch)
        expected = reference.predict(batch, verbose=0)
        low = model.predict(batch, verbose=0)
        before = policies(model)
        with precision("float32", model=model):
            inside = model.predict(batch, verbose=0)
            eager = model(batch)
            assert global_policy() == "float32"
        assert inside.dtype == "float32"
        np.testing.assert_array_equal(inside, expected)
        np.testing.assert_allclose(eager, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(low.astype("float32") - expected).max() > 1e-5
        assert same(before, policies(model))
        np.testing.assert_array_equal(model.predict(batch, verbose=0), low)

    @pytest.mark.parametrize("builder", BUILDERS[1:])
    def test_16_bit_inside_is_really_16_bit(self, builder, batch):
        model, reference = twins(builder, "mixed_bfloat16", batch)
        expected = model.predict(batch, verbose=0)
        before = policies(reference)
        with precision("mixed_bfloat16", model=reference):
            inside = reference.predict(batch, verbose=0)
        assert inside.dtype == expected.dtype
        np.testing.assert_allclose(
            inside.astype("float32"), expected.astype("float32"), atol=0.02
        )
        assert same(before, policies(reference))

    def test_functions_come_back_without_a_retrace(self):
        model = small_model()
        counter = model.layers[1]
        x, y = np.ones((8, 4)), np.ones((8, 1))
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(x, y, verbose=0)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        functions = _keras.compiled_functions(model)
        traces = counter.traces
        with precision("mixed_bfloat16", model=model):
            assert set(_keras.compiled_functions(model).values()) == {None}
            model.evaluate(x, y, verbose=0)
        assert counter.traces > traces
        assert _keras.compiled_functions(model) == functions
        traces = counter.traces
        model.fit(x, y, verbose=0)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        assert counter.traces == traces

    def test_compile_inside_drops_the_old_functions(self):
        model = small_model()
        x, y = np.ones((8, 4)), np.ones((8, 1))
        model.compile("sgd", "mse", jit_compile=False)
        model.evaluate(x, y, verbose=0)
        with precision("mixed_bfloat16", model=model):
            model.compile("sgd", "mae", jit_compile=False)
        assert model.test_function is None
        loss = model.evaluate(x, y, verbose=0)
        expected = np.abs(model.predict(x, verbose=0) - y).mean()
        assert loss == pytest.approx(expected, rel=1e-5)

    def test_restores_after_an_exception(self, batch):
        model, _ = twins(sequential, "mixed_bfloat16", batch)
        before = policies(model)
        with pytest.raises(KeyError), precision("float32", model=model):
            raise KeyError
        assert same(before, policies(model))
        assert global_policy() == "float32"

    def test_nests_on_one_model(self, batch):
        model, _ = twins(sequential, "mixed_bfloat16", batch)
        before = policies(model)
        with precision("float32", model=model):
            between = policies(model)
            with precision("mixed_float16", model=model):
                assert model.predict(batch, verbose=0).dtype == "float16"
            assert same(between, policies(model))
            assert model.predict(batch, verbose=0).dtype == "float32"
        assert same(before, policies(model))

    def test_variables_keep_dtype_and_values(self, batch):
        model, _ = twins(nested, "mixed_bfloat16", batch)
        weights = model.get_weights()
        with precision("float32", model=model):
            model.evaluate(batch, np.ones((8, 1)), verbose=0)
        assert {w.dtype for w in model.weights} <= {"float32", "int64"}
        for old, new in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)

    def test_training_inside_works(self, batch):
        model, _ = twins(sequential, "mixed_bfloat16", batch)
        before = policies(model)
        weights = model.get_weights()
        with precision("float32", model=model):
            model.fit(batch, np.ones((8, 1)), verbose=0)
        model.fit(batch, np.ones((8, 1)), verbose=0)
        assert same(before, policies(model))
        assert np.abs(weights[0] - model.get_weights()[0]).max() > 0

    def test_float32_layers_of_a_mixed_model_stay_float32(self):
        head = layers.Dense(1, dtype="float32")
        body = layers.Dense(3, dtype="mixed_float16")
        model = keras.Sequential([body, head])
        model.build((None, 4))
        with precision("mixed_bfloat16", model=model):
            assert body.compute_dtype == "bfloat16"
            assert head.compute_dtype == "float32"
        with precision("float32", model=model):
            assert body.compute_dtype == "float32"
        assert body.compute_dtype == "float16"

    def test_quantized_layers_stay_quantized(self):
        model = small_model()
        model.layers[0].quantize("int8")
        quantized, plain = model.layers[0], model.layers[2]
        x = np.ones((2, 4), "float32")
        expected = model(x)
        with precision("mixed_bfloat16", model=model):
            assert quantized.quantization_mode == "int8"
            assert plain.compute_dtype == "bfloat16"
            assert model(x).dtype == tf.bfloat16
        assert quantized.dtype_policy.name == "int8_from_float32"
        np.testing.assert_array_equal(model(x), expected)

    def test_policy_map_comes_back_untouched(self):
        policy_map = keras.dtype_policies.DTypePolicyMap(
            "mixed_bfloat16", {"m/b": keras.DTypePolicy("float32")}
        )
        model = keras.Sequential(
            [
                layers.Dense(3, name="a", dtype=policy_map),
                layers.Dense(1, name="b", dtype=policy_map),
            ],
            name="m",
        )
        model.build((None, 4))
        a, b = model.layers
        assert (a.compute_dtype, b.compute_dtype) == ("bfloat16", "float32")
        with precision("float32", model=model):
            assert (a.compute_dtype, b.compute_dtype) == ("float32", "float32")
        assert a.dtype_policy is policy_map
        assert b.dtype_policy is policy_map
        assert (a.compute_dtype, b.compute_dtype) == ("bfloat16", "float32")
        assert len(policy_map) == 1

    def test_adapted_normalization_is_exact_inside(self):
        data = np.float32([[1000.0], [1001.0], [1002.0]])
        with precision("mixed_bfloat16"):
            layer = layers.Normalization()
            layer.adapt(data)
            model = keras.Sequential([layer])
        coarse = model(data)
        with precision("float32", model=model):
            fine = model(data)
        np.testing.assert_allclose(fine[:, 0], [-1.2247, 0, 1.2247], atol=1e-3)
        np.testing.assert_array_equal(model(data), coarse)

    def test_ids_stay_integers(self):
        model = keras.Sequential(
            [
                keras.Input((), dtype="int64"),
                layers.IntegerLookup(vocabulary=[2049, 70000]),
                layers.Embedding(3, 2),
            ]
        )
        ids = np.array([70000, 2049, 5])
        expected = model(ids)
        with precision("mixed_bfloat16", model=model):
            inside = model(ids)
        assert inside.dtype == tf.bfloat16
        np.testing.assert_allclose(
            keras.ops.cast(inside, "float32"), expected, atol=1e-3
        )

    def test_float64_and_integer_layers_stay(self):
        exact = layers.Dense(1, dtype="float64")
        ids = layers.Hashing(5)
        model = keras.Sequential([layers.Dense(3), exact, ids])
        with precision("mixed_bfloat16", model=model):
            assert model.layers[0].compute_dtype == "bfloat16"
            assert exact.compute_dtype == "float64"
            assert ids.compute_dtype == "int64"

    def test_layers_made_inside_follow_their_parent(self, batch):
        for builder in (sequential, Subclassed):
            model = builder()
            with precision("mixed_bfloat16", model=model):
                model(batch)
            for _, policy, input_dtype in policies(model):
                assert policy.name == "float32"
                assert input_dtype in (None, "float32")

    def test_not_a_model(self):
        with (
            pytest.raises(TypeError, match="expects a Keras model.*'resnet'"),
            precision("float32", model="resnet"),
        ):
            pytest.fail("the block must not be entered")
        assert global_policy() == "float32"

    def test_quantized_policy_is_refused(self):
        model = small_model()
        with (
            pytest.raises(ValueError, match="Use model.quantize"),
            precision("int8_from_float32", model=model),
        ):
            pytest.fail("the block must not be entered")
        assert global_policy() == "float32"
        assert model.layers[0].quantization_mode is None


def test_public_names_exist():
    for name in policy_lib.__all__:
        assert getattr(policy_lib, name).__doc__
