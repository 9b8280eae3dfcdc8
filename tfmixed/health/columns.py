"""What is measured of each tensor: columns of one array, a row a tensor."""

import enum

# Magnitudes are counted by their binary exponent, from 2^-64 to 2^31; what is
# beyond counts at the edge.
LOWEST_EXPONENT = -64
NUM_EXPONENTS = 96
# The largest magnitude is taken over all values; the rest over so many of
# each tensor at most, at equal distances.
SAMPLE = 2**13


class Column(enum.IntEnum):
    """The numbers of one tensor, exact and rough.

    "Exact" is an unscaled float32 run; "rough" the run as the step computes.
    """

    LARGEST = 0  # largest finite exact magnitude
    LARGEST_ROUGH = 1  # largest finite rough magnitude, scaled as it was
    SIZE = 2  # number of values
    SMALLEST = 3  # smallest exact magnitude that is not zero
    NONZERO = 4  # exact values that are not zero
    FLUSHED = 5  # of those, zero in the rough run
    OVERFLOWED = 6  # finite in the exact run, not in the rough one
    BAD = 7  # exact values that are not finite
    SQUARES = 8  # sum of the squares of the exact ones
    ERRORS = 9  # sum of the squares of the differences, unscaled
    ALL_FINITE = 10  # 1 if the whole rough tensor is finite


EXPONENTS = slice(len(Column), len(Column) + NUM_EXPONENTS)


class Part(enum.Enum):
    """Whose numbers they are."""

    WEIGHTS = "gradients of the weights"
    GRADIENTS = "gradients of the outputs"
    OUTPUTS = "outputs"
