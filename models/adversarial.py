"""The training of two networks against each other."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

import tfmixed
from models.frechet import FrechetDistance


@keras.saving.register_keras_serializable(package="tfmixed_models")
class Adversarial(tfmixed.Model):
    """A generator and a discriminator, each with an optimizer of its own.

    A `tfmixed.Model`, because two optimizers in one step need its guard: where
    the loss or the gradients of a network are not finite, its weights and its
    optimizer stay as they were, and so do the statistics of both networks and
    the metrics. Where statistics would not be finite, both networks stay.

    Calling it makes images. `fit` takes random vectors and real images,
    `evaluate` returns how far the images it makes are from the real ones.

    Args:
        generator: built model from vectors to images.
        discriminator: built model from images to one logit, positive for
            what it takes for real.
        **kwargs: `name` and `dtype` of the model.

    Example:

    ```python
    model = Adversarial(generator, discriminator)
    model.compile("adam")
    model.fit(latents, images)
    ```
    """

    def __init__(
        self, generator: Any, discriminator: Any, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.generator = generator
        self.discriminator = discriminator
        self.generator_loss = keras.metrics.Mean("generator_loss")
        self.discriminator_loss = keras.metrics.Mean("discriminator_loss")
        self.distance = FrechetDistance(generator.output_shape[1:])
        self.build(generator.input_shape)

    def compile(  # type: ignore[override]
        self, optimizer: Any = "adam", **kwargs: Any
    ) -> None:
        """Configures the training.

        Args:
            optimizer: that of the generator. The discriminator gets one with
                the same settings.
            **kwargs: as of `tfmixed.Model.compile`.
        """
        super().compile(optimizer, **kwargs)
        # With the wrapper that skips steps, if it has one.
        config = self.optimizer.get_config()
        self.discriminator_optimizer = type(self.optimizer).from_config(config)
        for own, network in self._parts():
            own.build(network.trainable_variables)

    def _parts(self) -> Iterator[tuple[Any, Any]]:
        yield self.optimizer, self.generator
        yield self.discriminator_optimizer, self.discriminator

    def call(self, latents: Any, training: bool = False) -> Any:
        """Makes an image of each vector."""
        return self.generator(latents, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains both networks on the same images."""
        latents, images, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            losses = self._compute_losses(latents, images)
            scaled = [
                optimizer.scale_loss(loss)
                for (optimizer, _), loss in zip(
                    self._parts(), losses, strict=True
                )
            ]
        for (optimizer, network), loss in zip(
            self._parts(), scaled, strict=True
        ):
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        metrics = (self.generator_loss, self.discriminator_loss)
        for metric, loss in zip(metrics, losses, strict=True):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in metrics}

    def _compute_losses(self, latents: Any, images: Any) -> tuple[Any, Any]:
        """Computes the loss of the generator and that of the discriminator."""
        made = self.generator(latents, training=True)
        # Batches of their own, so that the statistics of one kind do not give
        # the other away.
        real = self.discriminator(images, training=True)
        fake = self.discriminator(made, training=True)
        return (
            ops.mean(ops.softplus(-fake)),
            ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(fake)),
        )

    def test_step(self, data: Any) -> dict[str, Any]:
        """Compares images that were made with real ones."""
        latents, images, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.distance.update_state(images, self(latents, training=False))
        return {self.distance.name: self.distance.result()}

    def get_config(self) -> dict[str, Any]:
        """Returns the two networks, and the name."""
        return {
            **super().get_config(),
            "name": self.name,
            "generator": keras.saving.serialize_keras_object(self.generator),
            "discriminator": keras.saving.serialize_keras_object(
                self.discriminator
            ),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> Any:
        """Makes a model of what `get_config` returned."""
        config = dict(config)
        for name in ("generator", "discriminator"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)
