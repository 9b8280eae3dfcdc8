import re
import warnings

import keras
import pytest
from support import arrays
from support import batches
from support import number
from support import slow
from support import small_model
from support import train_on

import tfmixed


class TestTelling:
    def run(self, model_class=tfmixed.Model, bad=(), count=20, **scale):
        model = small_model(model_class)
        algorithm = scale.pop("loss_scale", None)
        optimizer = tfmixed.LossScaleOptimizer(
            "sgd", algorithm or tfmixed.DynamicLossScale(**scale)
        )
        model.compile(optimizer, "mse")
        return lambda: model.fit(
            *arrays(count, bad=bad), batch_size=8, shuffle=False, verbose=0
        )

    @pytest.mark.parametrize("model_class", [keras.Model, *slow(tfmixed.Model)])
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"bad": range(0, 20, 2)},
                "10 of 20 training steps were skipped because a gradient or "
                "the loss was not finite; the loss scale is now 32. In the "
                "first steps that is how the scale finds its level",
            ),
            (
                {"bad": (18, 19)},
                "The last 2 steps were among them, so it is still falling: "
                "train on, or start lower with tfmixed.DynamicLossScale("
                "initial=8192)",
            ),
            (
                {"bad": (3,), "initial": 4.0, "minimum": 4.0},
                "1 of 20 training steps was skipped",
            ),
            (
                {"bad": (3,), "initial": 8.0, "minimum": 4.0},
                "That is its minimum, so a smaller scale is no cure",
            ),
            ({"bad": (3,), "loss_scale": 8.0}, "It does not adapt: use a sm"),
            ({"bad": (3,), "loss_scale": "none"}, "No loss scaling is in use"),
        ],
    )
    def test_fit_tells_of_skips(self, model_class, arguments, message):
        fit = self.run(model_class, **arguments)
        with pytest.warns(UserWarning, match=re.escape(message)) as caught:
            fit()
        assert caught[0].filename == __file__

    def test_ordinary_calibration_is_no_news(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.run(bad=(0,))()
        assert not [w for w in caught if "skipped" in str(w.message)]

    def test_each_skip_is_told_once(self):
        fit = self.run(bad=(0, 1, 2))
        for _ in range(2):
            with pytest.warns(UserWarning, match="3 of 20 training steps"):
                fit()

    def test_skips_before_a_save_are_not_told_after_it(self, tmp_path):
        model = small_model(tfmixed.Model)
        model.compile(tfmixed.LossScaleOptimizer("sgd", 8.0), "mse")
        for batch in batches(2, bad=(0,)):
            train_on(model, *batch)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert number(loaded.optimizer.skipped_steps) == 1
        loaded.fit(*arrays(2), verbose=0)

    def test_each_epoch_tells_of_its_own(self):
        """Not only the last: a long training is to be stopped in time."""
        told = []

        class Watch(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                told.append(len(caught))

        # Its optimizer is replaced in the first step, which finds float16.
        model = small_model(tfmixed.Model)
        model.compile("sgd", "mse")
        model.layers[1].dtype_policy = "mixed_float16"
        with pytest.warns(UserWarning, match="1 of 2 training step") as caught:
            # Positional, as somebody may write it; ours comes after theirs.
            model.fit(*arrays(2, bad=(0,)), 8, 3, 0, Watch(), shuffle=False)
        assert told == [0, 1, 2]
        assert len(caught) == 3
