"""Digits on photographs: masks, disjoint parts, determinism, messages."""

import re
import sys

import numpy as np
import pytest

from models.data import mnist5k
from models.scenes import scenes


@pytest.fixture(scope="module")
def parts():
    return scenes()


@pytest.fixture(scope="module")
def digits():
    return [images[..., 0] for images, _ in mnist5k()]


def inks(digit):
    """The digit at each of the places that it may have in a scene."""
    for above in range(5):
        for before in range(5):
            ink = np.zeros((32, 32), "float32")
            ink[above : above + 28, before : before + 28] = digit
            yield ink


def ink_of(mask, digit):
    found = [i for i in inks(digit) if np.array_equal(i >= 0.5, mask)]
    assert len(found) == 1, "the mask is not that of the digit"
    return found[0]


def places(crop, hidden):
    """Where a photograph agrees with a crop outside of the hidden pixels."""
    from sklearn.datasets import load_sample_images

    # From a pixel of the margin, which no digit covers.
    for number, photograph in enumerate(load_sample_images().images):
        photograph = photograph.astype("float32") / 255
        tops, lefts = np.nonzero((photograph == crop[0, 0]).all(-1))
        for top, left in zip(tops, lefts, strict=True):
            there = photograph[top : top + 32, left : left + 32]
            if there.shape == crop.shape and np.array_equal(
                there[~hidden], crop[~hidden]
            ):
                yield number, top, left


def test_shapes_and_dtypes(parts):
    for (x, y), count in zip(parts, (1200, 300), strict=True):
        assert x.shape == (count, 32, 32, 3)
        assert y.shape == (count, 32, 32)
        assert x.dtype == np.float32
        assert y.dtype == np.int32
        assert x.min() >= 0
        assert x.max() <= 1
        assert set(np.unique(y)) == {0, 1}
        # A digit covers a tenth of its image.
        assert 0.08 < y.mean() < 0.12


def test_mask_is_that_of_the_digit_and_ink_has_one_colour(parts, digits):
    for (x, y), images in zip(parts, digits, strict=True):
        for scene, mask, digit in zip(x[:40], y, images, strict=False):
            colours = scene[ink_of(mask, digit) > 0.98]
            assert len(colours) > 0
            assert np.ptp(colours, axis=0).max() <= 0.02


def test_parts_share_no_pixel_of_a_photograph(parts, digits):
    columns, numbers = [], set()
    for (x, y), images in zip(parts, digits, strict=True):
        found = []
        for scene, mask, digit in zip(x[:30], y, images, strict=False):
            where = list(places(scene, ink_of(mask, digit) > 0))
            assert where, "no photograph has this crop"
            # A crop of one colour may be found in several places.
            if len(where) == 1:
                found.append(where[0][2])
                numbers.add(where[0][0])
        assert len(found) > 20
        columns.append(found)
    assert max(columns[0]) + 32 <= min(columns[1])
    assert numbers == {0, 1}


def test_parts_share_no_digit(digits):
    train = {digit.tobytes() for digit in digits[0]}
    assert not any(digit.tobytes() in train for digit in digits[1])


def test_same_scenes_at_every_call(parts):
    for first, second in zip(parts, scenes(), strict=True):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 4001}, "`scenes` got `train=4001`.*from 1 to 4000"),
        ({"validation": 0}, "`scenes` got `validation=0`.*from 1 to 1000"),
        ({"train": True}, "train=True"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenes(**arguments)


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    message = re.escape("`scenes` reads its data from the package `sklearn`")
    with pytest.raises(ImportError, match=message):
        scenes()
